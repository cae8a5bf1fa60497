"""Summary lines at the end of a run: outcome, files, next commands. Pure."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.config.command_line import TrainCommand
from titan_rl.config.io.bounded_files import read_json
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress

_UNSCORED = ("discarded (infra_error)", "discarded (timeout)")
"""Fates of samples that machinery or its deadlines lost, in the ledger's words."""
_USE_OF_HELPERS = {
    False: ": the trainer never waited long enough to lend its devices; leave placement.helper_generators out",
    True: "; whether steps became shorter, seconds_step of a run without placement.helper_generators tells",
}
_OFTEN_CUT = 0.5
"""Share of answers without an end."""


def stopping(run_dir: RunDir, command: TrainCommand) -> str:
    """Message on a request to stop."""
    return f"stopping: what is at hand ends, then what is new is saved; to go on: {command.resume(run_dir.root)}"


def end_summary(
    why: str, summary: dict[str, Any], progress: Progress, run_dir: RunDir, command: TrainCommand
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
            f"nothing was learned from it (mean of all steps {fmean(rewards):.2f}): take prompts that are sometimes "
            f"answered right, or raise rollout.group_size; filter.no_signal = true draws others instead"
        )
    if (cut := summary["truncated_mean"] or 0.0) >= _OFTEN_CUT:
        yield (
            f"{cut:.0%} of the answers were cut: raise rollout.max_new_tokens, or training.seq_len where several turns "
            f"fill it"
        )
    if (share := summary["helper_token_share_mean"]) is not None:
        yield f"helper generators sampled {share:.0%} of the tokens{_USE_OF_HELPERS[share > 0]}"
    lost = {key: summary["samples"][key] for key in _UNSCORED if summary["samples"].get(key)}
    if lost:
        told = " and ".join(f"{count} {key}" for key, count in lost.items())
        yield f"samples that nothing was learned from: {told}; titan-rl ledger {run_dir.root} tells more"
    has_model = _holds_model(run_dir.model) and progress.model_step == steps_done
    left = {"model": run_dir.model} if has_model else {}
    left |= {"curves": run_dir.curves, "run": run_dir.root}
    yield "  ".join(f"{name} {path}" for name, path in left.items() if path.exists())
    if _holds_model(run_dir.model) and not has_model:
        yield f"{run_dir.model} is not of step {steps_done}, at which none was written"
    config = _config(run_dir.model) if has_model else {}
    is_quantized = "quantization_config" in config
    if (dtype := config.get("dtype") or config.get("torch_dtype")) is not None:
        rounded = "as it was trained" if dtype == "float32" else "rounded from the float32 that was trained"
        yield (
            f"the model's linear layers are written in FP8, for vLLM, the rest in {dtype} "
            f"(checkpoint.export_quantization)"
            if is_quantized
            else f"the model is written in {dtype}, {rounded} (checkpoint.export_dtype)"
        )
    is_read_here = has_model and not is_quantized
    commands = list(_next_commands(steps_done, num_steps, run_dir, command, can_evaluate=is_read_here))
    if commands:
        yield "next: " + "\n      ".join(commands)


def _next_commands(
    steps_done: int, num_steps: int, run_dir: RunDir, command: TrainCommand, *, can_evaluate: bool
) -> Iterator[str]:
    if steps_done < num_steps:
        yield command.resume(run_dir.root)
    if any(run_dir.rollouts.glob("step-*.parquet")):
        yield shlex.join(["titan-rl", "show", str(run_dir.root)])
        drafter = run_dir.drafter if _holds_model(run_dir.drafter) else None
        if can_evaluate and (evaluation := command.evaluate(run_dir.model, drafter)):
            yield evaluation
    elif steps_done:  # on rows, which have no answers to show
        yield shlex.join(["titan-rl", "watch", str(run_dir.root)])


def _config(folder: Path) -> dict[str, Any]:
    """A model's config.json; empty if it is none."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()
