"""A rollout token by token: who wrote each, what either side thought of it, what it earned. HTML of our own, in which
what a model or a tool wrote is escaped text, and never anything else. Pure.

Dimensions: T tokens of a rollout.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from titan_rl.config.io.printable import printable
from titan_rl.controller.interactive.token_view import TokenView, of_tokens
from titan_rl.data.types import Provenance, Rollout, is_model

COLOURS = ("provenance", "disagreement", "logprob", "advantage", "version")
MOST_TOKENS = 3000
"""That are shown at once."""
_FULL = {"disagreement": 0.1, "logprob": 5.0}
"""Where the colour is full: nats."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a rollout with their recorded values."""

    rollout: Rollout
    pieces_T: list[str]
    trained: dict[str, Any] | None = None
    """As ``records.steps.trained.read_trained`` gives it."""

    @cached_property
    def trainer_T(self) -> np.ndarray:
        """The trainer's log-probabilities; NaN where the token was not trained on."""
        return self._of("trainer_logprobs")

    @cached_property
    def advantage_T(self) -> np.ndarray:
        return self._of("advantages")

    def _of(self, name: str) -> np.ndarray:
        nothing = np.full(len(self.rollout.tokens), np.nan)
        if self.trained is None or len(self.trained[name]) != self.rollout.num_model_tokens:
            return nothing
        return of_tokens(self.rollout, np.asarray(self.trained[name], float))

    @cached_property
    def disagreement_T(self) -> np.ndarray:
        """|trainer logprob - sampling logprob|."""
        return np.abs(self.trainer_T - self.rollout.logprobs)

    # drawing

    def html(self, by: str, first: int = 0) -> str:
        """Tokens as HTML. ``by``: one of COLOURS; at most MOST_TOKENS from the ``first`` on."""
        last = min(first + MOST_TOKENS, len(self.pieces_T))
        view = TokenView(self.rollout, self.pieces_T)
        return f'<div class="tok">{"".join(self._span(view, place, by) for place in range(first, last))}</div>'

    def _span(self, view: TokenView, place: int, by: str) -> str:
        piece = self.pieces_T[place]
        text = escape(printable(piece)) or "&#8709;"
        title = escape(printable(" · ".join([*view.known(place), *self._more(place)])), quote=True)
        kind, style = self._colour(place, by)
        begins = '<hr class="tok-branch">' if place and place in self.rollout.branches else ""
        line_end = "<br>" if piece.endswith("\n") else ""
        return f'{begins}<span class="tok-{kind}"{style} title="{title}">{text}</span>{line_end}'

    def _more(self, place: int) -> Iterator[str]:
        if np.isfinite(self.trainer_T[place]):
            yield f"trainer logprob {self.trainer_T[place]:.4f}"
            yield f"disagreement {self.disagreement_T[place]:.2g}"
        if np.isfinite(self.advantage_T[place]):
            yield f"advantage {self.advantage_T[place]:.4g}"
        yield "trained on" if np.isfinite(self.trainer_T[place]) else "not trained on"

    def _colour(self, place: int, by: str) -> tuple[str, str]:
        who = Provenance(int(self.rollout.provenance[place]))
        if by == "provenance":
            return who.name.lower(), ""
        if who != Provenance.MODEL:
            return "plain", ""
        if by == "version":
            return f"version{int(self.rollout.versions[place]) % 5}", ""
        values_T = {
            "disagreement": self.disagreement_T,
            "logprob": self.rollout.logprobs,
            "advantage": self.advantage_T,
        }
        value = float(values_T[by][place])
        if not np.isfinite(value):
            return "plain", ""
        share = min(abs(value) / (_FULL.get(by) or self._largest_advantage), 1.0)
        return ("up" if by == "advantage" and value > 0 else "down"), f' style="--a:{0.75 * share:.3f}"'

    @cached_property
    def _largest_advantage(self) -> float:
        finite = self.advantage_T[np.isfinite(self.advantage_T)]
        return float(np.abs(finite).max(initial=0.0)) or 1.0


def legend(by: str) -> str:
    if by == "provenance":
        labels = {
            "model": "the model: trained on",
            "template": "template and prompt",
            "tool": "a tool, or the environment",
        }
        labels["repeated"] = "the model, in an earlier branch"
        labels["forced"] = "the budget for thinking, which closed it"
        return "".join(f'<span class="tok-{name}">{text}</span>' for name, text in labels.items())
    return {
        "disagreement": f"red: trainer and generator differ; full at {_FULL['disagreement']} nats",
        "logprob": f"red: an unlikely token; full at {_FULL['logprob']} nats",
        "advantage": "green: made more likely; red: less likely",
        "version": "a colour for each version of the weights",
    }[by]


def facts_of(tokens: Tokens, why: str) -> list[tuple[str, str]]:
    """Name and value of what holds for the whole, in an order to read."""
    rollout, written = tokens.rollout, is_model(tokens.rollout.provenance)
    versions = sorted({int(version) for version in rollout.versions[written]})
    facts = [("status", rollout.status), ("reward", f"{rollout.reward:.6g}")]
    facts += [(f"reward: {name}", f"{value:.6g}") for name, value in rollout.reward_parts.items()]
    if rollout.turn_rewards:
        facts.append(("rewards of turns", ", ".join(f"{value:.4g}" for value in rollout.turn_rewards)))
    for name, value in (("the task's own reward", rollout.task_reward), ("grade", rollout.grade)):
        if value is not None:
            facts.append((name, f"{value:.6g}"))
    if tokens.trained is not None:
        facts.append(("advantage", f"{tokens.trained['advantage']:.4g}"))
        facts.append(("disagreement", f"{tokens.trained['disagreement']:.3g} nats on average"))
    facts.append(("weights", "version " + ", ".join(map(str, versions))))
    facts.append(("tokens", f"{int(written.sum())} by the model, {len(written)} in all"))
    facts.append(("stopped", ", ".join(turn.stop_reason for turn in rollout.turns)))
    facts += [("seat", rollout.seat)] * bool(rollout.seat)
    return [*facts, ("trained on", f"no: {why}" if why else "yes" if tokens.trained is not None else "not recorded")]
