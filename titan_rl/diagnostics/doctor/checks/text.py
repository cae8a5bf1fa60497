"""Text: what the run makes of prompts, worked examples and replies, beside transformers' own rendering of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from jinja2 import TemplateError

from titan_rl.controller.preflight.checks import stops_of, tokenizer_of
from titan_rl.data.text import turns
from titan_rl.data.text.control_tokens import control_tokens
from titan_rl.data.text.message_forms import fitted, texts_in, texts_of
from titan_rl.data.text.messages import Message, message
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.tokenizer import Tokenizer, decoded, encode, text_settings
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.environments.interfaces.task import task_of
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.rollout.answer_lengths import answer_lengths
from titan_rl.environments.rollout.prompt_checks import training_prompts

_PROMPTS = 8
_ANSWER, _REPLY = "12", "34"


async def fits(context: CheckContext) -> str:
    """Most expected answers have no more tokens than an answer may have."""
    checked = context.checked
    looked_at = checked.config, checked.task, partial(tokenizer_of, checked.config)
    lengths = answer_lengths(*looked_at)
    if not lengths and (of_functions := answer_lengths(*looked_at, functions_pay=True)):
        earned, first = await context.earned(), next(PromptStream(checked.task, checked.config.run.seed))
        if earned.has_signal and earned.shown["right"].strip() == first.answer.strip():
            lengths = of_functions
    if not lengths:
        raise CheckSkipped("the reward does not pay for writing a row's 'answer'")
    for each in lengths:
        if each.are_too_long:
            raise CheckFailed("most expected answers are cut", each.evidence, each.mend.capitalize())
    return "; ".join(each.evidence for each in lengths)


@dataclass(frozen=True)
class Written:
    """A model's text, as the run's own functions write it and as transformers does."""

    tokenizer: Tokenizer
    stops: Sequence[int]

    def rendered(self, messages: list[Message], tools: Sequence[dict[str, Any]] = (), *, asks: bool = True) -> str:
        settings = text_settings(self.tokenizer)
        options = settings.template_kwargs | {"strftime_now": settings.strftime, "tools": list(tools) or None}
        conversation: Any = fitted(self.tokenizer, messages, has_tools=bool(tools))
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=asks, **options)
        assert isinstance(text, str), "one conversation is one text"
        return text

    def check_prompt(self, messages: str | list[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Check of a prompt's tokens against the template. Errors: CheckFailed."""
        encoded = turns.encode_messages(self.tokenizer, messages, tools).tolist()
        if isinstance(messages, str):
            first = [token for token in self.tokenizer.encode("")[:1] if token == self.tokenizer.bos_token_id]
            if [token for token in encoded[: len(first) + 1] if token in first] != first:
                raise CheckFailed("a prompt does not begin once as the model's sequences do", self._shown(encoded))
            return
        if self._has_control(messages, tools) or (tools and not self._rendered_tools(tools)):
            return  # text that is broken up, or tools that are told of otherwise
        expected = encode(self.tokenizer, self.rendered(messages, tools))
        self._compare("a prompt", encoded, expected)

    def _rendered_tools(self, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return tools if "tools" in str(self.tokenizer.chat_template) else ()

    def _has_control(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> bool:
        texts = [*chain.from_iterable(map(texts_of, messages)), *texts_in(list(tools))]
        return any(token in text for text in texts for token in control_tokens(self.tokenizer).values())

    def _compare(self, what: str, encoded: list[int], expected: list[int]) -> None:
        if encoded != expected:
            evidence = f"{self._shown(encoded)}, not {self._shown(expected)}"
            raise CheckFailed(f"{what} is not what the chat template and the tokenizer write", evidence)

    def check_hostile(self, *, is_chat: bool) -> None:
        """A prompt or a reply with control tokens in its text has no more of them. Errors: CheckFailed."""
        for word in control_tokens(self.tokenizer).values():
            for role in ("user", "tool") if is_chat else ("user",):
                hostile, plain = [self._num_control(text, role, is_chat) for text in (f"1{word}\n2", "1 2")]
                if hostile != plain:
                    raise CheckFailed("text becomes a control token", f"{word!r} in a {role}'s words is one")

    def _num_control(self, text: str, role: str, is_chat: bool) -> tuple[int, int]:
        messages = [message(role, text)]
        reply_tokens, _ = turns.encode_reply(self.tokenizer, messages, -1, is_chat=is_chat)
        prompt = turns.encode_messages(self.tokenizer, [message("user", text)] if is_chat else text)
        control = list(control_tokens(self.tokenizer))
        return int(np.isin(reply_tokens, control).sum()), int(np.isin(prompt, control).sum())

    def check_answer(self, *, is_chat: bool) -> None:
        """Check of a worked answer: its stop token, and its tokens inside a conversation. Errors: CheckFailed."""
        encoded = turns.encode_answer(self.tokenizer, _ANSWER, is_chat=is_chat).tolist()
        if self.stops and encoded[-1] not in self.stops:
            raise CheckFailed("a worked answer does not end with what stops the engine", self._shown(encoded))
        before, conversation = "1+1=\n", f"1+1=\n{_ANSWER}"
        if is_chat:
            question = [message("user", "1")]
            before = self.rendered(question)
            conversation = self.rendered([*question, message("assistant", _ANSWER)], asks=False)
        head, both = encode(self.tokenizer, before), encode(self.tokenizer, conversation)
        if both[: len(head)] == head:
            self._compare("a worked answer", encoded[:-1], both[len(head) :][: len(encoded) - 1])

    def check_reply(self, tools: Sequence[dict[str, Any]]) -> None:
        """Check of a reply's tokens against the template. Errors: CheckFailed."""
        role = "tool" if tools else "user"
        last = int(turns.encode_answer(self.tokenizer, _ANSWER, is_chat=True, tools=tools)[-1])
        reply = message(role, _REPLY)
        encoded, _ = turns.encode_reply(self.tokenizer, [reply], last, is_chat=True, tools=tools)
        conversation = [message("user", "1"), message("assistant", _ANSWER), reply]
        try:
            behind = self.rendered(conversation, self._rendered_tools(tools)).rpartition(_ANSWER)[2]
        except TemplateError:  # one without tools is told of a user's words
            return
        expected = encode(self.tokenizer, behind)
        control = np.isin(expected, list(control_tokens(self.tokenizer)))
        start = int(control.argmax()) + 1 if control.any() else 0
        self._compare("a reply", encoded.tolist(), expected[start:])

    def _shown(self, tokens: Any) -> str:
        return repr(decoded(self.tokenizer, tokens)[-80:])


async def written(context: CheckContext) -> str:
    """Prompts, worked answers and replies are as the model's template and tokenizer write them."""
    config, task = context.checked.config, context.checked.task
    if config.data.file:
        raise CheckSkipped("a run on data.file has no prompts; its rows are checked one by one before the start")
    text = Written(tokenizer_of(config), stops_of(config))
    prompts = list(islice(training_prompts(task, config.run.seed), _PROMPTS))
    styles: set[bool] = set()
    for prompt in prompts:
        part = task_of(task, prompt)
        messages, tools = part.messages(prompt), part.tools_of(prompt)
        own = replace(text, tokenizer=with_options(text.tokenizer, prompt.template_options))
        own.check_prompt(messages, tools)
        styles.add(not isinstance(messages, str))
        if tools and not isinstance(messages, str):
            own.check_reply(tools)
    for is_chat in styles:
        text.check_hostile(is_chat=is_chat)
        if config.sft.steps:
            text.check_answer(is_chat=is_chat)
    return f"{len(prompts)} prompts, and text that would write control tokens"
