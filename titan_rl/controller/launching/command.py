"""``titan-rl launch``: what it may be asked. Imported before torch."""

import argparse
import time
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.shipped import find_config


def add_arguments(launch: argparse.ArgumentParser) -> None:
    launch.add_argument("to", help="slurm or k8s")
    launch.add_argument("file", help="TOML of the run; --section.key value overrides it")
    launch.add_argument("--nodes", type=int, required=True, metavar="N", help="hosts of the run, a node each")
    launch.add_argument("--folder", type=Path, help="a new one for what is submitted (launches/FILE-DATE)")
    launch.add_argument("--dry-run", action="store_true", help="write that, and stop there")


def launch(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """Write and submit a run over several hosts. Errors: ConfigError, with nothing submitted."""
    if options.to not in ("slurm", "k8s"):
        raise ConfigError(f"launch {options.to!r} is unknown: {nearest(options.to, ['slurm', 'k8s'])}")
    if options.nodes < 1:
        raise ConfigError(f"--nodes {options.nodes}: give the number of hosts, 1 or more")
    for key in ("launcher", "count", "addresses"):
        if key in overrides.get("hosts", {}):
            raise ConfigError(f"hosts.{key} is set by launch: leave it out, and give --nodes N")
    file, date = find_config(options.file), time.strftime("%Y%m%d-%H%M%S")
    folder = (options.folder or Path("launches", f"{file.stem}-{date}")).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: give another --folder")

    from titan_rl.controller.launching.kubernetes import launch_on_kubernetes
    from titan_rl.controller.launching.request import Request
    from titan_rl.controller.launching.slurm import launch_on_slurm

    request = Request(file.absolute(), date, options.nodes, folder, overrides, is_dry=options.dry_run)
    (launch_on_slurm if options.to == "slurm" else launch_on_kubernetes)(request)
    return 0
