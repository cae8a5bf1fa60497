"""Task from outside the tree: ``[task] name = "pkg.module:name"``, a class or function called with the TaskConfig.

Whatever it raises becomes one line with its name and place, and so does a hook (task.py) that is misspelled or takes
other arguments. Its ``reply``, tools and environments run in the verifier process, between the turns of all episodes
there, so what takes long must be awaited; its ``score`` runs in the scorer process.
"""

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import (
    check_signature,
    check_spelling,
    is_method,
    is_overridden,
    resolve,
    shown,
    source_file,
    what_happened,
)
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.tools import ToolEnvironment
from titan_rl.environments.interfaces.agent import Agent
from titan_rl.environments.interfaces.environment import Environment
from titan_rl.environments.interfaces.task import REPLYING, RewardParts, Size, Task, UserCodeError
from titan_rl.environments.interfaces.tool import Schema, Tool, schema_of
from titan_rl.environments.rewards.functions import as_parts

_REQUIRED = ("prompt", "messages", "demonstration", "score")
_METHODS = {
    name: tuple(inspect.signature(hook).parameters)[1:]
    for name, hook in vars(Task).items()
    if inspect.isfunction(hook) and not name.startswith("_")
}
"""Parameters of each hook that is called."""
_ATTRIBUTES = (*inspect.get_annotations(Task), "size")
"""Hooks that are values."""
_EXCLUDE_EACH_OTHER = {"reply": ("environment", "tools"), "agent": ("environment", "tools", "reply")}


def user_task(task: TaskConfig, folders: Sequence[str]) -> "UserTask":
    """Make and check the user's task.

    Errors: ConfigError if it cannot be made, has an invalid hook, or gives an invalid prompt.
    """
    label = f"task.name = {task.name!r}"
    maker = resolve("task.name", task.name, folders)
    check_signature(label, maker, ("task",))
    try:
        user_object = maker(task)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code: whatever it raises is reported by name
        raise UserCodeError(f"{label}: {what_happened(error, source_file(maker))}") from None
    _check_hooks(label, user_object)
    checked = UserTask(label, user_object, task.style)
    checked.check()
    return checked


def _check_hooks(label: str, user_object: object) -> None:
    """Errors: ConfigError."""
    class_label = f"{label} made an object of type {type(user_object).__name__}"
    check_spelling(class_label, user_object, Task, _METHODS, _ATTRIBUTES)
    for name, parameters in _METHODS.items():
        if is_overridden(user_object, name, Task):
            _check_method(f"{label}: {name}", getattr(user_object, name), getattr(Task, name), parameters)
        elif name in _REQUIRED:
            raise ConfigError(f"{class_label} without {name}({', '.join(parameters)}): add it")
    for name in _ATTRIBUTES:
        if is_method(user_object, name):
            raise ConfigError(f"{label}: {name} is a method: make it an attribute or a property")
    for first, excluded in _EXCLUDE_EACH_OTHER.items():
        beside = [name for name in excluded if is_overridden(user_object, name, Task)]
        if is_overridden(user_object, first, Task) and beside:
            raise ConfigError(f"{class_label} with {first} and {beside[0]}: keep one of them")


def _check_method(label: str, method: Any, default: Any, parameters: Sequence[str]) -> None:
    """Errors: ConfigError."""
    check_signature(label, method, parameters)
    if inspect.iscoroutinefunction(default) and not inspect.iscoroutinefunction(method):
        raise ConfigError(f"{label} is awaited: define it with async def")
    if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(default):
        raise ConfigError(f"{label} is not awaited: define it without async")


class UserTask(Task):
    """Task around the user's object, with defaults for missing hooks. Errors of all calls: UserCodeError."""

    def __init__(self, label: str, task: Any, style: Style):
        self.label, self.task = label, task
        self.style: Style = style
        self.own_methods = frozenset(name for name in _METHODS if is_overridden(task, name, Task))
        """Methods that the user's object has of its own."""
        self.tools = [self._schema(tool) for tool in self._value("tools")]
        self.speaks_first, self.sessions = self._value("speaks_first"), self._value("sessions")
        if isinstance(seats := self._value("seats"), str):
            raise ConfigError(f"{label}: seats = {seats!r}: give a list or tuple of names")
        self.seats = tuple(seats)

    def _value(self, name: str) -> Any:
        with self._naming_errors(name):
            return getattr(self.task, name, getattr(Task, name))

    def _schema(self, tool: object) -> Schema:
        """Errors: ConfigError."""
        if isinstance(tool, Tool):
            return schema_of(tool)
        if isinstance(tool, dict) and self.own_methods & {"environment", "agent"}:
            return tool
        raise ConfigError(
            f"{self.label}: tools holds {shown(tool)}: give titan_rl.environments.interfaces.tool.Tool objects"
        )

    def check(self) -> None:
        """Make one prompt and encode its messages."""
        prompt = self.prompt("check", 0, 0)
        if self.prompt("check", 0, 0) != prompt:
            raise ConfigError(
                f"{self.label}: prompt('check', 0, 0) gave two different prompts: draw from the seed alone"
            )
        try:
            json.dumps(asdict(replace(prompt, images=[])))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.label}: a prompt's entry must be plain values, as in JSON: {error}") from None
        self.messages(prompt)

    @contextmanager
    def _naming_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code: whatever it raises is reported by name
            raise UserCodeError(f"{self.label}: {name}: {what_happened(error, source_file(self.task))}") from None

    def _call(self, name: str, *arguments: Any) -> Any:
        """The user's own method, or the default."""
        if name not in self.own_methods:
            return getattr(super(), name)(*arguments)
        with self._naming_errors(name):
            return getattr(self.task, name)(*arguments)

    @property
    def has_agent(self) -> bool:
        return "agent" in self.own_methods

    @property
    def has_one_answer(self) -> bool:
        return not (self.tools or self.own_methods & set(REPLYING))

    @cached_property
    def size(self) -> Size | None:
        with self._naming_errors("size"):
            size = getattr(self.task, "size", None)
        if size is None:
            return None
        if not isinstance(size, Sequence) or len(size) != 2:
            raise UserCodeError(
                f"{self.label}: size is {shown(size)}: give (number of training prompts, number of held-out prompts)"
            )
        return Size(*size)

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        prompt, expected = self._call("prompt", stream, seed, index), f"{stream}/{index:07d}"
        if not isinstance(prompt, Prompt):
            raise UserCodeError(
                f"{self.label}: prompt gave a value of type {type(prompt).__name__}: give a titan_rl.data.types.Prompt"
            )
        if prompt.id != expected:
            raise UserCodeError(f"{self.label}: prompt gave the id {prompt.id!r}: it must be {expected!r}")
        return prompt

    def is_held_out(self, prompt: Prompt) -> bool:
        return bool(self._call("is_held_out", prompt))

    def messages(self, prompt: Prompt) -> str | list[Message]:
        messages = self._call("messages", prompt)
        if isinstance(messages, str):
            return messages
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise UserCodeError(
                f"{self.label}: messages gave {shown(messages)}: give text, or a list of {{role, content}}"
            )
        return messages

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        return self._call("demonstration", prompt)

    def tools_of(self, prompt: Prompt) -> Sequence[Schema]:
        return list(self._call("tools_of", prompt))

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        reply = self._call("reply", prompt, answers)
        if reply is not None and not isinstance(reply, str):
            kind = type(reply).__name__
            raise UserCodeError(f"{self.label}: reply gave a value of type {kind}: give text, or None to end")
        return reply

    def environment(self, prompt: Prompt) -> Environment:
        if self.tools and "environment" not in self.own_methods:
            return ToolEnvironment(self.task.tools, self.style)
        return self._call("environment", prompt)

    def agent(self, prompt: Prompt) -> Agent:
        return self._call("agent", prompt)

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return self._call("row", prompt)

    def difficulty(self, prompt: Prompt) -> str | None:
        level = self._call("difficulty", prompt)
        return None if level is None else str(level)

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        value = self._call("score", prompt, answers)
        if value == {} and self.own_methods & {"environment", "agent"}:
            return {}  # which rewards instead
        return as_parts(f"{self.label}: score", value)

    def check_ready(self) -> None:
        self._call("check_ready")

    def prepare_episodes(self) -> None:
        self._call("prepare_episodes")

    def prepare_scoring(self) -> None:
        self._call("prepare_scoring")

    async def close(self) -> None:
        with self._naming_errors("close"):
            await self._call("close")
