"""A rollout as coloured tokens; pointing at one tells what is known of it. HTML with inline styles alone, so a saved
notebook shows it, too.

Dimensions: T tokens of a rollout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from titan_rl.config.io.printable import printable
from titan_rl.data.types import Provenance, Rollout

_OF_PROVENANCE = {
    Provenance.MODEL: "#cfe8ff",
    Provenance.TOOL: "#ffe3c2",
    Provenance.TEMPLATE: "#eeeeee",
    Provenance.REPEATED: "#e4ecf2",
    Provenance.FORCED: "#fff3bf",
}
_OF_VERSION = ("#cfe8ff", "#d6f5d6", "#fff3bf", "#ffd6e7", "#e5dbff")
_BOX = "font-family: monospace; white-space: pre-wrap; color: #111; background: #fff; padding: 6px; line-height: 1.7"


@dataclass(frozen=True)
class TokenView:
    """Coloured tokens of a rollout, as HTML in a notebook's cell."""

    rollout: Rollout
    pieces_T: list[str]
    """The text of each token."""
    by: str = "provenance"
    """What colours say: ``provenance``, ``version``, ``logprob``, ``advantage``, or the name of ``values_T``."""
    values_T: np.ndarray | None = None
    """A number of each token, NaN where there is none: advantages, or how far trainer and generator disagree, say. Blue
    is above 0, red below."""

    def __repr__(self) -> str:
        """Where no HTML is shown, and for who keeps a notebook as text."""
        return printable("".join(self.pieces_T))

    def _repr_html_(self) -> str:
        spans = "".join(self._span(place) for place in range(len(self.pieces_T)))
        return f'<div style="{_BOX}">{self._head()}<br>{spans}</div>'

    def _head(self) -> str:
        rollout = self.rollout
        parts = ", ".join(f"{name} {value:.3g}" for name, value in rollout.reward_parts.items())
        summary = (
            f"{rollout.prompt_id} sample {rollout.sample}: {rollout.status}, reward {rollout.reward:.3g} ({parts})"
        )
        return f"<b>{escape(printable(summary))}</b> &nbsp; {' '.join(self._legend())}"

    def _legend(self) -> Iterator[str]:
        if self.by == "provenance":
            for provenance, colour in _OF_PROVENANCE.items():
                yield _painted(colour, provenance.name.lower())
        elif self.by == "version":
            for version in sorted({int(version) for version in self.rollout.versions if version >= 0}):
                yield _painted(_OF_VERSION[version % len(_OF_VERSION)], f"version {version}")
        else:
            yield escape(f"colour: {self.by}")

    def _span(self, place: int) -> str:
        text = escape(printable(self.pieces_T[place]))
        line_end = "<br>" if self.pieces_T[place].endswith("\n") else ""
        title = escape(printable(", ".join(self.known(place))), quote=True)
        return f'<span style="background: {self._colour(place)}" title="{title}">{text}</span>{line_end}'

    def known(self, place: int) -> Iterator[str]:
        """Facts about a token: id, provenance, logprob, version, value."""
        rollout = self.rollout
        yield f"token {place}: {int(rollout.tokens[place])}"
        yield Provenance(int(rollout.provenance[place])).name.lower()
        if rollout.provenance[place] == Provenance.MODEL:
            yield f"logprob {rollout.logprobs[place]:.4f}"
            yield f"version {int(rollout.versions[place])}"
            if rollout.advantage is not None and self.values_T is None:
                yield f"advantage {rollout.advantage:.4g}"
        if self.values_T is not None and np.isfinite(self.values_T[place]):
            yield f"{self.by} {self.values_T[place]:.4g}"

    def _colour(self, place: int) -> str:
        provenance = Provenance(int(self.rollout.provenance[place]))
        if self.by == "provenance":
            return _OF_PROVENANCE[provenance]
        if provenance != Provenance.MODEL:
            return "#ffffff"
        if self.by == "version":
            return _OF_VERSION[int(self.rollout.versions[place]) % len(_OF_VERSION)]
        if self.by == "advantage" and self.values_T is None:  # a sample's tokens share its own
            return shade(np.nan if self.rollout.advantage is None else self.rollout.advantage)
        values_T = self.rollout.logprobs if self.values_T is None else self.values_T
        largest = float(np.nanmax(np.abs(values_T))) or 1.0
        return shade(float(values_T[place]) / largest)


def of_tokens(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """[T] of a value for each token, or for each that the model wrote: NaN for the others. Errors: ValueError."""
    is_models_T = rollout.provenance == Provenance.MODEL
    if len(values) == len(is_models_T):
        return np.asarray(values, dtype=float)
    if len(values) != is_models_T.sum():
        raise ValueError(f"{len(values)} values for {len(is_models_T)} tokens, {is_models_T.sum()} of them the model's")
    values_T = np.full(len(is_models_T), np.nan)
    values_T[is_models_T] = values
    return values_T


def shade(value: float) -> str:
    """From red at -1 over white at 0 to blue at 1; grey for what is no number."""
    if not np.isfinite(value):
        return "#dddddd"
    faded = round(255 - 110 * min(abs(value), 1.0))
    red, blue = (255, faded) if value < 0 else (faded, 255)
    return f"#{red:02x}{faded:02x}{blue:02x}"


def _painted(colour: str, text: str) -> str:
    return f'<span style="background: {colour}">{escape(text)}</span>'
