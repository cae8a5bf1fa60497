"""A model's tokenizer: how it is loaded, and how text is encoded and answers are decoded.

A tokenizer of SentencePiece's kind writes a space before whatever text it is given. A piece in the middle of a
sequence has none, so it is tokenized behind other text, of which the tokens are then left out.

transformers takes a second to import, so its type stands in annotations alone.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.model_directory.directory import check_files
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import Config
from titan_rl.data.images import UNLIMITED, ImageProcessor, image_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any

SHORTEST = 3
"""Characters of a control token: some models name ``!`` or a line end as padding, which is text all the same."""
_NEUTRAL = ("\n", ":", "|", "a")
"""What a piece is tokenized behind where its own context would melt into it."""


@dataclass(frozen=True)
class TextSettings:
    """Settings of a run's text."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """The chat template's own options, such as ``enable_thinking``."""
    date: str = "2026-01-01"
    """What a template that asks for the time is told, so that prompts do not follow the clock."""
    keep_special: bool = False
    """Whether an answer's text has the special tokens that the model wrote."""
    template: str = ""
    """The chat template itself; empty: the tokenizer's own."""
    images: ImageProcessor | None = None
    """Of a model that sees images."""
    limits: ImagesConfig = UNLIMITED
    """A run's own, of images."""

    def strftime(self, form: str) -> str:
        return datetime.fromisoformat(self.date).strftime(form)


_SETTINGS: WeakKeyDictionary[Tokenizer, TextSettings] = WeakKeyDictionary()


def set_text(tokenizer: Tokenizer, settings: TextSettings) -> Tokenizer:
    """Attach the settings to a tokenizer, which is returned, with their template."""
    _SETTINGS[tokenizer] = settings
    if settings.template:
        tokenizer.chat_template = settings.template
    return tokenizer


def text_settings(tokenizer: Tokenizer) -> TextSettings:
    return _SETTINGS.get(tokenizer, TextSettings())


def settings_of(config: Config) -> TextSettings:
    """Text settings of a configuration. Errors: ConfigError for a date that is none."""
    template = config.model.chat_template
    try:
        datetime.fromisoformat(template.date)
    except ValueError:
        raise ConfigError(f"model.chat_template.date = {template.date!r}: give a date, 2026-01-31") from None
    limits = config.model.images
    return TextSettings(template.options, template.date, config.task.keep_special, template.text, limits=limits)


def load_tokenizer(path: str | Path, config: Config) -> Tokenizer:
    """A run's. Errors: ConfigError for one that cannot be read, or whose model's form of images cannot."""
    tokenizer = read_tokenizer(path)
    try:
        images = image_processor(path, config.model.images)
    except ValueError as error:
        raise ConfigError(f"model.path = {str(path)!r}: {error}") from None
    return set_text(tokenizer, replace(settings_of(config), images=images))


def read_tokenizer(path: str | Path) -> Tokenizer:
    """Tokenizer of a model directory, without any code of the directory's. Errors: ConfigError if it cannot be read."""
    if not Path(path).is_dir():
        raise ConfigError(f"model.path = {str(path)!r}: its tokenizer cannot be used: there is no such directory")
    from transformers import AutoTokenizer

    try:
        check_files(Path(path))
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of transformers, tokenizers or sentencepiece, which share no narrower one
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model.path = {str(path)!r}: its tokenizer cannot be used: {reason}") from None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text alone, without what a sequence begins or ends with."""
    return tokenizer.encode(text, add_special_tokens=False)


def unknown_of_model(tokenizer: Tokenizer) -> int | None:
    """Id that stands for characters without a token; None of a tokenizer that has a token for each byte."""
    if not tokenizer.is_fast:
        unknown: Any = tokenizer.unk_token_id
        return unknown
    return _unknown(backend(tokenizer))


@lru_cache(maxsize=8)
def _unknown(vocabulary: Any) -> int | None:
    """Of the library's tokenizer, which copies with other text settings share: it is written out as JSON to know."""
    model = json.loads(vocabulary.to_str())["model"]
    if (number := model.get("unk_id")) is not None:
        return number
    return vocabulary.token_to_id(model.get("unk_token") or "")


def backend(tokenizer: Tokenizer) -> Any:
    """Of the library ``tokenizers``, which each fast one has."""
    return tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]


def has_unknown_words(tokenizer: Tokenizer) -> bool:
    """Whether text can hold a character that becomes the token of unknown words."""
    return tokenizer.unk_token_id is not None and unknown_of_model(tokenizer) == tokenizer.unk_token_id


@lru_cache(maxsize=8)
def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token at the beginning of the model's sequences, where its tokenizer has one."""
    return tuple(token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id)


def encode_from_start(tokenizer: Tokenizer, text: str) -> list[int]:
    """Text that a sequence begins with: the beginning of a sequence once, also where the text holds it."""
    tokens, first = encode(tokenizer, text), list(beginning(tokenizer))
    return tokens if tokens[: len(first)] == first else first + tokens


def encode_behind(tokenizer: Tokenizer, context: str, text: str) -> list[int]:
    """Tokens of a text that stands behind others, which have tokens already."""
    before = _chosen(tokenizer, context, text)
    return encode(tokenizer, before + text)[len(encode(tokenizer, before)) :]


def tokens_and_owner(
    tokenizer: Tokenizer, text: str, spans: Iterable[tuple[int, int]], *, begins: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [T], and whether each holds any character of these spans; all do if the tokenizer cannot tell.

    ``begins``: whether the text is the beginning of a sequence, and stands behind nothing.
    """
    before = "" if begins else _chosen(tokenizer, "", text)
    num_before = len(encode(tokenizer, before))
    encoded = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
    tokens = np.asarray(encoded["input_ids"][num_before:], np.int32)
    if not tokenizer.is_fast:
        return tokens, np.ones(len(tokens), bool)
    first, last = np.asarray(encoded["offset_mapping"][num_before:]).reshape(-1, 2).T - len(before)
    return tokens, np.any([(last > start) & (first < stop) for start, stop in spans], axis=0)


@lru_cache(maxsize=8)
def _writes_a_space(tokenizer: Tokenizer) -> bool:
    """Whether text by itself becomes other tokens than behind a line end."""
    head, both = encode(tokenizer, "\n"), encode(tokenizer, "\na")
    return both[: len(head)] == head and both[len(head) :] != encode(tokenizer, "a")


def _chosen(tokenizer: Tokenizer, context: str, text: str) -> str:
    """What to tokenize the text behind: nothing where that makes no difference, else the first whose own tokens stay
    as they are."""
    if not _writes_a_space(tokenizer):
        return ""
    for before in (context, *_NEUTRAL):
        head = encode(tokenizer, before)
        if before and encode(tokenizer, before + text)[: len(head)] == head:
            return before
    return ""


def decoded(tokenizer: Tokenizer, tokens: np.ndarray | list[int], *, skip_special_tokens: bool = False) -> str:
    """The text of one sequence of tokens [T]."""
    text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str), "one sequence has one text"
    return text


def read_answer(tokenizer: Tokenizer, tokens: np.ndarray, *, ended: bool) -> str:
    """An answer's text, as rewards, tools and environments read it.

    ``ended``: whether its last token is the one that stopped it, which is in no text.
    """
    if text_settings(tokenizer).keep_special:
        return decoded(tokenizer, tokens[:-1] if ended else tokens)
    return decoded(tokenizer, tokens, skip_special_tokens=True)
