"""What the pods of a run have in common: nobody's rights, memory, and the run's certificates."""

from typing import Any

from titan_rl.mesh.launch.kubernetes.options import KubernetesOptions

RUN, PART = "titan-rl/run", "titan-rl/part"
"""Labels: of all that is the run's; ``host`` or ``controller``."""
CERTIFICATES = "/run/titan-rl/certificates"
"""A folder in memory: a key of a Secret can be read by its group, and the user must own it alone."""
_SECRET = "/etc/titan-rl/certificates"
TAKE_CERTIFICATES = f"umask 077; mkdir -p {CERTIFICATES}; cp -Lf {_SECRET}/* {CERTIFICATES}/"

Manifest = dict[str, Any]


def metadata(options: KubernetesOptions, name: str) -> Manifest:
    return {"name": name, "namespace": options.namespace, "labels": {RUN: options.name}}


def secret_name(options: KubernetesOptions) -> str:
    """Of the one that holds the certificates."""
    return f"{options.name}-certificates"


def labels(options: KubernetesOptions, part: str) -> dict[str, str]:
    return {RUN: options.name, PART: part}


def container(name: str, options: KubernetesOptions, script: str, resources: dict[str, str]) -> Manifest:
    """``resources``: both what it is promised and what it may have."""
    return {
        "name": name,
        "image": options.image,
        "command": ["/bin/sh", "-c", f"{TAKE_CERTIFICATES}\n{script}\n"],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "certificates", "mountPath": _SECRET, "readOnly": True},
            {"name": "private", "mountPath": "/run/titan-rl"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def pod(options: KubernetesOptions, part: str, filled: Manifest) -> Manifest:
    """The template of pods with one container."""
    return {
        "metadata": {"labels": labels(options, part)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": options.user,
                "runAsGroup": options.user,
                "fsGroup": options.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [filled],
            "volumes": [
                {
                    "name": "certificates",
                    "secret": {"secretName": secret_name(options), "defaultMode": 0o440},
                },
                {"name": "private", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
