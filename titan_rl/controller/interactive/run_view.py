"""A run by what it writes down, whoever drives it: active or ended. Nothing here waits for the run."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from titan_rl.config.io.bounded_files import read_json, read_text
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import MADE_MODELS
from titan_rl.controller.interactive.live_plot import LivePlot
from titan_rl.controller.interactive.plots import Picture, TimeBar, time_bar
from titan_rl.controller.interactive.tables import Table
from titan_rl.controller.interactive.token_view import TokenView, of_tokens
from titan_rl.controller.loop.scaling import scale_generators
from titan_rl.data.text.tokenizer import Tokenizer, decoded, read_tokenizer
from titan_rl.data.types import Group, Rollout
from titan_rl.mesh.processes.processes import memory_bytes, process_state
from titan_rl.records.metrics import MetricsReader
from titan_rl.records.plot import figure_of
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts, recorded_steps

_STATES = {"R": "works", "S": "waits", "D": "waits", "T": "stopped"}


class RunView:
    """``pandas`` tables (tables.py) of a run directory."""

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir
        self._loaded_tokenizer: Tokenizer | None = None
        self._metrics = MetricsReader(run_dir.root)

    def __repr__(self) -> str:
        step, _, what = self.phase.partition(" ")
        return f"<run {self.root}: step {step or 0}, {what or 'at work' if self.is_active else 'ended'}>"

    @property
    def root(self) -> Path:
        return self.run_dir.root

    @property
    def is_active(self) -> bool:
        """Whether a process drives the run now."""
        return self.run_dir.is_in_use()

    @property
    def phase(self) -> str:
        """Steps done, and what the run does now."""
        with suppress(OSError, ValueError):
            return read_text(self.run_dir.phase).strip()
        return ""

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each step (0: what was measured before the first), a column for each metric."""
        return self._metrics_after(-1)

    def _metrics_after(self, step: int) -> pd.DataFrame:
        return Table(self._metrics.records_after(step) or {"step": []}).set_index("step")

    def rollouts(self, step: int | None = None) -> pd.DataFrame:
        """A row for each sample of a step, the last one by default; parts of the reward as ``reward/NAME``.

        Errors: ConfigError if the step is not recorded; RolloutsError for a damaged file."""
        _, groups = self._recorded(step)
        samples = ((group, rollout) for group in groups for rollout in group.rollouts)
        return Table([_row(rollout, group.question, group.expected) for group, rollout in samples])

    def _recorded(self, step: int | None) -> tuple[int, list[Group]]:
        steps = recorded_steps(self.run_dir.rollouts)
        step = steps[-1] if step is None and steps else step
        if step not in steps:
            there = f"{steps[0]} to {steps[-1]} are" if steps else "none is yet"
            raise ConfigError(f"step {step} is not recorded, {there}")
        return step, read_rollouts(self.run_dir.rollouts, step)

    def tokens(
        self,
        prompt_id: str,
        sample: int = 0,
        *,
        step: int | None = None,
        by: str = "provenance",
        values: np.ndarray | None = None,
    ) -> TokenView:
        """A sample as coloured tokens; ``by`` and ``values``: as TokenView has them, or a value for each token that the
        model wrote. Errors: ConfigError if there is no such sample, or the run's tokenizer is gone; ValueError for
        another number of values."""
        _, groups = self._recorded(step)
        for rollout in (rollout for group in groups if group.prompt_id == prompt_id for rollout in group.rollouts):
            if rollout.sample == sample:
                pieces = [decoded(self.tokenizer, [token]) for token in rollout.tokens.tolist()]
                return TokenView(rollout, pieces, by, None if values is None else of_tokens(rollout, values))
        raise ConfigError(f"there is no sample {sample} of {prompt_id} in that step")

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's, as transformers reads it. Errors: ConfigError if it is gone."""
        if self._loaded_tokenizer is None:
            config = read_json(self.run_dir.config)
            path = config["model"]["path"]
            self._loaded_tokenizer = read_tokenizer(self.run_dir.base_model if path in MADE_MODELS else path)
        return self._loaded_tokenizer

    @property
    def curves(self) -> Picture | None:
        """Plot of the metrics over steps; None before the first."""
        return Picture(figure) if (figure := figure_of(self.root)) is not None else None

    @property
    def time(self) -> TimeBar | None:
        """Time of the last steps by phase; None before the first."""
        return time_bar(self.metrics)

    def follow(self, what: Literal["actors", "curves", "time"] = "actors") -> LivePlot:
        """One of these three, drawn anew in its cell while the run goes on."""
        states = {"actors": self._actors_now, "curves": self._last_step, "time": self._last_step}
        if what not in states:
            raise ConfigError(f"{what!r} cannot be followed: one of {', '.join(states)} can")

        def draw() -> Any:
            picture = getattr(self, what)
            return self.phase if picture is None else picture

        return LivePlot(draw, states[what], lambda: not self.is_active)

    def _actors_now(self) -> str:
        return self.actors.to_csv()

    def _last_step(self) -> int:
        return int(self.metrics.index.to_numpy().max()) if len(self.metrics) else -1

    @property
    def events(self) -> pd.DataFrame:
        """Events of the run: starts, deaths, replacements, a row each."""
        return Table(read_events(self.root))

    @property
    def actors(self) -> pd.DataFrame:
        """The run's processes as they are now: id, state, and memory in MiB."""
        with suppress(OSError, ValueError, AttributeError):
            names = read_json(self.run_dir.pids)
            return actor_table({int(pid): name for pid, name in names.items()} if self.is_active else {})
        return actor_table({})

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty while the run is active."""
        with suppress(OSError, ValueError, TypeError):
            return dict(read_json(self.run_dir.summary))
        return {}

    def scale(self, generators: int) -> None:
        """Ask an active run for so many generators. Errors: ConfigError."""
        scale_generators(self.root, generators)


def actor_table(names: dict[int, str]) -> pd.DataFrame:
    rows = [(name, pid, process_state(pid), memory_bytes(pid) >> 20) for pid, name in names.items()]
    rows = [(name, pid, _STATES.get(state, "gone"), memory) for name, pid, state, memory in sorted(rows)]
    return Table(rows, columns=["actor", "pid", "state", "MiB"]).set_index("actor")


def _row(rollout: Rollout, question: str, expected: str) -> dict[str, Any]:
    return {
        "prompt_id": rollout.prompt_id,
        "sample": rollout.sample,
        "prompt": question,
        "expected": expected,
        "answer": rollout.text,
        "status": rollout.status,
        "reward": rollout.reward,
        **{f"reward/{name}": value for name, value in rollout.reward_parts.items()},
        "advantage": rollout.advantage,
        "version": int(rollout.versions.max()),
        "tokens": rollout.tokens,
        "provenance": rollout.provenance,
        "logprobs": rollout.logprobs,
    }
