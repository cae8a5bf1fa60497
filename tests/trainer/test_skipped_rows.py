"""Rows of data whose numbers are not finite: named by file and line, both answers of a pair together, and left out from
then on; so a step is the same whenever it is done again. On a trainer of one rank in this process."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import poison, spoil_a_weight, with_fault
from local_trainer import LocalTrainer, make_steps
from row_tasks import write

from titan_rl.config.load import load_config
from titan_rl.controller.loop.shutdown import StopRequest
from titan_rl.controller.offline.controller import DataComponents, OfflineController
from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatches, NonfiniteBatchesError
from titan_rl.data.nonfinite import Culprit, NonfiniteBatch
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import UPDATE_LEFT_OUT, MetricsLog, read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.steps.skipped_rows import SkippedRows

pytestmark = pytest.mark.usefixtures("process_group")
NUM_ROWS, BAD, STEPS = 24, 9, 8
"""Lines of each file, the one that is at fault, and steps of four rows: more than an epoch."""
MARK = character_tokenizer().convert_tokens_to_ids("#")
"""What the row at fault has in its last answer, and no other."""
HUGE = 1e300
"""A margin that JSON can write and float32 cannot hold."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def write_rows(folder: Path, name: str, margins: dict[int, float]) -> None:
    """``margins``: by line."""
    rows = []
    for line in range(1, NUM_ROWS + 1):
        last = "b#" if line == BAD else "bb"
        if name in ("sft", "kto"):
            rows.append({"prompt": f"{line}=", "completion": last} | ({"label": line % 2 > 0} if name == "kto" else {}))
        else:
            rows.append({"prompt": f"{line}=", "chosen": "aaa", "rejected": last, "margin": margins.get(line, 0.0)})
    write(folder, rows, "rows.jsonl")
    write(folder, [{**rows[0], "prompt": "held out="}], "held_out.jsonl")


def config_of(folder: Path, name: str, seq_len: int = 512, examples_per_step: int = 4):
    return load_config(
        None,
        {
            "run": {"plugin_path": [str(folder)]},
            "algorithm": {"name": name},
            "data": {
                "file": "rows.jsonl",
                "held_out_file": "held_out.jsonl",
                "examples_per_step": examples_per_step,
            },
            "optimizer": {"lr": 1e-3},
            "training": {"steps": STEPS, "seq_len": seq_len},
        },
    )


# who is named


def spoil(trainer: LocalTrainer, fault: str) -> None:
    """From now on what the trainer, or its reference, finds of the marked row is not finite."""
    learner = trainer.learner
    if fault == "gradient":
        poison(learner)
    elif fault == "reference logprob":
        role = learner.roles["reference"]
        plain_find = role.find

        def find(rows):
            found = plain_find(rows)
            for row, columns in zip(rows, found, strict=True):
                columns["reference_logprob_S"][row.target_S == MARK] = np.nan
            return found

        role.find = find
    else:
        plain_loss = learner._loss

        def loss(statistics, index, columns, totals):
            is_marked_S = columns["target_S"] == MARK
            is_bad_S = is_marked_S | is_marked_S.roll(1)  # and the answer's end behind it, where a reward is read
            return plain_loss(statistics.masked_fill(is_bad_S, torch.nan), index, columns, totals)

        learner._loss = loss


FAULTS = {
    "logprob": ("sft", "dpo", "simpo", "orpo", "kto"),
    "value": ("reward_model",),
    "reference logprob": ("dpo", "kto"),
    "gradient": ("sft", "dpo", "simpo", "orpo", "kto", "reward_model"),
    "loss": ("reward_model",),
}


@pytest.mark.parametrize("seq_len", [40, 512])
@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, names in FAULTS.items() for name in names])
def test_the_row_is_named_and_of_a_pair_the_answer(tmp_path, model_path, fault, name, seq_len):
    """Also where a pair's two answers are fine, each by itself."""
    write_rows(tmp_path, name, {BAD: HUGE} if fault == "loss" else {})
    checked, steps = make_steps(config_of(tmp_path, name, seq_len, examples_per_step=NUM_ROWS))
    trainer, place = LocalTrainer(checked, model_path), f"rows.jsonl line {BAD}"
    before = {shard.name: shard.tensor.clone() for shard in trainer.learner.shards()}
    if fault != "loss":
        spoil(trainer, fault)
    batch = asyncio.run(steps.batch(trainer, 1))
    if fault == "gradient":
        with_fault(batch, fault, place, 0)
    [found] = asyncio.run(trainer.train([batch], 1))
    is_of_one = name not in ("sft", "kto") and fault not in ("gradient", "loss")
    what = f"{fault} of the rejected answer" if is_of_one else fault
    assert isinstance(found, NonfiniteBatch) and found.culprits == [Culprit(place, None, what)]
    assert str(found).endswith(f": {what} of {place}")
    assert all(torch.equal(before[shard.name], shard.tensor) for shard in trainer.learner.shards())


def test_a_zero_that_is_no_number_puts_no_blame_on_others(tmp_path, model_path):
    """KTO's, which is measured by all rows of a step: only the row that made it so is named."""
    write_rows(tmp_path, "kto", {})
    checked, steps = make_steps(config_of(tmp_path, "kto", examples_per_step=NUM_ROWS))
    trainer = LocalTrainer(checked, model_path)
    spoil(trainer, "reference logprob")
    measured = asyncio.run(trainer.evaluate(asyncio.run(steps.batch(trainer, 1))))
    assert np.isnan(measured.loss_metrics["log_ratio"])
    _, found = asyncio.run(steps.train(trainer, 1))
    assert [culprit.prompt_id for culprit in found.culprits] == [f"rows.jsonl line {BAD}"]


# what becomes of it


class Run:
    """The loop of a run without a generator on its directory, with the trainer in this process."""

    def __init__(self, root: Path, folder: Path, model_path: Path):
        root.mkdir(exist_ok=True)
        self.run_dir, self.said, self.notes = RunDir(root), [], []
        self.left_out = SkippedRows(self.run_dir.left_out_rows)
        config = config_of(folder, "reward_model")
        checked, self.steps = make_steps(config, self.left_out.is_out)
        self.trainer, self.attempts = LocalTrainer(checked, model_path), []
        self.metrics, self.progress = MetricsLog(root), Progress(STEPS)
        train = self.trainer.train

        async def counted(batches, step):
            self.attempts.append(step)
            return await train(batches, step)

        self.trainer.train = counted
        nonfinite_batches = NonfiniteBatches(
            config.recovery, self.run_dir, log=self.said.append, record_metrics=self.metrics.write
        )
        reporter = SimpleNamespace(
            display=SimpleNamespace(log=self.said.append),
            enter=lambda step, phase: None,
            trained=self.metrics.write,
            metrics=self.metrics,
            record_event=lambda kind, **fields: self.notes.append((kind, fields)),
        )
        none, unsaved = SimpleNamespace(), SimpleNamespace(is_due=lambda step, every: False)
        meshes = SimpleNamespace(trainer=self.trainer)
        parts = (meshes, self.steps, none, unsaved, nonfinite_batches, none, reporter, self.progress, self.left_out)
        self.controller = OfflineController(self.run_dir, (), StopRequest(), DataComponents(*parts))

    def go(self, steps: int = STEPS) -> dict[int, tuple[float, float]]:
        """Loss and gradient norm of each step that had an update."""

        async def run() -> None:
            while self.progress.step < steps:
                await self.controller.step()

        asyncio.run(run())
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in read_metrics(self.run_dir.root) if "loss" in r}

    def weights(self) -> dict[str, torch.Tensor]:
        return {shard.name: shard.tensor.clone() for shard in self.trainer.learner.shards()}


def bad_step(run: Run) -> int:
    """The first that draws the row."""
    return next(s for s in range(1, STEPS + 1) if f"rows.jsonl line {BAD}" in places(run, s))


def places(run: Run, step: int) -> list[str]:
    return [example.place for example in run.steps.examples(step)]


@pytest.fixture
def disturbed(tmp_path, model_path) -> Run:
    write_rows(tmp_path, "reward_model", {BAD: HUGE})
    return Run(tmp_path / "run", tmp_path, model_path)


def test_a_step_is_done_without_its_bad_row_and_no_later_one_has_it(disturbed):
    step = bad_step(disturbed)
    numbers = disturbed.go()
    assert sorted(numbers) == list(range(1, STEPS + 1)) and all(np.isfinite(n).all() for n in numbers.values())
    assert disturbed.attempts == sorted([*range(1, STEPS + 1), step])
    record = {"row": f"rows.jsonl line {BAD}", "why": "loss", "from_step": step}
    assert [json.loads(line) for line in disturbed.run_dir.left_out_rows.read_text().splitlines()] == [record]
    assert any(f"loss of rows.jsonl line {BAD}; the update was left out" in line for line in disturbed.said)
    assert ("rows_left_out", {"step": step, "rows": {record["row"]: "loss"}}) in disturbed.notes
    assert len(places(disturbed, step)) == 3 and not any(record["row"] in places(disturbed, s) for s in range(1, 40))


def test_steps_that_are_done_again_come_out_as_they_did(disturbed, tmp_path, model_path):
    """Whether the row is met for the first time, or the record tells of it."""
    numbers, step = disturbed.go(), min(disturbed.left_out._from_step.values())
    again = Run(disturbed.run_dir.root, tmp_path, model_path)
    assert again.go() == numbers and again.attempts == list(range(1, STEPS + 1))
    ours, theirs = disturbed.weights(), again.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(again.left_out.is_out(f"rows.jsonl line {BAD}", before) for before in range(step))


def test_where_all_rows_are_at_fault_the_model_is_and_none_is_left_out(tmp_path, model_path):
    write_rows(tmp_path, "reward_model", dict.fromkeys(range(1, NUM_ROWS + 1), HUGE))
    run = Run(tmp_path / "run", tmp_path, model_path)
    with pytest.raises(NonfiniteBatchesError, match="3 batches in a row"):
        run.go()
    assert run.attempts == [1, 2, 3] and run.progress.step == 3 and not run.run_dir.left_out_rows.exists()
    assert [record["step"] for record in read_metrics(run.run_dir.root) if UPDATE_LEFT_OUT in record] == [1, 2, 3]


def test_where_weights_are_not_finite_no_row_is_to_blame(disturbed):
    spoil_a_weight(disturbed.trainer.learner)
    with pytest.raises(NonfiniteBatchesError, match="weights are not finite"):
        disturbed.go()
    assert not disturbed.run_dir.left_out_rows.exists()


def test_a_step_whose_rows_are_all_left_out_asks_the_trainer_for_nothing(disturbed):
    disturbed.left_out.leave_out(dict.fromkeys(places(disturbed, 1), "loss"), 1)
    disturbed.go(2)
    assert disturbed.attempts[0] == 2 and any("all of its rows are left out" in line for line in disturbed.said)


# the record


def test_rows_that_are_too_long_are_listed_once(tmp_path, model_path):
    write_rows(tmp_path, "reward_model", {})
    config = config_of(tmp_path, "reward_model", seq_len=512)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    long = json.dumps({"prompt": "x" * 600, "chosen": "a", "rejected": "b"})
    (tmp_path / "rows.jsonl").write_text("\n".join([long, *lines, long]) + "\n")
    config.data.too_long = "skip"
    checked, _ = make_steps(config)
    path = tmp_path / "left_out_rows.jsonl"
    for _ in range(2):  # a run, and the same when it is resumed
        rows = SkippedRows(path)
        rows.list_too_long(checked.dataset.too_long)
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["row"] for record in listed] == ["rows.jsonl line 1", f"rows.jsonl line {NUM_ROWS + 2}"]
    assert all(record["why"].startswith("too long: 60") and "from_step" not in record for record in listed)
    rows.leave_out({"rows.jsonl line 4": "gradient"}, 7)
    assert SkippedRows(path).is_out("rows.jsonl line 4", 7) and not SkippedRows(path).is_out("rows.jsonl line 4", 6)
    assert not SkippedRows(path).is_out("rows.jsonl line 1", 7)


def test_a_record_that_was_cut_short_is_met_again(tmp_path):
    path = tmp_path / "left_out_rows.jsonl"
    path.write_text('{"row": "a line 1", "why": "loss", "from_step": 2}\n[1]\n{"row": "a line 2", "fr')
    rows = SkippedRows(path)
    assert rows.is_out("a line 1", 2) and not rows.is_out("a line 2", 9)
    rows.leave_out({"a line 2": "loss"}, 3)
    assert SkippedRows(path).is_out("a line 2", 3)
