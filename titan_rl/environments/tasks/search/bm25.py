"""BM25 over passages in memory: which of them fit a query best. Pure.

    score(d, q) = sum over t in q of  idf(t) f(t, d) (k1 + 1) / (f(t, d) + k1 (1 - b + b |d| / mean |d|))
    idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

Source: Robertson and Zaragoza 2009, Foundations and Trends in Information Retrieval 3(4); the idf, which is never
negative, is Lucene's.

Postings lie in compressed sparse rows: those of a term are a slice of two arrays, 8 bytes a posting.

Dimensions: N passages, V terms, M postings, P postings of one term, C candidates.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

K1, B = 1.2, 0.75
MAX_TERMS = 64
"""Terms of a query; what follows them does not count."""
_MAX_COUNT = 2**16 - 1
"""Occurrences of a term in a passage that are counted."""
_TERM = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Passage:
    """Passage of a corpus; ``title`` may be empty."""

    title: str
    text: str


def terms_of(text: str) -> list[str]:
    """Terms of a text: letters and digits, in lower case."""
    return _TERM.findall(text.casefold())


class BM25:
    """Index of passages, never changed."""

    def __init__(self, passages: Iterable[Passage]):
        """Errors: ValueError without a passage."""
        self.passages: list[Passage] = []
        self._terms = dict[str, int]()
        terms, counts = array("i"), array("H")
        lengths, num_postings = array("i"), array("i")
        for passage in passages:
            frequencies = Counter(terms_of(f"{passage.title} {passage.text}"))
            self.passages.append(passage)
            lengths.append(frequencies.total())
            num_postings.append(len(frequencies))
            terms.extend([self._terms.setdefault(term, len(self._terms)) for term in frequencies])
            counts.extend([min(count, _MAX_COUNT) for count in frequencies.values()])
        if not self.passages:
            raise ValueError("it holds no passage")
        self._fill(*(np.frombuffer(column, column.typecode) for column in (terms, counts, lengths, num_postings)))

    def _fill(self, term_M: np.ndarray, count_M: np.ndarray, length_N: np.ndarray, num_postings_N: np.ndarray) -> None:
        """Sort postings by their terms, and weigh each: what it adds to its passage's score."""
        num_passages_V = np.bincount(term_M, minlength=len(self._terms))
        idf_V = np.log(1 + (len(length_N) - num_passages_V + 0.5) / (num_passages_V + 0.5))
        damping_N = K1 * (1 - B + B * length_N / max(length_N.mean(), 1.0))
        order_M = np.argsort(term_M, kind="stable").astype(np.int32)
        self._starts = np.concatenate(([0], np.cumsum(num_passages_V)))
        self._number_M = np.repeat(np.arange(len(length_N), dtype=np.int32), num_postings_N)[order_M]
        weight_M = count_M[order_M].astype(np.float32)
        weight_M *= (K1 + 1) / (weight_M + damping_N.astype(np.float32)[self._number_M])
        weight_M *= np.repeat(idf_V.astype(np.float32), num_passages_V)
        self._weight_M = weight_M

    def scores(self, query: str) -> np.ndarray:
        """Score of each passage, float32 [N]."""
        score_N = np.zeros(len(self.passages), np.float32)
        for term in terms_of(query)[:MAX_TERMS]:
            if (number := self._terms.get(term)) is not None:
                postings = slice(self._starts[number], self._starts[number + 1])
                score_N[self._number_M[postings]] += self._weight_M[postings]
        return score_N

    def search(self, query: str, count: int) -> list[Passage]:
        """The best passages, best first, of those with a term of the query; of equal ones the earlier first."""
        score_N = self.scores(query)
        number_C = np.flatnonzero(score_N)
        if len(number_C) > count:
            lowest = np.partition(score_N[number_C], -count)[-count]
            number_C = number_C[score_N[number_C] >= lowest]
        best = number_C[np.argsort(-score_N[number_C], kind="stable")[:count]]
        return [self.passages[number] for number in best]
