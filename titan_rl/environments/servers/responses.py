"""Transcript of an episode as an object of OpenAI's Responses API, for NeMo Gym's servers."""

import json
from collections.abc import Sequence
from typing import Any

from titan_rl.config.sections.kinds import Style
from titan_rl.environments.conversation.tool_calls import Call, Malformed, text_beside_calls


class Transcript:
    """Items of an episode's response, in order."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []

    def add_answer(self, answer: str, style: Style, calls: list[Call | Malformed]) -> None:
        """Add an answer's text; without a call it is a message even if it is empty."""
        words = text_beside_calls(answer, style, calls)
        if words or not calls:
            content = [{"type": "output_text", "text": words, "annotations": []}]
            about = {"type": "message", "role": "assistant", "status": "completed", "content": content}
            self._items.append(about | {"id": self._new_id("message")})

    def add_call(self, call: Call, result: str) -> None:
        """Add a call and its result."""
        number = self._new_id("call")
        about = {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments)}
        self._items.append(about | {"call_id": number, "id": number, "status": "completed"})
        self._items.append({"type": "function_call_output", "call_id": number, "output": result})

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{len(self._items)}"

    def response(self) -> dict[str, Any]:
        """Response object, with the fields that servers validate."""
        about: dict[str, Any] = {"id": "response", "object": "response", "created_at": 0.0, "model": "policy"}
        settings: dict[str, Sequence[Any] | str | bool] = {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        return about | settings | {"output": list(self._items)}
