"""``[hosts]``: what it can be refused for, before anything starts."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import titan_rl
from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import all_tasks
from titan_rl.config.sections.hosts import HostsConfig, parse_address
from titan_rl.config.sections.schema import FILE_OPTIONS, TASKS_OF_FILES, Config
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.mesh.launch.base import HostLauncher, make_host_launcher
from titan_rl.mesh.resources.certificates import certify
from titan_rl.records.run_directory.controller_epochs import next_epoch
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.trainer.roles.names import FROZEN, LEARNED, configured_paths

_LEAST_SILENCE = 5.0
_PACKAGE = Path(titan_rl.__file__).resolve().parent


def check_hosts(config: Config) -> HostLauncher | None:
    """Launcher of the run's other hosts; None without. Errors: ConfigError."""
    hosts = config.hosts
    if not hosts.is_on:
        return None
    _check_addresses(hosts)
    launcher = make_host_launcher(hosts, config.run.plugin_path)
    assert launcher is not None, "hosts that are on have one"
    check_placed(config, launcher.count)
    certify(hosts)
    return launcher


def check_placed(config: Config, count: int) -> None:
    """Check placement and settings of a run on ``count`` hosts. Errors: ConfigError."""
    _check_named(config.hosts, count)
    _check_with_others(config)


def without_hosts(config: Config) -> Config:
    """Configuration for actors on this host alone."""
    return replace(config, hosts=HostsConfig())


def on_hosts(config: Config, run_dir: RunDir) -> dict[str, Any]:
    """Arguments of ``HostNeeds``, in a new controller epoch. Errors: ConfigError."""
    if not config.hosts.is_on:
        return {}
    run, epoch = next_epoch(run_dir.epoch)
    return {"home": run_dir.root, "elsewhere": paths_on_hosts(config), "run": run, "epoch": epoch}


def paths_on_hosts(config: Config) -> list[str]:
    """Which processes on the run's hosts look for, and nobody brings there: files of tasks, directories of models that
    roles begin with or that draft, the folder of checkpoint.store, and modules of run.plugin_path, as far as this
    process has imported them."""
    store = config.checkpoint.store
    models = [path for role in (*FROZEN, *LEARNED) for path in configured_paths(config, role)]
    models += [config.reward_model.path, config.lora.adapter, config.generator.speculative.model]
    models += [] if "://" in store else [store]
    files = [
        path
        for task in all_tasks(config.task).values()
        for option in FILE_OPTIONS
        if task.name in TASKS_OF_FILES and (files := task.options.get(option))
        for source in locate_sources(option, files, config.run.plugin_path)
        for path in source.paths
    ]
    paths = [path for path in models if path != config.model.path] + files + _own_modules(config.run.plugin_path)
    return list(dict.fromkeys(str(path) for path in paths if path))


def _own_modules(folders: list[str]) -> list[str]:
    users, theirs = [Path(folder).resolve() for folder in folders], (Path(sys.prefix).resolve(), _PACKAGE)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(file).resolve() for file in files if file and Path(file).is_file()]
    return [
        str(path)
        for path in paths
        if any(folder in path.parents for folder in users) and not any(folder in path.parents for folder in theirs)
    ]


def _check_addresses(hosts: HostsConfig) -> None:
    for address in hosts.addresses:
        try:
            place = parse_address(address)
        except ValueError as error:
            raise ConfigError(f"hosts.addresses: {error}") from None
        if not (place.name and place.port):
            raise ConfigError(f"hosts.addresses: {address!r} is no host address: give tls://NAME:PORT")
        if place.scheme == "tcp" and not hosts.insecure:
            raise ConfigError(
                f"hosts.addresses: whoever reaches {address} runs code as the run's owner: use tls://, or set "
                f"hosts.insecure = true where nobody else can reach it"
            )
        if place.scheme == "tls" and hosts.insecure:
            raise ConfigError(f"hosts.insecure = true is for tcp://, and {address} is not: leave it out")
    if len(set(hosts.addresses)) < len(hosts.addresses):
        raise ConfigError("hosts.addresses names an address twice: name each once")


def _check_named(hosts: HostsConfig, count: int) -> None:
    if len(hosts.labels) > count:
        raise ConfigError(f"hosts.labels has {len(hosts.labels)} words, and there are {count} hosts: give one for each")
    for role in ("trainer", "generator", "verifier"):
        for host in getattr(hosts, role):
            exists = host in hosts.labels if isinstance(host, str) else 0 <= host < count
            if not exists:
                labels = f", or one of {sorted(set(hosts.labels))}" if hosts.labels else ""
                raise ConfigError(f"hosts.{role}: {host!r} is no host: give numbers from 0 to {count - 1}{labels}")


def _check_with_others(config: Config) -> None:
    hosts, mesh = config.hosts, config.mesh
    if mesh.worker_loops or mesh.launcher != "local":
        raise ConfigError("mesh.worker_loops is for a run on this host alone: leave it out where [hosts] is given")
    if mesh.transport not in ("auto", "rdma_ibverbs", "rdma_tcp", "tcp"):
        raise ConfigError(f"mesh.transport = {mesh.transport!r} does not reach other hosts: leave it out")
    if bool(hosts.gpus) != bool(hosts.gpu_memory_gib):
        raise ConfigError(
            f"hosts.gpus = {hosts.gpus} and hosts.gpu_memory_gib = {hosts.gpu_memory_gib:g} belong together: give what "
            f"each host has, such as 8 and 79, or neither for a run on the hosts' cores"
        )
    if hosts.silence < _LEAST_SILENCE:
        raise ConfigError(f"hosts.silence = {hosts.silence:g} would take a busy host for lost: give {_LEAST_SILENCE:g}")
