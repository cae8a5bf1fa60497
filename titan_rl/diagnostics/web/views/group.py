"""A group, opened: the answers to one prompt in a step beside each other, with its pass rate."""

from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui

from titan_rl.data.types import SCORED, correct
from titan_rl.diagnostics.web.data.watched_run import Watched
from titan_rl.diagnostics.web.html.images import images_html
from titan_rl.diagnostics.web.html.tokens import printable
from titan_rl.diagnostics.web.views.rollout import open_sheet

_MOST = 128
"""Answers that are shown."""


async def open_group(run: Watched, row: dict[str, Any], closed: Callable[[], None] = lambda: None) -> None:
    """Dialog with one group. ``row``: with its step and prompt_id."""
    try:
        step, prompt_id = int(row["step"]), str(row["prompt_id"])
    except (KeyError, ValueError, TypeError):
        return
    members = await nicegui_run.io_bound(run.index.group, step, prompt_id)
    if not members:
        ui.notify("this group is not there any more", type="warning")
        return
    images = await nicegui_run.io_bound(lambda: images_html(run.images(step, prompt_id, members[0]["sample"]))) or ""
    with ui.dialog(value=True) as dialog, ui.column().classes("sheet wide-sheet"):
        with ui.row().classes("items-center w-full no-wrap"):
            ui.html(f"<h2>{escape(prompt_id)} · step {step}: {escape(summary(members))}</h2>", sanitize=False)
            ui.element("div").classes("grow")
            ui.button(icon="close", on_click=dialog.close).props("flat dense round aria-label=close")
        question = escape(printable(members[0]["question"] or ""))
        ui.html(f'<div class="soft">asked</div><div class="said">{question}</div>{images}', sanitize=False)
        with ui.element("div").classes("answers"):
            for member in members[:_MOST]:
                shown = ui.html(card(member), sanitize=False).classes("answer")
                shown.on("click", partial(open_sheet, run, member))
        more = f"{len(members) - _MOST} more answers are not shown. " if len(members) > _MOST else ""
        ui.label(f"{more}Click on an answer to see it token by token.").classes("soft")

    def over() -> None:
        dialog.delete()
        closed()

    dialog.on("hide", over)


def summary(members: list[dict[str, Any]]) -> str:
    """The pass rate and the mean reward, of answers that were scored."""
    scored = [member for member in members if member["status"] in SCORED]
    if not scored:
        return f"none of {len(members)} answers was scored"
    right = sum(correct(member["true_reward"]) for member in scored)
    reward = sum(member["reward"] for member in scored) / len(scored)
    return f"{right} of {len(scored)} right ({right / len(scored):.0%}), mean reward {reward:.3f}"


def card(member: dict[str, Any]) -> str:
    """Answer as HTML."""
    reward = "" if member["reward"] is None else f"{member['reward']:.3f}"
    is_right = member["true_reward"] is not None and correct(member["true_reward"])
    facts = [f"{member['length']} tokens" if member["length"] is not None else "", str(member["status"] or "")]
    facts += [f"advantage {member['advantage']:+.3f}"] if member["advantage"] is not None else []
    facts += [f"discarded: {member['why']}"] if member["why"] else []
    details = escape(" · ".join(filter(None, facts)))
    return (
        f'<div class="answer-head"><b>{escape(str(member["sample"]))}</b>'
        f'<b class="{"good" if is_right else ""}">{reward}</b><span class="soft">{details}</span></div>'
        f'<div class="said">{escape(printable(member["text"] or ""))}</div>'
    )
