"""Models of random weights, batches, and how many operations they take: arithmetic."""

from dataclasses import dataclass
from typing import Any

from titan_rl.data.types import Row


@dataclass(frozen=True)
class Size:
    """A Llama's."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int
    words: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """That multiply: of all layers."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    def as_config(self) -> dict[str, Any]:
        """Arguments of transformers' LlamaConfig."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.words,
        }


SIZES = {
    "135m": Size(576, 1536, 30, 9, 3, 49152),
    "1b": Size(2048, 8192, 16, 32, 8, 128256),
    "tiny": Size(64, 192, 2, 4, 2, 500),
}


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: groups of samples behind one prompt, in rows of so many tokens."""

    groups: int
    samples: int
    prompt: int
    answer: int
    """At most; a sample's has at least half as many."""
    row_tokens: int


STEP, LONG_STEP = Shape(16, 8, 256, 256, 8192), Shape(32, 8, 256, 512, 8192)
"""A step that is measured; one that is long beside what is done to a model of 1B parameters in the background."""
CHECKED, TINY = Shape(2, 4, 40, 60, 512), Shape(2, 4, 10, 12, 200)


def operations(size: Size, rows: list[Row]) -> int:
    """Floating-point operations of a step's products, forward and backward: two for each weight and token, thrice; the
    head's of trained tokens alone. Attention's are those that the mask leaves: 4 for each feature of a query and a key
    that it sees."""
    tokens, trained = sum(len(row.tokens_T) for row in rows), sum(len(row.target_S) for row in rows)
    pairs = sum(seen(segment.length, segment.prefix_length) for row in rows for segment in row.segments)
    attention = 12 * size.layers * size.heads * size.head_size * pairs
    return 6 * (size.layer_weights * tokens + size.hidden * size.words * trained) + attention


def seen(length: int, prefix_length: int) -> int:
    """Pairs of a query and a key of a segment, causally, and of all that comes before it."""
    return length * prefix_length + length * (length + 1) // 2
