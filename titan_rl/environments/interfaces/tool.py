"""Tool that a model may call: its schema, its function, and who is at fault where a call fails."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry

from titan_rl.config.load import ConfigError

_RETRIES = 2
_NOTHING_ELSE = Registry()
"""A schema that refers to another address is not looked up there."""
_ANY_ARGUMENTS = inspect.signature(lambda **arguments: "")

Schema = dict[str, Any]
"""A tool as chat templates take it: ``{"type": "function", "function": {name, description, parameters}}``."""


class ToolError(Exception):
    """Error of a tool call by the model's fault: its message is the call's result."""


@dataclass(frozen=True)
class Tool:
    """Function for the model to call.

    ``run`` takes the arguments by name and gives text, sync or async. It raises ToolError for what the model did wrong;
    whatever else it raises is the machinery's fault, and it is tried again before the episode ends for it.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object's."""
    run: Callable[..., str | Awaitable[str]]
    timeout: float = 10.0
    """Seconds for a call; the model gets a timeout as its result."""
    retries: int = _RETRIES

    def __post_init__(self) -> None:
        try:
            Draft202012Validator.check_schema(self.parameters)
        except SchemaError as error:
            raise ConfigError(f"tool {self.name}: its parameters are no JSON schema: {error.message}") from None

    @cached_property
    def schema(self) -> Schema:
        """Schema for chat templates."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def mistake(self, arguments: dict[str, Any]) -> str | None:
        """Schema violation of the arguments, as a message; None if they fit."""
        try:
            error = best_match(Draft202012Validator(self.parameters, registry=_NOTHING_ELSE).iter_errors(arguments))
        except (RecursionError, ArithmeticError) as error:  # what the model wrote is too deep or too large to check
            return f"the arguments cannot be checked ({type(error).__name__})"
        if error is not None:
            return f"{error.json_path.removeprefix('$.')}: {error.message}"
        try:
            self._signature.bind(**arguments)
        except TypeError as error:  # its schema lets through what the function has no place for
            return str(error)
        return None

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.run)
        except (TypeError, ValueError):  # of something written in C, which does not tell
            return _ANY_ARGUMENTS


def schema_of(tool: Tool | Schema) -> Schema:
    """Schema of a tool, or the schema itself."""
    return tool.schema if isinstance(tool, Tool) else tool
