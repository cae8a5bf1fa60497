"""Results of suites as a table for people."""

from collections.abc import Iterable, Sequence

from titan_rl.records.evaluations.results import SuiteResult

_HEAD = ("suite", "questions", "metric", "value", "95 % interval")


def table(results: Sequence[SuiteResult]) -> str:
    """Lines of all suites' estimates, in columns."""
    rows = [_HEAD, *(row for result in results for row in _rows(result))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(_line(row, widths) for row in rows)


def _rows(result: SuiteResult) -> Iterable[tuple[str, ...]]:
    count = str(len(result.questions))
    for name, each in result.estimates.items():
        yield result.name, count, name, f"{each.value:.1%}", f"{each.low:.1%} to {each.high:.1%}"
    if result.questions:
        metrics = result.metrics
        yield result.name, count, "truncated", f"{metrics[f'eval/{result.name}/truncated']:.1%}", ""
        yield result.name, count, "tokens an answer", f"{metrics[f'eval/{result.name}/response_length']:.1f}", ""
    if result.num_timeouts:
        yield result.name, count, "timeouts, as wrong", str(result.num_timeouts), ""
    if result.unscored:
        yield result.name, count, "not scored", str(len(result.unscored)), ""
    if result.left_out:
        yield result.name, count, "left out", str(result.left_out), ""


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
