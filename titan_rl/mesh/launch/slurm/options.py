"""``[hosts.options]`` of Slurm: what its jobs ask for."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.config.sections.kinds import Seconds, Whole

_SAID = "hosts.launcher = 'slurm'"
_OPTION = re.compile(r"-[-\w][^\n]*")


@dataclass(kw_only=True)
class SlurmOptions:
    folder: str = ""
    """One that all nodes see: for the scripts that are submitted, and for what the jobs print."""
    name: str = "titan_rl"
    """Of the run among its user's jobs: its hosts' are called by it, and those of that name are its own."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    """Of each job, as sbatch takes it; empty: the partition's."""
    gpus: Whole = 0
    """Of each host."""
    cpus: Whole = 0
    """Of each host; 0: what the node, or the partition, gives."""
    memory: str = ""
    wait: Seconds = 86400.0
    """For which a host may be in the queue, besides ``mesh.start_timeout``."""
    exclusive: bool = True
    """Whether a host has its node for itself."""
    sbatch: list[str] = field(default_factory=list)
    """More options of sbatch for each host, such as ``--constraint=a100``."""
    controller: list[str] = field(default_factory=lambda: ["--cpus-per-task=2"])
    """The same for the controller's job."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell before anything else on a node, such as ``module load python``."""


def slurm_options(settings: HostsConfig) -> SlurmOptions:
    """Errors: ConfigError."""
    options = build_section(SlurmOptions, settings.options, "hosts.options")
    if settings.addresses:
        raise ConfigError(f"{_SAID} finds the addresses of its hosts itself: leave hosts.addresses out")
    if not settings.count:
        raise ConfigError(f"{_SAID} needs to know how many hosts to ask for: set hosts.count")
    if not options.folder:
        raise ConfigError(
            f"{_SAID} needs hosts.options.folder, one that all nodes see, for what it submits: `titan-rl launch slurm` "
            f"gives it one"
        )
    if not (settings.certificates or settings.insecure):
        raise ConfigError(
            f"{_SAID} needs hosts.certificates, a folder that all nodes see: `titan-rl host --make-certificates FOLDER "
            f"NAME`, with the name of this machine, makes one in which each host makes its own"
        )
    _check_words(options)
    return options


def _check_words(options: SlurmOptions) -> None:
    """What becomes a line of a script must be one."""
    for key in ("name", "partition", "account", "qos", "time", "memory"):
        if not re.fullmatch(r"[^\s'\"\\]*", getattr(options, key)):
            raise ConfigError(f"hosts.options.{key} = {getattr(options, key)!r}: give one word")
    if not options.name:
        raise ConfigError("hosts.options.name is empty: leave it out, or give one word")
    for key in ("sbatch", "controller"):
        for line in getattr(options, key):
            if not _OPTION.fullmatch(line):
                raise ConfigError(f"hosts.options.{key}: {line!r} is no option of sbatch: give such as '--qos=high'")
    if "\n" in options.folder or not Path(options.folder).is_absolute():
        raise ConfigError(f"hosts.options.folder = {options.folder!r}: give its whole path, as the nodes see it")
