"""What is watched: a run, or folders of ``titan-rl eval``, and what was read of it before."""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from titan_rl.config.io.bounded_files import TOKENIZER_BYTES, RefusedFile, check_file, read_json
from titan_rl.config.load import ConfigError
from titan_rl.data.images import PlacedImage
from titan_rl.data.types import Group
from titan_rl.diagnostics.web.data.evaluations import Evaluations
from titan_rl.diagnostics.web.data.index import RolloutIndex
from titan_rl.diagnostics.web.html.tokens import Tokens
from titan_rl.records.evaluations.reading import is_evaluation, is_name
from titan_rl.records.metrics import MetricsReader
from titan_rl.records.run_directory.path_checks import check_place
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir
from titan_rl.records.steps.rollouts import RolloutsError, read_rollout
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

    def images(self, step: int, prompt_id: str, sample: int) -> Sequence[PlacedImage]:
        """Images of a rollout's prompt; none where they cannot be read any more."""
        with suppress(RolloutsError):
            if (record := read_rollout(self.run_dir.rollouts, step, prompt_id, sample)) is not None:
                return record[1].images
        return ()

    def _piece(self, token: int) -> str:
        if self._tokenizer is None:
            return f" {token}"
        return self._tokenizer.decode([token], skip_special_tokens=False)


class WatchedEvaluations:
    """Read-only evaluations on the page, without a run."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        """``names``: of the folders in this one."""
        self.name = names[0] if len(names) == 1 or not is_name(folder.name) else folder.name
        self.evaluations = Evaluations(folder, names)


def watched(roots: Iterable[Path]) -> list[Watched | WatchedEvaluations]:
    """Runs and evaluations of these folders; evaluations beside each other in one folder are one.

    Errors: ConfigError for what is neither, and those of ``existing_run_dir``.
    """
    shown: list[Watched | WatchedEvaluations] = []
    evaluations: dict[Path, list[str]] = {}
    for root in roots:
        if (folder := _evaluation(root)) is None:
            shown.append(_run(root))
        else:
            evaluations.setdefault(folder.parent, []).append(folder.name)
    shown += [WatchedEvaluations(*each) for each in evaluations.items()]
    _tell_apart(shown)
    return shown


def _tell_apart(shown: list[Watched | WatchedEvaluations]) -> None:
    """Number those that have one name."""
    counts, numbers = Counter(each.name for each in shown), Counter[str]()
    for each in shown:
        if counts[name := each.name] > 1:
            numbers[name] += 1
            each.name = f"{name} ({numbers[name]})"


def _evaluation(root: Path) -> Path | None:
    """Its folder, without links; None for what is something else. Errors: ConfigError."""
    check_place(root, write=False, what="run directory or an evaluation")
    folder = root.resolve()
    if RunDir(folder).config.is_file() and not (folder / "evaluation.json").is_file():
        return None
    if not is_evaluation(folder):
        return None
    if not is_name(folder.name):
        raise ConfigError(f"{str(folder)[:200]!r} has a name that cannot be shown: rename it")
    return folder


def _run(root: Path) -> Watched:
    run_dir = existing_run_dir(root)
    if not run_dir.config.is_file():
        raise ConfigError(
            f"{root} is neither a run nor an evaluation: give a run directory, such as runs/quickstart-<date>-<time>, "
            f"or a folder that titan-rl eval wrote, such as evaluations/<model>-<date>-<time>"
        )
    return Watched(run_dir)
