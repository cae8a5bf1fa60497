"""Live table of a run, fitted to the terminal: progress, last steps, one answer.

Pure: texts and tables of numbers.
"""

from dataclasses import dataclass

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from titan_rl.config.io.printable import printable
from titan_rl.data.types import Group

COLUMNS = {
    "loss": "{:.4f}",
    "rewards/accuracies": "{:.1%}",
    "rewards/margins": "{:.3f}",
    "reward": "{:.3f}",
    "accuracy": "{:.1%}",
    "groups_with_signal": "{:.0%}",
    "entropy": "{:.3f}",
    "response_length": "{:.1f}",
    "clip_fraction": "{:.2%}",
    "masked_fraction": "{:.2%}",
    "agreement_mean": "{:.6f}",
    "agreement_max": "{:.4f}",
    "kl_k3": "{:.2e}",
    "grad_norm": "{:.3f}",
    "learning_rate": "{:.2e}",
    "epoch": "{:.2f}",
    "staleness_max": "{:.0f}",
    "seconds_generate": "{:.2f}",
    "seconds_score": "{:.2f}",
    "seconds_wait": "{:.2f}",
    "seconds_forward_backward": "{:.2f}",
    "seconds_optimizer": "{:.2f}",
    "seconds_weight_sync": "{:.2f}",
    "tokens_per_second_generate": "{:,.0f}",
    "tokens_per_second_forward_backward": "{:,.0f}",
    "prompt_tokens_cached": "{:.0%}",
    "draft_acceptance_rate": "{:.0%}",
    "drafter_loss": "{:.4f}",
}
"""Metrics that are shown, the more important first: a small terminal shows as many as it has lines for."""
MOST_STEPS = 8
_VALUE_WIDTH, _NAME_WIDTH = 10, max(map(len, COLUMNS))
_OTHER_LINES = 6
"""The headline, the table's head and its rule, the answer, and what the cursor needs."""


@dataclass(frozen=True)
class Sample:
    """One answer, for people."""

    question: str
    expected: str
    answer: str
    reward: float


def sample_of(groups: list[Group]) -> Sample | None:
    """The best answer to the first prompt that has one."""
    for group in groups:
        if group.rollouts:
            best = max(group.rollouts, key=lambda rollout: rollout.reward)
            return Sample(group.question, group.expected, best.text, best.reward)
    return None


def sample_line(sample: Sample, width: int = 200) -> str:
    expectation = f" (expected {printable(sample.expected, width // 6)})" if sample.expected else ""
    shown_question, answer = printable(sample.question, width // 3), printable(sample.answer, width // 3)
    return f"{shown_question} -> {answer or 'nothing'}{expectation}, reward {sample.reward:.3g}"


def duration(seconds: float) -> str:
    """``0:07``, ``4:05`` or ``1:02:03``."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_LATE = 2.0
"""Times what a phase usually takes after which that says nothing any more."""


def headline(step: int, num_steps: int, phase: str, seconds: float, usual: float | None, step_seconds: float) -> str:
    """``seconds``: in this phase; ``usual``: how long it took before, if it did; ``step_seconds``: of a step, or 0."""
    parts = [f"step {step} of {num_steps}"] if step_seconds else []
    if phase:
        expected = f" of about {duration(usual)}" if usual and seconds < _LATE * usual + 1 else ""
        parts.append(f"{phase} {duration(seconds)}{expected}")
    if step_seconds and step < num_steps:
        parts += [f"{step_seconds:.2f} s a step", f"about {duration((num_steps - step) * step_seconds)} left"]
    return "  ".join(parts)


def step_table(records: list[dict[str, float]], width: int, height: int) -> Table:
    """The newest steps on the right; as many steps, and as many metrics, as there is room for."""
    shown = records[-max(1, min(MOST_STEPS, (width - _NAME_WIDTH) // _VALUE_WIDTH)) :]
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("step", no_wrap=True)
    for record in shown:
        table.add_column(str(record["step"]), justify="right", no_wrap=True, min_width=_VALUE_WIDTH - 1)
    names = [name for name in COLUMNS if all(name in record for record in shown)]  # algorithms count different things
    for name in names[: max(1, height)]:
        table.add_row(name.replace("_", " "), *(COLUMNS[name].format(record[name]) for record in shown))
    return table


def panel(
    headline: str, records: list[dict[str, float]], sample: Sample | None, width: int, height: int
) -> RenderableType:
    """Headline, step table and sample within ``height`` lines of ``width`` characters."""
    lines: list[RenderableType] = [Text(headline, no_wrap=True, overflow="ellipsis", style="bold")]
    if records:
        lines.append(step_table(records, width, height - _OTHER_LINES))
    if sample is not None:
        lines.append(Text(sample_line(sample, width), no_wrap=True, overflow="ellipsis", style="dim"))
    return Lines(*lines)
