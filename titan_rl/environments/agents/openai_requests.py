"""Requests of agents: OpenAI's two forms, parsed into one.

How tokens are drawn is the run's own (its temperature, a seed by name), since the trainer must know it: temperature,
top_p, top_k, seed and the like are passed over. What would change which words the model can choose is refused;
penalties and a budget for thinking are taken if they are the run's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.data.text.messages import REASONING
from titan_rl.data.types import Decoding
from titan_rl.environments.conversation.tool_calls import Call, Malformed, read_calls
from titan_rl.environments.conversation.untrusted_json import read_json


class Refused(Exception):
    """Refusal of a request; ``code``: OpenAI's name of the error, where it has one."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class ChatMessage:
    """Chat message, comparable with others."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments, as JSON with its keys in order."""

    @property
    def comparison_key(self) -> tuple:
        """Key that is equal for equal messages; white space around text does not count, since programs trim it."""
        return self.role, self.content.strip(), self.calls

    @property
    def text(self) -> str:
        """Content and calls, as a model writes them."""
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return "\n".join([*([self.content] if self.content else []), *calls])


@dataclass(frozen=True)
class ModelRequest:
    """Request of an agent: either ``messages``, or ``prompt`` as text or tokens."""

    messages: tuple[ChatMessage, ...] = ()
    prompt: str | tuple[int, ...] = ""
    tools: tuple[str, ...] = ()
    """Schemas as JSON."""
    max_new_tokens: int | None = None
    wants_logprobs: bool = False
    wants_tokens: bool = False
    wants_stream: bool = False
    decoding: tuple[tuple[str, Any], ...] = ()
    """Settings that the run has, too, as the agent wants them."""
    session: str = ""
    """Name of the seat, where several play in one episode."""

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [json.loads(tool) for tool in self.tools]


_REFUSED = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}
"""Settings that are taken with these values alone."""
_OF_RUN = {name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")}
_OF_RUN |= {"thinking_token_budget": "thinking_budget"}
"""Settings that are taken with the run's own values alone, by their names in ``Decoding``."""
_ROLES = {"developer": "system", "function": "tool"}


def read_chat(body: Mapping[str, Any]) -> ModelRequest:
    """Parse the body of a chat completion request. Errors: Refused."""
    _check(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: give a list of {role, content}")
    parsed = tuple(_message(message) for message in messages)
    if parsed[-1].role == "assistant":
        raise Refused("messages: the last one is the assistant's: there is nothing to answer")
    return ModelRequest(
        messages=parsed, tools=_schemas(body), **_options(body), wants_logprobs=body.get("logprobs") is True
    )


def read_completion(body: Mapping[str, Any]) -> ModelRequest:
    """Parse the body of a text completion request. Errors: Refused."""
    _check(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str) or not prompt:
        raise Refused("prompt: give one text, or one list of tokens")
    return ModelRequest(prompt=prompt, **_options(body), wants_logprobs=body.get("logprobs") is not None)


def _check(body: Mapping[str, Any]) -> None:
    for name, allowed in _REFUSED.items():
        if body.get(name) not in allowed:
            raise Refused(f"{name} = {body[name]!r:.100}: a run samples from the whole of its policy; leave it out")


def check_decoding(request: ModelRequest, decoding: Decoding) -> None:
    """Check of a request's settings against the run's. Errors: Refused."""
    for name, value in request.decoding:
        own = getattr(decoding, _OF_RUN[name])
        is_limit = name == "thinking_token_budget"
        if value != own or (is_limit and not own):  # vLLM's 0 is no thinking, a run's 0 no limit
            how = "without one" if is_limit and not own else f"with {own:g}"
            raise Refused(f"{name} = {value!r:.100}: the run samples {how}; leave it out")


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise Refused("max_tokens: give a number of 1 or more")
    return dict(
        max_new_tokens=limits[0] if limits else None,
        decoding=tuple((name, body[name]) for name in _OF_RUN if body.get(name) is not None),
        wants_tokens=body.get("return_token_ids") is True,
        wants_stream=body.get("stream") is True,
    )


def _message(message: Any) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Refused("messages: each is {role, content}")
    if name := next((name for name in REASONING if message.get(name)), None):
        raise Refused(f"messages: {name!r} would not be shown to the model: put it into content")
    calls = message.get("tool_calls") or ()
    try:
        return ChatMessage(_ROLES.get(role, role), _text(message.get("content")), tuple(_call(call) for call in calls))
    except (KeyError, TypeError, ValueError):
        raise Refused("messages: content is text, and tool_calls are functions with their arguments") from None


def _text(content: Any) -> str:
    """Errors: TypeError, KeyError."""
    if content is None:
        return ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError
    return content


def _call(call: Any) -> tuple[str, str]:
    """Errors: KeyError, TypeError, ValueError."""
    function = call["function"]
    return str(function["name"]), canonical_json(read_json(function["arguments"] or "{}"))


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, the same for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _schemas(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Errors: Refused."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise Refused("tools: give a list of {type: 'function', function: {name, parameters}}")
    return () if body.get("tool_choice") == "none" else tuple(map(_schema, tools))


def _schema(tool: Any) -> str:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
        raise Refused("tools: each is {type: 'function', function: {name, parameters}}")
    return canonical_json(tool)


def response_message(text: str, request: ModelRequest) -> ChatMessage:
    """Assistant message for the agent; a malformed call is text."""
    parsed = read_calls(text, "chat", {}) if request.tools else []
    calls = tuple((call.name, canonical_json(call.arguments)) for call in parsed if isinstance(call, Call))
    if not calls:
        return ChatMessage("assistant", text)
    before, _, _ = text.partition("<tool_call>") if "<tool_call>" in text else ("", "", "")
    return ChatMessage(
        "assistant", before + "".join(call.text for call in parsed if isinstance(call, Malformed)), calls
    )
