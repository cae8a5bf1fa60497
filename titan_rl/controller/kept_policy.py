"""The policy as it was when reinforcement learning began: what it is compared with, if supervised steps came before.

It is written once, as a Hugging Face directory in the run directory, so whoever serves as the reference finds it there:
ranks that replace others, a run that is resumed, a replay.
"""

from titan_rl.algorithms.base import Algorithm
from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.data.files import replacing
from titan_rl.mesh.meshes import Meshes
from titan_rl.records.rundir import RunDir


def keeps_policy(config: Config, algorithm: Algorithm) -> bool:
    """Whether the reference is no directory that was there before."""
    begins_elsewhere = config.sft.steps > 0 or bool(config.lora.adapter)
    return algorithm.needs.reference and not config.reference.path and begins_elsewhere


def kept_policy(config: Config, algorithm: Algorithm, run_dir: RunDir) -> str:
    """Where it is, or will be; "" if the run keeps none."""
    return str(run_dir.kept_policy.absolute()) if keeps_policy(config, algorithm) else ""


def check_kept(config: Config, algorithm: Algorithm, run_dir: RunDir, what: str) -> None:
    """``what``: cannot be done without it. Errors: ConfigError if the policy was kept, and is gone."""
    if keeps_policy(config, algorithm) and not (run_dir.kept_policy / "config.json").is_file():
        raise ConfigError(f"{run_dir.kept_policy}, the reference of this run, is gone: {what} needs it; put it back")


async def keep_policy(config: Config, algorithm: Algorithm, run_dir: RunDir, meshes: Meshes) -> None:
    """Write the policy as it is now, unless that was done, and have the reference take it."""
    if not (path := kept_policy(config, algorithm, run_dir)):
        return
    if not run_dir.kept_policy.exists():
        with replacing(run_dir.kept_policy) as folder:
            await meshes.trainer.call("save_hf", str(folder))
    await meshes.trainer.call("load_role", "reference", path)
    await meshes.roles.load_role("reference", path)
