"""``[hosts]``: other machines that a run's actors are on, how they come up, and who goes where."""

from dataclasses import dataclass, field
from typing import Any

from titan_rl.config.kinds import Seconds, Whole


@dataclass(kw_only=True)
class HostsConfig:
    launcher: str = "local"
    """What brings hosts up. ``local``: there are none but this one; ``attach``: somebody has started ``titan-rl host``
    at each of ``addresses``; or ``pkg.module:name`` of a launcher of your own (mesh/launch/base.py)."""
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
    controller: str = ""
    """The name or address by which the hosts reach this machine; empty: its host name."""
    certificates: str = ""
    """A folder with ``ca.pem``, and ``NAME.pem`` and ``NAME.key`` of this machine, as ``titan-rl host
    --make-certificates`` writes it; empty: what HYPERACTOR_TLS_CERT, _KEY and _CA name."""
    insecure: bool = False
    """Let addresses be ``tcp://``: whoever can reach such a port runs code as the run's owner."""
    silence: Seconds = 20.0
    """Seconds for which a host may be silent before it counts as lost; it ends its processes itself when it has not
    heard of the controller for 0.8 of that."""
    options: dict[str, Any] = field(default_factory=dict)
    """The launcher's own keys."""

    @property
    def is_on(self) -> bool:
        """Whether the run has other hosts than the controller's."""
        return self.launcher != "local"
