"""Summary lines at the end of a run: outcome, files, next commands. Pure."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress


def resume_command(run_dir: RunDir, config_file: str | None) -> str:
    """Command that resumes the run."""
    parts = ["titan-rl", "train", *([config_file] if config_file else []), "--resume", "--run.dir", str(run_dir.root)]
    return shlex.join(parts)


def stopping(run_dir: RunDir, config_file: str | None) -> str:
    """Message on a request to stop."""
    return (
        f"stopping: what is at hand ends, then what is new is saved; to go on: {resume_command(run_dir, config_file)}"
    )


def end_summary(
    why: str, summary: dict[str, Any], progress: Progress, run_dir: RunDir, config_file: str | None
) -> Iterator[str]:
    """Lines at the end of a run. ``why``: reason that it ended, in words."""
    steps_done, num_steps = summary["steps_done"], summary["steps_asked"]
    seconds = progress.seconds_training + progress.seconds_sft
    yield f"{why}: {steps_done} of {num_steps} steps, training took {seconds:.0f} s"
    for when in ("before", "after"):
        if (result := getattr(progress, f"held_out_{when}")) is not None:
            yield f"held-out accuracy {when:>6}: {result}"
    rewards, num_flat = summary["reward_by_step"], summary["steps_without_signal"]
    if num_flat and num_flat >= len(rewards) / 2:
        yield (
            f"no signal in {num_flat} of {len(rewards)} steps: all answers to a prompt had the same reward, and "
            f"nothing was learned from it (mean of all steps {fmean(rewards):.2f})"
        )
    left = {"model": run_dir.model, "curves": run_dir.curves, "run": run_dir.root}
    yield "  ".join(f"{name} {path}" for name, path in left.items() if path.exists())
    if (dtype := _dtype(run_dir.model)) is not None:
        rounded = "as it was trained" if dtype == "float32" else "rounded from the float32 that was trained"
        yield f"the model is written in {dtype}, {rounded} (checkpoint.export_dtype)"
    commands = list(_next_commands(steps_done, num_steps, run_dir, config_file))
    if commands:
        yield "next: " + "\n      ".join(commands)


def _next_commands(steps_done: int, num_steps: int, run_dir: RunDir, config_file: str | None) -> Iterator[str]:
    if steps_done < num_steps:
        yield resume_command(run_dir, config_file)
    if any(run_dir.rollouts.glob("step-*.parquet")):
        yield shlex.join(["titan-rl", "show", str(run_dir.root)])
        if config_file and _holds_model(run_dir.model):
            yield shlex.join(["titan-rl", "eval", str(run_dir.model), "--file", config_file])


def _dtype(folder: Path) -> str | None:
    """Dtype in a model's config.json; None without either."""
    try:
        config = read_json(folder / "config.json")
        return config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        return None


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
