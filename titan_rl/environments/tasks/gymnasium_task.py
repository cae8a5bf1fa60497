"""``[task] name = "gymnasium"``: an environment of ``gymnasium.make``, played in text, in the verifier process.

    action space   what an answer must be
    Text           the text itself, of the space's characters and length
    Discrete       the whole number, or its name where task.options.actions gives names
    any other      what a function of yours makes of it: task.options.action = "pkg.module:name"

    observation    what the model is shown
    text           the text itself
    any other      by task.options.observation: "render" for what render_mode = "ansi" gives where the environment has
                   that, the name of a dict's field, or a function of yours

Each episode has a thread of its own, since such an environment blocks. One that does not come back in time is an
``infra_error``, and holds nobody up but itself, unless it holds Python's lock.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.plugins import what_happened
from titan_rl.config.sections.kinds import Count
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.blocking_thread import BlockingThread
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import run_in_thread
from titan_rl.environments.interfaces.tool import ToolError
from titan_rl.environments.prompts.seeded_task import SteppedEnvironment, SteppedOptions, SteppedTask, StepResult, needs
from titan_rl.environments.servers.mapping import ToText, as_text, read_observation, user_function

_RENDER = "render"


@dataclass(kw_only=True)
class GymnasiumOptions(SteppedOptions):
    """``[task.options]`` of an environment of gymnasium's."""

    id: str
    """As ``gymnasium.make`` takes it: ``FrozenLake-v1``, or ``module:Name-v0`` of a module that registers it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it is made with besides, e.g. ``{ is_slippery = false }``."""
    actions: list[str] = field(default_factory=list)
    """Names of a Discrete space's actions, in order; empty: numbers."""
    action: str = ""
    """``pkg.module:name`` of a function (answer) -> action; empty: by the action space."""
    observation: str = ""
    """``render``, a field's name, or ``pkg.module:name`` of a function (observation) -> str; empty: it is text."""
    sessions: Count = 64
    """Episodes at once in a verifier process, each with a thread; the others wait for their turn."""


class GymnasiumTask(SteppedTask):
    """Task of a gymnasium environment. Errors: ConfigError."""

    options: GymnasiumOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        needs(task, ["id"], "the environment's name, as gymnasium.make takes it")
        needs(task, ["prompt"], "what the model is told before the environment's first words")
        options = build_section(GymnasiumOptions, task.options, "task.options")
        super().__init__(task, options)
        if options.action and options.actions:
            raise ConfigError("task.options.action and actions exclude each other: keep one of them")
        self._gymnasium = _imported()
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        self._action = (
            user_function("task.options.action", options.action, "answer", folders) if options.action else None
        )
        self._text = _text_of(options.observation, folders)

    def make(self) -> Any:
        """Make the environment. Errors: whatever it raises."""
        wants_render = self.options.observation == _RENDER and "render_mode" not in self.options.settings
        settings = self.options.settings | ({"render_mode": "ansi"} if wants_render else {})
        return self._gymnasium.make(self.options.id, **settings)

    def environment(self, prompt: Prompt) -> "GymnasiumEnvironment":
        return GymnasiumEnvironment(self, prompt.entry["seed"])

    def check_actions(self, space: Any) -> None:
        """Check the action space. Errors: EnvironmentFailed if text cannot be mapped to its actions."""
        spaces, names = self._gymnasium.spaces, self.options.actions
        if self._action is not None:
            return
        if names and not (isinstance(space, spaces.Discrete) and space.n == len(names)):
            raise EnvironmentFailed(f"task.options.actions has {len(names)} names, and the action space is {space}")
        if not isinstance(space, spaces.Text | spaces.Discrete):
            raise EnvironmentFailed(f"its action space is {space}: set task.options.action to a function of yours")

    def action(self, space: Any, answer: str) -> Any:
        """Action of an answer, in a checked space. Errors: ToolError for an answer that is no action."""
        if self._action is not None:
            return self._action(answer)
        spaces, word = self._gymnasium.spaces, answer.strip()
        if isinstance(space, spaces.Text):
            return _checked(space, word, f"at most {space.max_length} of its characters")
        if names := self.options.actions:
            if word not in names:
                raise ToolError(f"give one of {', '.join(names)}")
            return int(space.start) + names.index(word)
        first, last = int(space.start), int(space.start + space.n) - 1
        number = int(word) if word.removeprefix("-").isdecimal() and len(word) < 20 else None
        return _checked(space, number, f"one whole number from {first} to {last}")

    def text(self, environment: Any, observation: Any) -> str:
        """Text of an observation. Errors: EnvironmentFailed."""
        if self.options.observation == _RENDER:
            observation = environment.render()
        if self._text is not None:
            return self._text(observation)
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise EnvironmentFailed(
                f"it shows an observation of type {kind} and no text: set task.options.observation to 'render', to a "
                f"field of it or to a function"
            )
        return as_text(observation)

    def check_ready(self) -> None:
        """Make and reset an environment. Errors: ConfigError if that fails, or gives no text."""
        try:
            run_in_thread(self._try())
        except EnvironmentFailed as error:
            raise ConfigError(f"task.options.id = {self.options.id!r}: {error}") from None

    async def _try(self) -> None:
        environment = GymnasiumEnvironment(self, self.prompt("check", 0, 0).entry["seed"])
        try:
            await environment.reset()
        finally:
            await environment.close()


def _imported() -> ModuleType:
    try:
        import gymnasium
    except ModuleNotFoundError:
        raise ConfigError("task.name = 'gymnasium' needs a package that is not there: pip install gymnasium") from None
    return gymnasium


def _text_of(observation: str, folders: Sequence[str]) -> ToText | None:
    if observation in ("", _RENDER):
        return None
    return read_observation(observation, folders)


def _checked(space: Any, action: Any, expected: str) -> Any:
    """Errors: ToolError."""
    if action is None or not space.contains(action):
        raise ToolError(f"give {expected}")
    return action


class GymnasiumEnvironment(SteppedEnvironment):
    """Environment in a thread of its own."""

    def __init__(self, task: GymnasiumTask, seed: int):
        super().__init__(task.options.max_turns, task.style)
        self.task, self.seed = task, seed
        self._thread = BlockingThread(task.options.id)
        self._environment: Any = None

    async def _begin(self) -> StepResult:
        def begin() -> StepResult:
            self._environment = self.task.make()
            self.task.check_actions(self._environment.action_space)
            observation, _ = self._environment.reset(seed=self.seed)
            return StepResult(self.task.text(self._environment, observation))

        return await self._call("its reset", begin)

    async def _act(self, answer: str) -> StepResult:
        action = self.task.action(self._environment.action_space, answer)

        def act() -> StepResult:
            observation, reward, terminated, truncated, _ = self._environment.step(action)
            is_over = bool(terminated or truncated)
            return StepResult("" if is_over else self.task.text(self._environment, observation), float(reward), is_over)

        return await self._call("its step", act)

    async def _call(self, label: str, function: Any) -> StepResult:
        try:
            return await self._thread.call(label, function, self.task.options.timeout)
        except (EnvironmentFailed, ConfigError, ToolError):
            raise
        except (Exception, SystemExit) as error:  # user code: whatever it raises is reported by name
            raise EnvironmentFailed(f"{self.task.options.id}: {label}: {what_happened(error)}") from error

    async def close(self) -> None:
        await self._thread.end(self._close_environment, self.task.options.timeout)

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._environment.close()
