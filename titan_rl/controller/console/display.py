"""Console output of a run: a live view in a terminal, plain lines elsewhere.

A terminal may be closed, and who reads a pipe may go: the run goes on, and its log still has all that it says.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live

from titan_rl.config.io.printable import printable_lines
from titan_rl.config.io.terminal import Terminal
from titan_rl.controller.console.step_table import COLUMNS, MOST_STEPS, Sample, headline, panel, sample_line
from titan_rl.data.storage.files import LineFile, unless_full

_IN_LINE = (
    *("reward", "accuracy", "groups_with_signal", "entropy", "response_length", "agreement_mean", "grad_norm"),
    *("draft_acceptance_rate", "drafter_loss"),
)
_ON_DATA = ("loss", "rewards/accuracies", "rewards/margins", "grad_norm", "learning_rate", "epoch")
"""Metrics of a line, where the step has them; ``_ON_DATA``: of a run without rollouts."""
_LINE_SECONDS, _SAMPLE_SECONDS = 3.0, 60.0
"""Without a terminal, a line, and an answer, at most this often."""


class Display:
    """``step`` after each step, ``log`` for anything else, which also goes to the run's log; a context manager."""

    def __init__(self, num_steps: int, log: Path | None = None):
        self.console = _console()
        self._context = copy_context()
        self._file = LineFile(log) if log else None
        self.num_steps = num_steps
        self._last_line = self._last_sample = -_SAMPLE_SECONDS
        self._recent: list[dict[str, float]] = []
        self._sample: Sample | None = None
        self._phase, self._since = "", time.monotonic()
        self._usual: dict[str, float] = {}
        """Seconds that a phase took the last time."""
        self._live = Live(self, console=self.console, refresh_per_second=4) if self.console.is_terminal else None

    def __enter__(self) -> "Display":
        if self._live:
            self._show(self._live.start)
        return self

    def close_table(self) -> None:
        """Leave the table as it is; what is said from now on stands below it."""
        self.enter("")
        live, self._live = self._live, None
        if live:
            self._show(live.stop)

    def __exit__(self, *_: object) -> None:
        self.close_table()
        if self._file:
            self._file.close()

    def follow(self) -> None:
        """In a notebook, what is said from now on stands below the cell that calls this."""
        self._context = copy_context()

    def log(self, text: str) -> None:
        if self._file:
            with unless_full():
                self._file.write(printable_lines(text))
        self._show(lambda: self.console.print(text, soft_wrap=True))

    def enter(self, phase: str) -> None:
        """The run does this now."""
        if phase != self._phase:
            now = time.monotonic()
            self._usual[self._phase] = now - self._since
            self._phase, self._since = phase, now

    def step(self, record: dict[str, float], sample: Sample | None = None) -> None:
        """``sample``: one of its answers."""
        self._recent, self._sample = [*self._recent[1 - MOST_STEPS :], record], sample
        if self._live:  # whose thread draws it
            return
        now = time.monotonic()
        if self._is_due(now) or record["step"] in (1, self.num_steps):
            self._last_line = now
            values = "  ".join(f"{name} {COLUMNS[name].format(record[name])}" for name in _names(record))
            self.log(f"step {record['step']:>4}/{self.num_steps}  {values}  {record['seconds_step']:.2f} s")
            if sample is not None and now - self._last_sample >= _SAMPLE_SECONDS:
                self._last_sample = now
                self.log(f"  {sample_line(sample)}")

    def sft_step(self, num_steps: int, step: int, loss: float) -> None:
        """A supervised step before the first; the last one has a line of its own."""
        if self._live or step == num_steps:
            return
        now = time.monotonic()
        if self._is_due(now) or step == 1:
            self._last_line = now
            self.log(f"SFT step {step:>4}/{num_steps}  loss {COLUMNS['loss'].format(loss)}")

    def _is_due(self, now: float) -> bool:
        return now - self._last_line >= _LINE_SECONDS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._view(options.max_width, console.height)

    def _view(self, width: int, height: int) -> RenderableType:
        recent = list(self._recent)
        usual_step = sum(record["seconds_step"] for record in recent) / len(recent) if recent else 0.0
        step = int(recent[-1]["step"]) if recent else 0
        seconds, usual = time.monotonic() - self._since, self._usual.get(self._phase)
        first_line = headline(step, self.num_steps, self._phase, seconds, usual, usual_step)
        return panel(first_line, recent, self._sample, width, height)

    def _show(self, write: Callable[[], None]) -> None:
        try:
            self._context.copy().run(write)  # a context can be entered once at a time
        except (OSError, SystemExit):  # rich's answer to a broken pipe is to exit
            live, self._live, self.console = self._live, None, Terminal(quiet=True)
            if live:
                with suppress(OSError, SystemExit):
                    live.stop()
            _drop_unwritable()


def _console() -> Terminal:
    """In a notebook one for plain text, which a cell joins into one output; as HTML each line would be one."""
    return Terminal(force_jupyter=False, force_terminal=False) if Terminal().is_jupyter else Terminal()


def _names(record: dict[str, float]) -> tuple[str, ...]:
    """What a line tells of a step."""
    names = _IN_LINE if "reward" in record else _ON_DATA
    return tuple(name for name in names if name in record)


def _drop_unwritable() -> None:
    """Send to nowhere what can no longer be written: what is left in a buffer would fail again when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
