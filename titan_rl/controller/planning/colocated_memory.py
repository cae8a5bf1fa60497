"""Memory held at once under colocation, for GPUs and for a CPU.

Pure arithmetic. What a process still holds in the others' turn is what counts (mesh/control/colocation.py).
"""

from collections.abc import Collection, Mapping, Sequence

from titan_rl.mesh.resources.devices import ENGINES

Bytes = Mapping[str, float]
"""By reason."""
OF_ITS_TURN = ("gradients", "gathered weights", "activations")
"""What a rank of the trainer holds in its own turn alone."""
PUT_ASIDE = (*OF_ITS_TURN, "moments")
"""The same on a GPU, whose host takes the moments. A CPU is its own host, and they stay."""
_OF_ENGINES_ASLEEP = ("libraries", "draft model")


def held_at_turn(
    holds: Sequence[tuple[str, Bytes]], in_turns: Collection[str], *, engines: bool, aside: Collection[str]
) -> float:
    """Bytes that processes of these roles hold together in the engines' turn, or in the trainer's. ``in_turns``: its
    roles; none where it is always everybody's turn. ``aside``: by reason, what they give up in the engines'."""
    return sum(
        _held_by_engine(its, engines or not in_turns)
        if role in ENGINES
        else _held_by_other(its, aside if engines and role in in_turns else ())
        for role, its in holds
    )


def peak(holds: Sequence[tuple[str, Bytes]], in_turns: Collection[str], aside: Collection[str]) -> float:
    """Largest number of bytes held at once, in either turn."""
    return max(held_at_turn(holds, in_turns, engines=engines, aside=aside) for engines in (True, False))


def _held_by_engine(its: Bytes, is_awake: bool) -> float:
    return sum(size for reason, size in its.items() if is_awake or reason in _OF_ENGINES_ASLEEP)


def _held_by_other(its: Bytes, aside: Collection[str]) -> float:
    return sum(size for reason, size in its.items() if reason not in aside)
