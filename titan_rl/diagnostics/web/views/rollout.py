"""One rollout, opened: prompt, facts, tool calls, and its tokens."""

from collections.abc import Callable
from html import escape
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui

from titan_rl.data.types import Group, Rollout
from titan_rl.diagnostics.web.data.watched_run import Watched
from titan_rl.diagnostics.web.html.images import images_html
from titan_rl.diagnostics.web.html.tokens import COLOURS, MOST_TOKENS, Tokens, facts_of, legend
from titan_rl.records.steps.rollouts import RolloutsError

_MOST_CALLS = 200


async def open_sheet(run: Watched, row: dict[str, Any], closed: Callable[[], None] = lambda: None) -> None:
    """Dialog with one rollout. ``row``: as the table has it. ``closed``: is called when the sheet is."""
    try:
        name = int(row["step"]), str(row["prompt_id"]), int(row["sample"])
        shown = await nicegui_run.io_bound(run.tokens, *name)
    except (RolloutsError, KeyError, ValueError, TypeError) as error:
        ui.notify(str(error), type="negative")
        return
    if shown is None:
        ui.notify("this rollout is not there any more", type="warning")
        return
    images = await nicegui_run.io_bound(images_html, shown[1].rollout.images) or ""
    with ui.dialog(value=True) as dialog, ui.column().classes("sheet"):
        _sheet(*shown, images, name[0], str(row.get("why") or ""), dialog)

    def over() -> None:
        dialog.delete()
        closed()

    dialog.on("hide", over)


def _sheet(group: Group, tokens: Tokens, images: str, step: int, why: str, dialog: ui.dialog) -> None:
    rollout = tokens.rollout
    with ui.row().classes("items-center w-full no-wrap"):
        ui.html(f"<h2>{escape(rollout.prompt_id)} · sample {rollout.sample} · step {step}</h2>", sanitize=False)
        ui.element("div").classes("grow")
        ui.button(icon="close", on_click=dialog.close).props("flat dense round aria-label=close")
    facts = "".join(f"<span>{escape(name)}</span><span>{escape(value)}</span>" for name, value in facts_of(tokens, why))
    prompt = f'<div class="soft">prompt</div><div class="said">{escape(group.question)}</div>'
    answer = f'<div class="soft q-mt-sm">expected</div><div class="said">{escape(group.expected)}</div>'
    ui.html(
        f'<div class="two"><div class="facts">{facts}</div>'
        f"<div>{prompt}{images}{answer if group.expected else ''}</div></div>",
        sanitize=False,
    )
    if calls := _calls(rollout):
        ui.html(calls, sanitize=False)
    _tokens(tokens)


def _calls(rollout: Rollout) -> str:
    rows = [
        f'<tr><td class="n">{number}</td><td>{escape(call.name or "could not be read")}</td>'
        f"<td><code>{escape(call.arguments)}</code></td>"
        f'<td class="{"" if call.status == "ok" else "bad"}">{escape(call.status)}</td>'
        f'<td class="n">{call.seconds:.3f} s</td></tr>'
        for number, turn in enumerate(rollout.turns, start=1)
        for call in turn.calls
    ]
    head = "<th class='n'>turn</th><th>tool</th><th>arguments</th><th>came out</th><th class='n'>took</th>"
    return f'<table class="plain"><tr>{head}</tr>{"".join(rows[:_MOST_CALLS])}</table>' if rows else ""


def _tokens(tokens: Tokens) -> None:
    shown = {"by": "provenance", "first": 0}
    total = len(tokens.pieces_T)

    def draw(**changes: Any) -> None:
        shown.update(changes)
        key.set_content(f'<div class="tok-key">{legend(shown["by"])}</div>')
        picture.set_content(tokens.html(shown["by"], shown["first"]))

    with ui.row().classes("items-center w-full"):
        ui.toggle({by: by for by in COLOURS}, value="provenance", on_change=lambda e: draw(by=e.value)).props(
            "dense flat no-caps"
        )
        key = ui.html(sanitize=False)
    picture = ui.html(sanitize=False)
    if total > MOST_TOKENS:
        pages = {first: f"{first:,} to {min(first + MOST_TOKENS, total):,}" for first in range(0, total, MOST_TOKENS)}
        ui.select(pages, value=0, label="tokens", on_change=lambda e: draw(first=e.value)).props("dense")
    ui.label("Point at a token for its id, log-probabilities, version and advantage.").classes("soft")
    draw()
