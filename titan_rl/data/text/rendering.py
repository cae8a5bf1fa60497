"""Rendering of a chat template within limits, and the options that it reads.

What is here takes messages as the template takes them; ``chat_template.py`` brings them into that form.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, meta

from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.text.messages import Message
from titan_rl.data.text.template_limits import check_source, limited
from titan_rl.data.text.tokenizer import SHORTEST, Tokenizer, encode, set_text, text_settings

_FAULTS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    SyntaxError,
)
"""What a template may raise: it is a program."""
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers' own, around what the assistant writes."""
_SET_BY_RUN = {
    *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace"),
    *("bos_token", "eos_token", "pad_token", "unk_token", "loop", "range", "dict", "lipsum", "cycler", "joiner"),
    *("conversation", "chat_template", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Names that a template has without an option, and the arguments of transformers' own function."""


def rendered(tokenizer: Tokenizer, messages: Sequence[Message], *, tokenize: bool = False, **options: Any) -> Any:
    """Rendering of messages by the chat template, up to where the model begins. Errors: ConfigError with what the
    template says."""
    settings = text_settings(tokenizer)
    arguments = {"add_generation_prompt": True, "return_dict": False, "strftime_now": settings.strftime}
    arguments |= settings.template_kwargs | options
    conversation: Any = list(messages)
    try:
        with limited():  # to make tokens of it starts a thread for each core, whose stacks count
            for source in template_sources(tokenizer):
                check_source(source)
            text: Any = tokenizer.apply_chat_template(conversation, tokenize=False, **_without_tokens(arguments))
        if arguments["return_dict"]:
            return tokenizer.apply_chat_template(conversation, tokenize=True, **arguments)
        return encode(tokenizer, text) if tokenize else text
    except _FAULTS as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the model's chat template refuses messages of {roles}: {reason}") from None


def _without_tokens(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if not name.startswith("return_")}


def template_sources(tokenizer: Tokenizer) -> Iterable[str]:
    """Source of the chat template, or of each of several with names."""
    templates = getattr(tokenizer, "chat_template", None) or ()
    return (templates,) if isinstance(templates, str) else templates.values() if isinstance(templates, dict) else ()


# options


def option_names(tokenizer: Tokenizer) -> set[str]:
    """Names that the chat template reads besides what transformers gives it."""
    return {name for source in template_sources(tokenizer) for name in _names_in(source)} - _SET_BY_RUN


@lru_cache(maxsize=16)
def _names_in(source: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", source))))
    except (TemplateError, RecursionError):  # rendering tells what is wrong with it
        return frozenset()


def check_options(tokenizer: Tokenizer, options: Mapping[str, Any], setting: str) -> None:
    """Check of a chat template's options. ``setting``: where they are given.

    Errors: ConfigError for one that the run itself sets, or that the template never reads.
    """
    if own := sorted(options.keys() & _SET_BY_RUN):
        raise ConfigError(f"{setting}.{own[0]} is set by the run: leave it out")
    if unread := sorted(options.keys() - (names := option_names(tokenizer))):
        hint = nearest(unread[0], names) if names else "it reads none: leave it out"
        raise ConfigError(f"{setting}.{unread[0]}: the model's chat template does not read it; {hint}")


def with_options(tokenizer: Tokenizer, options: Mapping[str, Any]) -> Tokenizer:
    """Tokenizer with a row's own options for the chat template, over the run's.

    Errors: as ``check_options``, and ConfigError for one that holds a special token.
    """
    return _with_options(tokenizer, json.dumps(options, sort_keys=True)) if options else tokenizer


@lru_cache(maxsize=16)
def without_options(tokenizer: Tokenizer) -> Tokenizer:
    """Tokenizer whose chat template has no options."""
    return set_text(copy.copy(tokenizer), replace(text_settings(tokenizer), template_kwargs={}))


def _check_special(tokenizer: Tokenizer, options: str) -> None:
    """Errors: ConfigError for a row's options with a special token, which the template would write."""
    words = (word for word in tokenizer.all_special_tokens if len(word.strip()) >= SHORTEST)
    if word := next((word for word in words if json.dumps(word)[1:-1] in options), None):
        raise ConfigError(f"chat_template_kwargs holds {word!r}, a special token of this model's: leave it out")


@lru_cache(maxsize=16)
def _with_options(tokenizer: Tokenizer, options: str) -> Tokenizer:
    """A copy that shares the vocabulary: whatever is found out about a template is found out for its options, too."""
    own, settings = json.loads(options), text_settings(tokenizer)
    check_options(tokenizer, own, "chat_template_kwargs")
    _check_special(tokenizer, options)
    return set_text(copy.copy(tokenizer), replace(settings, template_kwargs=settings.template_kwargs | own))
