"""Prompts go to a verifier and a replica, and again to others if one of them dies or fails."""

import asyncio
import statistics
from collections.abc import Callable
from contextlib import suppress

from titan_rl.config.schema import Config
from titan_rl.data.types import Group, Prompt, Rollout, Sampling
from titan_rl.mesh.generators import Generators
from titan_rl.mesh.replica import Replica
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.background import retrieve_exception
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.verifiers import Verifiers

_END_SECONDS = 5.0
"""How long the death of a process that was killed is waited for."""


class Dispatcher:
    """Has groups sampled and scored. Errors of all calls: NoneLeft, DeadlineError."""

    def __init__(
        self, config: Config, generators: Generators, verifiers: Verifiers, *, reissued: Callable[[str], None]
    ):
        """``reissued(prompt_id)`` is called for each prompt that is sampled again since somebody died or failed."""
        self.config, self.generators, self.verifiers, self._reissued = config, generators, verifiers, reissued
        self._scoring_seconds: dict[str, list[float]] = {}

    async def run_group(self, prompt: Prompt, sampling: Sampling) -> Group:
        """Sample and score a prompt, on the verifier and the replica that have the fewest groups."""
        patience = self.config.mesh.start_timeout
        while True:
            async with (
                self.generators.router.choose(patience) as number,
                self.verifiers.router.choose(patience) as verifier,
            ):
                replica = self.generators.replicas.get(number)
                if replica is None or verifier not in self.verifiers.procs:  # it died while another was waited for
                    continue
                with replica:
                    group = await self._run_group_on(verifier, replica, prompt, sampling)
            if group is not None:
                self._scoring_seconds.setdefault(f"verifier {verifier}", []).append(group.seconds_score)
                self.generators.router.worked()
                self.verifiers.router.worked()
                return group
            self._reissued(prompt.id)

    async def _run_group_on(self, number: int, replica: Replica, prompt, sampling) -> Group | None:
        """None if somebody died or failed meanwhile."""
        seconds, what = self.config.verifier.episode_timeout, f"sampling prompt {prompt.id}"
        verifier: ActorProcess = self.verifiers.procs[number]
        work = asyncio.ensure_future(
            call(verifier, "run_group", prompt, sampling, replica.leader, seconds=seconds, what=what)
        )
        work.add_done_callback(retrieve_exception)
        await asyncio.wait({work, *(rank.died for rank in replica.ranks)}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            return None
        try:
            group = work.result()
        except ActorDied:
            return None
        except Exception as error:  # an episode never raises, so the verifier itself is at fault
            if not verifier.is_dead:
                verifier.fail(error)
                await asyncio.wait({verifier.died}, timeout=_END_SECONDS)
            return None
        if not group.replica_failure:
            return group
        if self.generators.replicas.get(replica.number) is replica:
            self.generators.fail(replica.number, f"failed: {group.replica_failure.strip().splitlines()[-1]}")
        return None

    def take_scoring_seconds(self) -> dict[str, float]:
        """Of a group, the mean for each verifier since this was last asked."""
        taken, self._scoring_seconds = self._scoring_seconds, {}
        return {name: statistics.fmean(seconds) for name, seconds in taken.items()}

    async def demonstrate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Worked examples, as rollouts."""
        seconds = self.config.mesh.step_timeout
        while True:
            async with self.verifiers.router.choose(self.config.mesh.start_timeout) as number:
                with suppress(ActorDied):
                    verifier = self.verifiers.procs[number]
                    return await call(verifier, "demonstrate", prompts, seconds=seconds, what="preparing the SFT")
