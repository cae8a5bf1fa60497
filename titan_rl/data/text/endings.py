"""What ends an answer, as the chat template writes it."""

from functools import lru_cache

from titan_rl.config.load import ConfigError
from titan_rl.data.text.chat_template import ANSWER, ASKED, REPLY, Tools, message, render, render_with_tools
from titan_rl.data.text.control_tokens import control_tokens
from titan_rl.data.text.tokenizer import Tokenizer

NO_END = (
    "the model's chat template ends an answer with no control token, so a model that learns from it would never end "
    "one: take another template"
)


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
