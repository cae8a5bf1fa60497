"""The meshes of a run, from its config: here actors, models and trainer settings meet, which the mesh does not know."""

from titan_rl.actors.classes import ACTORS
from titan_rl.config.schema import Config
from titan_rl.mesh.meshes import ActorClasses, Meshes
from titan_rl.models.device import DEVICE_TYPE
from titan_rl.models.spec import longest_rollout
from titan_rl.trainer.titan_config import TitanConfig


def make_meshes(
    config: Config, titan: TitanConfig, model_path: str, *, actors: ActorClasses = ACTORS, **options
) -> Meshes:
    """``options``: further keywords of Meshes."""
    return Meshes(
        config,
        model_path=model_path,
        world_size=titan.world_size,
        max_tokens=longest_rollout(titan.training.seq_len, model_path),
        on_cpu=DEVICE_TYPE == "cpu",
        actors=actors,
        **options,
    )
