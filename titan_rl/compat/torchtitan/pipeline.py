"""How TorchTitan cuts a model into pipeline stages."""

from titan_rl.compat.reach import TORCHTITAN, Reach

REACHES = (
    Reach(
        "torchtitan.distributed.pipeline_parallel:_generate_llm_fqn_per_model_part",
        "know a model's pipeline stages before any process starts",
    ),
)
TORCHTITAN.require(REACHES)

from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part


def modules_of_stages(num_stages: int, num_layers: int, first_less: int, last_less: int) -> list[list[str]]:
    """Names of the modules in each stage; the first and the last have so many layers fewer. Errors: ValueError."""
    return _generate_llm_fqn_per_model_part(num_stages, num_layers, first_less, last_less)
