"""The verifier processes. One that dies is replaced, and its groups are sampled again through another."""

import asyncio
from functools import partial

from titan_rl.mesh.members.endpoints import VerifierEndpoints
from titan_rl.mesh.members.router import Replacements, Router
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.calls import call, started
from titan_rl.mesh.supervision.standby import Standby


class Verifiers:
    """Verifier processes, each with a scorer process."""

    def __init__(self, actor: type, run: RunContext, environment: dict[str, str]):
        self.processes, self.config, self.log = run.processes, run.config, run.log
        self.router = Router("verifier", range(run.config.verifier.procs))
        self.procs: dict[int, ActorProcess] = {}
        self.scorers: dict[int, int] = {}
        """Id of the scorer process that each verifier began with."""
        self.standby = Standby(run.processes, run.config, "verifier", environment, actor, run.model_path)
        self._replacements = Replacements(self.router, run.log)
        self._scoring_seconds: dict[str, list[float]] = {}

    async def start(self) -> None:
        numbers = range(self.config.verifier.procs)
        await asyncio.gather(*(started(partial(self._start_one, number), self.log) for number in numbers))

    async def _start_one(self, number: int) -> None:
        process = await self.standby.take(f"verifier {number}")
        try:
            await self._set_up(number, process)
        except BaseException:  # also when cancelled: nobody else knows of it yet, so nobody else would end it
            process.kill()
            self.processes.forget(process)
            raise
        self.procs[number] = process
        process.deaths.register("verifier", lambda process: self._begin_replacing(number, process))
        if process.is_dead:
            self._begin_replacing(number, process)

    async def _set_up(self, number: int, process: ActorProcess) -> None:
        """With the settings that hold now."""
        seconds, what = self.config.mesh.start_timeout, f"starting verifier {number}"
        starting = VerifierEndpoints.start(self.config)
        self.scorers[number] = await call(process, starting, seconds=seconds, what=what)

    async def begin_anew(self) -> None:
        """Restart all verifiers with the current settings, while no group is in flight."""
        setting_up = (self._set_up(number, process) for number, process in self.procs.items())
        for answer in await asyncio.gather(*setting_up, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ActorDied):
                raise answer

    def note_scoring(self, name: str, seconds: float) -> None:
        """Record the scoring seconds of one group."""
        self._scoring_seconds.setdefault(name, []).append(seconds)

    def take_scoring_seconds(self) -> dict[str, list[float]]:
        """Scoring seconds of each group since the last call, by verifier."""
        seconds, self._scoring_seconds = self._scoring_seconds, {}
        return seconds

    def _begin_replacing(self, number: int, process: ActorProcess) -> None:
        if self.procs.get(number) is not process:
            return
        self.router.take_out(number, f"{process.name} {process.why}")
        del self.procs[number]
        self.processes.forget(process)
        self.log(f"{process.name} {process.why}: its groups are sampled again, and it is replaced")
        self._replacements.begin(number, lambda: self._replace(number))

    async def _replace(self, number: int) -> None:
        await self._start_one(number)
        self.router.put_in(number)
        self.processes.record_event("verifier_serves", number=number)
        self.standby.make()

    def stop(self) -> None:
        self._replacements.stop()
        self.standby.stop()
        self.procs = {}
