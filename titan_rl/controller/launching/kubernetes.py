"""``titan-rl launch k8s``: manifests of a run, and ``kubectl apply``."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from titan_rl.config.io.overrides import override_arguments
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.controller.launching.request import Request, Tables, write_private
from titan_rl.controller.preflight.host_checks import check_placed
from titan_rl.mesh.launch.kubernetes import manifests
from titan_rl.mesh.launch.kubernetes.options import KubernetesOptions, kubernetes_options
from titan_rl.mesh.launch.kubernetes.pods import CERTIFICATES
from titan_rl.mesh.resources.certificates import make_certificates
from titan_rl.trainer.titan_config import build_titan

_CLAIM, _CERTIFICATES, _RUN = "1-claim.yaml", "2-certificates.yaml", "3-run.yaml"


def launch_on_kubernetes(request: Request) -> None:
    """Errors: ConfigError."""
    options, overrides = _checked_options(request)
    if not request.is_dry and shutil.which("kubectl") is None:
        raise ConfigError("launch k8s needs kubectl, which is not on PATH: give --dry-run, and apply what it writes")

    def write(folder: Path) -> None:
        keys = folder / "certificates"
        make_certificates(keys, [options.controller, *map(options.host, range(request.nodes))])
        run = manifests.run(options, request.nodes, request.file, override_arguments(overrides))
        parts = {_CLAIM: [manifests.claim(options)], _CERTIFICATES: [manifests.secret(options, keys)], _RUN: run}
        for name, documents in parts.items():
            write_private(folder / name, yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120))

    request.write(write)
    say(f"wrote {_CLAIM}, {_CERTIFICATES} (with keys) and {_RUN} in {request.folder}")
    if not request.is_dry:
        _apply(request.folder)
        job = f"--namespace {options.namespace} --follow job/{options.name}-controller"
        say(f"submitted: `kubectl logs {job}` reads what it says")
    ends = " ".join(f"-f {request.folder / name}" for name in (_RUN, _CERTIFICATES))
    say(f"`kubectl delete {ends}` ends it, also when it is done, and leaves the run directory on its claim")


def _checked_options(request: Request) -> tuple[KubernetesOptions, Tables]:
    """Checked as far as it can be without what is in the image. Errors: ConfigError."""
    draft = request.load(with_models=False)
    if draft.run.dir:
        raise ConfigError("run.dir is on the claim of a run on Kubernetes: leave it out")
    name_option = {"name": draft.hosts.options.get("name") or dns_name(request.file.stem, request.date)}
    options = kubernetes_options(replace(draft.hosts, addresses=[]), request.nodes, **name_option)
    if not re.fullmatch(r"\S+", options.image):
        raise ConfigError("launch k8s needs an image in which titan-rl is installed: give --hosts.options.image NAME")
    hosts = {"certificates": CERTIFICATES, "controller": options.controller}
    overrides = request.over("kubernetes", name_option, manifests.run_dir(options), **hosts)
    config = request.load(overrides, with_models=False)
    check_placed(config, request.nodes)
    build_titan(config)
    return options, overrides


def dns_name(stem: str, date: str) -> str:
    """A name that DNS takes: at most 40 small letters, digits and -."""
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:20].rstrip("-")
    return f"{plain if plain[:1].isalpha() else f'run-{plain}'.rstrip('-')}-{date}"


class _Plain(yaml.SafeDumper):
    """For people to read: nothing refers to what stands elsewhere, and text of several lines is that."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Plain.add_representer(str, _Plain.represent_str)


def _apply(folder: Path) -> None:
    files = [part for name in (_CLAIM, _CERTIFICATES, _RUN) for part in ("-f", str(folder / name))]
    result = subprocess.run(["kubectl", "apply", *files], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.stdout:
        say(result.stdout.rstrip("\n"))
    if result.returncode:
        raise ConfigError(f"kubectl does not take what is in {folder}: {' '.join(result.stderr.split())}")
