"""``titan-rl show RUN``: prompts, answers and rewards of a step, as text.

Answers are hostile: what would move a terminal's cursor, or worse, is shown by its code.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from titan_rl.config.io.printable import printable
from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError
from titan_rl.data.images import PlacedImage, sizes_in_words
from titan_rl.data.types import Group, Rollout
from titan_rl.records.run_directory.rundir import existing_run_dir, is_on_data
from titan_rl.records.steps.rollouts import RolloutsError, read_rollouts, recorded_steps

_SHOWN = 100_000
"""Characters of a text; ``--json`` has all."""
_STYLES = {"ok": "green", "truncated": "yellow", "max_turns": "yellow"}


def show(run: Path, *, step: int | None, prompt: str | None, count: int, as_json: bool) -> int:
    """Recorded rollouts of a step, printed.

    ``step``: the last one recorded by default. ``prompt``: only this one; ``count``: else so many, 0 for all.
    """
    run_dir = existing_run_dir(run)
    if not run_dir.config.is_file():
        raise ConfigError(f"{run} holds no run: give a run directory, such as runs/quickstart-<date>")
    if is_on_data(run_dir):
        raise ConfigError(f"{run} is a run on data.file, which samples no answers: there is none to show")
    step, groups = _groups(run_dir.rollouts, step)
    if prompt is not None:
        if not (groups := [group for group in groups if group.prompt_id == prompt]):
            raise ConfigError(f"step {step} has no prompt {prompt!r}: leave --prompt out to see its prompts")
    elif count:
        groups = groups[:count]
    if as_json:
        print(json.dumps({"step": step, "groups": [as_plain(group) for group in groups]}))
        return 0
    console = Terminal()
    console.print(f"step {step} of {run}", style="bold", soft_wrap=True)
    for group in groups:
        for line in lines_of(group):
            console.print(line)
    return 0


def _groups(folder: Path, step: int | None) -> tuple[int, list[Group]]:
    """Errors: ConfigError if the step is not recorded, or cannot be read."""
    steps = recorded_steps(folder)
    if not steps:
        raise ConfigError(f"{folder} holds no rollouts yet: give a run that has done a step with a generator")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(f"step {step} is not recorded: give --step {steps[0]} to {steps[-1]}")
    try:
        return step, read_rollouts(folder, step)
    except (RolloutsError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from None


def as_plain(group: Group) -> dict:
    """Readable fields of a group."""
    return {
        "prompt_id": group.prompt_id,
        "prompt": group.question,
        "images": [
            {"width": image.pixels.shape[1], "height": image.pixels.shape[0], "tokens": image.num_tokens}
            for image in _images(group)
        ],
        "expected": group.expected,
        "samples": [
            {
                "sample": rollout.sample,
                "answer": rollout.text,
                "reward": rollout.reward,
                "reward_parts": rollout.reward_parts,
                "status": rollout.status,
                "tokens": rollout.num_model_tokens,
                "version": int(rollout.versions.max()),
            }
            for rollout in group.rollouts
        ],
    }


def _images(group: Group) -> Sequence[PlacedImage]:
    """Of the prompt, which all rollouts have."""
    return group.rollouts[0].images if group.rollouts else ()


def lines_of(group: Group) -> Iterator[Text]:
    """The prompt, then its answers, the best first; those that are alike once, with their number."""
    yield Text()
    yield Text.assemble((printable(group.prompt_id, _SHOWN), "bold cyan"), "  ", printable(group.question, _SHOWN))
    if images := _images(group):
        yield Text.assemble("  images    ", (sizes_in_words(images), "bold"))
    if group.expected:
        yield Text.assemble("  expected  ", (printable(group.expected, _SHOWN), "bold"))
    alike = Counter(_shown(rollout) for rollout in group.rollouts)
    for (reward, status, parts, text), number in sorted(alike.items(), key=lambda one: -one[0][0]):
        times = f"{number:>3} x" if number > 1 else " " * 5
        yield Text.assemble(
            f"{times} {reward:>8.3f}  ", (f"{printable(status):<12}", _STYLES.get(status, "red")), text, (parts, "dim")
        )


def _shown(rollout: Rollout) -> tuple[float, str, str, str]:
    """Reward, status, parts of the reward if there are several, and the answer."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in rollout.reward_parts.items())
    listed = f"  ({parts})" if len(rollout.reward_parts) > 1 else ""
    return rollout.reward, rollout.status, printable(listed, _SHOWN), printable(rollout.text, _SHOWN)
