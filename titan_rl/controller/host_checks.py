"""``[hosts]``: what it can be refused for, before anything starts."""

from dataclasses import replace

from titan_rl.config.hosts import HostsConfig, parse_address
from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.mesh.launch.base import HostLauncher, make_host_launcher
from titan_rl.mesh.launch.certificates import certify
from titan_rl.models.device import DEVICE_TYPE

_LEAST_SILENCE = 5.0


def check_hosts(config: Config) -> HostLauncher | None:
    """What brings the run's other hosts up; None if it has none. Errors: ConfigError."""
    hosts = config.hosts
    if not hosts.is_on:
        _check_unused(hosts)
        return None
    _check_addresses(hosts)
    launcher = make_host_launcher(hosts, config.run.plugin_path)
    check_placed(config, launcher.count)
    certify(hosts)
    return launcher


def check_placed(config: Config, count: int) -> None:
    """Of a run that has so many hosts: who goes where, and what else it is asked for. Errors: ConfigError."""
    _check_named(config.hosts, count)
    _check_with_others(config)


def without_hosts(config: Config) -> Config:
    """For actors on this host alone, whatever the run had."""
    return replace(config, hosts=HostsConfig())


def _check_unused(hosts: HostsConfig) -> None:
    if hosts.addresses or hosts.count:
        key = "addresses" if hosts.addresses else "count"
        raise ConfigError(f"hosts.{key} is given, and hosts.launcher = 'local' has no other hosts: set it to 'attach'")


def _check_addresses(hosts: HostsConfig) -> None:
    for address in hosts.addresses:
        try:
            place = parse_address(address)
        except ValueError as error:
            raise ConfigError(f"hosts.addresses: {error}") from None
        if not (place.name and place.port):
            raise ConfigError(f"hosts.addresses: {address!r} says not where a host is: give tls://NAME:PORT")
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
        for named in getattr(hosts, role):
            known = named in hosts.labels if isinstance(named, str) else 0 <= named < count
            if not known:
                labels = f", or one of {sorted(set(hosts.labels))}" if hosts.labels else ""
                raise ConfigError(f"hosts.{role}: {named!r} is no host: give numbers from 0 to {count - 1}{labels}")


def _check_with_others(config: Config) -> None:
    hosts, mesh = config.hosts, config.mesh
    if mesh.worker_loops or mesh.launcher != "local":
        raise ConfigError("mesh.worker_loops is for a run on this host alone: leave it out where [hosts] is given")
    if mesh.transport not in ("auto", "rdma_ibverbs", "rdma_tcp", "tcp"):
        raise ConfigError(f"mesh.transport = {mesh.transport!r} does not reach other hosts: leave it out")
    if config.generator.tensor_parallel > 1:
        raise ConfigError(
            "generator.tensor_parallel > 1 needs its ranks on one host, which [hosts] does not see to yet"
        )
    if DEVICE_TYPE != "cpu":
        raise ConfigError("[hosts] does not give out the GPUs of other hosts yet: leave it out, or run on CPUs")
    if hosts.silence < _LEAST_SILENCE:
        raise ConfigError(f"hosts.silence = {hosts.silence:g} would take a busy host for lost: give {_LEAST_SILENCE:g}")
