"""A run that this process drives, step by step or in the background, while other cells are answered.

What is asked of the run is done in turn, one thing at a time: a step, an evaluation, a checkpoint. Whoever stops
waiting (an interrupted cell) stops waiting and nothing else: the step at hand goes on, and the next call waits for it.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import pandas as pd

from titan_rl.config.command_line import leave_monarch_at_exit
from titan_rl.config.io.overrides import overriding
from titan_rl.config.load import ConfigError, nearest_setting
from titan_rl.config.plugins import forget, reference_to
from titan_rl.config.sections.kinds import LEAST_TEMPERATURE, MOST_TEMPERATURE
from titan_rl.controller.interactive.change_settings import change
from titan_rl.controller.interactive.custom_step import CustomStep, OrderError
from titan_rl.controller.interactive.run_view import RunView, actor_table
from titan_rl.controller.interactive.trainer import TrainerHandle
from titan_rl.controller.loop.interface import HeldOut
from titan_rl.controller.recovery.checkpointing import SaveError
from titan_rl.controller.session import Session, one_line
from titan_rl.data.rows.row_messages import messages
from titan_rl.data.text.messages import Message
from titan_rl.data.text.tokenizer import read_answer, set_text, settings_of
from titan_rl.data.text.turns import encode_messages
from titan_rl.data.types import Batch, Group, Request
from titan_rl.environments.rollout.decoding import decoding_of
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.records.statistics import Proportion
from titan_rl.trainer.roles.names import LEARNED

T = TypeVar("T")
_TICK_SECONDS = 0.1
"""A kernel's interrupt arrives when the event loop next wakes."""
Messages = list[Message]


class RunEnded(RuntimeError):
    """The run has ended, or is about to; says why."""


class LiveSession(RunView):
    """Await it to start it; as an async context manager it is closed at the end, whatever that is."""

    def __init__(self, session: Session):
        super().__init__(session.run_dir)
        self.session = session
        self.trainer = TrainerHandle(lambda: session.meshes, self._in_turn, lambda: self._at_hand)
        self._turn = asyncio.Lock()
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._background: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._own: CustomStep | None = None
        """The step at hand of a loop of one's own."""
        self._why_ended = ""

    def __repr__(self) -> str:
        progress = self.session.progress
        position = f"step {progress.step} of {progress.steps_asked}"
        return f"<run {self.root}: {position}, {'in the background, ' if self.is_running else ''}{self._state}>"

    @property
    def _state(self) -> str:
        """What goes on, in words."""
        if self._why_ended:
            return f"ended: {self._why_ended}"
        if self._ticking is None:
            return "not started"
        if self._turn.locked() or not self.session.has_started:
            return self.phase.partition(" ")[2] or "starting"
        if self._own is not None:
            return "a step of your own at hand"
        return "goes on" if self.is_running else "idle"

    # from start to end

    def __await__(self) -> Generator[Any, None, "LiveSession"]:
        return self._start().__await__()

    async def __aenter__(self) -> "LiveSession":
        return self if self._ticking is not None else await self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> "LiveSession":
        self._ticking = asyncio.create_task(_tick())
        try:
            await self.session
        except BaseException as error:
            self._end(one_line(error))
            raise
        leave_monarch_at_exit()
        return self

    def _end(self, why: str) -> None:
        self._why_ended = self._why_ended or why
        if self._ticking is not None:
            self._ticking.cancel()

    async def close(self) -> dict[str, Any]:
        """Save what is new and end all processes; what summary.json holds."""
        if self._why_ended:
            return self.summary
        self._may_go.clear()
        async with self._turn:  # the step at hand ends first
            self._end("it was closed")
        if self._background is not None:
            self._background.cancel()
        return await self.session.close()

    # the loop

    async def step(self, count: int = 1) -> pd.DataFrame:
        """Run ``count`` steps; their metrics. Errors: RunEnded; what ends the run, which is then closed."""
        if self.is_running:
            raise RunEnded("the run goes on in the background: await session.pause() before single steps")
        self._check_no_own()
        steps = [await self._in_turn(self._step) for _ in range(count)]
        await self._in_turn(self.session.reported)
        return self._metrics_after(min(steps, default=self.session.progress.step + 1) - 1)

    async def _step(self) -> int:
        await self.session.step()
        return self.session.progress.step

    @property
    def is_running(self) -> bool:
        """Whether steps run in the background."""
        return self._background is not None and not self._background.done() and self._may_go.is_set()

    def run(self) -> asyncio.Task[None]:
        """Run the remaining steps, the evaluation, a checkpoint and the export in the background. Await the task to
        wait for the end."""
        self._check_open()
        self._may_go.set()
        if self._background is None:  # one that failed has ended the session
            self._background = asyncio.create_task(self._run())
            self._background.add_done_callback(retrieve_exception)
        return self._background

    async def _run(self) -> None:
        progress = self.session.progress
        while progress.step < progress.steps_asked:
            await self._may_go.wait()
            await self._in_turn(self._step_unless_paused)
        await self._in_turn(self.session.run)  # no step is left: what comes after them

    async def _step_unless_paused(self) -> None:
        if self._may_go.is_set():  # or else a pause came while the turn was waited for
            await self.session.step()

    async def pause(self) -> None:
        """Pause after the current step, and wait for it. ``resume`` goes on."""
        self._check_open()
        self._may_go.clear()
        async with self._turn:
            return

    def resume(self) -> asyncio.Task[None]:
        return self.run()

    async def evaluate(self) -> Proportion | HeldOut:
        """Held-out accuracy as of now, between two steps."""
        return await self._in_turn(self.session.evaluate)

    async def save(self) -> str:
        """Write a checkpoint of the step at hand; where it is."""
        await self._in_turn(self._save)
        return str(self.session.run_dir.checkpoints)

    async def set(self, overrides: Mapping[str, Any] | str, value: Any = None) -> None:
        """Change a setting from the next step on, ``set("optimizer.lr", 1e-4)``, or some by their names: between two
        steps, where a checkpoint is written (change_settings.py). It is on record, and holds for a resumed run.

        Errors, with nothing changed: ConfigError for what cannot change or does not go together; SaveError if there can
        be no checkpoint."""
        self._check_no_own()
        tables = overriding({overrides: value} if isinstance(overrides, str) else overrides, hint=nearest_setting)
        await self._in_turn(lambda: change(self.session, tables))

    async def swap_reward(self, reward: str | Callable[..., Any]) -> None:
        """Another function scores from the next step on: ``"module:name"``, or a function of a module. One of a cell
        has no place where a resumed run would find it: ``%%writefile`` it.

        Errors: ConfigError, with nothing changed."""
        name = reward if isinstance(reward, str) else reference_to("task.reward", reward)
        forget(name, self.session.config.run.plugin_path)  # its file may be a newer one
        await self.set("task.reward", name)

    async def _save(self) -> None:
        await self.session.save()
        await self.session.controller.checkpointing.finish()

    # a loop of one's own

    async def sample(self) -> list[Group]:
        """The groups of the next step. What they are trained on is theirs: give each rollout an ``advantage``, or leave
        that to the algorithm; ``trainer.forward_backward``, ``trainer.optim_step`` and ``publish`` come next.

        Errors: ConfigError where a loop cannot be one's own."""
        if self.is_running:
            raise RunEnded("the run goes on in the background: await session.pause() before steps of your own")
        self._check_open()
        if self._own is None:
            self._own = CustomStep(self.session)
        return await self._in_turn(self._own.sample)

    def batch(self, groups: list[Group]) -> Batch:
        """Batch of the groups of ``sample`` with their advantages."""
        return self._at_hand.batch(groups)

    async def publish(self) -> pd.DataFrame:
        """Publish the weights and end the step; its metrics."""
        await self._in_turn(self._at_hand.publish)
        self._own = None
        await self._in_turn(self.session.reported)
        return self._metrics_after(self.session.progress.step - 1)

    @property
    def _at_hand(self) -> CustomStep:
        if self._own is None:
            raise OrderError("there is no step of your own at hand: await session.sample() comes first")
        return self._own

    def _check_no_own(self) -> None:
        if self._own is not None:
            raise OrderError("a step of your own is at hand: end it with optim_step and publish first")

    # in turn

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Goes on to its end whether or not somebody still waits for it."""
        self._check_open()
        self.session.display.follow()
        doing = asyncio.create_task(self._alone(work))
        doing.add_done_callback(retrieve_exception)
        return await asyncio.shield(doing)

    async def _alone(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            self._check_open()
            try:
                done = await self.session.stop_request.unless_failed(work())
                if not self.is_running:
                    self.session.rest()
                return done
            except (OrderError, ConfigError, SaveError):  # nothing was done
                raise
            except BaseException as error:  # the session cannot go on after any
                self._end(one_line(error))
                await self.session.close(error)
                raise

    def _check_open(self) -> None:
        """Errors: RunEnded."""
        if self._why_ended:
            raise RunEnded(f"the run has ended ({self._why_ended}): launch(..., resume=True) goes on with it")

    # beside the loop

    async def generate(
        self,
        prompts: list[str | Messages],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """Answers of the generators' policy to texts or conversations.

        Errors: ValueError for one that leaves no room for an answer, or for what vLLM does not sample at; TypeError for
        a text or a conversation in place of a list of them."""
        self._check_open()
        prompts = _listed(prompts)
        config, tokenizer = self.session.config, await asyncio.to_thread(lambda: self.tokenizer)
        set_text(tokenizer, settings_of(config))
        rollout = config.rollout
        seeds = random.Random(seed)
        room = rollout.max_new_tokens if max_new_tokens is None else max_new_tokens
        heat = rollout.temperature if temperature is None else temperature
        if heat and not LEAST_TEMPERATURE <= heat <= MOST_TEMPERATURE or room < 1:
            raise ValueError(
                f"temperature = {heat}, max_new_tokens = {room}: give a temperature from {LEAST_TEMPERATURE} to "
                f"{MOST_TEMPERATURE}, or 0 for the likeliest tokens, and 1 new token or more"
            )
        most = self.session.meshes.max_tokens
        asked = [p if isinstance(p, str) else messages(f"prompt {n}", "messages", p) for n, p in enumerate(prompts)]
        tokens = [encode_messages(tokenizer, each, is_plain=isinstance(each, str)) for each in asked]
        if too_long := [number for number, each in enumerate(tokens) if len(each) + room > most]:
            raise ValueError(f"prompt {too_long[0]} and {room} new tokens are more than {most} tokens: shorten it")
        requests = [Request(each, [seeds.getrandbits(32)], room, heat, decoding_of(rollout)) for each in tokens]
        answering = asyncio.gather(*map(self.session.meshes.dispatcher.complete, requests))
        completions = await self.session.stop_request.unless_failed(answering)
        return [read_answer(tokenizer, a.tokens, ended=a.stop_reason == "stop") for [a] in completions]

    @property
    def actors(self) -> pd.DataFrame:
        """The run's processes as they are now: id, state, memory in MiB, the host that they were spawned on, the policy
        version that they have, and the seconds that they worked in the last step."""
        if self._why_ended or not self.session.has_meshes:
            return actor_table({}).assign(host=[], version=[], seconds=[])
        meshes = self.session.meshes
        table, step, live = actor_table(meshes.pids), self.session.progress.step, meshes.weights.link.version
        of_kind = {"generator": live} | dict.fromkeys(("trainer", *LEARNED), step)
        versions = [of_kind.get(name.split()[0]) for name in table.index]
        hosts, seconds = meshes.hosts, meshes.stragglers.of_last_step
        return table.assign(
            host=[hosts.get(name, name) for name in table.index],
            version=pd.array(versions, dtype="Int64"),
            seconds=[round(seconds.get(name, math.nan), 3) for name in table.index],
        )


def _listed(prompts: Any) -> list[Any]:
    """Errors: TypeError for what is a prompt itself, whose letters or messages would be asked one by one."""
    if isinstance(prompts, str | bytes):
        raise TypeError(f"prompts = {prompts!r:.80} is one text: give a list, [{prompts!r:.80}]")
    each = [prompts] if isinstance(prompts, Mapping) else list(prompts)
    if any(isinstance(one, Mapping) for one in each):
        raise TypeError("prompts is one conversation: give a list of them, [[{'role': 'user', 'content': ...}]]")
    return each


async def _tick() -> None:
    while True:
        await asyncio.sleep(_TICK_SECONDS)
