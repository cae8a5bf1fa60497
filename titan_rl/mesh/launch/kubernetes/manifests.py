"""A run as Kubernetes takes it: its hosts, its controller, and who may reach them.

    Service NAME (no address of its own)    a name in DNS for each pod, which stays when the pod is another
    StatefulSet NAME-host                   hosts: `titan-rl host` in each, for one controller after another
    Job NAME-controller                     `titan-rl train`; started again, it goes on from the claim NAME-runs
    NetworkPolicy NAME                      pods of the run reach each other, and nobody else reaches them
    Secret NAME-certificates                who else reaches them has none of these
    ConfigMap NAME-config                   the TOML

Pure: what is returned is plain data, as YAML and JSON have it.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.mesh.launch.kubernetes.options import HOST_PORT, KubernetesOptions
from titan_rl.mesh.launch.kubernetes.pods import (
    CERTIFICATES,
    RUN,
    Manifest,
    container,
    labels,
    metadata,
    pod,
    secret_name,
)
from titan_rl.mesh.launch.resumable import resumable

CONFIG, RUNS = "/etc/titan-rl/config", "/runs"
_GRACE_SECONDS = 120
"""For the step at hand and its checkpoint, when a controller is told to end."""
_MAX_SECRET = 1 << 20
_EXIT_USER = 2


def run_dir(options: KubernetesOptions) -> str:
    """On the claim."""
    return f"{RUNS}/{options.name}"


def claim(options: KubernetesOptions) -> Manifest:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.storage}}}
    spec |= {"storageClassName": options.storage_class} if options.storage_class else {}
    about = metadata(options, f"{options.name}-runs")
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": about, "spec": spec}


def secret(options: KubernetesOptions, folder: Path) -> Manifest:
    """The certificates in a folder, and not the authority's key. Errors: ConfigError if they are too many."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "ca.key"]
    if sum(path.stat().st_size for path in files) > _MAX_SECRET:
        raise ConfigError(f"certificates of {len(files) // 2} pods are more than a Secret holds, 1 MiB: ask for fewer")
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in files}
    about = metadata(options, secret_name(options))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "data": data}


def run(options: KubernetesOptions, count: int, config: Path, overrides: Sequence[str]) -> list[Manifest]:
    """All but the claim and the secret. ``overrides``: of the TOML ``config``, with those that a run here needs."""
    return [
        _service(options),
        _network_policy(options),
        _config_map(options, config),
        _hosts(options, count),
        _controller(options, resumable("titan-rl", f"{CONFIG}/{config.name}", overrides, run_dir(options))),
    ]


def _service(options: KubernetesOptions) -> Manifest:
    """Pods are in DNS before they are ready: they look for their own names."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {RUN: options.name},
        "ports": [{"name": "host", "port": HOST_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(options, options.name), "spec": spec}


def _network_policy(options: KubernetesOptions) -> Manifest:
    ours = {"matchLabels": {RUN: options.name}}
    spec = {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ours}]}]}
    about = metadata(options, options.name)
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": about, "spec": spec}


def _config_map(options: KubernetesOptions, config: Path) -> Manifest:
    about = metadata(options, f"{options.name}-config")
    data = {config.name: config.read_text("utf-8-sig")}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": data}


def _hosts(options: KubernetesOptions, count: int) -> Manifest:
    resources = {"cpu": options.cpu, "memory": options.memory}
    resources |= {options.gpu_resource: str(options.gpus)} if options.gpus else {}
    address = f"tls://$POD.{options.service}:{HOST_PORT}"
    host = container("host", options, f'exec titan-rl host "{address}" --certificates {CERTIFICATES}', resources)
    host["env"].append({"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    host["ports"] = [{"name": "host", "containerPort": HOST_PORT}]
    host["readinessProbe"] = {"tcpSocket": {"port": "host"}, "periodSeconds": 5}
    spec = {
        "replicas": count,
        "serviceName": options.name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(options, "host")},
        "template": pod(options, "host", host),
    }
    about = metadata(options, f"{options.name}-host")
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": about, "spec": spec}


def _controller(options: KubernetesOptions, script: Sequence[str]) -> Manifest:
    resources = {"cpu": options.controller_cpu, "memory": options.controller_memory}
    controller = container("controller", options, "\n".join(script), resources)
    controller["workingDir"] = RUNS
    controller["volumeMounts"] += [
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "runs", "mountPath": RUNS},
    ]
    template = pod(options, "controller", controller)
    # a name in DNS that stays, as the StatefulSet gives to hosts
    template["spec"] |= {"hostname": "controller", "subdomain": options.name, "restartPolicy": "Never"}
    template["spec"]["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    template["spec"]["volumes"] += [
        {"name": "config", "configMap": {"name": f"{options.name}-config"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{options.name}-runs"}},
    ]
    spec = {"backoffLimit": options.retries, "podFailurePolicy": {"rules": _rules()}, "template": template}
    about = metadata(options, f"{options.name}-controller")
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": spec}


def _rules() -> list[Manifest]:
    """A mistake in what was asked is none that another start mends; a node that is cleared is no failure. Schemas of
    older releases want conditions in every rule."""
    mistake = {"containerName": "controller", "operator": "In", "values": [_EXIT_USER]}
    cleared = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        {"action": "FailJob", "onExitCodes": mistake, "onPodConditions": []},
        {"action": "Ignore", "onPodConditions": cleared},
    ]
