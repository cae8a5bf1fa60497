"""What every owner of actors has from the run that they belong to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.sections.schema import Config
from titan_rl.mesh.hosts.host_path import NOWHERE, HostPath
from titan_rl.mesh.supervision.actor_process import ActorProcesses


@dataclass(frozen=True)
class RunContext:
    """Context of a run: processes, settings and folders."""

    processes: ActorProcesses
    config: Config
    """Settings may change while the run goes on."""
    model_path: HostPath
    """Of the model that the run starts from."""
    kept_policy: HostPath = NOWHERE
    """Of the policy that the run keeps, if it does (``trainer.roles.names.role_paths``)."""
    scratch: Path = Path()
    """A folder of this host that nobody else uses."""
    log: Callable[[str], None] = print
    """Of deaths and repairs, for people."""
