"""``[hosts.options]`` of Kubernetes: what its pods are, and what they ask for."""

import re
from dataclasses import dataclass
from typing import Any

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.config.sections.kinds import Seconds, Whole

HOST_PORT = 26600
"""Where ``titan-rl host`` listens in a pod."""
_SAID = "hosts.launcher = 'kubernetes'"
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGTP]|[KMGTP]i)?")


@dataclass(kw_only=True)
class KubernetesOptions:
    image: str = ""
    """Of all pods: one in which ``titan-rl`` is on PATH, with the models and files that the TOML names."""
    name: str = ""
    """Of the run: of all that is made for it, and of its pods; ``titan-rl launch k8s`` gives it one."""
    namespace: str = "default"
    cluster_domain: str = "cluster.local"
    cpu: str = "4"
    """Of each host, as Kubernetes counts."""
    memory: str = "16Gi"
    gpus: Whole = 0
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory: str = "4Gi"
    """Of /dev/shm, a part of ``memory``."""
    controller_cpu: str = "2"
    controller_memory: str = "8Gi"
    storage: str = "20Gi"
    """Of the claim that keeps the run directory."""
    storage_class: str = ""
    """Empty: the cluster's own."""
    user: Whole = 1000
    """Whom all processes belong to; not root."""
    wait: Seconds = 1800.0
    """For which pods may be on their way, besides ``mesh.start_timeout``."""
    retries: Whole = 6
    """How often a controller that failed is started again."""

    @property
    def service(self) -> str:
        """The domain of all pods of the run."""
        return f"{self.name}.{self.namespace}.svc.{self.cluster_domain}"

    @property
    def controller(self) -> str:
        return f"controller.{self.service}"

    def host(self, number: int) -> str:
        """Its name stays, whatever pod has it."""
        return f"{self.name}-host-{number}.{self.service}"


def kubernetes_options(settings: HostsConfig, count: int, **overrides: Any) -> KubernetesOptions:
    """``count``: of hosts. ``given``: goes over the settings. Errors: ConfigError."""
    options = build_section(KubernetesOptions, settings.options | overrides, "hosts.options")
    if settings.addresses:
        raise ConfigError(f"{_SAID} finds the addresses of its hosts itself: leave hosts.addresses out")
    if settings.insecure:
        raise ConfigError(f"{_SAID} has certificates of its own: leave hosts.insecure out")
    if not count:
        raise ConfigError(f"{_SAID} needs to know how many hosts there are: set hosts.count")
    if not options.name:
        raise ConfigError(f"{_SAID} needs pods, which `titan-rl launch k8s` makes: it sets hosts.options.name, too")
    _check_names(options)
    _check_amounts(options)
    return options


def _check_names(options: KubernetesOptions) -> None:
    for key in ("name", "namespace"):
        if not _LABEL.fullmatch(getattr(options, key)):
            raise ConfigError(
                f"hosts.options.{key} = {getattr(options, key)!r}: give up to 40 small letters, digits and -, a letter "
                f"first"
            )
    for key in ("cluster_domain", "storage_class"):
        if (value := getattr(options, key)) and not _DOMAIN.fullmatch(value):
            raise ConfigError(f"hosts.options.{key} = {value!r}: give small letters, digits, - and .")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.gpu_resource):
        raise ConfigError(f"hosts.options.gpu_resource = {options.gpu_resource!r}: give such as 'nvidia.com/gpu'")
    if options.user == 0:
        raise ConfigError("hosts.options.user = 0 is root, whom no process of a run belongs to: give another number")


def _check_amounts(options: KubernetesOptions) -> None:
    for key in ("cpu", "memory", "shared_memory", "controller_cpu", "controller_memory", "storage"):
        if not _QUANTITY.fullmatch(getattr(options, key)):
            raise ConfigError(f"hosts.options.{key} = {getattr(options, key)!r}: give such as '4', '500m' or '16Gi'")
