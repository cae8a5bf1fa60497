"""``[task] name = "openenv"``: an environment of OpenEnv's behind its server, ``[task.options] url = "ws://HOST:PORT/ws"``.

A prompt is a seed for the reset. An invalid action is answered by its error; a failing environment is an
``infra_error``, and so is a server lost within an episode, whose state is unknown.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.http_body import AS_IT_IS, read_body_now
from titan_rl.environments.interfaces.server_address import SETTING, Address, read_address, run_in_thread
from titan_rl.environments.interfaces.task import UserCodeError
from titan_rl.environments.interfaces.tool import ToolError
from titan_rl.environments.prompts.seeded_task import SteppedEnvironment, SteppedOptions, SteppedTask, StepResult, needs
from titan_rl.environments.servers.mapping import ANSWER, ToAction, ToText, read_action, read_observation
from titan_rl.environments.servers.openenv_session import Outcome, Refused, Session

_EXAMPLE = "ws://127.0.0.1:8000/ws"
_DOES_NOT_FIT = "VALIDATION_ERROR"
_CHECK_SECONDS = 3.0
"""In which a server must answer before a run starts."""


@dataclass(kw_only=True)
class OpenEnvOptions(SteppedOptions):
    """``[task.options]`` of an OpenEnv server."""

    url: str
    """Where its WebSocket is: ``ws://HOST:PORT/ws``, or ``wss``."""
    token_env: str = ""
    """Name of the environment variable with a token that the server asks for, sent as ``Authorization: Bearer``."""
    action: dict[str, Any] | str
    """Of an answer: a table in which ``{answer}`` stands for it, or ``pkg.module:name``; servers/mapping.py."""
    observation: str
    """Text for the model, of an observation: a field's name, or ``pkg.module:name``."""
    reset: dict[str, Any] = field(default_factory=dict)
    """Arguments of a reset besides ``seed``."""


class OpenEnvTask(SteppedTask):
    """Task of an OpenEnv server. Errors: ConfigError."""

    options: OpenEnvOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        needs(task, ["url"], f"where its server is, as in {_EXAMPLE!r}")
        needs(task, ["action"], f"how an answer becomes an action, as in {{ message = '{ANSWER}' }}")
        needs(task, ["observation"], "which field of an observation the model is shown")
        needs(task, ["prompt"], "what the model is told before the environment's first words")
        super().__init__(task, build_section(OpenEnvOptions, task.options, "task.options"))
        self.address = _address(task.name, self.options)
        self._action = read_action(self.options.action, folders)
        self._text = read_observation(self.options.observation, folders)

    def environment(self, prompt: Prompt) -> "OpenEnvEnvironment":
        return self._environment(prompt, self.options.timeout)

    def _environment(self, prompt: Prompt, patience: float) -> "OpenEnvEnvironment":
        session = Session(self.address, self.options.timeout, patience)
        reset = self.options.reset | {"seed": prompt.entry["seed"]}
        limits = self.options.max_turns, self.style
        return OpenEnvEnvironment(session, reset, self._action, self._text, *limits)

    def check_ready(self) -> None:
        """Begin an episode, and compare the action with the server's schema. Errors: ConfigError."""
        try:
            run_in_thread(self._try())
        except EnvironmentFailed as error:
            raise ConfigError(f"{error}; start the server, or correct {SETTING} or what the line names") from None
        if isinstance(self.options.action, dict):
            _check_action(self.address, self.options.action)

    async def _try(self) -> None:
        environment = self._environment(self.prompt("check", 0, 0), _CHECK_SECONDS)
        try:
            await environment.reset()
        finally:
            await environment.close()


def _address(name: str, options: OpenEnvOptions) -> Address:
    address = read_address(name, options.url, options.token_env, ("ws", "wss"), _EXAMPLE)
    if address.parts.path in ("", "/"):
        raise ConfigError(f"{SETTING} = {options.url!r} has no path, and OpenEnv speaks at /ws: give {_EXAMPLE!r}")
    return address


def _check_action(address: Address, action: dict[str, Any]) -> None:
    """Compare the action with the server's schema, if it has one. Errors: ConfigError."""
    schema = _schema(address)
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    setting = f"task.options.action = {json.dumps(action)}"
    if missing := [name for name in required if name not in action]:
        raise ConfigError(f"{setting} lacks {', '.join(map(repr, missing))}, which this environment wants: add it")
    if schema.get("additionalProperties") is False and (unknown := [name for name in action if name not in properties]):
        raise ConfigError(f"{setting}: this environment takes no {unknown[0]!r}: {nearest(unknown[0], properties)}")


def _schema(address: Address) -> dict[str, Any]:
    """Schema of an action; empty without an answer of the server."""
    scheme = "https" if address.parts.scheme == "wss" else "http"
    url = address.parts._replace(scheme=scheme, path=f"{address.parts.path.rpartition('/')[0]}/schema").geturl()
    try:
        settings: dict[str, Any] = {"trust_env": not address.is_loopback, "timeout": _CHECK_SECONDS}
        with httpx.stream("GET", url, headers=address.headers() | AS_IT_IS, **settings) as response:
            schema = json.loads(read_body_now(response, url))["action"]
    except (EnvironmentFailed, httpx.HTTPError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    return schema if isinstance(schema, dict) else {}


class OpenEnvEnvironment(SteppedEnvironment):
    """Environment of one server session."""

    def __init__(
        self, session: Session, reset: dict[str, Any], action: ToAction, text: ToText, max_turns: int, style: Any
    ):
        super().__init__(max_turns, style)
        self.session, self._reset, self._action, self._text = session, reset, action, text

    async def _begin(self) -> StepResult:
        outcome = await self.session.begin(self._reset)
        if outcome.is_done:
            raise EnvironmentFailed(f"{self.session.address.url}: its episode was over at the reset")
        return self._step_result(outcome)

    async def _act(self, answer: str) -> StepResult:
        try:
            return self._step_result(await self.session.step(_plain(self._action(answer))))
        except Refused as error:
            if error.code == _DOES_NOT_FIT:
                raise ToolError(str(error)) from None
            raise EnvironmentFailed(f"{self.session.address.url} failed at a step: {error.code}: {error}") from error

    def _step_result(self, outcome: Outcome) -> StepResult:
        """What is over is not shown."""
        text = "" if outcome.is_done else self._text(outcome.observation)
        return StepResult(text, outcome.reward, outcome.is_done)

    async def close(self) -> None:
        await self.session.close()


def _plain(action: Any) -> Any:
    """Errors: UserCodeError for what the user's function gave that is no action."""
    try:
        if isinstance(action, dict):
            json.dumps(action)
            return action
        why = f"it gave type {type(action).__name__}"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise UserCodeError(f"task.options.action must give a dict of plain values, as in JSON: {why}")
