"""Report of a recipe's run: its run directory read once, and written as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_rl.config.errors import ConfigError
from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.io.printable import printable
from titan_rl.config.load import flat, load_config, read_resolved
from titan_rl.controller.preflight.checks import resolve
from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.diagnostics.recipes import comparison
from titan_rl.diagnostics.recipes.recipe import NOT_MEASURED, Curve, Recipe, Variant
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir, is_on_data
from titan_rl.records.statistics import Proportion

_LONGEST_VALUE = 80
"""Characters of a setting's value in a table."""


@dataclass(frozen=True)
class Measured:
    """What the command measured around a run: the machine, and the largest memory of its host and GPUs."""

    memory_mib: float
    memory_by_process: Mapping[str, float]
    gpu_mib: Mapping[str, float]
    """By GPU; empty without one."""
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class RecipeRun:
    """Run directory of a recipe's variant."""

    recipe: Recipe
    variant: Variant
    run_dir: RunDir
    measured: Measured | None = None
    """None: the run was not driven by ``recipe run``."""

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
    def recipe_settings(self) -> dict[str, Any]:
        """Flat, as the recipe's TOML resolves on this machine. Errors: ConfigError."""
        return flat(resolve(load_config(self.recipe.toml(self.variant), with_models=False)).as_dict())

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
    """Report as Markdown. ``picture``: file name of the curves beside it; None without a step."""
    return "\n".join(_lines(run, picture)) + "\n"


def _lines(run: RecipeRun, picture: str | None) -> Iterator[str]:
    yield f"# {run.recipe.name}: {run.variant.name}"
    yield from ("", run.recipe.expected.about, "")
    if picture:
        yield from (f"![{run.variant.metric}]({picture})", "")
    yield from _section("The run", ("", ""), [*_outcome(run), *_measures(run)])
    for curve in (*run.variant.curves, *run.variant.ours):
        yield from _beside(run, curve)
    found = comparison.differences(run.recipe_settings, run.settings)
    rows = [(each.key, _value(each.recipe), _value(each.run)) for each in found]
    yield from _section("What differs from the recipe", ("setting", "recipe", "this run"), rows)


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


def _outcome(run: RecipeRun) -> Iterator[tuple[str, str]]:
    summary = run.summary
    yield "directory", _value(str(run.run_dir.root))
    steps = f"{len(run.steps)} of {run.settings.get('training.steps')}"
    yield "steps", f"{steps}; {_cell(str(summary['why_ended']))}" if "why_ended" in summary else f"{steps}; not ended"
    for when in ("before", "after"):
        if (accuracy := _proportion(summary.get(f"held_out_{when}"))) is not None:
            yield f"held-out accuracy {when}", str(accuracy)
    if run.points:
        yield run.variant.metric, f"{run.points[0][1]:.3f} → {run.points[-1][1]:.3f}"


def _proportion(value: Any) -> Proportion | None:
    """None for what a summary would not hold."""
    if not isinstance(value, dict):
        return None
    correct, count = value.get("correct"), value.get("count")
    if not isinstance(correct, int) or not isinstance(count, int) or not 0 <= correct <= count or not count:
        return None
    return Proportion(correct, count)


def _measures(run: RecipeRun) -> Iterator[tuple[str, str]]:
    yield "seconds a step, median", _seconds(run)
    for phase in ("generate", "forward_backward"):
        rate = comparison.median_of(run.steps, f"tokens_per_second_{phase}")
        if rate is not None:
            yield f"tokens a second, {phase.replace('_', ' and ')}", f"{rate:,.0f}"
    yield "largest memory of all actors", _memory(run.measured)
    if run.measured and run.measured.gpu_mib:
        used = ", ".join(f"GPU {index} {mib / 1024:.1f}" for index, mib in run.measured.gpu_mib.items())
        yield "largest memory of a GPU, GiB", used
    if run.measured:
        yield "machine", _cell(", ".join(f"{name} {value}" for name, value in run.measured.machine.items()))
    yield from _ratios(run)
    yield "agreement of trainer and generator", _agreement(comparison.agreement_of(run.steps, run.settings))
    yield "ledger", _ledger(run.ledger)


def _ratios(run: RecipeRun) -> Iterator[tuple[str, str]]:
    """Of the policy to the one that sampled, and how much of it was clipped."""
    for name, title in (
        ("ratio", "policy ratio, median of steps"),
        ("clip_fraction", "clipped tokens, median of steps"),
    ):
        value = comparison.median_of(run.steps, name)
        if value is not None:
            yield title, f"{value:.4f}"


def _seconds(run: RecipeRun) -> str:
    seconds = comparison.median_of(run.steps, "seconds_step")
    published = [
        f"{curve.label}: {curve.seconds_per_step:g}{f' on {curve.hardware}' if curve.hardware else ''}"
        for curve in (*run.variant.curves, *run.variant.ours)
        if curve.seconds_per_step
    ]
    ours = NOT_MEASURED if seconds is None else f"{seconds:.2f}"
    return f"{ours} ({'; '.join(published)})" if published else ours


def _memory(measured: Measured | None) -> str:
    if measured is None or not measured.memory_mib:
        return NOT_MEASURED
    largest = sorted(measured.memory_by_process.items(), key=lambda each: -each[1])[:3]
    names = ", ".join(f"{_cell(name)} {mib / 1024:.2f}" for name, mib in largest)
    return f"{measured.memory_mib / 1024:.2f} GiB on the host ({names})"


def _agreement(agreement: comparison.Agreement | None) -> str:
    if agreement is None:
        return "none: nothing was sampled"
    figures = f"mean {agreement.mean:.5f}, largest {agreement.largest:.5f}"
    if agreement.limit is None:
        return f"{figures} (off-policy, without a limit)"
    return f"{figures}; {'within' if agreement.holds else 'BEYOND'} the limit of {agreement.limit:g}"


def _ledger(ledger: Mapping[str, Any] | None) -> str:
    if ledger is None:
        return "none: the run sampled nothing"
    discarded = ", ".join(f"{count:,} {_cell(reason)}" for reason, count in ledger["discarded"].items()) or "0"
    verdict = "adds up" if ledger["adds_up"] else f"does NOT add up: {_cell(str(ledger['flaws'][0]))}"
    account = f"issued {ledger['issued']:,} = trained {ledger['trained']:,} + discarded {discarded}"
    return f"{account} + pending {ledger['pending']:,}; {verdict}"


def _beside(run: RecipeRun, curve: Curve) -> Iterator[str]:
    bound = "at least" if curve.is_bound else "published"
    rows = [
        (f"{pair.step:g}", f"{pair.published:.3f}", *_of_run(pair))
        for pair in comparison.beside(curve.points, run.points)
    ]
    yield from _section(f"Beside {curve.label}", ("step", bound, "this run", "at step", "difference"), rows)
    yield f"{curve.metric}, {curve.source}; this run: `{run.variant.metric}`."
    yield ""


def _of_run(pair: comparison.Pair) -> tuple[str, str, str]:
    if pair.ours is None or pair.difference is None:
        return NOT_MEASURED, "", ""
    return f"{pair.ours:.3f}", f"{pair.at:g}", f"{pair.difference:+.3f}"


def _value(value: Any) -> str:
    return f"`{_cell(repr(value))}`"


def _cell(text: str) -> str:
    """Text of a run or a file, as a table's cell holds it."""
    return printable(text, _LONGEST_VALUE).replace("|", "\\|").replace("`", "'")


def report_files(root: Path) -> tuple[Path, Path]:
    """Files of a run's report: Markdown, picture."""
    return root / "report.md", root / "report.png"
