"""An answer to a suite's question, opened, or all answers to a question; with those of another evaluation beside."""

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui

from titan_rl.config.io.printable import printable, printable_lines
from titan_rl.diagnostics.web.data.evaluations import MOST_SAMPLES, Evaluations, Place
from titan_rl.diagnostics.web.views.estimates import label
from titan_rl.records.evaluations.reading import EvaluationError

_MOST_CHARACTERS, _FEW_CHARACTERS = 100_000, 4000
"""Of a text in a sheet, and in a card among others."""
_MOST_READINGS = 50

Places = tuple[Place, ...]
"""That which is shown, and that beside it, if there is one."""


async def open_answer(
    source: Evaluations, places: Places, question_id: str, sample: int, closed: Callable[[], None]
) -> None:
    """Dialog with one answer, and that of the same sample beside it. ``closed``: is called when the dialog is."""

    def read() -> list[dict[str, Any] | None]:
        return [source.answer(place, question_id, sample) for place in places]

    if (found := await _read(read)) is None or found[0] is None:
        return _missing(found, closed)
    with _sheet(f"{question_id} · sample {sample}", closed):
        _asked(found[0])
        with ui.element("div").classes("two" if len(places) > 1 else "w-full"):
            has_final = any(row and row["final"] for row in found)
            for place, row in zip(places, found, strict=True):
                ui.html(whole(place, row, has_final=has_final), sanitize=False)


async def open_question(source: Evaluations, places: Places, question_id: str, closed: Callable[[], None]) -> None:
    """Dialog with all answers to a question, of each evaluation."""

    def read() -> list[list[dict[str, Any]]]:
        return [source.question(place, question_id) for place in places]

    if (found := await _read(read)) is None or not found[0]:
        return _missing(found, closed)
    with _sheet(question_id, closed):
        _asked(found[0][0])
        for place, rows in zip(places, found, strict=True):
            ui.html(f"<h2>{escape(label(place.evaluation))}: {escape(summary(rows))}</h2>", sanitize=False)
            with ui.element("div").classes("answers"):
                for row in rows[:MOST_SAMPLES]:
                    shown = ui.html(card(row), sanitize=False).classes("answer")
                    shown.on("click", partial(open_answer, source, places, question_id, row["sample"], lambda: None))
        ui.label("Click on an answer to read all of it.").classes("soft")


async def _read(read: Callable[[], Any]) -> Any:
    """What is read off the event loop; None, with a notice, where a file cannot be read."""
    try:
        return await nicegui_run.io_bound(read)
    except EvaluationError as error:
        ui.notify(str(error), type="negative")
        return None


def _missing(found: object, closed: Callable[[], None]) -> None:
    if found is not None:
        ui.notify("this answer is not there any more", type="warning")
    closed()


def _sheet(title: str, closed: Callable[[], None]) -> ui.column:
    with ui.dialog(value=True) as dialog:
        sheet = ui.column().classes("sheet wide-sheet")
    with sheet, ui.row().classes("items-center w-full no-wrap"):
        ui.html(f"<h2>{escape(printable(title))}</h2>", sanitize=False)
        ui.element("div").classes("grow")
        ui.button(icon="close", on_click=dialog.close).props("flat dense round aria-label=close")

    def over() -> None:
        dialog.delete()
        closed()

    dialog.on("hide", over)
    return sheet


def _asked(row: dict[str, Any]) -> None:
    parts = [("question", row["question"]), ("expected", row["expected"])]
    shown = "".join(f'<div><div class="soft">{name}</div>{said(text)}</div>' for name, text in parts if text)
    ui.html(f'<div class="{"two" if shown.count("said") > 1 else ""}">{shown}</div>', sanitize=False)


def whole(place: Place, row: dict[str, Any] | None, *, has_final: bool = True) -> str:
    """Answer with all that is recorded of it, as HTML. ``has_final``: whether any that is shown has a final one."""
    head = f"<h2>{escape(label(place.evaluation))}</h2>"
    if row is None:
        return f'{head}<span class="soft">This sample is not there.</span>'
    facts = "".join(f"<span>{name}</span><span>{value}</span>" for name, value in facts_of(row, has_final=has_final))
    return f'{head}<div class="facts">{facts}</div><div class="soft q-mt-sm">answer</div>{said(row["answer"], "tall")}'


def facts_of(row: dict[str, Any], *, has_final: bool) -> Iterable[tuple[str, str]]:
    """Name and value of what is recorded, as HTML."""
    yield "counts as", verdict(row["correct"])
    yield "status", escape(printable(row["status"], 100))
    if has_final:
        yield "final answer", escape(printable(row["final"] or "none", 1000))
    if row["reward"] is not None:
        yield "reward", f"{row['reward']:.6g}"
    if row["num_tokens"] is not None:
        yield "tokens", f"{row['num_tokens']:,}"
    for name, is_right in (row["readings"] or [])[:_MOST_READINGS]:
        yield f"{escape(printable(name, 100))} reading", verdict(is_right)


def verdict(is_right: bool | None) -> str:
    if is_right is None:
        return "–"
    return '<b class="good">right</b>' if is_right else '<b class="bad">wrong</b>'


def summary(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "this question is not there"
    if len(rows) > MOST_SAMPLES:
        return f"the first {MOST_SAMPLES} answers"
    return f"{sum(row['correct'] for row in rows)} of {len(rows)} right"


def card(row: dict[str, Any]) -> str:
    """Answer among others as HTML."""
    facts = [f"{row['num_tokens']} tokens"] if row["num_tokens"] is not None else []
    facts += [printable(row["status"], 100)]
    facts += [f"final: {printable(row['final'], 60)}"] if row["final"] else []
    return (
        f'<div class="answer-head"><b>{row["sample"]}</b>{verdict(row["correct"])}'
        f'<span class="soft">{escape(" · ".join(facts))}</span></div>{said(row["answer"], most=_FEW_CHARACTERS)}'
    )


def said(text: str | None, look: str = "", most: int = _MOST_CHARACTERS) -> str:
    """Text with its line ends as HTML; what is cut away is told."""
    text = text or ""
    cut = f'<div class="soft">the first {most:,} of {len(text):,} characters</div>' if len(text) > most else ""
    shown = escape(printable_lines(text[:most])) or '<span class="soft">nothing</span>'
    return f'<div class="said {look}">{shown}</div>{cut}'
