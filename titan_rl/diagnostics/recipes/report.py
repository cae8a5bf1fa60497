"""Report of a recipe's run: its run directory read once, and written as Markdown.

A part of the run directory that cannot be read says so in its own place, and leaves the others as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_rl.config.errors import ConfigError
from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.io.printable import printable
from titan_rl.config.load import flat, read_resolved
from titan_rl.diagnostics.bench.memory_watch import MemoryUse
from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.diagnostics.recipes import comparison
from titan_rl.diagnostics.recipes.recipe import NOT_MEASURED, Curve, Recipe, Variant
from titan_rl.diagnostics.recipes.variants import differences_from
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir, is_on_data
from titan_rl.records.statistics import Proportion

_MAX_VALUE = 80
"""Characters of a setting's value in a table."""
_MAX_TEXT = 500
"""Characters of a recipe's own text in a table."""
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class RecipeRun:
    """Run directory of a recipe's variant."""

    recipe: Recipe
    variant: Variant
    run_dir: RunDir
    observed: Rows = ()
    """What was measured from outside while the run lasted, as rows of the report."""

    @property
    def curves(self) -> dict[str, Curve]:
        return self.recipe.curves(self.variant)

    @cached_property
    def records(self) -> list[dict[str, float]]:
        return list(read_metrics(self.run_dir.root))

    @cached_property
    def steps(self) -> Sequence[comparison.Record]:
        return comparison.steps_of(self.records)

    @cached_property
    def points(self) -> list[tuple[float, float]]:
        """Of the variant's metric."""
        return comparison.points_of(self.records, self.variant.metric)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Flat, as the run resolved them. Errors: ConfigError."""
        return flat(read_resolved(self.run_dir.config))

    @cached_property
    def differences(self) -> list[comparison.Difference]:
        """Settings that are not the recipe's. Errors: ConfigError."""
        return differences_from(self.recipe, self.variant, self.settings)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Empty: the run wrote none. Errors: ConfigError."""
        try:
            summary = read_json(self.run_dir.summary)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.run_dir.summary}: {error}") from None
        return summary if isinstance(summary, dict) else {}

    @cached_property
    def ledger(self) -> dict[str, Any] | None:
        """Account of the samples; None of a run that samples nothing. Errors: ConfigError."""
        return None if is_on_data(self.run_dir) else read_ledger(self.run_dir.root)


def markdown(run: RecipeRun, picture: str | None) -> str:
    """Report as Markdown. ``picture``: file name of the curves' picture; None without a step."""
    return "\n".join(_lines(run, picture)) + "\n"


def _lines(run: RecipeRun, picture: str | None) -> Iterator[str]:
    yield f"# {_cell(run.recipe.name)}: {run.variant.name}"
    yield from ("", _text(run.recipe.expected.about), "")
    if picture:
        yield from (f"![{_text(run.variant.metric)}]({picture})", "")
    yield from _section("The run", ("", ""), [*_outcome(run), *_speed(run), *run.observed, *_health(run)])
    for label, curve in run.curves.items():
        yield from _comparison(run, label, curve)
    yield from _section("What differs from the recipe", ("setting", "recipe", "this run"), _differing(run))


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Heading and table."""
    yield from (f"## {title}", "")
    if rows:
        yield f"| {' | '.join(header)} |"
        yield f"|{' --- |' * len(header)}"
        yield from (f"| {' | '.join(row)} |" for row in rows)
    else:
        yield "Nothing."
    yield ""


def _or_error(part: Callable[[], str]) -> str:
    """Cell of a part, or why it cannot be read."""
    try:
        return part()
    except (ConfigError, OSError) as error:
        return _text(str(error))


def _outcome(run: RecipeRun) -> Iterator[tuple[str, str]]:
    yield "directory", _value(str(run.run_dir.root))
    yield "steps", _or_error(lambda: _steps(run))
    for when in ("before", "after"):
        cell = _or_error(lambda when=when: _proportion(run.summary.get(f"held_out_{when}")))
        if cell:
            yield f"held-out accuracy {when}", cell
    if run.points:
        yield _text(run.variant.metric), f"{run.points[0][1]:.3f} → {run.points[-1][1]:.3f}"


def _steps(run: RecipeRun) -> str:
    steps = f"{len(run.steps)} of {_cell(str(run.settings.get('training.steps')))}"
    why_ended = run.summary.get("why_ended")
    return f"{steps}; not ended" if why_ended is None else f"{steps}; {_cell(str(why_ended))}"


def _proportion(value: Any) -> str:
    """Empty for what a summary would not hold."""
    if not isinstance(value, dict):
        return ""
    correct, count = value.get("correct"), value.get("count")
    if not isinstance(correct, int) or not isinstance(count, int) or not 0 <= correct <= count or not count:
        return ""
    return str(Proportion(correct, count))


def _speed(run: RecipeRun) -> Iterator[tuple[str, str]]:
    yield "seconds a step, median", _seconds(run)
    for phase in ("generate", "forward_backward"):
        rate = comparison.median_of(run.steps, f"tokens_per_second_{phase}")
        if rate is not None:
            yield f"tokens a second, {phase.replace('_', ' and ')}", f"{rate:,.0f}"
    if not run.observed:
        yield "largest memory of all actors", NOT_MEASURED


def observed_rows(memory: MemoryUse, gpu_mib: Mapping[str, float], machine: Mapping[str, Any]) -> Rows:
    """Rows of what was measured from outside: the largest memory of the host and of GPUs, and the machine."""
    used = ", ".join(f"GPU {index} {mib / 1024:.1f}" for index, mib in gpu_mib.items())
    of_gpus = [("largest memory of a GPU, GiB", used)] if used else []
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    return [("largest memory of all actors", _memory(memory)), *of_gpus, ("machine", _text(about))]


def _memory(memory: MemoryUse) -> str:
    if not memory.mib:
        return NOT_MEASURED
    largest = sorted(memory.by_process.items(), key=lambda each: -each[1])[:3]
    names = ", ".join(f"{_cell(name)} {mib / 1024:.2f}" for name, mib in largest)
    return f"{memory.mib / 1024:.2f} GiB on the host ({names})"


def _health(run: RecipeRun) -> Iterator[tuple[str, str]]:
    """Ratio of the policy to the one that sampled, agreement, and the ledger."""
    for name, title in (
        ("ratio", "policy ratio, median of steps"),
        ("clip_fraction", "clipped tokens, median of steps"),
    ):
        value = comparison.median_of(run.steps, name)
        if value is not None:
            yield title, f"{value:.4f}"
    yield "agreement of trainer and generator", _or_error(lambda: _agreement(run))
    yield "ledger", _or_error(lambda: _ledger(run.ledger))


def _seconds(run: RecipeRun) -> str:
    seconds = comparison.median_of(run.steps, "seconds_step")
    published = [
        f"{_text(label)}: {curve.seconds_per_step:g}{f' on {_text(curve.hardware)}' if curve.hardware else ''}"
        for label, curve in run.curves.items()
        if curve.seconds_per_step
    ]
    measured = NOT_MEASURED if seconds is None else f"{seconds:.2f}"
    return f"{measured} ({'; '.join(published)})" if published else measured


def _agreement(run: RecipeRun) -> str:
    agreements = comparison.agreements_of(run.steps)
    if not agreements:
        return "none: nothing was sampled"
    figures = f"mean {sum(agreements) / len(agreements):.5f}, largest {comparison.largest_of(agreements):.5f}"
    limit = comparison.limit_of(run.settings)
    if limit is None:
        return f"{figures} (stale samples, without a limit)"
    return f"{figures}; {'within' if comparison.is_within(agreements, limit) else 'BEYOND'} the limit of {limit:g}"


def _ledger(ledger: Mapping[str, Any] | None) -> str:
    if ledger is None:
        return "none: the run sampled nothing"
    discarded = ", ".join(f"{count:,} {_cell(reason)}" for reason, count in ledger["discarded"].items()) or "0"
    verdict = "adds up" if ledger["adds_up"] else f"does NOT add up: {_cell(str(ledger['flaws'][0]))}"
    account = f"issued {ledger['issued']:,} = trained {ledger['trained']:,} + discarded {discarded}"
    return f"{account} + pending {ledger['pending']:,}; {verdict}"


def _comparison(run: RecipeRun, label: str, curve: Curve) -> Iterator[str]:
    header = ("step", "at least" if curve.is_lower_bound else "reference", "this run", "at step", "difference")
    rows = [
        (f"{pair.step:g}", f"{pair.reference:.3f}", *_of_run(pair))
        for pair in comparison.compare(curve.points, run.points)
    ]
    yield from _section(f"Compared with {_text(label)}", header, rows)
    yield f"{_text(curve.metric)}, {curve.source}; this run: `{_text(run.variant.metric)}`."
    yield ""


def _of_run(pair: comparison.Pair) -> tuple[str, str, str]:
    if pair.measured is None:
        return NOT_MEASURED, "", ""
    return f"{pair.measured:.3f}", f"{pair.measured_step:g}", f"{pair.measured - pair.reference:+.3f}"


def _differing(run: RecipeRun) -> list[tuple[str, str, str]]:
    try:
        return [(_cell(each.key), _value(each.recipe), _value(each.run)) for each in run.differences]
    except ConfigError as error:
        return [("cannot be compared", _text(str(error)), "")]


def _value(value: Any) -> str:
    return f"`{_cell(repr(value))}`"


def _text(text: str) -> str:
    return _cell(text, _MAX_TEXT)


def _cell(text: str, most: int = _MAX_VALUE) -> str:
    """Text of a run or a file, as a table's cell holds it."""
    return printable(text, most).replace("|", "\\|").replace("`", "'")


def report_files(root: Path) -> tuple[Path, Path]:
    """Files of a run's report: Markdown, picture."""
    return root / "report.md", root / "report.png"
