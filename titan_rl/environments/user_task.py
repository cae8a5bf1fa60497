"""A task from outside the tree: ``[task] name = "pkg.module:name"``, a class or function called with the TaskConfig.

Whatever it raises becomes one line with its name and place. Its ``reply``, tools and environments run in the verifier
process, between the turns of all episodes there, so what takes long must be awaited; its ``score`` runs in the scorer
process.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_signature, resolve, what_happened
from titan_rl.config.schema import TaskConfig
from titan_rl.data import seeds
from titan_rl.data.types import Prompt
from titan_rl.environments.environment import Environment, OneAnswer, Replying
from titan_rl.environments.rewards import as_parts, shown, source_file
from titan_rl.environments.task import Size, UserCodeError
from titan_rl.environments.tools import Tool, ToolEnvironment

_REQUIRED = {
    "prompt": ("stream", "seed", "index"),
    "messages": ("prompt",),
    "demonstration": ("prompt",),
    "score": ("prompt", "answers"),
}
_OPTIONAL = {
    "reply": ("prompt", "answers"),
    "environment": ("prompt",),
    "agent": ("prompt",),
    "is_held_out": ("prompt",),
    "row": ("prompt",),
    "difficulty": ("prompt",),
}


def user_task(task: TaskConfig, folders: Sequence[str]) -> "UserTask":
    """Errors: ConfigError if it cannot be made, lacks a method, or gives no prompt that can be used."""
    said = f"task.name = {task.name!r}"
    maker = resolve("task.name", task.name, folders)
    check_signature(said, maker, ("task",))
    try:
        made = maker(task)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # it is the user's code: whatever it raises is told by name
        raise UserCodeError(f"{said}: {what_happened(error, source_file(maker))}") from None
    _check_methods(said, made)
    checked = UserTask(said, made, task.style)
    checked.check()
    return checked


def _check_methods(said: str, made: Any) -> None:
    for name, parameters in (_REQUIRED | _OPTIONAL).items():
        if hasattr(made, name):
            check_signature(f"{said}: {name}", getattr(made, name), parameters)
        elif name in _REQUIRED:
            raise ConfigError(f"{said} made a {type(made).__name__} without {name}({', '.join(parameters)}): add it")
    for first, others in (("reply", ("environment", "tools")), ("agent", ("environment", "tools", "reply"))):
        beside = [name for name in others if hasattr(made, name)]
        if hasattr(made, first) and beside:
            raise ConfigError(f"{said} made a {type(made).__name__} with {first} and {beside[0]}: keep one of them")
    for tool in getattr(made, "tools", ()):
        if not isinstance(tool, Tool):
            raise ConfigError(f"{said}: tools holds {shown(tool)}: give titan_rl.environments.tools.Tool objects")


class UserTask:
    """The user's object, with defaults for what it may leave out: an environment of its own, or one that its tools or
    its ``reply`` make; or its agent. Errors of all calls: UserCodeError."""

    def __init__(self, said: str, task: Any, style: Literal["compact", "chat"]):
        self.said, self.task, self.style = said, task, style
        self.tools = [tool.schema for tool in getattr(task, "tools", ())]
        self.speaks_first, self.sessions = getattr(task, "speaks_first", False), getattr(task, "sessions", None)
        if hasattr(task, "agent"):
            self.agent, self.seats = partial(self._call, "agent"), tuple(getattr(task, "seats", ()))

    def check(self) -> None:
        """One prompt is made and written out."""
        prompt = self.prompt("check", 0, 0)
        if self.prompt("check", 0, 0) != prompt:
            raise ConfigError(
                f"{self.said}: prompt('check', 0, 0) gave two different prompts: draw from the seed alone"
            )
        try:
            json.dumps(asdict(prompt))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.said}: a prompt's entry must be plain values, as in JSON: {error}") from None
        self.messages(prompt)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.task, name)(*arguments)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # it is the user's code: whatever it raises is told by name
            raise UserCodeError(f"{self.said}: {name}: {what_happened(error, source_file(self.task))}") from None

    @property
    def size(self) -> Size | None:
        size = getattr(self.task, "size", None)
        return None if size is None else Size(*size)

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        prompt, expected = self._call("prompt", stream, seed, index), f"{stream}/{index:07d}"
        if not isinstance(prompt, Prompt):
            raise UserCodeError(
                f"{self.said}: prompt gave a {type(prompt).__name__}: give a titan_rl.data.types.Prompt"
            )
        if prompt.id != expected:
            raise UserCodeError(f"{self.said}: prompt gave the id {prompt.id!r}: it must be {expected!r}")
        return prompt

    def is_held_out(self, prompt: Prompt) -> bool:
        if hasattr(self.task, "is_held_out"):
            return bool(self._call("is_held_out", prompt))
        return seeds.is_held_out(prompt.text)

    def messages(self, prompt: Prompt) -> str | list[dict[str, str]]:
        messages = self._call("messages", prompt)
        if isinstance(messages, str):
            return messages
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise UserCodeError(
                f"{self.said}: messages gave {shown(messages)}: give text, or a list of {{role, content}}"
            )
        return messages

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        return self._call("demonstration", prompt)

    def environment(self, prompt: Prompt) -> Environment:
        if hasattr(self.task, "environment"):
            return self._call("environment", prompt)
        if self.tools:
            return ToolEnvironment(self.task.tools, self.style)
        return Replying(partial(self._reply, prompt)) if hasattr(self.task, "reply") else OneAnswer()

    def _reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        reply = self._call("reply", prompt, answers)
        if reply is not None and not isinstance(reply, str):
            raise UserCodeError(f"{self.said}: reply gave a {type(reply).__name__}: give text, or None to end")
        return reply

    def row(self, prompt: Prompt) -> dict[str, Any]:
        if hasattr(self.task, "row"):
            return self._call("row", prompt)
        return {"question": prompt.text, "answer": prompt.answer} | prompt.entry

    def difficulty(self, prompt: Prompt) -> str | None:
        """What it has its pass rate in common with, if the task says so (curriculum.py)."""
        return str(self._call("difficulty", prompt)) if hasattr(self.task, "difficulty") else None

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        given = self._call("score", prompt, answers)
        if given == {} and (hasattr(self.task, "environment") or hasattr(self.task, "agent")):
            return {}  # which rewards instead
        return as_parts(f"{self.said}: score", given)
