"""A checkpoint is complete or absent, whenever its writer dies, and a damaged one is recognised."""

import asyncio
import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from titan_rl.controller.recovery.checkpointing import Checkpointing
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.ledger.ledger import Ledger


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, keep_latest_k=2)


def state_of(step: int) -> ControllerState:
    return ControllerState(step, 10 * step, {"correct": 3, "count": 8}, 1.5)


def save(folder: CheckpointFolder, step: int, content: str = "") -> None:
    writing = folder.begin(step)
    (writing / "weights").write_text(content or f"weights {step}")
    folder.commit(writing, state_of(step))


def test_nothing_saved(folder):
    assert folder.steps() == [] and folder.newest_complete() is None


def test_latest_holds_what_was_written(folder):
    save(folder, 3)
    save(folder, 20)
    path, state = folder.newest_complete()
    assert state == state_of(20) and path == folder.path(20)
    assert (path / "weights").read_text() == "weights 20"


def test_keeps_the_latest_k(folder, tmp_path):
    for step in (1, 2, 10, 9):
        save(folder, step)
    assert folder.steps() == [9, 10]
    assert len(list(tmp_path.iterdir())) == 2


def test_interrupted_save_is_ignored_and_then_removed(folder, tmp_path):
    save(folder, 1)
    (folder.begin(2) / "weights").write_text("half")
    assert folder.steps() == [1] and folder.newest_complete()[1] == state_of(1)
    begun = folder.begin(3)
    assert list(begun.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", begun.name]


def test_a_thread_that_was_given_up_cannot_write_into_the_next_try(folder):
    assert folder.begin(2) != folder.begin(2)


def test_writing_stays_apart_until_it_is_committed(folder):
    save(folder, 1, "old")
    (folder.begin(1) / "weights").write_text("new")
    assert (folder.path(1) / "weights").read_text() == "old"


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 1, "old")
    save(folder, 1, "new")
    assert folder.steps() == [1] and (folder.path(1) / "weights").read_text() == "new"


@pytest.mark.parametrize("deletions", [0, 1])
@pytest.mark.parametrize("step", [2, 3])
def test_death_while_an_old_checkpoint_is_removed_leaves_only_complete_ones(folder, monkeypatch, step, deletions):
    """Saving step 2 again replaces it; saving step 3 drops step 1. Either may die in the middle of a removal."""
    save(folder, 1)
    save(folder, 2)
    writing = folder.begin(step)
    (writing / "weights").write_text(f"weights {step}")

    def die(path, *_, **__):
        for file in sorted(path.iterdir(), reverse=True)[:deletions]:
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", die)
        folder.commit(writing, state_of(step))
    path, state = folder.newest_complete()
    assert state.step >= 2 and (path / "weights").read_text() == f"weights {state.step}"
    for kept in folder.steps():
        assert {file.name for file in folder.path(kept).iterdir()} == {"weights", "state.json"}


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "cut short": ("weights", cut_short, "bytes instead of"),
    "flipped": ("weights", flip_a_bit, "checksum"),
    "longer": ("weights", lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes instead of"),
    "empty": ("weights", lambda path: path.write_bytes(b""), "0 bytes instead of"),
    "gone": ("weights", lambda path: path.unlink(), "weights"),
    "metadata": (".metadata", flip_a_bit, ".metadata fails its checksum"),
    "state cut short": ("state.json", cut_short, "state.json"),
    "state flipped": ("state.json", flip_a_bit, "state.json"),
    "state of another kind": ("state.json", lambda path: path.write_text("[]"), "state.json"),
    "state gone": ("state.json", lambda path: path.unlink(), "state.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_is_taken(folder, damage):
    name, hurt, word = DAMAGES[damage]
    for step in (1, 2):
        writing = folder.begin(step)
        (writing / "weights").write_text(f"weights {step}")
        (writing / ".metadata").write_text("where what lies")
        folder.commit(writing, state_of(step))
    assert folder.flaw(2) is None
    hurt(folder.path(2) / name)
    lines = []
    path, state = folder.newest_complete(log=lines.append)
    assert (path, state) == (folder.path(1), state_of(1))
    assert len(lines) == 1 and str(folder.path(2)) in lines[0] and word in lines[0]


def test_no_checkpoint_is_complete(folder):
    save(folder, 1)
    save(folder, 2)
    for step in (1, 2):
        cut_short(folder.path(step) / "weights")
    lines = []
    assert folder.newest_complete(log=lines.append) is None and len(lines) == 2


def test_newest_no_later_than_a_step(folder):
    save(folder, 3)
    save(folder, 6)
    assert [folder.newest_complete(step)[1].step for step in (3, 5, 6, 100)] == [3, 3, 6, 6]
    assert folder.newest_complete(2) is None


def test_later_checkpoints_make_way_for_a_run_that_goes_on_from_before(folder):
    """Otherwise they would count as the run's newest, and the ones it makes would be removed first."""
    for _ in range(2):
        save(folder, 3)
        save(folder, 6)
        folder.drop_after(3)
        assert folder.steps() == [3] and (folder.root / "unused-step-000006").is_dir()
    save(folder, 4)
    assert folder.steps() == [3, 4]


class FakeTrainer:
    """Trainers whose ``write`` may go wrong, and that take ``delay`` polls to do it."""

    def __init__(self, write, delay=2):
        self.write, self.delay, self.begun, self.num_repaired = write, delay, [], 0
        self.trainer = self

    async def call(self, request):
        if request.endpoint == "begin_checkpoint":
            self.begun.append(request.arguments[0])
            self.left = self.delay
            return [None, None]
        assert request.endpoint == "checkpoint_outcome"
        self.left -= 1
        if self.left > 0:
            return ["", None]
        try:
            self.write(self.begun[-1])
        except OSError as error:
            return ["", f"CheckpointException: {error}"]
        return ["", ""]

    async def collect(self, *paths):
        """They write on this host."""


def write_some(path):
    (Path(path) / "weights").write_bytes(b"w" * 1000)


def no_space(path):
    raise OSError(errno.ENOSPC, "No space left on device")


def saving(folder, trainer, tmp_path):
    lines, records = [], []
    ledger = Ledger(tmp_path / "ledger.db")
    made = Checkpointing(folder, trainer, ledger, timeout=5, log=lines.append, record_metrics=records.append)
    return made, lines, records


@pytest.fixture
def inner(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep_latest_k=2)


def test_steps_go_on_while_it_is_written_and_the_next_waits(inner, tmp_path):
    trainer = FakeTrainer(write_some)

    async def run():
        made, lines, records = saving(inner, trainer, tmp_path)
        await made.begin(state_of(1))
        assert inner.steps() == [] and made.saved_step == -1
        await made.begin(state_of(2))
        assert inner.steps() == [1] and made.saved_step == 1
        await made.finish()
        assert inner.steps() == [1, 2] and not lines
        assert [record["step"] for record in records] == [1, 2]
        assert all(record["checkpoint_failed"] == 0 for record in records)

    asyncio.run(run())


def test_it_is_committed_when_the_last_rank_has_written(inner, tmp_path):
    """The first says at once that it has; the other's file comes later."""

    async def run():
        made, lines, _ = saving(inner, FakeTrainer(write_some, delay=3), tmp_path)
        await made.begin(state_of(1))
        await made.finish()
        assert not lines and inner.flaw(1) is None
        assert {path.name for path in inner.path(1).iterdir()} == {"state.json", "weights"}

    asyncio.run(run())


@pytest.mark.parametrize("where", ["trainers", "begin", "commit"])
def test_a_full_disk_costs_a_warning_and_no_older_checkpoint(inner, tmp_path, monkeypatch, where):
    trainer = FakeTrainer(write_some)

    async def run():
        made, lines, records = saving(inner, trainer, tmp_path)
        for step in (1, 2):
            await made.begin(state_of(step))
        await made.finish()
        with monkeypatch.context() as patched:
            if where == "trainers":
                patched.setattr(trainer, "write", no_space)
            else:
                patched.setattr(inner, where, lambda *_: no_space(None))
            await made.begin(state_of(3))
            await made.finish()
        assert inner.steps() == [1, 2] and made.saved_step == 2
        assert len(lines) == 1 and "step 3" in lines[0] and "No space left" in lines[0] and "1, 2" in lines[0]
        assert records[-1] == {"step": 3, "checkpoint_failed": 1.0}
        assert where == "commit" or not list(inner.root.glob("writing-*"))
        await made.begin(state_of(4))
        await made.finish()
        assert inner.steps() == [2, 4]

    asyncio.run(run())


def test_trainers_that_never_answer_cost_a_warning_too(inner, tmp_path):
    async def run():
        made, lines, _ = saving(inner, FakeTrainer(write_some, delay=10**9), tmp_path)
        made.timeout = 0.3
        await made.begin(state_of(1))
        await asyncio.wait_for(made.finish(), 5)
        assert len(lines) == 1 and "did not end within 0.3 s" in lines[0]

    asyncio.run(run())


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_a_death_has_cost_is_due_after_the_next_step(inner, tmp_path, dies):
    """And one that a full disk has cost is not: each step would try in vain."""

    def fails(folder) -> None:
        trainer.num_repaired += dies
        raise OSError("no")

    trainer = FakeTrainer(fails)

    async def run():
        made, _, _ = saving(inner, trainer, tmp_path)
        assert [step for step in range(1, 11) if made.is_due(step, 5)] == [5, 10] and not made.is_due(5, 0)
        await made.begin(state_of(5))
        await made.finish()
        assert made.is_due(6, 5) == dies and not made.is_due(6, 0)
        trainer.write = write_some
        await made.begin(state_of(6))
        await made.finish()
        assert not made.is_due(7, 5) and inner.steps() == [6]

    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; skipped where none can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full(small_disk, tmp_path):
    folder = CheckpointFolder(small_disk, keep_latest_k=2)
    sizes = iter([10_000, 200_000, 10_000])
    trainer = FakeTrainer(lambda path: (Path(path) / "weights").write_bytes(b"w" * next(sizes)))

    async def run():
        made, lines, _ = saving(folder, trainer, tmp_path)
        for step in (1, 2, 3):
            await made.begin(state_of(step))
        await made.finish()
        assert folder.steps() == [1, 3] and len(lines) == 1 and "No space left" in lines[0]
        assert all(folder.flaw(step) is None for step in folder.steps())

    asyncio.run(run())
