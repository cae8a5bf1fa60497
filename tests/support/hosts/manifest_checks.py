"""What the published schemas of Kubernetes do not say: whether the parts of several manifests fit each other."""

import re
from collections.abc import Iterator

QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i)?")


def flaws(parts: list[dict]) -> list[str]:
    """In words, each with the name of what has it."""
    return [f"{part['kind']} {part['metadata']['name']}: {flaw}" for part in parts for flaw in _flaws(part, parts)]


def _flaws(part: dict, parts: list[dict]) -> Iterator[str]:
    named = {(each["kind"], each["metadata"]["name"]) for each in parts}
    if part["kind"] in ("StatefulSet", "Job"):
        template = part["spec"]["template"]
        labels = template["metadata"]["labels"]
        yield from _volumes(template["spec"], named)
        yield from _amounts(template["spec"])
        service = part["spec"].get("serviceName", template["spec"].get("subdomain"))
        if ("Service", service) not in named:
            yield f"there is no Service {service}"
        for each in parts:
            wanted = _selected(each)
            if each["kind"] in ("Service", "NetworkPolicy") and not wanted.items() <= labels.items():
                yield f"{each['kind']} {each['metadata']['name']} does not select its pods"
        if part["kind"] == "StatefulSet" and not _selected(part).items() <= labels.items():
            yield "its selector is not for its own pods"
    if len({each["metadata"]["namespace"] for each in parts}) > 1:
        yield "the parts are in several namespaces"
    if part["kind"] == "PersistentVolumeClaim":
        yield from _quantities(part["spec"]["resources"]["requests"])


def _selected(part: dict) -> dict:
    spec = part.get("spec", {})
    if part["kind"] == "Service":
        return spec["selector"]
    return (spec.get("podSelector") or spec.get("selector") or {}).get("matchLabels", {})


def _volumes(pod: dict, named: set[tuple[str, str]]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    yield from (f"{name} is mounted and is no volume" for name in mounted - set(volumes))
    yield from (f"{name} is a volume and is not mounted" for name in set(volumes) - mounted)
    kinds = {"secret": "Secret", "configMap": "ConfigMap", "persistentVolumeClaim": "PersistentVolumeClaim"}
    for volume in volumes.values():
        for key, kind in kinds.items():
            source = volume.get(key, {})
            name = source.get("secretName") or source.get("name") or source.get("claimName")
            if source and (kind, name) not in named:
                yield f"there is no {kind} {name}"
        yield from _quantities({"sizeLimit": volume.get("emptyDir", {}).get("sizeLimit", "0")})


def _amounts(pod: dict) -> Iterator[str]:
    for container in pod["containers"]:
        ports = {port["name"] for port in container.get("ports", [])}
        probed = container.get("readinessProbe", {}).get("tcpSocket", {}).get("port")
        if probed is not None and probed not in ports:
            yield f"its probe asks at {probed}, which is no port of it"
        for amounts in container["resources"].values():
            yield from _quantities(amounts)


def _quantities(amounts: dict) -> Iterator[str]:
    yield from (f"{key} = {value!r} is no amount" for key, value in amounts.items() if not QUANTITY.fullmatch(value))
