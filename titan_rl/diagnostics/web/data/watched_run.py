"""One run that is watched: its directory, and what was read of it before."""

import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from titan_rl.config.io.bounded_files import TOKENIZER_BYTES, RefusedFile, check_file, read_json
from titan_rl.config.load import ConfigError
from titan_rl.data.types import Group
from titan_rl.diagnostics.web.data.evaluations import Evaluations
from titan_rl.diagnostics.web.data.index import RolloutIndex
from titan_rl.diagnostics.web.html.tokens import Tokens
from titan_rl.records.metrics import MetricsReader
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir
from titan_rl.records.steps.rollouts import read_rollout
from titan_rl.records.steps.trained import read_trained


class Watched:
    """Read-only run on the page."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.name = run_dir, run_dir.root.resolve().name
        self._metrics = MetricsReader(run_dir.root)
        self._reading = threading.Lock()
        self.index, self.evaluations = RolloutIndex(run_dir), Evaluations(run_dir.evaluations)

    def records(self) -> list[dict[str, float]]:
        """Current records of all steps."""
        with self._reading:
            return self._metrics.records_after(-1)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The run's own copy, or else the model's that it began with; None where neither can be read."""
        paths = [self.run_dir.base_model, self.run_dir.model]
        with suppress(OSError, ValueError, TypeError, KeyError):
            paths.append(Path(read_json(self.run_dir.config)["model"]["path"]))
        for path in (path / "tokenizer.json" for path in paths):
            if path.is_file():
                with suppress(Exception):  # the library raises a bare one
                    check_file(path, TOKENIZER_BYTES)
                    return Tokenizer.from_file(str(path))
        return None

    def tokens(self, step: int, prompt_id: str, sample: int) -> tuple[Group, Tokens] | None:
        """A rollout with its prompt; None if it is not there any more. Errors: RolloutsError."""
        if (record := read_rollout(self.run_dir.rollouts, step, prompt_id, sample)) is None:
            return None
        group, rollout = record
        trained = None
        with suppress(OSError, pa.ArrowException, RefusedFile):
            trained = read_trained(self.run_dir.trained, step, prompt_id, sample)
        return group, Tokens(rollout, [self._piece(token) for token in rollout.tokens.tolist()], trained)

    def _piece(self, token: int) -> str:
        if self._tokenizer is None:
            return f" {token}"
        return self._tokenizer.decode([token], skip_special_tokens=False)


def watched(root: Path) -> Watched:
    """Watched runs of these directories. Errors: ConfigError where no run is, and those of ``existing_run_dir``."""
    run_dir = existing_run_dir(root)
    if not run_dir.config.is_file():
        raise ConfigError(f"{root} is no run: give a run directory, such as runs/quickstart-<date>-<time>")
    return Watched(run_dir)
