"""The model that a run starts from, and the policy as reinforcement learning began, if supervised steps came before.

The latter is written before step 1, as a Hugging Face directory in the run directory, so whoever serves as the
reference finds it there: ranks that replace others, a run that is resumed, a replay.
"""

import shutil
from collections.abc import Mapping
from typing import Any

from titan_rl.algorithms.base import Algorithm
from titan_rl.config.load import ConfigError, as_dict
from titan_rl.config.sections.schema import MADE_MODELS, Config
from titan_rl.data.storage.files import replacing
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.meshes import Meshes
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.trainer.roles.names import own_learned


def base_model(config: Config, run_dir: RunDir) -> str:
    """Directory of the model that a run starts from; one of MADE_MODELS is made in the run directory."""
    if config.model.path not in MADE_MODELS:
        return config.model.path
    if not run_dir.base_model.exists():
        from titan_rl.models.builtin.made import make_model

        with replacing(run_dir.base_model) as folder:  # a run that is killed must not leave half a model
            make_model(config.model.path, folder, config.run.seed)
    return str(run_dir.base_model)


def keeps_policy(config: Config, algorithm: Algorithm) -> bool:
    """Whether a role that begins as the policy needs a directory of it, and none was there before."""
    return bool(config.sft.steps > 0 or config.lora.adapter) and bool(_begin_as_policy(config, algorithm))


def _begin_as_policy(config: Config, algorithm: Algorithm) -> list[str]:
    """The roles that take the policy from where the run keeps it."""
    roles = ["reference"] * algorithm.needs.reference
    if (learned := own_learned(config, algorithm.needs)) is not None:
        roles.append(learned)
    return [role for role in roles if not getattr(config, role).path]


def kept_policy(config: Config, algorithm: Algorithm, run_dir: RunDir) -> str:
    """Directory of the policy before step 1; "" if the run keeps none."""
    return str(run_dir.kept_policy.absolute()) if keeps_policy(config, algorithm) else ""


def check_kept(config: Config, algorithm: Algorithm, run_dir: RunDir, what: str) -> None:
    """Check that the kept policy exists. ``what`` needs it, for the message. Errors: ConfigError."""
    if keeps_policy(config, algorithm) and not (run_dir.kept_policy / "config.json").is_file():
        whose = " and the ".join(_begin_as_policy(config, algorithm))
        raise ConfigError(f"{run_dir.kept_policy}, the {whose} of this run, is gone: {what} needs it; put it back")


def check_resumed(config: Config, algorithm: Algorithm, run_dir: RunDir, recorded: Mapping[str, Any]) -> None:
    """Check a run that goes on behind its first steps. ``recorded``: its settings so far, flat.

    Errors: ConfigError if a model would begin as another policy than it did, or as one that was not kept."""
    if not (roles := _begin_as_policy(config, algorithm)):
        return
    whose, number = " and the ".join(roles), recorded.get("sft.steps", 0)
    if bool(config.sft.steps) != bool(number):
        raise ConfigError(
            f"sft.steps = {config.sft.steps} is not what {run_dir.root} was begun with, {number}: the {whose} is the "
            f"policy as it was before step 1; give that, or set {roles[0]}.path"
        )
    algorithm_now = as_dict(config)["algorithm"]
    is_other = any(recorded.get(f"algorithm.{key}", value) != value for key, value in algorithm_now.items())
    if is_other and keeps_policy(config, algorithm) and not run_dir.kept_policy.exists():
        raise ConfigError(
            f"algorithm: the {whose} would be the policy as it was before step 1, which {run_dir.root} has not kept, "
            f"since its algorithm needed none: set {roles[0]}.path"
        )
    check_kept(config, algorithm, run_dir, "--resume")


async def keep_policy(config: Config, algorithm: Algorithm, run_dir: RunDir, meshes: Meshes) -> None:
    """Write the policy as it is now, and have the roles take it that begin as it.

    One that is there is of a run that ended before its first checkpoint, perhaps after other supervised steps."""
    if not (path := kept_policy(config, algorithm, run_dir)):
        return
    shutil.rmtree(run_dir.kept_policy, ignore_errors=True)
    with replacing(run_dir.kept_policy) as folder:
        await meshes.trainer.call(TrainerEndpoints.save_hf(HostPath(folder)))
    for role in _begin_as_policy(config, algorithm):
        await meshes.trainer.call(TrainerEndpoints.load_role(role, HostPath(path)))
        await meshes.roles.load_role(role, HostPath(path))
