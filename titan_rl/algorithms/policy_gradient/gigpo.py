"""GiGPO: a turn is compared with turns that began in the same state, its rollout with the group.

    A = A_episode + omega A_step
    A_episode = (reward - mean) / deviation over the group's rollouts
    A_step = (G_t - mean) / deviation over the group's turns with an equal anchor
    G_t = sum_{u >= t} discount^(u - t) r_u

both without the deviation if not ``normalize_std``. r_u are rewards of turns as turn_grpo.py has them.

The anchor of a turn, which stands for the state that it begins in, is what the model was told since it last wrote: the
tokens between the answer before and this one, and before a conversation's first answer its prompt. Turns with equal
anchors are of one group wherever they stand, and in one rollout, too: an environment whose reply does not tell its
state apart from others (a bare "ok") gives groups of unlike states. A turn alone in its group has A_step = 0.

Source: arXiv 2505.10978 (v3), equations 3 and 5 to 8. Episodes are compared a rollout once, as there; verl-agent takes
their mean and deviation over all turns, and leaves the deviation out by default.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import group_relative, rewards_of
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO, of_tokens, returns_of_turns
from titan_rl.data.types import Provenance, Rollout, Turn

_WRITTEN = [int(Provenance.MODEL), int(Provenance.REPEATED), int(Provenance.FORCED)]


class GiGPO(TurnGRPO):
    @dataclass(kw_only=True)
    class Settings(TurnGRPO.Settings):
        discount: Annotated[float, Field(ge=0, le=1)] = 0.95
        """Of a turn's reward, for every turn that it comes later."""
        omega: Annotated[float, Field(ge=0, le=1e6)] = 1.0
        """Of the step's advantage; that of the episode counts 1."""

        def __post_init__(self) -> None:
            """Errors: ValueError for settings that do not go together."""
            super().__post_init__()
            if not self.omega:
                self.refuse(("discount",), "omega = 0 weighs no return of a turn: set that")

    def advantages(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        s = self.settings
        episode_G = group_relative(rewards_of(rollouts), s.normalize_std)
        returns = [returns_of_turns(rollout, s.discount) for rollout in rollouts]
        places: dict[bytes, list[tuple[int, int]]] = {}
        for number, rollout in enumerate(rollouts):
            for place, turn in enumerate(rollout.turns):
                places.setdefault(anchor(rollout, turn), []).append((number, place))
        steps = [np.zeros_like(of_turns) for of_turns in returns]
        for group in places.values():
            returns_of_group = np.array([returns[number][place] for number, place in group])
            relative = group_relative(returns_of_group, s.normalize_std)
            for (number, place), advantage in zip(group, relative, strict=True):
                steps[number][place] = advantage
        return [
            of_tokens(rollout, episode + s.omega * of_turns)
            for rollout, episode, of_turns in zip(rollouts, episode_G, steps, strict=True)
        ]


def anchor(rollout: Rollout, turn: Turn) -> bytes:
    """Tokens right before a turn that the model did not write, back to its conversation's beginning at most."""
    begin = max(start for start, _ in rollout.spans if start <= turn.start)
    written = np.flatnonzero(np.isin(rollout.provenance[begin : turn.start], _WRITTEN))
    return rollout.tokens[begin + (written[-1] + 1 if len(written) else 0) : turn.start].tobytes()
