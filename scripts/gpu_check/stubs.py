"""What a bare GPU machine lacks, stood in for: Monarch's actor class, a part of TorchTitan's, two names of torch 2.13.

Called before anything of titan_rl or TorchTitan is imported. In a rehearsal what is not on such a machine may not be
imported either, though it is installed.
"""

import sys
import types
from typing import Any

import torch
import torch.distributed.fsdp as fsdp

ABSENT = (
    *("vllm", "reasoning_gym", "jsonschema", "pyseccomp", "math_verify", "starlette", "uvicorn", "websockets", "gguf"),
    *("datasets", "torchdata", "wandb"),
)
"""Of what titan_rl and TorchTitan can use."""


def prepare(*, rehearse: bool) -> None:
    _stand_in("monarch", {})
    _stand_in("monarch.actor", {"Actor": object, "endpoint": lambda function: function})
    # it brings a data loader and trackers along, for one question whether something is one
    trainer = type("Trainer", (), {"Config": type("Config", (), {})})
    _stand_in("torchtitan.trainer", {"Trainer": trainer})
    if rehearse:
        for name in ABSENT:
            sys.modules[name] = None  # pyright: ignore[reportArgumentType] - so Python refuses to import it
    if not hasattr(fsdp, "DataParallelMeshDims"):
        _as_torch_2_13()


def _stand_in(name: str, contents: dict[str, Any]) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


def _as_torch_2_13() -> None:
    """FSDP2 may be told which mesh dimensions are whose; here it is not, since one rank has no others."""
    plain = fsdp.fully_shard

    def fully_shard(module: torch.nn.Module, *, dp_mesh_dims: object = None, **settings: Any) -> Any:
        if dp_mesh_dims is not None:
            raise NotImplementedError(f"torch {torch.__version__} knows no dp_mesh_dims")
        return plain(module, **settings)

    fsdp.fully_shard, fsdp.DataParallelMeshDims = fully_shard, type("DataParallelMeshDims", (), {})
