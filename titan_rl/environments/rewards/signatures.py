"""Signatures of reward functions: ours, by position, and verl's, by keyword.

    ours    (prompt, completion, row)
    verl    (data_source, solution_str, ground_truth, extra_info=None), whose dict pays by its ``score`` alone

A function of another order would be called without an error, and pay for the wrong thing: it is refused by its names.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_signature, shown
from titan_rl.data.rows.column_names import at
from titan_rl.data.rows.public_shapes import source_of
from titan_rl.data.types import Prompt

Call = Callable[[Prompt, str, dict[str, Any]], Any]
"""Call of a reward function for a prompt, the last answer and the row."""

_OURS = ("prompt", "completion", "row")
_VERL = frozenset({"solution_str", "ground_truth"})
_PROMPTS = frozenset({"prompt", "prompts", "queries", "question"})
_COMPLETIONS = frozenset({"completion", "completions", "response", "responses", "solution_str", "solution_strs"})
_EXPECTED = frozenset({"ground_truth", "ground_truths", "label", "labels", "target", "reference"})
_MISPLACED = (
    _COMPLETIONS | _EXPECTED | {"prompts", "queries", "data_source", "data_sources"},
    _PROMPTS | _EXPECTED | {"completions", "responses", "solution_strs"},
    _PROMPTS | _COMPLETIONS | _EXPECTED | {"answer", "answers"},
)
"""Names that cannot mean the first, second or third of our arguments: others of a sample, or a batch of them."""


def check_reward(label: str, function: object) -> None:
    """Check of a reward function's parameters. Errors: ConfigError unless they are ours or verl's."""
    if is_verl(function):
        _check_verl(label, function)
        return
    check_signature(label, function, _OURS)
    for name, ours, misplaced in zip(_parameters(function), _OURS, _MISPLACED, strict=False):
        if name in misplaced:
            raise ConfigError(
                f"{label} takes {name!r} where it is given the {ours}: define it as ({', '.join(_OURS)}), of one "
                f"sample, with the expected answer in row['answer']"
            )


def caller(function: Callable[..., Any]) -> Call:
    """Call of a checked reward function by its signature."""
    if is_verl(function):
        return lambda prompt, completion, row: _call_verl(function, prompt, completion, row)
    return lambda prompt, completion, row: function(prompt.entry.get("messages") or prompt.text, completion, row)


def is_verl(function: object) -> bool:
    """Whether a function has verl's parameters."""
    return _parameters(function).keys() >= _VERL


def _parameters(function: object) -> dict[str, inspect.Parameter]:
    """Parameters by name, without ``*args`` and ``**kwargs``; empty where a function in C does not tell."""
    if not callable(function):
        return {}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return {}
    return {name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def _check_verl(label: str, function: object) -> None:
    """Errors: ConfigError for a parameter that verl's arguments do not fill."""
    given = _arguments_of_verl("", "", "", {})
    for name, parameter in _parameters(function).items():
        if parameter.kind is parameter.POSITIONAL_ONLY or (name not in given and parameter.default is parameter.empty):
            raise ConfigError(f"{label} takes {name!r}: a function of verl's form is given {', '.join(given)} by name")


def _arguments_of_verl(source: str, completion: str, expected: Any, extra: Any) -> dict[str, Any]:
    return {"data_source": source, "solution_str": completion, "ground_truth": expected, "extra_info": extra}


def _call_verl(function: Callable[..., Any], prompt: Prompt, completion: str, row: dict[str, Any]) -> Any:
    expected = prompt.answer or at(row, "reward_model.ground_truth")  # which may be a list or a table
    arguments = _arguments_of_verl(source_of(row) or "", completion, expected, row.get("extra_info") or {})
    takes_all = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
    known = arguments if takes_all else {name: arguments[name] for name in _parameters(function) if name in arguments}
    value = function(**known)
    return _awaited(value) if inspect.isawaitable(value) else _score(value)


async def _awaited(value: Awaitable[Any]) -> Any:
    return _score(await value)


def _score(value: Any) -> Any:
    """Reward in a value of verl's: of a dict its ``score``, since the rest is for monitoring. Errors: ValueError."""
    if not isinstance(value, dict):
        return value
    if "score" not in value:
        raise ValueError(f"gave {shown(value)}: a dict of verl's form has its reward as 'score'")
    return value["score"]
