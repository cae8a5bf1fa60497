"""What a person sees of a run: a live table in a terminal, plain lines elsewhere, and nothing once nobody can see it.

A terminal may be closed, and who reads a pipe may go: the run goes on, and its log still has all that it says.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from titan_rl.data.files import LineFile, unless_full

_COLUMNS = {
    "loss": "{:.4f}",
    "rewards/accuracies": "{:.1%}",
    "rewards/margins": "{:.3f}",
    "reward": "{:.3f}",
    "accuracy": "{:.1%}",
    "groups_with_signal": "{:.0%}",
    "entropy": "{:.3f}",
    "response_length": "{:.1f}",
    "clip_fraction": "{:.2%}",
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
}
_IN_LINE = ("reward", "accuracy", "groups_with_signal", "entropy", "response_length", "agreement_mean", "grad_norm")
_ON_DATA = ("loss", "rewards/accuracies", "rewards/margins", "grad_norm", "learning_rate", "epoch")
"""Of a run without rollouts, where the step has it."""
_NUM_SHOWN = 8
_LINE_SECONDS = 3.0
"""Without a terminal, a line at most this often."""


class Display:
    """``step`` after each step, ``say`` for anything else, which also goes to the run's log; a context manager."""

    def __init__(self, num_steps: int, log: Path | None = None):
        self.console = Console()
        self._log = LineFile(log) if log else None
        self.num_steps = num_steps
        self._last_line = 0.0
        self._recent: list[dict[str, float]] = []
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=False) if self.console.is_terminal else None
        )

    def __enter__(self) -> "Display":
        if self._live:
            self._show(self._live.start)
        return self

    def close_table(self) -> None:
        """Leave the table as it is; what is said from now on stands below it."""
        live, self._live = self._live, None
        if live:
            self._show(live.stop)

    def __exit__(self, *_) -> None:
        self.close_table()
        if self._log:
            self._log.close()

    def say(self, text: str) -> None:
        if self._log:
            with unless_full():
                self._log.write(text)
        self._show(lambda: self.console.print(text, highlight=False, markup=False, soft_wrap=True))

    def step(self, record: dict[str, float]) -> None:
        self._recent = [*self._recent[1 - _NUM_SHOWN :], record]
        if self._live:
            self._live.update(self._table())  # its thread draws it
        elif time.monotonic() - self._last_line >= _LINE_SECONDS or record["step"] in (1, self.num_steps):
            self._last_line = time.monotonic()
            values = "  ".join(f"{name} {_COLUMNS[name].format(record[name])}" for name in _names(record))
            self.say(f"step {record['step']:>4}/{self.num_steps}  {values}  {record['seconds_step']:.2f} s")

    def _show(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, SystemExit):  # rich's answer to a broken pipe is to exit
            live, self._live, self.console = self._live, None, Console(quiet=True)
            if live:
                with suppress(OSError, SystemExit):
                    live.stop()
            _drop_unwritable()

    def _table(self) -> Table:
        table = Table(title=f"step {self._recent[-1]['step']} of {self.num_steps}")
        table.add_column("")
        for record in self._recent:
            table.add_column(str(record["step"]), justify="right")
        for name, form in _COLUMNS.items():
            if all(name in record for record in self._recent):  # not every algorithm counts all of them
                table.add_row(name.replace("_", " "), *(form.format(record[name]) for record in self._recent))
        return table


def _names(record: dict[str, float]) -> tuple[str, ...]:
    """What a line tells of a step."""
    return _IN_LINE if "reward" in record else tuple(name for name in _ON_DATA if name in record)


def _drop_unwritable() -> None:
    """Send to nowhere what can no longer be written: what is left in a buffer would fail again when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
