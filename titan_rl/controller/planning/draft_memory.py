"""A draft model's part of a run's memory, which the plan counts with the processes that hold it."""

from dataclasses import asdict, dataclass
from typing import Any

from titan_rl.controller.planning.memory_plan import GIB, GRADIENT, MOMENTS, WEIGHT, bytes_of, draft_of
from titan_rl.controller.preflight.checks import Checked
from titan_rl.mesh.channel.memory.region import NUM_SLOTS

_MIB = 2**20
_KINDS = {"draft_model": "draft model", "eagle3": "draft head", "mtp": "layer for multi-token prediction"}


@dataclass(frozen=True)
class DraftMemory:
    """Memory of a draft model in bytes."""

    kind: str
    parameters: int
    engine_bytes: int
    """Of each engine: weights, and the next ones if it learns."""
    trainer_bytes: int
    """Of each replica of the trainer; 0 for one that does not learn."""

    def __str__(self) -> str:
        trainer = f"trainer {_size(self.trainer_bytes)} (weights, gradients, moments, weights to send), "
        return (
            f"{self.kind}: {self.parameters:,} parameters; of the memory above {trainer if self.trainer_bytes else ''}"
            f"each engine {_size(self.engine_bytes)}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def draft_memory(checked: Checked) -> DraftMemory | None:
    """None where no weights draft."""
    config = checked.config
    if not config.has_generators or (drafting := draft_of(checked)) is None:
        return None
    learns, element = config.drafter.learns, bytes_of(config.generator.dtype)
    count, kind = drafting[1].parameters, _KINDS[config.generator.speculative.method]
    trained = count * (WEIGHT + GRADIENT + MOMENTS + NUM_SLOTS * element) if learns else 0
    return DraftMemory(kind, count, count * element * (1 + learns), trained)


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB / 10 else f"{number / _MIB:.1f} MiB"
