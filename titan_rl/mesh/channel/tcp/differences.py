"""Difference of a block from the same block of another version: the words that changed, exact to the bit.

A small step changes few of the weights that are stored in bfloat16. A difference has for each stretch of 65,536 words
the number of changed ones, then the place of each in its stretch, then the exclusive or of its old and its new value.
"""

import numpy as np

_STRETCH = 1 << 16
_WORD = np.dtype("<u2")
_COUNT = np.dtype("<u4")
_BYTES_EACH = 2 * _WORD.itemsize
_MOST_SHARE = 0.5
"""Of a block's bytes: more for its changes are not sent."""


class WrongDifference(ValueError):
    """Bytes that are no difference of a block of that length."""


def _num_stretches(num_words: int) -> int:
    return -(-num_words // _STRETCH)


def _most_changes(nbytes: int) -> int:
    return int(_MOST_SHARE * nbytes / _BYTES_EACH)


def longest_difference(nbytes: int) -> int:
    """Most bytes of a difference of two blocks of so many."""
    return _COUNT.itemsize * _num_stretches(nbytes // _WORD.itemsize) + _BYTES_EACH * _most_changes(nbytes)


def difference(old: memoryview, new: memoryview) -> bytes | None:
    """Difference of two blocks of one length; None for blocks that differ too much, or by single bytes."""
    if len(new) % _WORD.itemsize:
        return None
    words_old, words_new = np.frombuffer(old, _WORD), np.frombuffer(new, _WORD)
    most = _most_changes(len(new))
    sample = slice(0, _STRETCH)  # most blocks that change too much are told by their beginning
    share = most / max(len(words_new), 1)
    if np.count_nonzero(words_old[sample] != words_new[sample]) > share * len(words_new[sample]):
        return None
    places = np.flatnonzero(words_old != words_new)
    if len(places) > most:
        return None
    counts = np.bincount(places // _STRETCH, minlength=_num_stretches(len(words_new))).astype(_COUNT)
    changes = words_old[places] ^ words_new[places]
    return b"".join((counts.tobytes(), (places % _STRETCH).astype(_WORD).tobytes(), changes.tobytes()))


def apply_difference(data: bytes | bytearray, block: memoryview) -> None:
    """Turn the old block into the new one, in place. Errors: WrongDifference, with the block as it was."""
    words = np.frombuffer(block, _WORD)
    begin = _COUNT.itemsize * _num_stretches(len(words))
    if len(block) % _WORD.itemsize or len(data) < begin or (len(data) - begin) % _BYTES_EACH:
        raise WrongDifference(f"{len(data)} bytes for a block of {len(block)}")
    counts = np.frombuffer(data, _COUNT, count=begin // _COUNT.itemsize).astype(np.int64)
    num_changes = (len(data) - begin) // _BYTES_EACH
    if int(counts.sum()) != num_changes:
        raise WrongDifference(f"{num_changes} changes where {int(counts.sum())} are told")
    places = np.frombuffer(data, _WORD, count=num_changes, offset=begin).astype(np.int64)
    places += np.repeat(np.arange(len(counts)) * _STRETCH, counts)
    if num_changes and int(places.max()) >= len(words):
        raise WrongDifference(f"a change at {int(places.max())} of {len(words)} words")
    words[places] ^= np.frombuffer(data, _WORD, count=num_changes, offset=begin + _WORD.itemsize * num_changes)
