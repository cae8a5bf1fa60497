"""A model's tokenizer, by its type in annotations: the import of transformers itself takes a second."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any

__all__ = ["Tokenizer", "decoded"]


def decoded(tokenizer: Tokenizer, tokens: np.ndarray | list[int], *, skip_special_tokens: bool = False) -> str:
    """The text of one sequence of tokens [T]."""
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str), "one sequence has one text"
    return text
