"""What a model's tokenizer and chat template do with text, found before a run starts by rendering marks."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.kinds import Style
from titan_rl.data.text.chat_template import (
    ANSWER,
    ASKED,
    first_unrendered,
    message,
    render,
    renders_tools,
    reply_template,
)
from titan_rl.data.text.control_tokens import NO_END, control_tokens, end_of_answer, written_answer
from titan_rl.data.text.rendering import check_options, option_names
from titan_rl.data.text.tokenizer import TextSettings, Tokenizer, beginning, decoded, encode, text_settings
from titan_rl.data.text.turns import NO_TEMPLATE

_HIDES_ANSWER = "the model's chat template does not show an answer as it is: take another"
_RENDERINGS = 4
"""Of one question, which must all be alike."""


@dataclass(frozen=True)
class TextUse:
    """Use of text by a run."""

    stops: Sequence[int] = ()
    """Ids that stop the engine; () if they are not known."""
    samples: bool = True
    """Whether answers are sampled, and read by rewards."""
    learns: bool = False
    """Whether answers that somebody wrote are learned: rows of data, or worked examples."""
    demonstrates: bool = False
    """Whether they are worked examples."""
    replies: bool = False
    """Whether something replies to an answer."""
    calls: bool = False
    """Whether answers may call tools."""


def check_model_text(path: str, tokenizer: Tokenizer, use: TextUse, styles: Container[Style]) -> None:
    """Check of a model's tokenizer and template for the run's prompts.

    ``styles``: of the run's prompts or rows. Errors: ConfigError that names the model.
    """
    try:
        if "chat" in styles:
            check_chat(tokenizer, use)
        if "compact" in styles:
            check_text(tokenizer, use)
    except ConfigError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from None


def check_text(tokenizer: Tokenizer, use: TextUse) -> None:
    """Check of text without a template. Errors: ConfigError if a learned answer has no end, or one that does not stop
    the engine."""
    end = tokenizer.eos_token_id
    if use.learns and end is None:
        raise ConfigError(
            "the tokenizer has no eos_token, with which text ends that is learned (sft.steps, or rows of text): add it "
            "to tokenizer_config.json, or, if there is a chat template with an end of its own, give chats"
        )
    if use.learns and isinstance(end, int) and use.stops and end not in use.stops:
        raise ConfigError(_unlike(tokenizer, end, use.stops, "the tokenizer's eos_token, with which text ends,"))


def check_chat(tokenizer: Tokenizer, use: TextUse) -> None:
    """Check of a model's chat template.

    Errors: ConfigError if the model has no chat template, or one that a run cannot be played or taught by.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(NO_TEMPLATE if use.samples else _NO_TEMPLATE_FOR_ROWS)
    check_options(tokenizer, text_settings(tokenizer).template_kwargs, "model.chat_template.options")
    _check_date(tokenizer)
    _check_question(tokenizer)
    _check_end(tokenizer, use)
    if use.demonstrates:
        _check_learned(tokenizer)
    if use.samples:
        _check_special(tokenizer, use)
    if use.replies:
        reply_template(tokenizer)


_NO_TEMPLATE_FOR_ROWS = (
    "rows of messages, and data.chat, need a chat template, and the model's tokenizer has none: take an "
    "instruction-tuned model, set model.chat_template.file, or give rows of text"
)


def _check_date(tokenizer: Tokenizer) -> None:
    """Errors: ConfigError for a date that is not the default, and that no template asks for."""
    date = text_settings(tokenizer).date
    if date != TextSettings().date and not _writes_date(tokenizer):
        raise ConfigError(
            f"model.chat_template.date = {date!r} has no effect: the model's chat template asks for no date; leave it "
            f"out"
        )


def _writes_date(tokenizer: Tokenizer) -> bool:
    return "strftime_now" in str(tokenizer.chat_template)


def _check_question(tokenizer: Tokenizer) -> None:
    question = [message("user", ASKED)]
    first, *others = (render(tokenizer, question) for _ in range(_RENDERINGS))
    if ASKED not in first.casefold():
        raise ConfigError("the model's chat template does not render a user's message: take another")
    if any(other != first for other in others):
        raise ConfigError("the model's chat template writes the same question otherwise each time: take another")
    bare = render(tokenizer, question, add_generation_prompt=False)
    if bare == first and _control_before_answer(tokenizer, bare):
        raise ConfigError(
            "the model's chat template has no generation prompt (add_generation_prompt changes nothing), and an "
            "answer begins with control tokens that nobody would write: take another"
        )


def _control_before_answer(tokenizer: Tokenizer, question: str) -> list[str]:
    """Control tokens between where the model begins and its answer's text."""
    try:
        conversation = [message("user", ASKED), message("assistant", ANSWER)]
        rendered = render(tokenizer, conversation, add_generation_prompt=False)
    except ConfigError:
        return []
    if not rendered.startswith(question) or ANSWER not in rendered:
        return []
    control = control_tokens(tokenizer)
    header = rendered[len(question) :].partition(ANSWER)[0]
    return [control[token] for token in encode(tokenizer, header) if token in control]


def _check_end(tokenizer: Tokenizer, use: TextUse) -> None:
    end = end_of_answer(tokenizer)
    if end is not None and use.stops and end not in use.stops:
        raise ConfigError(_unlike(tokenizer, end, use.stops, "the chat template's end of an answer"))
    if end is None and use.learns:
        raise ConfigError(NO_END if _shows_answer(tokenizer) else _HIDES_ANSWER)


def _shows_answer(tokenizer: Tokenizer) -> bool:
    conversation = [message("user", ASKED), message("assistant", ANSWER)]
    return ANSWER in render(tokenizer, conversation, add_generation_prompt=False)


def _unlike(tokenizer: Tokenizer, end: int, stops: Container[int], what: str) -> str:
    return (
        f"{what} is {decoded(tokenizer, [end])!r} (id {end}), which does not stop the engine: eos_token_id in the "
        f"model's generation_config.json and config.json has {stops}: add {end} to it, or take the tokenizer that "
        f"belongs to the model"
    )


def _check_learned(tokenizer: Tokenizer) -> None:
    _, answer_text = written_answer(tokenizer, ANSWER)
    if ANSWER not in answer_text:
        raise ConfigError(_HIDES_ANSWER)


def _check_special(tokenizer: Tokenizer, use: TextUse) -> None:
    if text_settings(tokenizer).keep_special:
        return
    effect = "which rewards and tools would not see: set task.keep_special = true"
    if use.calls and "<tool_call>" in control_tokens(tokenizer).values():
        raise ConfigError(f"'<tool_call>' is a special token of this model's tokenizer, {effect}")
    if token := _control_before_answer(tokenizer, render(tokenizer, [message("user", ASKED)])):
        raise ConfigError(f"the model's chat template begins an answer with {token[0]!r}, a special token, {effect}")


# what a doctor tells


def text_facts(tokenizer: Tokenizer, stops: Sequence[int]) -> dict[str, str]:
    """Facts of tokenizer and template, by name; of a template only where there is one."""

    def shown(tokens: Sequence[int]) -> str:
        return " ".join(decoded(tokenizer, [token]) for token in tokens) or "nothing"

    facts: dict[str, str] = {"a sequence begins with": shown(beginning(tokenizer)), "the engine stops at": shown(stops)}
    if tokenizer.chat_template is None:
        return facts | {"chat template": "none"}
    end, settings = end_of_answer(tokenizer), text_settings(tokenizer)
    rendered = render(tokenizer, [message("user", ASKED)])
    facts |= {
        "the template ends an answer with": shown([] if end is None else [end]),
        "an answer is asked for with": rendered.rpartition(ASKED)[2],
        "system messages": "shown" if _shows_system(tokenizer) else "not shown",
        "tools": "in the template" if renders_tools(tokenizer) else "in the system message",
        "date": settings.date if _writes_date(tokenizer) else "not written",
    }
    return facts | ({"options": ", ".join(sorted(names))} if (names := option_names(tokenizer)) else {})


def _shows_system(tokenizer: Tokenizer) -> bool:
    try:
        return first_unrendered(tokenizer, ("system", "user")) is None
    except ConfigError:
        return False
