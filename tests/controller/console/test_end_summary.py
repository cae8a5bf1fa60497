"""What a run says last: where everything is, and what can be done next."""

import shlex

import pytest

from titan_rl.config.command_line import TrainCommand
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.controller.console.end_summary import end_summary, stopping
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.statistics import Proportion


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    run_dir = RunDir(tmp_path / "a run")
    for folder in (run_dir.rollouts, run_dir.model):
        folder.mkdir(parents=True)
    (run_dir.rollouts / "step-000003.parquet").touch()
    (run_dir.model / "config.json").write_text("{}")
    run_dir.curves.touch()
    return run_dir


def said(
    run_dir: RunDir,
    done: int,
    config_file: str | None = "my.toml",
    without_signal: int = 0,
    overrides=None,
    cut=None,
    lost=0,
    model_step=None,
    helped=None,
) -> str:
    progress = Progress(steps_asked=5, model_step=done if model_step is None else model_step)
    progress.seconds_training, progress.held_out_after = 61.0, Proportion(3, 4)
    summary = {"steps_done": done, "steps_asked": 5}
    summary |= {
        "reward_by_step": [0.0, 0.5] * (done // 2),
        "steps_without_signal": without_signal,
        "truncated_mean": cut,
        "helper_token_share_mean": helped,
        "samples": {"trained": 9} | ({"discarded (infra_error)": lost} if lost else {}),
    }
    return "\n".join(end_summary("completed", summary, progress, run_dir, TrainCommand(config_file, overrides or {})))


def test_a_completed_run_names_its_places_and_what_to_look_at(run_dir):
    text = said(run_dir, 5)
    assert text.startswith("completed: 5 of 5 steps, training took 61 s\nheld-out accuracy  after: 75.0%")
    assert f"model {run_dir.model}  curves {run_dir.curves}  run {run_dir.root}" in text
    assert f"titan-rl show '{run_dir.root}'" in text and f"titan-rl eval '{run_dir.model}' --config my.toml" in text
    assert "--resume" not in text


def test_a_run_on_rows_names_what_shows_its_curves(run_dir):
    (run_dir.rollouts / "step-000003.parquet").unlink()
    assert said(run_dir, 5).endswith(f"next: titan-rl watch '{run_dir.root}'")
    assert "titan-rl watch" not in said(run_dir, 0)


@pytest.mark.parametrize(("without_signal", "is_said"), [(0, False), (1, False), (2, True), (4, True)])
def test_one_that_had_nothing_to_learn_from_says_so(run_dir, without_signal, is_said):
    line = f"no signal in {without_signal} of 4 steps: all answers to a prompt had the same reward"
    assert (line in said(run_dir, 4, without_signal=without_signal)) == is_said
    assert ("no signal" in said(run_dir, 4, without_signal=without_signal)) == is_said


def test_samples_without_a_score_are_told(run_dir):
    assert "nothing was learned from: 16 discarded (infra_error); titan-rl ledger" in said(run_dir, 4, lost=16)
    assert "nothing was learned from" not in said(run_dir, 4)


@pytest.mark.parametrize(
    ("helped", "line"),
    [
        (None, ""),
        (0.0, "helper generators sampled 0% of the tokens: the trainer never waited long enough to lend its devices"),
        (0.376, "helper generators sampled 38% of the tokens; whether steps became shorter, seconds_step of a run"),
    ],
)
def test_one_with_helpers_says_what_they_did(run_dir, helped, line):
    text = said(run_dir, 4, helped=helped)
    assert line in text and ("helper generators" in text) == (helped is not None)


@pytest.mark.parametrize(("cut", "is_said"), [(None, False), (0.49, False), (0.9, True)])
def test_one_whose_answers_were_cut_names_the_limit(run_dir, cut, is_said):
    assert ("90% of the answers were cut: raise rollout.max_new_tokens" in said(run_dir, 4, cut=cut)) == is_said


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ('{"dtype": "float32"}', "the model is written in float32, as it was trained (checkpoint.export_dtype)"),
        ('{"torch_dtype": "bfloat16"}', "the model is written in bfloat16, rounded from the float32 that was trained"),
        (
            '{"dtype": "bfloat16", "quantization_config": {}}',
            "linear layers are written in FP8, for vLLM, the rest in b",
        ),
    ],
)
def test_it_says_in_what_the_model_is_written(run_dir, config, line):
    (run_dir.model / "config.json").write_text(config)
    assert line in said(run_dir, 5) and "is written in" not in said(RunDir(run_dir.root / "none"), 5)
    assert ("titan-rl eval" in said(run_dir, 5)) == ("FP8" not in line)  # which engines here do not read


def test_a_model_of_an_earlier_step_is_not_offered(run_dir):
    text = said(run_dir, 4, model_step=2)
    assert f"\n{run_dir.model} is not of step 4, at which none was written\n" in text
    assert "model " + str(run_dir.model) not in text and "titan-rl eval" not in text and "is written in" not in text


def test_one_that_was_stopped_can_be_gone_on_with(run_dir):
    command = f"titan-rl train my.toml --resume --run.dir '{run_dir.root}'"
    assert f"next: {command}\n" in said(run_dir, 3) and stopping(run_dir, TrainCommand("my.toml")).endswith(command)
    assert "train --resume" in said(run_dir, 3, None) and "eval" not in said(run_dir, 3, None)


def test_what_is_offered_next_is_told_what_the_run_was_told(run_dir):
    settings = '--task.reward="my file:f" --task.options.a="true" --task.options.b=true --task.options.c=["d"]'
    overrides = {"run": {"dir": "x"}, "training": {"steps": 5}, "model": {"path": "m"}}
    overrides["task"] = {"reward": "my file:f", "options": {"a": "true", "b": True, "c": ["d"]}}
    resumed, _, evaluated = said(run_dir, 3, overrides=overrides).partition("next: ")[2].splitlines()
    for line, fixed in ((resumed, "--training.steps=5 --model.path=m"), (evaluated, "--training.steps=5")):
        assert " ".join(shlex.split(line)).endswith(f" {fixed} {settings}") and "run.dir=x" not in line


def test_a_model_is_evaluated_with_the_drafter_that_learned_beside_it(run_dir):
    overrides = {"drafter": {"path": "models/draft", "updates": 2}}
    assert "--drafter.path=models/draft" in said(run_dir, 5, overrides=overrides)
    run_dir.drafter.mkdir()
    (run_dir.drafter / "config.json").write_text("{}")
    [evaluated] = [line for line in said(run_dir, 5, overrides=overrides).splitlines() if "titan-rl eval" in line]
    told = parse_overrides(shlex.split(evaluated)[-2:])
    assert told == {"drafter": {"updates": 2, "path": str(run_dir.drafter)}}


def test_one_that_has_nothing_to_show_names_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    text = said(RunDir(tmp_path / "run"), 0)
    assert "show" not in text and "model" not in text and text.count("titan-rl") == 1
