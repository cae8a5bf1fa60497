"""Sampling masks: which tokens of the vocabulary each token was sampled from, in the fewest bytes.

top-k, top-p and min-p cut a distribution; what is left is renormalized. The trainer needs the same tokens to compute
the same log-probability, so they travel with the sample, as ids or as a bit for each token of the vocabulary.

Dimensions: T tokens, V words of the vocabulary, B = ceil(V / 8) bytes of a bitmask.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_ID = np.dtype("<i4")


@dataclass(frozen=True)
class SamplingMask:
    """Sampling mask of T tokens.

    A token's bytes are the kept ids, ascending int32, or a bitmask of B bytes, lowest bit first, where ids would take
    as many; none where the whole vocabulary is kept. So a token takes at most B bytes.
    """

    vocabulary: int
    data: np.ndarray
    """uint8: the tokens' bytes, one behind the other."""
    ends: np.ndarray
    """int64 [T]: where each token's bytes end."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def width(self) -> int:
        """Bytes of a bitmask."""
        return -(-self.vocabulary // 8)

    @property
    def starts(self) -> np.ndarray:
        """int64 [T]: where each token's bytes begin."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])[:-1]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [T]: bytes of each token."""
        return self.ends - self.starts

    @classmethod
    def of(cls, supports: Iterable[np.ndarray], vocabulary: int) -> "SamplingMask":
        """Mask of tokens by the ids that each was sampled from, ascending; no ids: from the whole vocabulary."""
        return cls.of_bytes([_encoded(np.asarray(support), vocabulary) for support in supports], vocabulary)

    @classmethod
    def of_bytes(cls, parts: Sequence[bytes], vocabulary: int) -> "SamplingMask":
        """Mask of tokens by the bytes of each. What they say is not looked at: see ``check``."""
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(vocabulary, np.frombuffer(b"".join(parts), np.uint8), ends)

    @classmethod
    def whole(cls, count: int, vocabulary: int) -> "SamplingMask":
        """Mask of tokens sampled from the whole vocabulary, or not sampled at all."""
        return cls(vocabulary, np.zeros(0, np.uint8), np.zeros(count, np.int64))

    def to_bytes(self) -> list[bytes]:
        """Bytes of each token."""
        data = self.data.tobytes()
        return [data[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def take(self, places: np.ndarray) -> "SamplingMask":
        """Mask of the tokens at these places, in their order."""
        starts, lengths = self.starts[places], self.lengths[places]
        ends = np.cumsum(lengths)
        index = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
        return SamplingMask(self.vocabulary, self.data[index], ends)

    def kept(self, place: int) -> np.ndarray:
        """Ids that the token at a place was sampled from, ascending int32."""
        part = self.data[self.ends[place] - self.lengths[place] : self.ends[place]]
        if not len(part):
            return np.arange(self.vocabulary, dtype=np.int32)
        if len(part) < self.width:
            return np.frombuffer(part.tobytes(), _ID).astype(np.int32)
        return np.flatnonzero(np.unpackbits(part, count=self.vocabulary, bitorder="little")).astype(np.int32)

    @property
    def num_kept(self) -> np.ndarray:
        """int64 [T]: ids that each token was sampled from."""
        lengths, width = self.lengths, self.width
        counts = np.where(lengths, lengths // _ID.itemsize, self.vocabulary)
        for place in np.flatnonzero(lengths == width):
            counts[place] = len(self.kept(int(place)))
        return counts

    def bits(self) -> np.ndarray:
        """Bitmasks of all tokens: uint8 [T, B]."""
        bits_TB = np.zeros((len(self), self.width), np.uint8)
        lengths = self.lengths
        bits_TB[lengths == 0] = 0xFF
        is_dense = lengths == self.width
        if is_dense.any():
            bits_TB[is_dense] = self.take(np.flatnonzero(is_dense)).data.reshape(-1, self.width)
        listed = np.flatnonzero((lengths > 0) & ~is_dense)
        ids = np.frombuffer(self.take(listed).data.tobytes(), _ID).astype(np.int64)
        tokens = np.repeat(listed, lengths[listed] // _ID.itemsize)
        np.bitwise_or.at(bits_TB, (tokens, ids >> 3), np.left_shift(1, ids & 7).astype(np.uint8))
        return bits_TB

    def check(self) -> None:
        """Check of bytes from a file. Errors: ValueError for bytes that are no mask."""
        lengths = self.lengths
        if (lengths < 0).any() or lengths.sum() != self.nbytes:
            raise ValueError(f"a sampling mask has {self.nbytes} bytes, and says that it has {lengths.sum()}")
        for place, length in enumerate(lengths.tolist()):
            if not length:
                continue
            if length > self.width or length < self.width and length % _ID.itemsize:
                raise ValueError(f"the sampling mask of token {place} has {length} bytes")
            ids = self.kept(place)
            if not len(ids) or ids[0] < 0 or ids[-1] >= self.vocabulary or (ids[1:] <= ids[:-1]).any():
                raise ValueError(f"the sampling mask of token {place} has other ids than a vocabulary's, ascending")

    def first_without(self, tokens: np.ndarray, places: np.ndarray) -> int | None:
        """First of these places whose token, of all ``tokens`` [T], is not among its own; None if there is none."""
        masked = places[self.lengths[places] > 0].tolist()
        return next((place for place in masked if tokens[place] not in self.kept(place)), None)


def _encoded(ids: np.ndarray, vocabulary: int) -> bytes:
    if len(ids) in (0, vocabulary):
        return b""
    if len(ids) * _ID.itemsize < -(-vocabulary // 8):
        return ids.astype(_ID).tobytes()
    is_kept = np.zeros(vocabulary, bool)
    is_kept[ids] = True
    return np.packbits(is_kept, bitorder="little").tobytes()


def joined(masks: Sequence[SamplingMask | None], counts: Sequence[int]) -> SamplingMask | None:
    """Masks of tokens one behind the other; None if none of them is masked. ``counts``: tokens of each."""
    vocabulary = next((mask.vocabulary for mask in masks if mask is not None), None)
    if vocabulary is None:
        return None
    parts = [
        SamplingMask.whole(count, vocabulary) if mask is None else mask
        for mask, count in zip(masks, counts, strict=True)
    ]
    offsets = np.cumsum([0, *(part.nbytes for part in parts)])[:-1]
    ends = np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)])
    return SamplingMask(vocabulary, np.concatenate([part.data for part in parts]), ends)
