"""Timeline of a step: one row an actor, one box a span, empty space a bubble.

HTML of our own, every name in it escaped. Pure.
"""

from collections.abc import Iterable, Sequence
from html import escape

from titan_rl.data.spans import Span, merged
from titan_rl.records.steps.trace import ActorSpan, by_actor, lanes

_KINDS = {
    "generate": "generate",
    "episode": "episode",
    "scoring": "scoring",
    "forward and backward": "train",
    "optimizer": "optimizer",
    "roles": "roles",
    "learn": "train",
    "find": "roles",
    "publish": "weights",
    "fetch": "weights",
    "take the weights": "weights",
    "evaluate": "scoring",
    "wait for rollouts": "wait",
    "train": "train",
}
_FEW_LANES, _MOST_LANES = 4, 64


def window(spans: Sequence[ActorSpan]) -> tuple[float, float]:
    """Window of a step in Unix seconds: from the controller's first span to the end of all."""
    own = [span for span in spans if span.actor == "controller"] or list(spans)
    return min(span.begin for span in own), max(span.begin + span.seconds for span in spans)


def busy_share(spans: Iterable[ActorSpan], begin: float, end: float) -> float:
    """The share of a time in which an actor does anything; waiting is nothing."""
    cut = (
        Span("", max(span.begin, begin), min(span.begin + span.seconds, end) - max(span.begin, begin))
        for span in spans
        if _KINDS.get(span.name) != "wait"
    )
    united = merged(sorted((span for span in cut if span.seconds > 0), key=lambda span: span.begin), 0.0)
    return sum(span.seconds for span in united) / max(end - begin, 1e-9)


def draw(spans: Sequence[ActorSpan]) -> str:
    """Timeline of one or more consecutive steps; empty without spans."""
    if not spans:
        return ""
    begin, end = window(spans)
    rows = "".join(_row(actor, own, begin, end) for actor, own in by_actor(spans).items())
    return f'<div class="tl">{_axis(end - begin)}{rows}</div>{_legend(spans)}'


def _axis(seconds: float) -> str:
    marks = (f'<span style="left:{25 * n}%">{_seconds(seconds * n / 4)}</span>' for n in range(5))
    return f'<div class="tl-row tl-axis"><div></div><div class="tl-track">{"".join(marks)}</div><div>busy</div></div>'


def _row(actor: str, own: list[ActorSpan], begin: float, end: float) -> str:
    own = [span for span in own if span.begin + span.seconds > begin]
    places = lanes(own)
    count = min(max(places, default=0) + 1, _MOST_LANES)
    height = 20 if count <= _FEW_LANES else max(3, round(96 / count))
    boxes = "".join(_box(*item, height, begin, end) for item in zip(own, places, strict=True) if item[1] < count)
    share = busy_share(own, begin, end)
    return (
        f'<div class="tl-row"><div class="tl-name">{escape(actor)}</div>'
        f'<div class="tl-track" style="height:{count * height + 4}px">{boxes}</div><div>{share:.0%}</div></div>'
    )


def _box(span: ActorSpan, lane: int, height: int, begin: float, end: float) -> str:
    duration = max(end - begin, 1e-9)
    left = max(span.begin - begin, 0.0) / duration
    width = max(min(span.begin + span.seconds, end) - max(span.begin, begin), 0.0) / duration
    kind = _KINDS.get(span.name, "other")
    title = f"{span.name}: {_seconds(span.seconds)}, from {_seconds(span.begin - begin)} on"
    text = escape(span.name) if height >= 16 and width > 0.08 else ""
    style = f"left:{100 * left:.3f}%;width:{100 * width:.3f}%;top:{2 + lane * height}px;height:{height - 1}px"
    return f'<i class="tl-{kind}" style="{style}" title="{escape(title, quote=True)}">{text}</i>'


def _legend(spans: Iterable[ActorSpan]) -> str:
    names: dict[str, set[str]] = {}
    for span in spans:
        names.setdefault(_KINDS.get(span.name, "other"), set()).add(span.name)
    items = (f'<b><i class="tl-{kind}"></i>{escape(", ".join(sorted(own)))}</b>' for kind, own in names.items())
    return f'<div class="tl-legend">{"".join(items)}<b><i class="tl-gap"></i>nothing: a bubble</b></div>'


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:.0f} ms"
