"""BM25 over passages in memory: which of them fit a query best. Pure.

    score(d, q) = sum over t in q of  idf(t) f(t, d) (k1 + 1) / (f(t, d) + k1 (1 - b + b |d| / mean |d|))
    idf(t) = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

Source: Robertson and Zaragoza 2009, Foundations and Trends in Information Retrieval 3(4); the idf, which is never
negative, is Lucene's.

Dimensions: N passages, P of them with a term.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

K1, B = 1.2, 0.75
MOST_TERMS = 64
"""Of a query; what follows them does not count."""
_TERM = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
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
        lengths, postings = list[int](), dict[str, list[tuple[int, int]]]()
        for number, passage in enumerate(passages):
            terms = terms_of(f"{passage.title} {passage.text}")
            self.passages.append(passage)
            lengths.append(len(terms))
            for term, count in Counter(terms).items():
                postings.setdefault(term, []).append((number, count))
        if not self.passages:
            raise ValueError("it holds no passage")
        length_N = np.array(lengths, np.float64)
        self._damping_N = K1 * (1 - B + B * length_N / max(length_N.mean(), 1.0))
        self._weights = {term: self._weights_of(found) for term, found in postings.items()}

    def _weights_of(self, found: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Passages with a term, int32 [P], and what it adds to each one's score, float32 [P]."""
        number_P, count_P = np.array(found, np.int64).T
        idf = np.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
        weight_P = idf * count_P * (K1 + 1) / (count_P + self._damping_N[number_P])
        return number_P.astype(np.int32), weight_P.astype(np.float32)

    def scores(self, query: str) -> np.ndarray:
        """Score of each passage, float64 [N]."""
        score_N = np.zeros(len(self.passages))
        for term in terms_of(query)[:MOST_TERMS]:
            if term in self._weights:
                number_P, weight_P = self._weights[term]
                score_N[number_P] += weight_P
        return score_N

    def search(self, query: str, count: int) -> list[Passage]:
        """The best passages, best first, of those with a term of the query; of equal ones the earlier first."""
        score_N = self.scores(query)
        best = np.argsort(-score_N, kind="stable")[:count]
        return [self.passages[number] for number in best if score_N[number] > 0]
