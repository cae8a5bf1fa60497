"""Completions in OpenAI's two forms, with vLLM's names for the tokens."""

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.data.types import Completion
from titan_rl.environments.agents.openai_requests import ChatMessage, ModelRequest


@dataclass(frozen=True)
class ModelResponse:
    """Response to an agent, in OpenAI's form of its request."""

    request: ModelRequest
    prompt: np.ndarray
    """int32 [T]"""
    completion: Completion
    message: ChatMessage
    pieces: list[str]
    """The text of each token of the completion."""

    def body(self, model: str) -> dict[str, Any]:
        """Body of a response."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish_reason}
        if self.request.is_chat:
            choice |= {"message": self._message(), "logprobs": self._chat_logprobs()}
        else:
            choice |= {"text": self.message.content, "logprobs": self._logprobs()}
        return self._about(model, "") | {"choices": [self._with_tokens(choice)], "usage": self._usage()}

    def events(self, model: str) -> Iterator[str]:
        """Server-sent events of a stream; the first has the whole answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if self.request.is_chat:
            message = self._message()
            calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls", []))]
            choice |= {"delta": message | ({"tool_calls": calls} if calls else {}), "logprobs": self._chat_logprobs()}
        else:
            choice |= {"text": self.message.content, "logprobs": self._logprobs()}
        about, kind = self._about(model, ".chunk"), "delta" if self.request.is_chat else "text"
        end = {"index": 0, "finish_reason": self._finish_reason, kind: {} if self.request.is_chat else ""}
        for chunk in (
            about | {"choices": [self._with_tokens(choice)]},
            about | {"choices": [end]},
            about | {"choices": [], "usage": self._usage()},
        ):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def _about(self, model: str, kind: str) -> dict[str, Any]:
        form = f"chat.completion{kind}" if self.request.is_chat else "text_completion"
        return {"id": f"cmpl-{uuid.uuid4().hex}", "object": form, "created": int(time.time()), "model": model}

    @property
    def _finish_reason(self) -> str:
        if self.message.calls:
            return "tool_calls"
        return "length" if self.completion.stop_reason == "length" else "stop"

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.message.content or None}
        if not self.message.calls:
            return message | {"content": self.message.content}
        return message | {
            "tool_calls": [
                {
                    "id": f"call-{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in self.message.calls
            ]
        }

    def _usage(self) -> dict[str, int]:
        num_prompt, num_completion = len(self.prompt), len(self.completion.tokens)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }

    def _with_tokens(self, choice: dict[str, Any]) -> dict[str, Any]:
        if not self.request.wants_tokens:
            return choice
        tokens = {"prompt_token_ids": self.prompt.tolist(), "token_ids": self.completion.tokens.tolist()}
        return choice | tokens

    def _chat_logprobs(self) -> dict[str, Any] | None:
        if not self.request.wants_logprobs:
            return None
        pairs = zip(self.pieces, self.completion.logprobs.tolist(), strict=True)
        return {
            "content": [
                {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, logprob in pairs
            ]
        }

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.request.wants_logprobs:
            return None
        offsets = np.cumsum([0, *map(len, self.pieces)])[:-1].tolist()
        logprobs = self.completion.logprobs.tolist()
        return {"tokens": self.pieces, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
