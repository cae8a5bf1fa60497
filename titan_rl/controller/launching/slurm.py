"""``titan-rl launch slurm``: a job for the run's controller, which then asks for one for each host.

The run directory and the folder of the launch are the job's for good: when Slurm requeues it, since its node was
drained or has failed, it goes on with its run.
"""

import os
from pathlib import Path

from titan_rl.config.io.overrides import override_arguments
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.hosts import HostsConfig
from titan_rl.controller.launching.request import Request, Tables
from titan_rl.controller.preflight.checks import resolve
from titan_rl.controller.preflight.host_checks import check_placed
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.mesh.launch.resumable import resumable
from titan_rl.mesh.launch.slurm.commands import SlurmError, check_commands, job_environment, submit
from titan_rl.mesh.launch.slurm.options import slurm_options
from titan_rl.mesh.launch.slurm.script import controller_script, program
from titan_rl.mesh.resources.certificates import make_certificates


def launch_on_slurm(request: Request) -> None:
    """Errors: ConfigError."""
    draft = request.load()
    name = f"{request.file.stem}-{request.date}"
    run_dir = Path(draft.run.dir or f"runs/{name}").absolute()
    overrides = _overrides(request, draft.hosts, name, str(run_dir))
    config = request.load(overrides)
    options = slurm_options(config.hosts)
    check_placed(config, request.nodes)
    checked = resolve(config)
    check_read(checked.config, checked.algorithm, checked.titan, checked.task)
    if not request.is_dry:
        check_commands("launch slurm")
    body = resumable(program(), str(request.file), override_arguments(overrides), str(run_dir))
    script = request.folder / "controller.sh"

    def write(folder: Path) -> None:
        if config.hosts.certificates == str(folder / "certificates"):
            make_certificates(folder / "certificates", [])  # each machine makes its own there (certificates.py)
        script.write_text(controller_script(options, Path.cwd(), body))

    request.write(write)
    say(f"wrote {script}; the run directory is {run_dir}")
    if not request.is_dry:
        _submit(script)


def _overrides(request: Request, settings: HostsConfig, name: str, run_dir: str) -> Tables:
    options = {"folder": str(request.folder), "name": settings.options.get("name") or name}
    certificates = str(Path(settings.certificates).absolute()) if settings.certificates else ""
    if not (certificates or settings.insecure):
        certificates = str(request.folder / "certificates")
    return request.over("slurm", options, run_dir, certificates=certificates)


def _submit(script: Path) -> None:
    try:
        job = submit(script, job_environment(os.environ))
    except SlurmError as error:
        raise ConfigError(f"Slurm does not take {script}: {error}") from None
    say(f"submitted as Slurm job {job}: what it prints is in {script.with_suffix('.out')}; `scancel {job}` ends it")
