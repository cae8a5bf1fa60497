"""``[hosts]``: other machines that a run's actors are on, how they come up, and who goes where."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titan_rl.config.sections.kinds import Gib, Seconds, Whole

_FORM = re.compile(r"(tls|tcp)://(\[[0-9a-fA-F:]+\]|[^/:@\[\]\s]*):(\d{1,5})")


class Address(NamedTuple):
    """Where a worker loop listens, or a controller."""

    scheme: str
    """``tls`` or ``tcp``."""
    name: str
    """Of the machine, as it was written."""
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}:{self.port}"

    @property
    def host(self) -> str:
        """The name without the brackets of an IPv6 address."""
        return self.name.strip("[]")


def parse_address(text: str) -> Address:
    """Errors: ValueError unless it looks like ``tls://NAME:PORT``; NAME may be empty."""
    if not (match := _FORM.fullmatch(text)) or int(match[3]) > 65535:
        raise ValueError(f"{text!r} is no address of a host: give tls://NAME:PORT")
    return Address(match[1], match[2], int(match[3]))


@dataclass(kw_only=True)
class HostsConfig:
    launcher: str = "local"
    """What brings hosts up. ``local``: there are none but this one; ``attach``: somebody has started ``titan-rl host``
    at each of ``addresses``; ``slurm``: a job for each; ``kubernetes``: pods that ``titan-rl launch k8s`` has made; or
    ``pkg.module:name`` of a launcher of your own (mesh/launch/base.py)."""
    addresses: list[str] = field(default_factory=list)
    """Where the hosts' worker loops listen, such as ``tls://node1:26600``."""
    count: Whole = 0
    """How many hosts a launcher brings up that finds their addresses itself; 0: as many as there are addresses."""
    labels: list[str] = field(default_factory=list)
    """A word for each host, by which the lists below may name it: ``gpu``, ``cpu``."""
    trainer: list[int | str] = field(default_factory=list)
    """Hosts of the trainer's ranks, and of roles with ``placement = "own"``, by number or label; empty: all. Each kind
    is spread over its hosts. Where all hosts of a kind are lost it goes to those that are left."""
    generator: list[int | str] = field(default_factory=list)
    verifier: list[int | str] = field(default_factory=list)
    gpus: Whole = 0
    """GPUs of each host, on which trainer and engines work; 0: they work on its cores."""
    gpu_memory_gib: Gib = 0.0
    """Memory of each of these, by which it is settled before anything starts what fits where."""
    controller: str = ""
    """The name or address by which the hosts reach this machine; empty: its host name."""
    certificates: str = ""
    """A folder with ``ca.pem``, and ``NAME.pem`` and ``NAME.key`` of this machine, as ``titan-rl host
    --make-certificates`` writes it (with ``ca.key`` there, they are made); empty: what HYPERACTOR_TLS_CERT, _KEY and
    _CA name."""
    insecure: bool = False
    """Let addresses be ``tcp://``: whoever can reach such a port runs code as the run's owner."""
    silence: Seconds = 18.0
    """Seconds for which a host may be silent before it counts as lost; when it has not heard of the controller for 0.85
    of that, it ends its processes itself. TCP needs up to 13 to notice that a cable of 10 is back; give more where
    links are slow."""
    options: dict[str, Any] = field(default_factory=dict)
    """The launcher's own keys."""

    @property
    def is_on(self) -> bool:
        """Whether the run has other hosts than the controller's."""
        return self.launcher != "local"

    def label_of(self, number: int) -> str:
        """Empty for a host that has none."""
        return self.labels[number] if number < len(self.labels) else ""


def hosts_of(settings: HostsConfig, kind: str, count: int) -> set[int]:
    """Numbers of the hosts that a kind of process goes to."""
    labels = getattr(settings, kind if kind in ("generator", "verifier") else "trainer")
    if not labels:
        return set(range(count))
    return {number for number in range(count) if number in labels or settings.label_of(number) in labels}
