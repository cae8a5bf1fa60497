"""Prompts go to a verifier and an engine, and on to others if one of them dies or fails.

a verifier is chosen ─▶ an engine is chosen ─▶ the group is sampled, scored, done
        ▲                        ▲                  │
        │                        └── engine dies, ──┤   the group goes on where it was (asked_generator.py)
        │                            or sleeps      │
        └───── verifier dies, engine raises ────────┘   the group begins again
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Completion, Group, Prompt, Request, Rollout, Sampling
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.control.poison_prompts import ConsecutiveFailures, PoisonPrompts
from titan_rl.mesh.control.weight_sync import WeightSync
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, VerifierEndpoints
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import NoneLeft, Router
from titan_rl.mesh.members.verifiers import Verifiers
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.deadlines import unless
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.calls import Deadline, call, done_or_dead
from titan_rl.mesh.supervision.remote_call import RemoteCall

POISON = "poison"
"""Why a prompt is refused that engines died of, or could not take."""
_SILENT_SHARE = 0.2
_END_SECONDS = 5.0
"""How long the death of a process that was killed is waited for."""


class Dispatcher:
    """Dispatcher of prompts to verifiers and replicas.

    Errors of all calls: NoneLeft, DeadlineError; EveryPromptFails.
    """

    def __init__(
        self,
        config: Config,
        generators: Generators,
        verifiers: Verifiers,
        *,
        on_retry: Callable[[str], None],
        weights: WeightSync | None = None,
    ):
        """``on_retry(prompt_id)`` is called for each prompt that is sampled again since somebody died or failed.
        ``weights``: has generators wake up that sleep; None if they never do."""
        self.config, self.generators, self.verifiers, self._on_retry = config, generators, verifiers, on_retry
        self._weights = weights
        limit = config.rollout.max_retries
        self._at_engines, self._at_verifiers, self._refusals = (PoisonPrompts(limit) for _ in range(3))
        self._suspects = self._at_engines, self._at_verifiers, self._refusals
        self.faults = ConsecutiveFailures()
        """Also for what is given up elsewhere (controller/loop/rollout_queue.py)."""
        self._attempts: dict[str, float] = {}
        """When the last attempt at each prompt under way began."""
        self._last_news = 0.0
        """When a group was done, or it was said that none is."""
        self._reasons: dict[str, list[str]] = {}
        """What went wrong with each prompt under way, each reason once."""

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Sample and score a prompt, on the verifier and the replica that have the fewest groups.

        A prompt that was there at ``rollout.max_retries`` deaths is refused as poison.
        """
        self.faults.check()
        try:
            while not self._is_poison(prompt.id):
                if (group := await self._try(prompt, sampling)) is not None:
                    return group
            why = "; ".join(self._reasons[prompt.id])
            self.faults.record_failure(prompt.id, why, self._attempts[prompt.id])
            return Group(prompt.id, [], refused=POISON, replica_failure=why)
        finally:
            for suspects in self._suspects:
                suspects.forget(prompt.id)
            self._attempts.pop(prompt.id, None)
            self._reasons.pop(prompt.id, None)

    async def _try(self, prompt: Prompt, sampling: Sampling) -> Group | None:
        """None if the group is to begin again, since a verifier died or an engine failed."""
        patience, name = self.config.mesh.start_timeout, prompt.id
        async with self.verifiers.router.choose(patience, alone=self._at_verifiers.is_suspect(name)) as number:
            verifier: ActorProcess = self.verifiers.procs[number]
            group = await self._run_group_at(verifier, prompt, sampling)
        if group is None:
            if not self._is_poison(name):
                self._on_retry(name)
            return None
        group.verifier = f"verifier {number}"
        self.verifiers.note_scoring(group.verifier, group.seconds_score)
        self.generators.router.worked()
        self.verifiers.router.worked()
        self._last_news = time.monotonic()
        if any(rollout.status not in ("infra_error", "timeout") for rollout in group.rollouts):
            self.faults.record_success()
        return group

    async def _wake_generators(self) -> None:
        if self._weights is not None:
            await self._weights.wake()

    async def _run_group_at(self, verifier: ActorProcess, prompt: Prompt, sampling: Sampling) -> Group | None:
        """Group from one engine, and from another if that one dies; None as of ``_try``."""
        work, name, allowed = None, prompt.id, Deadline(self.config.verifier.episode_timeout)
        what = f"sampling prompt {name}"
        try:
            while True:
                async with AsyncExitStack() as choice:
                    moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    engine = self._engine_for(name, sampling.num_samples, allowed, moved, is_under_way=work is not None)
                    replica = await unless([work] if work else [], choice.enter_async_context(engine))
                    if work is None:
                        assert replica is not None, "there is nothing else to wait for"
                        if verifier.is_dead:  # while an engine was waited for
                            return None
                        request = VerifierEndpoints.run_group(prompt, sampling, replica.reference)
                        work = asyncio.ensure_future(call(verifier, request, seconds=allowed, what=what))
                        work.add_done_callback(retrieve_exception)
                    elif replica is not None:
                        await self._tell(verifier, VerifierEndpoints.move_group(name, replica.reference))
                    allowed.restart()
                    await done_or_dead(work, replica.ranks if replica is not None else (), moved)
                if work.done():
                    return await self._outcome(work, verifier, replica, name)
                assert replica is not None, "or the work is done"
                if not replica.is_dead:  # a helper, which sleeps (helpers.py)
                    self.generators.processes.record_event("group_moved", prompt=name, generator=replica.number)
                    continue
                self._engine_died(replica, name)
                if self._is_poison(name):
                    await self._tell(verifier, VerifierEndpoints.end_group(name))
                    return None
                self._on_retry(name)
                allowed.restart()
                await self._tell(verifier, VerifierEndpoints.move_group(name, None))
        finally:
            if work is not None:
                work.cancel()

    @asynccontextmanager
    async def _engine_for(
        self, prompt_id: str, samples: int, allowed: Deadline, moved: asyncio.Future[None], *, is_under_way: bool
    ) -> AsyncIterator[Replica]:
        """Engine with the fewest samples; a prompt that was there at a death has one for itself. ``moved``: done once
        the group is to go on at another. Errors: NoneLeft."""
        await self._wake_generators()
        patience, alone = self.config.mesh.start_timeout, self._at_engines.is_suspect(prompt_id)
        size = {"samples": samples, "is_under_way": is_under_way}
        async with self.generators.router.choose(patience, alone=alone, **size) as number:
            if (replica := self.generators.replicas.get(number)) is None:
                raise NoneLeft("no generator is left: they are being stopped")
            self._attempts[prompt_id] = time.monotonic()
            with replica.at_work(allowed, samples, moved), self._reported_if_slow(prompt_id):
                yield replica

    async def _tell(self, verifier: ActorProcess, request: RemoteCall[None]) -> None:
        """Tell a verifier, unless it dies."""
        with suppress(ActorDied):
            await call(verifier, request, seconds=self.config.mesh.step_timeout, what=request.endpoint)

    async def _outcome(
        self, work: asyncio.Future[Group], verifier: ActorProcess, replica: Replica | None, prompt_id: str
    ) -> Group | None:
        """Group of finished work. ``replica``: that it asked; None: it waited for one."""
        try:
            group = work.result()
        except ActorDied:
            self._verifier_died(verifier, prompt_id)
            return None
        except Exception as error:  # an episode never raises, so the verifier itself is at fault
            if not verifier.is_dead:
                verifier.fail(error)
                await asyncio.wait({verifier.died}, timeout=_END_SECONDS)
            self._verifier_died(verifier, prompt_id)
            return None
        if not group.replica_failure:
            return group
        if replica is not None:
            self._engine_failed(replica, group)
        return None

    async def complete(self, request: Request) -> list[Completion]:
        """Completions of a request outside the run's prompts. Another replica is tried if one dies."""
        why = ""
        for _ in range(1 + self.config.rollout.max_retries):
            await self._wake_generators()
            samples, patience = len(request.seeds), self.config.mesh.start_timeout
            async with self.generators.router.choose(patience, samples=samples) as number:
                if (replica := self.generators.replicas.get(number)) is None:
                    continue
                allowed, generation = Deadline(self.config.mesh.step_timeout), GeneratorEndpoints.generate(request)
                with replica.at_work(allowed, samples):
                    try:
                        return await call(replica.ranks[0], generation, seconds=allowed, what="answering")
                    except ActorDied as death:
                        why = f": {death}"
        raise NoneLeft(f"every generator that was tried died{why}")

    @contextmanager
    def _reported_if_slow(self, prompt_id: str) -> Iterator[None]:
        """Say so once nothing at all has come for a good part of the time that a group may take."""
        began, most = time.monotonic(), self.config.verifier.episode_timeout
        seconds = _SILENT_SHARE * most

        def report() -> None:
            if self._last_news < began:
                self._last_news = time.monotonic()
                self.generators.log(
                    f"no group has ended for {seconds:g} s, prompt {prompt_id} among them: each may take "
                    f"verifier.episode_timeout = {most:g} s"
                )

        timer = asyncio.get_running_loop().call_later(seconds, report)
        try:
            yield
        finally:
            timer.cancel()

    # who is to blame

    def _is_poison(self, prompt_id: str) -> bool:
        return any(suspects.is_poison(prompt_id) for suspects in self._suspects)

    def _engine_failed(self, replica: Replica, group: Group) -> None:
        """It did not answer, so it is ended; but where it only refuses a request, it lives on."""
        why = group.replica_failure.strip().splitlines()[-1]
        if group.is_request_refused:
            self._add_reason(group.prompt_id, why)
            self._refusals.count_death(group.prompt_id, alone=True)
            self._report_poison(self._refusals, group.prompt_id, why)
            return
        if self.generators.replicas.get(replica.number) is replica:
            self.generators.fail(replica.number, f"failed: {why}")
        self._engine_died(replica, group.prompt_id)

    def _engine_died(self, replica: Replica, prompt_id: str) -> None:
        if replica.number in self.generators.router.members:  # or else it was taken away
            dead = next((rank for rank in replica.ranks if rank.is_dead), replica.ranks[0])
            self._count_death(self._at_engines, self.generators.router, prompt_id, dead)

    def _verifier_died(self, verifier: ActorProcess, prompt_id: str) -> None:
        self._count_death(self._at_verifiers, self.verifiers.router, prompt_id, verifier)

    def _count_death(self, suspects: PoisonPrompts, router: Router, prompt_id: str, dead: ActorProcess) -> None:
        if dead.why.startswith("lost "):  # its host, of which no prompt is the cause
            return
        self._add_reason(prompt_id, f"{router.kind} {dead.why}")
        suspects.count_death(prompt_id, alone=suspects.is_suspect(prompt_id))
        if suspects.is_poison(prompt_id):
            router.blame(f"prompt {prompt_id} is poison: {dead.name} {dead.why}")
            self._report_poison(suspects, prompt_id, f"{dead.name} {dead.why}")

    def _add_reason(self, prompt_id: str, reason: str) -> None:
        reasons = self._reasons.setdefault(prompt_id, [])
        if reason not in reasons:
            reasons.append(reason)

    def _report_poison(self, suspects: PoisonPrompts, prompt_id: str, why: str) -> None:
        if suspects.is_poison(prompt_id):
            count = suspects.num_deaths(prompt_id)
            self.generators.log(f"prompt {prompt_id} is discarded as poison at its fault number {count}: {why}")
            self.generators.processes.record_event(POISON, prompt=prompt_id, faults=count, why=why)

    async def demonstrate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Demonstrations of these prompts, as rollouts."""
        seconds, request = self.config.mesh.step_timeout, VerifierEndpoints.demonstrate(prompts)
        while True:
            async with self.verifiers.router.choose(self.config.mesh.start_timeout) as number:
                with suppress(ActorDied):
                    verifier = self.verifiers.procs[number]
                    return await call(verifier, request, seconds=seconds, what="preparing the SFT")
