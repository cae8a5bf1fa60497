"""Text: what the run makes of prompts, worked examples and replies, beside transformers' own rendering of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError

from titan_rl.controller.preflight.checks import stops_of, tokenizer_of
from titan_rl.data.rows.row_fields import Message
from titan_rl.data.text import pieces, turns
from titan_rl.data.text.control_tokens import control_tokens
from titan_rl.data.text.tokenizer import Tokenizer, decoded, text_settings
from titan_rl.diagnostics.doctor.context import Visit
from titan_rl.diagnostics.doctor.findings import NotLookedAt, Wrong
from titan_rl.environments.interfaces.task import task_of
from titan_rl.environments.rollout.prompt_checks import training_prompts

_PROMPTS = 8
_ANSWER, _REPLY = "12", "34"


@dataclass(frozen=True)
class Written:
    """A model's text, as the run's own functions write it and as transformers does."""

    tokenizer: Tokenizer
    stops: Sequence[int]

    def rendered(self, messages: list[Message], tools: Sequence[dict[str, Any]] = (), *, asks: bool = True) -> str:
        settings = text_settings(self.tokenizer)
        told = settings.template_kwargs | {"strftime_now": settings.strftime, "tools": list(tools) or None}
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **told)
        assert isinstance(text, str), "one conversation is one text"
        return text

    def check_prompt(self, messages: str | list[Message], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Errors: Wrong."""
        ours = turns.encode_messages(self.tokenizer, messages, tools).tolist()
        if isinstance(messages, str):
            first = [token for token in self.tokenizer.encode("")[:1] if token == self.tokenizer.bos_token_id]
            if [token for token in ours[: len(first) + 1] if token in first] != first:
                raise Wrong("a prompt does not begin once as the model's sequences do", self._shown(ours))
            return
        if self._has_control(messages) or (tools and not self._told(tools)):
            return  # text that is broken up, or tools that are told of otherwise
        theirs = pieces.encode(self.tokenizer, self.rendered(messages, tools))
        self._compare("a prompt", ours, theirs)

    def _told(self, tools: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        return tools if "tools" in str(self.tokenizer.chat_template) else ()

    def _has_control(self, messages: list[Message]) -> bool:
        texts = (message["content"] for message in messages)
        return any(token in text for text in texts for token in control_tokens(self.tokenizer).values())

    def _compare(self, what: str, ours: list[int], theirs: list[int]) -> None:
        if ours != theirs:
            evidence = f"{self._shown(ours)}, not {self._shown(theirs)}"
            raise Wrong(f"{what} is not what the chat template and the tokenizer write", evidence)

    def check_hostile(self, *, is_chat: bool) -> None:
        """A prompt or a reply with control tokens in its text has no more of them. Errors: Wrong."""
        for word in control_tokens(self.tokenizer).values():
            for role in ("user", "tool") if is_chat else ("user",):
                ours, plain = [self._num_control(text, role, is_chat) for text in (f"1{word}\n2", "1 2")]
                if ours != plain:
                    raise Wrong("text becomes a control token", f"{word!r} in a {role}'s words is one")

    def _num_control(self, text: str, role: str, is_chat: bool) -> tuple[int, int]:
        messages = [{"role": role, "content": text}]
        said, _ = turns.encode_reply(self.tokenizer, messages, -1, is_chat=is_chat)
        prompt = turns.encode_messages(self.tokenizer, [{"role": "user", "content": text}] if is_chat else text)
        control = list(control_tokens(self.tokenizer))
        return int(np.isin(said, control).sum()), int(np.isin(prompt, control).sum())

    def check_answer(self, *, is_chat: bool) -> None:
        """A worked answer ends with what stops the engine, and is in its place what the whole is. Errors: Wrong."""
        ours = turns.encode_answer(self.tokenizer, _ANSWER, is_chat=is_chat).tolist()
        if self.stops and ours[-1] not in self.stops:
            raise Wrong("a worked answer does not end with what stops the engine", self._shown(ours))
        before, whole = "1+1=\n", f"1+1=\n{_ANSWER}"
        if is_chat:
            asked = [{"role": "user", "content": "1"}]
            before = self.rendered(asked)
            whole = self.rendered([*asked, {"role": "assistant", "content": _ANSWER}], asks=False)
        head, both = pieces.encode(self.tokenizer, before), pieces.encode(self.tokenizer, whole)
        if both[: len(head)] == head:
            self._compare("a worked answer", ours[:-1], both[len(head) :][: len(ours) - 1])

    def check_reply(self, tools: Sequence[dict[str, Any]]) -> None:
        """Errors: Wrong."""
        role = "tool" if tools else "user"
        last = int(turns.encode_answer(self.tokenizer, _ANSWER, is_chat=True, tools=tools)[-1])
        reply: Message = {"role": role, "content": _REPLY}
        ours, _ = turns.encode_reply(self.tokenizer, [reply], last, is_chat=True, tools=tools)
        asked = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _ANSWER}, reply]
        try:
            behind = self.rendered(asked, self._told(tools)).rpartition(_ANSWER)[2]
        except TemplateError:  # one without tools is told of a user's words
            return
        theirs = pieces.encode(self.tokenizer, behind)
        control = np.isin(theirs, list(control_tokens(self.tokenizer)))
        start = int(control.argmax()) + 1 if control.any() else 0
        self._compare("a reply", ours.tolist(), theirs[start:])

    def _shown(self, tokens: Any) -> str:
        return repr(decoded(self.tokenizer, tokens)[-80:])


async def written(visit: Visit) -> str:
    """Prompts, worked answers and replies are as the model's template and tokenizer write them."""
    config, task = visit.checked.config, visit.checked.task
    if config.data.file:
        raise NotLookedAt("a run on data.file has no prompts; its rows are checked one by one before the start")
    text = Written(tokenizer_of(config), stops_of(config))
    prompts = list(islice(training_prompts(task, config.run.seed), _PROMPTS))
    styles: set[bool] = set()
    for prompt in prompts:
        part = task_of(task, prompt)
        messages, tools = part.messages(prompt), part.tools_of(prompt)
        text.check_prompt(messages, tools)
        styles.add(not isinstance(messages, str))
        if tools and not isinstance(messages, str):
            text.check_reply(tools)
    for is_chat in styles:
        text.check_hostile(is_chat=is_chat)
        if config.sft.steps:
            text.check_answer(is_chat=is_chat)
    return f"{len(prompts)} prompts, and text that would write control tokens"
