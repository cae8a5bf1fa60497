"""Hosts of other machines: brought up, watched, lost, and asked for again.

    launcher: an address ─▶ reception (claims.py): a worker loop ─▶ attach ─▶ agent (agent.py): what there is
        ─▶ files ─▶ processes may be spawned there              two beats a second │
    lost: silent for too long, its agent died, or the launcher says so ─▶ its processes are dead, it is told to end,
                                                                          and the launcher is asked for it again

A host that was lost never comes back as it was: what does so is another one, of the same number.
"""

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import attach_to_workers, enable_transport
from monarch.config import configure

from titan_rl.compat.monarch.actors import know_faults_of
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import HostsConfig, hosts_of, parse_address
from titan_rl.mesh.hosts.agent import Heartbeat, HostAgent
from titan_rl.mesh.hosts.host_files import bring
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.hosts.remote_processes import RemoteProcesses
from titan_rl.mesh.launch.base import HostLauncher, HostOrder, HostUnavailable
from titan_rl.mesh.launch.claims import Claim, ClaimSuperseded, ask_for_loop
from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.processes.deadlines import DeadlineError, together, within
from titan_rl.mesh.resources.cores import Crew
from titan_rl.mesh.resources.network import HOST_ADDRESS, address_for, has_address

_BEAT_SECONDS = 0.5
_ROUNDING = 0.005
"""Of a GPU's memory, by which what it is said to have may be too high."""
_LEASE_SHARE = 0.85
"""Of ``hosts.silence``: after so much of it a host ends its processes itself."""
_FAREWELL_SECONDS = 5.0
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Of a run on the hosts' cores: a process that finds a GPU works on it."""
_TRIES, _PAUSE_SECONDS = 5, 3.0
"""To have a host back that is there, and cannot be used."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class NoHosts(RuntimeError):
    """All hosts, or the required one, are lost."""


@dataclass(frozen=True)
class HostNeeds:
    """Needs of a run on its hosts."""

    home: Path | None
    """The run directory, which is the controller's: on a host, what it is to hold is in that host's scratch folder."""
    model: Path
    """Which is brought to each host."""
    crew: Crew
    elsewhere: Sequence[str] = ()
    """Paths that must be on every host already."""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    """What hosts know the run by, whoever its controller is."""
    epoch: int = 0
    """How often it was resumed."""
    can_fork: bool = False
    """Whether processes may come of a host's fork servers."""


class RemoteHosts:
    """Hosts of other machines, brought up and replaced."""

    def __init__(
        self,
        launcher: HostLauncher,
        settings: HostsConfig,
        needs: HostNeeds,
        *,
        seconds: float,
        logs: str | None,
        log: Callable[[str], None],
        on_lost: Callable[[str], None] = lambda why: None,
    ):
        """``seconds``: for a host to come up. ``over(why)`` is called when another controller has gone on with the
        run, so that this one must end."""
        self._launcher, self._settings, self._needs, self._seconds = launcher, settings, needs, seconds
        self._logs, self._log, self._on_lost = logs, log, on_lost
        self._controller, self._numbers = uuid.uuid4().hex, itertools.count()
        self._came = asyncio.Event()
        """Set whenever a host has come."""
        self._hosts: dict[int, Host] = {}
        self._background = BackgroundTasks()
        self._logged: set[str] = set()
        self.num_lost, self._names_this = 0, False

    def configure_monarch(self) -> None:
        """Before anything else of Monarch's: how this process listens, and is patient with a network. What hosts have
        in their environment (command.py) is the same."""
        enable_transport(self._launcher.rendezvous())
        # 30 s by default: an address that was silent for longer is dead to this process for good
        configure(message_delivery_timeout="10m", mesh_orphan_timeout="60s")

    def register(self, on_start: Callable[[Host], None], on_death: Callable[[Host], None]) -> None:
        """Register callbacks for started and lost hosts."""
        self._on_start, self._on_death = on_start, on_death

    @property
    def can_fork(self) -> bool:
        return self._needs.can_fork

    async def open(self) -> None:
        """Bring up all hosts. Errors: HostUnavailable; ClaimSuperseded; ConfigError if one lacks a file."""
        await together(self._bring_up(number, 0) for number in range(self._launcher.count))
        self._name_this_host()

    def _name_this_host(self) -> None:
        """Until the run ends: trainer ranks ask this process for their batches."""
        if self.alive and not has_address():
            os.environ[HOST_ADDRESS] = address_for([host.remote_facts.address for host in self.alive.values()])
            self._names_this = True

    async def _bring_up(self, number: int, attempt: int) -> None:
        name = f"host {number}"
        try:
            starting = self._launcher.start(HostOrder(number, attempt))
            # one that was lost may take as long as it likes: nobody waits for it
            seconds = self._seconds + getattr(self._launcher, "wait", 0.0)
            address = await (starting if attempt else within(seconds, f"starting {name}", starting))
            host = await within(self._seconds, f"reaching {name} at {address}", self._attach(number, address))
        except DeadlineError as error:
            raise HostUnavailable(
                f"{error}: `titan-rl host` must run there, at that address, with a certificate of the same authority"
            ) from None
        self._hosts[number] = host
        self._on_start(host)
        self._came.set()
        self._background.start(self._beat(number, host))
        self._background.start(self._ask_launcher(number, host))

    async def _attach(self, number: int, address: str) -> Host:
        claim = Claim(self._needs.run, self._needs.epoch, next(self._numbers), self._controller)
        loop, tag = await ask_for_loop(parse_address(address), claim, self._log_once), f"{number}_{claim.number}"
        know_faults_of(f"host{tag}", f"agent{tag}")
        mesh = attach_to_workers(ca="trust_all_connections", workers=[loop], name=f"host{tag}")
        agent = mesh.spawn_procs(name=f"agent{tag}").spawn(f"agent{tag}", HostAgent)
        lease, towards = _LEASE_SHARE * self._settings.silence, parse_address(self._launcher.rendezvous()).host
        facts = await agent.begin.call_one(lease, time.monotonic(), towards)
        await self._check_gpus(number, facts.name, agent)
        if missing := await agent.missing.call_one(list(self._needs.elsewhere)):
            raise ConfigError(f"host {number} ({facts.name}) has no {missing[0]}: put it there, at the same path")
        host = Host(f"host {number} ({facts.name})", mesh, facts=facts, agent=agent, number=number)
        host.processes = RemoteProcesses(agent)
        host.paths = await self._bring_model(host)
        return host

    async def _check_gpus(self, number: int, name: str, agent: HostAgent) -> None:
        """Errors: ConfigError for a host that has less than was promised of it."""
        if not self._settings.gpus:
            return
        count, nbytes = await agent.gpus.call_one()
        required, gib = self._settings.gpus, self._settings.gpu_memory_gib
        if count < required or nbytes < (1 - _ROUNDING) * gib * 2**30:
            raise ConfigError(
                f"host {number} ({name}) has {count} GPUs of {nbytes / 2**30:.1f} GiB, and hosts.gpus = {required} "
                f"with hosts.gpu_memory_gib = {gib:g} are required of each host: set these to what all have"
            )

    async def _bring_model(self, host: Host) -> dict[str, str]:
        """Where paths of the controller are on the host."""
        home, model, scratch = self._needs.home, self._needs.model, host.remote_facts.scratch
        await bring(host.remote_agent, model, f"{scratch}/model")
        homes = {} if home is None else {str(home): f"{scratch}/run", str(home.absolute()): f"{scratch}/run"}
        return {str(model): f"{scratch}/model"} | homes

    # who goes where

    @property
    def alive(self) -> dict[int, Host]:
        """Live hosts by number, in order."""
        return {number: host for number, host in sorted(self._hosts.items()) if not host.died.done()}

    async def choose(self, kind: str, on: int | None = None) -> Host:
        """As ``Hosts.choose``; ``on``: the number of the only one that will do, since GPUs are there which are meant
        for that process. Errors: NoHosts if none is left, and none comes back in the time that one has to come up."""
        await self._some_alive(on)
        host = self._spread(kind) if on is None else self.alive[on]
        host.kinds.append(kind)
        return host

    async def _some_alive(self, on: int | None) -> None:
        """Until there is a host, or that one."""
        deadline = time.monotonic() + self._seconds
        while not (self.alive if on is None else on in self.alive):
            self._came.clear()
            try:
                await within(deadline - time.monotonic(), "a host", self._came.wait())
            except DeadlineError:
                hosts = "all hosts of the run are" if on is None else f"host {on}, with the GPUs that it works on, is"
                raise NoHosts(f"{hosts} lost, and did not come back in {self._seconds:g} s") from None

    def _spread(self, kind: str) -> Host:
        alive, allowed = self.alive, hosts_of(self._settings, kind, self._launcher.count)
        able = [host for number, host in alive.items() if number in allowed]
        if not able:
            self._log_once(f"no host for a {kind} is left: it goes to those that are there")
        return min(able or alive.values(), key=lambda host: (host.kinds.count(kind), len(host.kinds)))

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)

    def environment(self, host: Host, kind: str) -> dict[str, str]:
        """Of a process of that kind there, over what such a process has anywhere."""
        facts, threads = host.remote_facts, self._threads(host, kind)
        variables = facts.mark | {"TMPDIR": facts.scratch, HOST_ADDRESS: facts.address}
        variables |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        variables |= {} if self._settings.gpus else _NO_GPUS
        # peers on other hosts are not to be reached by ``lo``, nor by what the host's name resolves to
        return variables | ({key: facts.interface for key in _INTERFACES} if facts.interface else {})

    def _threads(self, host: Host, kind: str) -> int | None:
        """None: of one that does not compute."""
        here = {
            role: -(-count // len(hosts))
            for role, count in self._needs.crew.counts.items()
            if host.number in (hosts := hosts_of(self._settings, role, self._launcher.count))
        }
        return self._needs.crew.threads(kind, host.remote_facts.cores, here)

    # how they fare

    async def _beat(self, number: int, host: Host) -> None:
        silence, what = self._settings.silence, f"the network of {host.name}"
        while not host.died.done():
            try:
                beat = await within(silence, what, host.remote_agent.beat.call_one(time.monotonic()))
            except DeadlineError:
                return self._lose(number, host, f"was silent for {silence:g} s")
            except Exception:  # of Monarch's, by many names
                return self._lose(number, host, "its agent died")
            if not host.died.done():
                await asyncio.to_thread(self._take, host, beat)
            await asyncio.sleep(_BEAT_SECONDS)

    def _take(self, host: Host, beat: Heartbeat) -> None:
        _processes_of(host).stopped = beat.stopped
        if self._logs:
            for name, text in beat.printed.items():
                with open(Path(self._logs) / Path(name).name, "ab") as file:
                    file.write(text)

    async def _ask_launcher(self, number: int, host: Host) -> None:
        self._lose(number, host, await self._launcher.watch(number))

    def _lose(self, number: int, host: Host, why: str) -> None:
        """From now on whatever comes from there is nobody's."""
        if host.died.done():
            return
        self.num_lost += 1
        host.why = why
        _processes_of(host).is_lost = True
        host.died.set_result(None)
        self._background.start(_end(host))  # it may be there all the same, and hear of it when it can be reached
        self._on_death(host)
        self._background.start(self._again(number))

    async def _again(self, number: int) -> None:
        """The run goes on without it meanwhile, or for good."""
        await self._launcher.kill(number)
        why: Exception | None = None
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._bring_up(number, self.num_lost + attempt)
            except ClaimSuperseded as error:
                return self._on_lost(str(error))
            except Exception as error:
                why = error
            await asyncio.sleep(_PAUSE_SECONDS)
        self._log(f"host {number} does not come back: {why}")

    async def close(self) -> None:
        """End all hosts. Never raises."""
        self._background.cancel()
        if self._names_this:
            del os.environ[HOST_ADDRESS]
            self._names_this = False
        ends = [asyncio.ensure_future(_end(host)) for host in self.alive.values()]
        if ends:
            await asyncio.wait(ends, timeout=_FAREWELL_SECONDS)
        with suppress(Exception):
            kills = (self._launcher.kill(number) for number in range(self._launcher.count))
            await within(_FAREWELL_SECONDS, "giving hosts back", asyncio.gather(*kills, return_exceptions=True))


def _processes_of(host: Host) -> RemoteProcesses:
    assert isinstance(host.processes, RemoteProcesses)
    return host.processes


async def _end(host: Host) -> None:
    with suppress(Exception):  # it is gone, which is what was wanted
        await host.remote_agent.end.call_one()
