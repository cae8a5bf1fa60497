"""A model's tokenizer: how it is loaded, what a run tells it, and how an answer is read.

transformers takes a second to import, so its type stands in annotations alone.
"""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.model_directory.directory import check_files
from titan_rl.config.sections.schema import Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any

SHORTEST = 3
"""Characters of a control token: some models name ``!`` or a line end as padding, which is text all the same."""


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
    return TextSettings(template.options, template.date, config.task.keep_special, template.text)


def load_tokenizer(path: str | Path, config: Config) -> Tokenizer:
    """A run's. Errors: ConfigError for one that cannot be read."""
    return set_text(read_tokenizer(path), settings_of(config))


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
