"""Routed experts: which experts of each layer a token went through when it was sampled.

A mixture of experts computes something else where its router chooses otherwise, as it may by a last bit. So the choices
travel with a sample, and the trainer takes the same ones (R3, arXiv 2510.11370).

Dimensions: T tokens, L layers of the decoder, K experts that a token goes through in a layer. A layer without experts
has zeros. A token whose choices are not recorded has the largest number of the dtype, which is no expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExpertShape:
    """Mixtures of experts of a model."""

    has_experts: tuple[bool, ...]
    """Of each layer of the decoder."""
    num_experts: int
    per_token: int

    @property
    def num_layers(self) -> int:
        return len(self.has_experts)


def compact(experts_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Routed experts in the smallest dtype that has a number left."""
    return np.asarray(experts_TLK, np.uint8 if num_experts < 256 else np.uint16)


def unrecorded(count: int, like_TLK: np.ndarray) -> np.ndarray:
    """Tokens whose experts are not recorded, in the form of others."""
    return np.full((count, *like_TLK.shape[1:]), np.iinfo(like_TLK.dtype).max, like_TLK.dtype)


def is_recorded(experts_TLK: np.ndarray) -> np.ndarray:
    """Bool [T]: whether a token's experts are recorded."""
    return experts_TLK[:, 0, 0] != np.iinfo(experts_TLK.dtype).max


def joined_experts(parts: Sequence[np.ndarray | None], counts: Sequence[int]) -> np.ndarray | None:
    """Routed experts of tokens one behind the other; None if none has any. ``counts``: tokens of each part."""
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    return np.concatenate(
        [unrecorded(count, known) if part is None else part for part, count in zip(parts, counts, strict=True)]
    )


def filled(experts_TLK: np.ndarray | None, context_CLK: np.ndarray, count: int) -> np.ndarray:
    """Routed experts of T = ``count`` tokens, with those that are not recorded from a pass over the first C of them."""
    experts_TLK = unrecorded(count, context_CLK) if experts_TLK is None else experts_TLK.copy()
    missing = np.flatnonzero(~is_recorded(experts_TLK[: len(context_CLK)]))
    experts_TLK[missing] = context_CLK[missing]
    return experts_TLK


def check_experts(experts_TLK: np.ndarray, shape: ExpertShape) -> None:
    """Check of choices from a file.

    Errors: ValueError for an expert that there is not or is chosen twice, or a token of which a part is recorded.
    """
    recorded_T = is_recorded(experts_TLK)
    if (experts_TLK[~recorded_T] != np.iinfo(experts_TLK.dtype).max).any():
        raise ValueError("experts of a token in some layers alone")
    has_experts = np.array(shape.has_experts)
    if experts_TLK[recorded_T][:, ~has_experts].any():
        raise ValueError("experts in a layer that has none")
    known_NLK = np.sort(experts_TLK[recorded_T][:, has_experts], axis=2)
    if not known_NLK.size:
        return
    if int(known_NLK.max()) >= shape.num_experts:
        raise ValueError(f"expert {known_NLK.max()} of {shape.num_experts}")
    if (known_NLK[..., 1:] == known_NLK[..., :-1]).any():
        raise ValueError("an expert that is chosen twice for a token")
