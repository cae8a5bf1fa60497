"""Randomness by name: a hash of what it is for, so order of arrival and retries cannot change it."""

import hashlib


def named_seed(*names: object) -> int:
    """A 63-bit seed for e.g. ``(run seed, prompt id, sample, turn)``."""
    digest = hashlib.blake2b("\x1f".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


_HELD_OUT_SHARE = 5
"""One prompt text in five is held out."""


def is_held_out(text: str) -> bool:
    """Whether a prompt is for evaluation only: a matter of its text alone, whatever stream or seed it came from."""
    return hashlib.blake2b(text.encode(), digest_size=2).digest()[0] % _HELD_OUT_SHARE == 0
