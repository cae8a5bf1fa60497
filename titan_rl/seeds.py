"""Randomness by name: a seed is a hash of what it is for, so order of arrival and retries cannot change it."""

import hashlib


def named_seed(*names: object) -> int:
    """A 63-bit seed for e.g. ``(run seed, prompt id, sample, turn)``."""
    digest = hashlib.blake2b("\x1f".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
