"""Hosts as jobs of Slurm: one job of one node for each, asked for anew when it was lost."""

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

from titan_rl.config.sections.hosts import Address, HostsConfig
from titan_rl.mesh.launch.base import HostOrder, HostUnavailable
from titan_rl.mesh.launch.claims import until_it_listens
from titan_rl.mesh.launch.slurm.commands import (
    JobState,
    Queue,
    SlurmError,
    cancel,
    cancel_named,
    check_commands,
    job_environment,
    submit,
)
from titan_rl.mesh.launch.slurm.options import slurm_options
from titan_rl.mesh.launch.slurm.script import host_script, job_name, port_of
from titan_rl.mesh.processes.deadlines import within

_LISTEN_SECONDS = 300.0
"""From the start of a job: its node may have to load Python from a file system that is slow at first."""
_NUM_REFUSALS = 30
"""Of squeue, one after another, that a waiting start forgives: its server may be started anew."""


class SlurmLauncher:
    """Owns the jobs. What it submits is in ``hosts.options.folder``, and so is what they print."""

    def __init__(self, settings: HostsConfig):
        """Errors: ConfigError."""
        self._options = slurm_options(settings)
        check_commands("hosts.launcher = 'slurm'")
        self.count, self.wait = settings.count, self._options.wait
        self._scheme = "tcp" if settings.insecure else "tls"
        self._certificates = "" if settings.insecure else str(Path(settings.certificates).absolute())
        self._name = settings.controller or socket.gethostname()
        self._jobs: dict[int, int] = {}
        self._queue: Queue | None = None

    def rendezvous(self) -> str:
        return f"{self._scheme}://{self._name}:0"

    async def start(self, order: HostOrder) -> str:
        """Errors: HostUnavailable. One that is not waited for any longer is cancelled."""
        number = order.number
        try:
            self._jobs[number] = job = await asyncio.to_thread(self._submit, order)
            address = Address(self._scheme, await self._node_of(job), port_of(job))
            await within(
                _LISTEN_SECONDS, f"Slurm job {job}: listening at {address}", self._until_listening(number, address)
            )
            return str(address)
        except SlurmError as error:
            raise HostUnavailable(f"host {number}: {error}") from None
        except BaseException:
            await self.kill(number)
            raise

    async def _until_listening(self, number: int, address: Address) -> None:
        """Errors: HostUnavailable if its job ends before."""
        listening = asyncio.ensure_future(until_it_listens(address))
        ended = asyncio.ensure_future(self.watch(number))
        try:
            await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                raise HostUnavailable(ended.result())
        finally:
            listening.cancel()
            ended.cancel()

    def _submit(self, order: HostOrder) -> int:
        with suppress(SlurmError):  # those of an earlier controller of this run
            cancel_named(job_name(self._options, order.number))
        script = Path(self._options.folder, f"{job_name(self._options, order.number)}-{order.attempt}.sh")
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(host_script(self._options, order.number, self._certificates))
        return submit(script, job_environment(os.environ) | dict(order.environment))

    async def _node_of(self, job: int) -> str:
        """Once it has one. Errors: HostUnavailable, SlurmError."""
        refusals = 0
        while True:
            try:
                job_state = (await self._look()).get(job)
                refusals = 0
            except SlurmError:
                if (refusals := refusals + 1) == _NUM_REFUSALS:
                    raise
                continue
            if job_state is None or not (job_state.is_running or job_state.is_waiting):
                raise HostUnavailable(self._why(job, "is not there" if job_state is None else f"is {job_state.state}"))
            if job_state.is_running:
                return job_state.node

    async def watch(self, number: int) -> str:
        """A job that ends is seen within a second or two."""
        if (job := self._jobs.get(number)) is None:
            return "it was given back"
        while True:
            with suppress(SlurmError):  # that Slurm does not answer says nothing of the host
                job_state = (await self._look()).get(job)
                if job_state is None or not job_state.is_running:
                    return self._why(job, "is not there any more" if job_state is None else f"is {job_state.state}")

    async def _look(self) -> dict[int, JobState]:
        if self._queue is None:  # made in the event loop that uses it
            self._queue = Queue()
        return await self._queue.look()

    def _why(self, job: int, what: str) -> str:
        return f"Slurm job {job} {what} (what it printed is in {self._options.folder})"

    async def kill(self, number: int) -> None:
        if (job := self._jobs.pop(number, None)) is not None:
            with suppress(SlurmError):
                await asyncio.to_thread(cancel, str(job))
