"""Prompts go to a verifier and a replica, and again to others if one of them dies or fails."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from titan_rl.config.schema import Config
from titan_rl.data.types import Completion, Group, Prompt, Request, Rollout, Sampling
from titan_rl.mesh.endpoints import GeneratorEndpoints, VerifierEndpoints
from titan_rl.mesh.generators import Generators
from titan_rl.mesh.replica import Replica
from titan_rl.mesh.router import NoneLeft, Router
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.background import retrieve_exception
from titan_rl.mesh.supervision.calls import call, done_or_dead
from titan_rl.mesh.suspects import Suspects
from titan_rl.mesh.verifiers import Verifiers

POISON = "poison"
"""Why a prompt is refused that engines died of, or could not take."""
_END_SECONDS = 5.0
"""How long the death of a process that was killed is waited for."""


async def _always() -> None:
    """Of engines that never sleep."""


class Dispatcher:
    """Has groups sampled and scored. Errors of all calls: NoneLeft, DeadlineError."""

    def __init__(
        self,
        config: Config,
        generators: Generators,
        verifiers: Verifiers,
        *,
        reissued: Callable[[str], None],
        awake: Callable[[], Awaitable[None]] = _always,
    ):
        """``reissued(prompt_id)`` is called for each prompt that is sampled again since somebody died or failed.
        ``awake``: has generators wake up if they sleep."""
        self.config, self.generators, self.verifiers, self._reissued = config, generators, verifiers, reissued
        self._awake = awake
        limit = config.rollout.max_retries
        self._at_engines, self._at_verifiers, self._at_refusals = (Suspects(limit) for _ in range(3))
        self._suspects = self._at_engines, self._at_verifiers, self._at_refusals
        self._scoring_seconds: dict[str, list[float]] = {}

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Sample and score a prompt, on the verifier and the replica that have the fewest groups.

        A prompt that was there at ``rollout.max_retries`` deaths is refused as poison.
        """
        try:
            while not self._is_poison(prompt.id):
                if (group := await self._try(prompt, sampling)) is not None:
                    return group
            return Group(prompt.id, [], refused=POISON)
        finally:
            for suspects in self._suspects:
                suspects.forget(prompt.id)

    async def _try(self, prompt: Prompt, sampling: Sampling) -> Group | None:
        """None if somebody died or failed meanwhile. One that was there at a death is sampled alone."""
        patience, name = self.config.mesh.start_timeout, prompt.id
        await self._awake()
        async with (
            self.generators.router.choose(patience, alone=self._at_engines.is_suspect(name)) as number,
            self.verifiers.router.choose(patience, alone=self._at_verifiers.is_suspect(name)) as verifier,
        ):
            replica = self.generators.replicas.get(number)
            if replica is None or verifier not in self.verifiers.procs:  # it died while another was waited for
                return None
            with replica:
                group = await self._run_group_on(verifier, replica, prompt, sampling)
        if group is None:
            if not self._is_poison(name):
                self._reissued(name)
            return None
        group.verifier = f"verifier {verifier}"
        self._scoring_seconds.setdefault(group.verifier, []).append(group.seconds_score)
        self.generators.router.worked()
        self.verifiers.router.worked()
        return group

    async def _run_group_on(self, number: int, replica: Replica, prompt: Prompt, sampling: Sampling) -> Group | None:
        """None if somebody died or failed meanwhile."""
        seconds, what = self.config.verifier.episode_timeout, f"sampling prompt {prompt.id}"
        verifier: ActorProcess = self.verifiers.procs[number]
        work = asyncio.ensure_future(
            call(verifier, VerifierEndpoints.run_group(prompt, sampling, replica.reference), seconds=seconds, what=what)
        )
        work.add_done_callback(retrieve_exception)
        await done_or_dead(work, replica.ranks)
        if not work.done():
            work.cancel()
            self._engine_died(replica, prompt.id)
            return None
        try:
            group = work.result()
        except ActorDied:
            self._verifier_died(verifier, prompt.id)
            return None
        except Exception as error:  # an episode never raises, so the verifier itself is at fault
            if not verifier.is_dead:
                verifier.fail(error)
                await asyncio.wait({verifier.died}, timeout=_END_SECONDS)
            self._verifier_died(verifier, prompt.id)
            return None
        if not group.replica_failure:
            return group
        self._engine_failed(replica, group)
        return None

    async def complete(self, request: Request) -> list[Completion]:
        """Of tokens that are no prompt of the run. Another replica is asked if one dies; what one raises is raised."""
        for _ in range(1 + self.config.rollout.max_retries):
            await self._awake()
            async with self.generators.router.choose(self.config.mesh.start_timeout) as number:
                if (replica := self.generators.replicas.get(number)) is None:
                    continue
                with replica, suppress(ActorDied):
                    seconds, asked = self.config.mesh.step_timeout, GeneratorEndpoints.generate(request)
                    return await call(replica.ranks[0], asked, seconds=seconds, what="answering")
        raise NoneLeft("the generators that were asked died, one after the other")

    # who is to blame

    def _is_poison(self, prompt_id: str) -> bool:
        return any(suspects.is_poison(prompt_id) for suspects in self._suspects)

    def _engine_failed(self, replica: Replica, group: Group) -> None:
        """It did not answer, so it is ended; but where it only refuses a request, it lives on."""
        why = group.replica_failure.strip().splitlines()[-1]
        if group.is_request_refused:
            self._at_refusals.was_there(group.prompt_id, alone=True)
            self._tell_poison(self._at_refusals, group.prompt_id, why)
            return
        if self.generators.replicas.get(replica.number) is replica:
            self.generators.fail(replica.number, f"failed: {why}")
        self._engine_died(replica, group.prompt_id)

    def _engine_died(self, replica: Replica, prompt_id: str) -> None:
        if replica.number in self.generators.router.members:  # or else it was taken away
            dead = next((rank for rank in replica.ranks if rank.is_dead), replica.ranks[0])
            self._was_there(self._at_engines, self.generators.router, prompt_id, dead)

    def _verifier_died(self, verifier: ActorProcess, prompt_id: str) -> None:
        self._was_there(self._at_verifiers, self.verifiers.router, prompt_id, verifier)

    def _was_there(self, suspects: Suspects, router: Router, prompt_id: str, dead: ActorProcess) -> None:
        if dead.why.startswith("lost "):  # its host, of which no prompt is the cause
            return
        suspects.was_there(prompt_id, alone=suspects.is_suspect(prompt_id))
        if suspects.is_poison(prompt_id):
            router.blame(f"prompt {prompt_id} is poison: {dead.name} {dead.why}")
            self._tell_poison(suspects, prompt_id, f"{dead.name} {dead.why}")

    def _tell_poison(self, suspects: Suspects, prompt_id: str, why: str) -> None:
        if suspects.is_poison(prompt_id):
            count = suspects.num_deaths(prompt_id)
            self.generators.say(f"prompt {prompt_id} is discarded as poison at its fault number {count}: {why}")
            self.generators.processes.tell(POISON, prompt=prompt_id, faults=count, why=why)

    def take_scoring_seconds(self) -> dict[str, list[float]]:
        """Of each group, by verifier, since this was last asked."""
        taken, self._scoring_seconds = self._scoring_seconds, {}
        return taken

    async def demonstrate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Worked examples, as rollouts."""
        seconds, asked = self.config.mesh.step_timeout, VerifierEndpoints.demonstrate(prompts)
        while True:
            async with self.verifiers.router.choose(self.config.mesh.start_timeout) as number:
                with suppress(ActorDied):
                    verifier = self.verifiers.procs[number]
                    return await call(verifier, asked, seconds=seconds, what="preparing the SFT")
