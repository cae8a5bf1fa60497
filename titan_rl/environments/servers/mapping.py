"""Mapping of answers to an environment's actions and of observations to text, as configured.

action       a table in which ``{answer}`` stands for the answer, such as { message = "{answer}" }; or
             ``pkg.module:name`` of a function (answer) -> dict, whose ToolError is told to the model
observation  the name of a field, ``board`` or ``game.board``; or ``pkg.module:name`` of a function (observation) -> str
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from titan_rl.config.io.printable import whole_characters
from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_signature, is_reference, resolve, shown, source_file, what_happened
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.task import UserCodeError
from titan_rl.environments.interfaces.tool import ToolError

ANSWER = "{answer}"
ToAction = Callable[[str], Any]
ToText = Callable[[Any], str]


def read_action(action: dict[str, Any] | str, folders: Sequence[str]) -> ToAction:
    """Function from an answer to an action. Errors: ConfigError; of the result ToolError, UserCodeError."""
    setting = "task.options.action"
    if isinstance(action, str):
        return user_function(setting, action, "answer", folders)
    if ANSWER not in json.dumps(action):
        raise ConfigError(f"{setting} = {action!r} leaves out what the model wrote: put '{ANSWER}' where it belongs")
    return lambda answer: _filled(action, answer)


def _filled(value: Any, answer: str) -> Any:
    if isinstance(value, dict):
        return {name: _filled(part, answer) for name, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, answer) for part in value]
    return value.replace(ANSWER, answer) if isinstance(value, str) else value


def user_function(setting: str, reference: str, parameter: str, folders: Sequence[str]) -> Callable[[Any], Any]:
    """User's function of one argument, with its name in every error.

    Errors: ConfigError; of the result ToolError, UserCodeError.
    """
    if not is_reference(reference):
        raise ConfigError(f"{setting} = {reference!r}: give a function of yours as 'module:name'")
    function = resolve(setting, reference, folders)
    check_signature(f"{setting} = {reference!r}", function, (parameter,))

    def wrapped(argument: Any) -> Any:
        try:
            return function(argument)
        except (ConfigError, ToolError):
            raise
        except (Exception, SystemExit) as error:  # user code: whatever it raises is reported by name
            raise UserCodeError(f"{reference}: {what_happened(error, source_file(function))}") from None

    return wrapped


def read_observation(reference: str, folders: Sequence[str]) -> ToText:
    """Function from an observation to text. Errors: ConfigError; of the result EnvironmentFailed, UserCodeError."""
    if not is_reference(reference):
        return lambda observation: as_text(_field(observation, reference))
    function = user_function("task.options.observation", reference, "observation", folders)

    def text(observation: Any) -> str:
        result = function(observation)
        if not isinstance(result, str):
            raise UserCodeError(f"{reference} gave {shown(result)}: give text")
        return as_text(result)

    return text


def _field(observation: Any, path: str) -> Any:
    """Errors: EnvironmentFailed."""
    for name in path.split("."):
        if not isinstance(observation, dict) or name not in observation:
            has = ", ".join(map(repr, observation)) if isinstance(observation, dict) else "no fields"
            raise EnvironmentFailed(f"task.options.observation = {path!r}: an observation has {has or 'no fields'}")
        observation = observation[name]
    return observation


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON; a lone surrogate becomes a question mark."""
    return whole_characters(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
