"""Control tokens: which end an answer, and where text holds one, it is broken up or refused.

They are the tokens that a tokenizer calls special, by name or in its list of added tokens, and the added ones that the
chat template writes around messages. Text that is sampled, typed or read from a file must never become one, or a row of
data could end its turn and begin a system's.
"""

import re
from collections.abc import Mapping
from functools import lru_cache

from titan_rl.config.load import ConfigError
from titan_rl.data.text.chat_template import ANSWER, ASKED, REPLY, Tools, message, render, render_with_tools
from titan_rl.data.text.tokenizer import SHORTEST, Tokenizer, backend, unknown_of_model

_MAX_PASSES = 8
NO_END = (
    "the model's chat template ends an answer with no control token, so a model that learns from it would never end "
    "one: take another template"
)


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Id and text of each token that is more than text."""
    added = tokenizer.added_tokens_decoder  # pyright: ignore[reportAttributeAccessIssue]  # each kind has it
    around = _around_messages(tokenizer)
    tokens = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    tokens |= {number: token.content for number, token in added.items() if token.special or number in around}
    return {number: text for number, text in tokens.items() if len(text.strip()) >= SHORTEST}


def _around_messages(tokenizer: Tokenizer) -> set[int]:
    """All tokens of the template's text before a user's words, and between an answer and the next."""
    conversation = [message("user", ASKED), message("assistant", ANSWER), message("user", REPLY)]
    try:
        rendered = render(tokenizer, conversation, add_generation_prompt=False) if tokenizer.chat_template else ""
    except ConfigError:
        return set()
    if not all(mark in rendered for mark in (ASKED, ANSWER)):
        return set()
    texts = rendered.partition(ASKED)[0], rendered.rpartition(ANSWER)[2].partition(REPLY)[0]
    return {token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)}


@lru_cache(maxsize=8)
def _of_template(tokenizer: Tokenizer) -> dict[int, str]:
    """Control tokens, and added words of the chat template's, such as those around a tool's result."""
    added = tokenizer.added_tokens_decoder  # pyright: ignore[reportAttributeAccessIssue]  # each kind has it
    template = str(tokenizer.chat_template)
    words = {number: token.content for number, token in added.items() if token.content in template}
    return control_tokens(tokenizer) | {n: text for n, text in words.items() if len(text.strip()) >= SHORTEST}


@lru_cache(maxsize=8)
def end_of_answer(tokenizer: Tokenizer) -> int | None:
    """Id of the control token behind an answer: the template's end of a turn, else what begins the next turn.

    None if the template writes no control token there, or hides the answer.
    """
    conversation = [message("user", ASKED), message("assistant", ANSWER)]
    for messages in (conversation, [*conversation, message("user", REPLY)]):
        try:
            rendered = render(tokenizer, messages, add_generation_prompt=False)
        except ConfigError:
            continue
        behind = rendered.rpartition(ANSWER)[2].partition(REPLY)[0] if ANSWER in rendered else ""
        token_ids = tokenizer.encode(behind, add_special_tokens=False)
        if (end := next((number for number in token_ids if number in control_tokens(tokenizer)), None)) is not None:
            return end
    return None


def written_answer(tokenizer: Tokenizer, answer: str, tools: Tools = ()) -> tuple[str, str]:
    """The template's text before an answer, and from where the model begins to what follows the answer.

    Errors: ConfigError if the template writes an answer otherwise than it asks for one, as do some whose generation
    prompt opens the model's thinking.
    """
    question = [message("user", ASKED)]
    before = render_with_tools(tokenizer, question, tools)
    rendered = render_with_tools(
        tokenizer, [*question, message("assistant", answer)], tools, add_generation_prompt=False
    )
    if not rendered.startswith(before):
        raise ConfigError(
            f"the model's chat template asks for an answer with {before.rpartition(ASKED)[2]!r}, and does not write "
            f"an answer so: there is nothing that a worked example could go on from; take another template, or other "
            f"model.chat_template.options"
        )
    return before, rendered[len(before) :]


def with_end(tokenizer: Tokenizer, tokens: list[int], following: list[int]) -> tuple[list[int], list[int]]:
    """Tokens of the assistant's turn up to its end, and what the template writes behind that.

    ``following``: the tokens of what is said next. A template may end a turn with the beginning of the next one: then
    that token is the end. Errors: ConfigError if there is no control token that could be it.
    """
    control, end = control_tokens(tokenizer), end_of_answer(tokenizer)
    places = [place for place, token in enumerate(tokens) if token in control]
    if places:
        last = tokens.index(end) if end in tokens else places[-1]
        return tokens[: last + 1], tokens[last + 1 :] + following
    if following and following[0] in control:
        return [*tokens, following[0]], following[1:]
    if end is None:
        raise ConfigError(NO_END)
    return [*tokens, end], following


def plain(tokenizer: Tokenizer, text: str, role: str = "user") -> str:
    """A message's text, with a space inside of whatever the tokenizer would read as a control token.

    What a tool says cannot write the template's own words either.
    """
    control = _of_template(tokenizer) if role == "tool" else control_tokens(tokenizer)
    for _ in range(_MAX_PASSES):
        places = _places(tokenizer, text, control)
        if not places:
            return text
        for place, _ in reversed(places):
            text = f"{text[: place + 1]} {text[place + 1 :]}"
    raise ConfigError(f"text holds control tokens of this model's tokenizer that cannot be broken up: {text[:80]!r}")


def first_control(tokenizer: Tokenizer, text: str) -> str | None:
    """The first control token in the text."""
    control = control_tokens(tokenizer)
    return next((control[number] for _, number in _places(tokenizer, text, control)), None)


def check_plain(tokenizer: Tokenizer, what: str, text: str) -> None:
    """Check of text for control tokens.

    Errors: ConfigError for text that would begin or end a turn. ``what``: whose it is.
    """
    if (token := first_control(tokenizer, text)) is not None:
        raise ConfigError(
            f"{what} holds {token!r}, which this model's tokenizer takes for more than text: leave it out"
        )


def _places(tokenizer: Tokenizer, text: str, control: Mapping[int, str]) -> list[tuple[int, int]]:
    """Where the tokenizer reads control tokens, and which; of an unknown word none is read."""
    if not tokenizer.is_fast:
        return sorted((text.index(word), number) for number, word in control.items() if word in text)
    if not may_hold(tokenizer, text):
        return []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = []
    for number, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if number not in control:
            continue
        word = text[start:stop]
        if number != tokenizer.unk_token_id or word.strip() == control[number]:
            places.append((start + len(word) - len(word.lstrip()), number))
    return places


def may_hold(tokenizer: Tokenizer, text: str) -> bool:
    """Whether any control token is spelled out in the text; only such text has to be tokenized to know.

    A token is read where its own characters are: as they stand, or as the tokenizer normalizes them. White space does
    not count, which some tokenizers write as another character.
    """
    words = _words(tokenizer)
    return words is None or any(words.search(_squeezed(form)) for form in _forms(tokenizer, text))


@lru_cache(maxsize=8)
def _words(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Pattern of all control tokens; None where one can stand for characters that are not its own."""
    control = _of_template(tokenizer)
    unknown = unknown_of_model(tokenizer)
    if unknown in control and unknown != tokenizer.unk_token_id:
        return None
    words = {_squeezed(form) for word in control.values() for form in _forms(tokenizer, word)}
    return None if "" in words else re.compile("|".join(sorted(map(re.escape, words))) or r"(?!)")


def _forms(tokenizer: Tokenizer, text: str) -> tuple[str, ...]:
    normalizer = backend(tokenizer).normalizer
    return (text,) if normalizer is None else (text, normalizer.normalize_str(text))


def _squeezed(text: str) -> str:
    return "".join(text.split()).replace("\N{LOWER ONE EIGHTH BLOCK}", "")
