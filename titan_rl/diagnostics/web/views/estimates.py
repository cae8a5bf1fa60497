"""A suite's estimates, counts and settings as HTML, in which every text of a file is escaped.

Pure.
"""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from titan_rl.config.io.printable import printable
from titan_rl.diagnostics.web.data.evaluations import Overview
from titan_rl.records.evaluations.estimators import Estimate
from titan_rl.records.evaluations.reading import SuiteRecord, order_of
from titan_rl.records.steps.step_names import step_of

_MOST_ROWS = 200
"""Of a table; how many more there are is told."""
_MOST_CHARACTERS = 300
_DEPTH = 4
"""Of settings within each other."""


def label(evaluation: str) -> str:
    step = step_of(evaluation)
    return printable(evaluation, 60) if step is None else f"step {step}"


def notices(lines: Iterable[str]) -> str:
    return "".join(f'<div class="alarm">{_text(line, 1000)}</div>' for line in lines)


def estimates(overview: Overview) -> str:
    """Table of estimates with their intervals, beside those of another evaluation."""
    if overview.record is None or overview.place is None:
        return ""
    shown = overview.record.estimates
    beside = overview.record_beside.estimates if overview.record_beside else {}
    rows = [
        f"<tr><td>{_text(name)}</td>{_cells(each)}{_cells(beside.get(name), soft=True) if beside else ''}"
        f'<td class="wide-only">{_picture(each)}{_picture(beside.get(name), soft=True)}</td></tr>'
        for name, each in list(shown.items())[:_MOST_ROWS]
    ]
    if not rows:
        rows = ['<tr><td class="soft">No question was scored.</td></tr>']
    if not beside or overview.beside is None:
        names = '<th class="n">value</th><th class="n">95 % interval</th>'
    else:
        names = "".join(
            f'<th class="n">{escape(label(place.evaluation))}</th><th class="n">95 % interval</th>'
            for place in (overview.place, overview.beside)
        )
    head = f'<tr><th>metric</th>{names}<th class="wide-only"></th></tr>'
    return f'<table class="plain estimates">{head}{"".join(rows)}</table>{_left_over(len(shown))}'


def _cells(each: Estimate | None, *, soft: bool = False) -> str:
    look = "n soft" if soft else "n"
    if each is None:
        return f'<td class="{look}">–</td><td class="{look}"></td>'
    return f'<td class="{look}">{each.value:.1%}</td><td class="n soft">{each.low:.1%} to {each.high:.1%}</td>'


def _picture(each: Estimate | None, *, soft: bool = False) -> str:
    """Interval and value on a line from 0 to 1."""
    if each is None:
        return ""
    low, value, high = (100 * min(max(share, 0.0), 1.0) for share in (each.low, each.value, each.high))
    look = "interval of-beside" if soft else "interval"
    band = f'<i style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
    return f'<div class="{look}">{band}<b style="left:{value:.2f}%"></b></div>'


def facts(record: SuiteRecord) -> str:
    """Counts of a suite."""
    found = [("questions", f"{record.num_questions:,}"), ("samples of each", f"{record.num_samples:,}")]
    if record.truncated is not None:
        found.append(("truncated", f"{record.truncated:.1%}"))
    if record.response_length is not None:
        found.append(("tokens an answer", f"{record.response_length:,.1f}"))
    found.append(("not scored", _questions(len(record.unscored))))
    found.append(("left out", f"{record.left_out:,} rows" if record.left_out else "none"))
    return _facts(found)


def _questions(count: int) -> str:
    return f"{count:,} question{'s' * (count != 1)}" if count else "none"


def unscored(record: SuiteRecord) -> str:
    """Table of questions that were not scored, and why; empty without any."""
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(why)}</td></tr>"
        for name, why in list(record.unscored.items())[:_MOST_ROWS]
    )
    return f'<table class="plain">{rows}</table>{_left_over(len(record.unscored))}' if rows else ""


def settings(record: SuiteRecord) -> str:
    """Settings as names with dots."""
    found = list(_flat("", record.settings))
    return _facts(found[:_MOST_ROWS]) + _left_over(len(found))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value and name.count(".") < _DEPTH:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else key, inner)
    else:
        yield name, "–" if value in (None, "", [], {}) else str(value)


def comparison(overview: Overview) -> str:
    """Sentences on what changed from the earlier evaluation to the later."""
    compared, shown, beside = overview.comparison, overview.place, overview.beside
    if compared is None or shown is None or beside is None:
        return ""
    first, last = sorted((shown.evaluation, beside.evaluation), key=order_of)
    if compared.difference is None:
        return f"No answer of {_text(label(last))} has its question and sample in {_text(label(first))}, too."
    each = compared.difference
    return (
        f"From {_text(label(first))} to {_text(label(last))}, of {compared.num_answers:,} answers "
        f'<b class="good">{compared.became_right:,} became right</b> and '
        f'<b class="bad">{compared.became_wrong:,} became wrong</b>; {_questions(compared.num_better)} '
        f"{'has' if compared.num_better == 1 else 'have'} more right answers, {compared.num_worse:,} fewer. "
        f"Share of right answers: {_points(each.value)} points (95&nbsp;% interval, over the questions: "
        f"{_points(each.low)} to {_points(each.high)})."
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _facts(found: Iterable[tuple[str, str]]) -> str:
    return f'<div class="facts">{"".join(f"<span>{_text(n)}</span><span>{_text(v)}</span>" for n, v in found)}</div>'


def _left_over(count: int) -> str:
    return f'<div class="soft">and {count - _MOST_ROWS:,} more</div>' if count > _MOST_ROWS else ""


def _text(text: str, most: int = _MOST_CHARACTERS) -> str:
    return escape(printable(text, most))
