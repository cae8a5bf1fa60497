"""Construction of a rank's part of a sharded model from its spec, by TorchTitan."""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titan_rl.compat.torch.pipelining import stages_of
from titan_rl.models.compiling import allow_graphs
from titan_rl.models.families.qwen2_5_vl import recompute_tower
from titan_rl.models.float8 import convert_to_float8
from titan_rl.models.spec import apply_parallelism
from titan_rl.models.weights.lora import skip_adapter_init
from titan_rl.models.weights.shards import decoder_of
from titan_rl.trainer.model.determinism import set_determinism
from titan_rl.trainer.model.layout import stage_modules
from titan_rl.trainer.model.pipeline import Pipeline
from titan_rl.trainer.titan_config import TitanConfig


def parallel_model(
    spec: ModelSpec, titan: TitanConfig, parallel_dims: ParallelDims, device: torch.device
) -> tuple[list[torch.nn.Module], Pipeline | None]:
    """Model parts: one, or this rank's stages of a pipeline.

    They are built on the meta device, sharded, and then get memory, but no weights yet.
    """
    set_determinism(titan.debug.deterministic, device)
    emulate, compiles = device.type == "cpu", titan.compile.enable
    convert_to_float8(decoder_of(spec), titan.float8, emulate=emulate, compiles=compiles)
    apply_parallelism(spec, titan.parallelism, titan.training)
    with torch.device("meta"):
        model = spec.model.build()
    skip_adapter_init(model)
    if titan.compile.enable:
        allow_graphs()
    common: dict[str, Any] = dict(
        parallel_dims=parallel_dims,
        training=titan.training,
        parallelism=titan.parallelism,
        compile_config=titan.compile,
        ac_config=titan.activation_checkpoint,
        dump_folder=".",
    )
    pipeline = None
    if parallel_dims.pp_enabled:
        parts, pipeline = _pipeline(spec, model, titan, parallel_dims, device, common)
    else:
        parts = [spec.parallelize_fn(model, **common)]
    for part in parts:
        if titan.activation_checkpoint is not None:
            recompute_tower(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                _set_reduction(module, parallel_dims, device)
        part.to_empty(device=device)
        with torch.no_grad():
            assert isinstance(part, Module)
            part.init_states(buffer_device=None)
        part.train()
    return parts, pipeline


def _set_reduction(module: FSDPModule, parallel_dims: ParallelDims, device: torch.device) -> None:
    """How gradients are added up over ranks; TorchTitan has had them divided by 1."""
    if device.type == "cpu":
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    if parallel_dims.dp_replicate * parallel_dims.dp_shard * parallel_dims.cp == 1:
        # where nothing is added up, that would cost a pass over each; torch's annotation leaves None out, its default
        module.set_gradient_divide_factor(None)  # pyright: ignore[reportArgumentType]


def _pipeline(
    spec: ModelSpec,
    model: torch.nn.Module,
    titan: TitanConfig,
    parallel_dims: ParallelDims,
    device: torch.device,
    common: dict[str, Any],
) -> tuple[list[torch.nn.Module], Pipeline]:
    """TorchTitan cuts and shards the stages. Its schedule is for one shape of batch, so it is not used."""
    parallelism, training = titan.parallelism, titan.training
    num_stages = len(stage_modules(parallelism, len(decoder_of(spec).layers)))
    assert spec.pipelining_fn is not None
    schedule, parts, _, _ = spec.pipelining_fn(
        model,
        device=device,
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=None,
        **common | {"training": replace(training, local_batch_size=num_stages)},
    )
    stages = stages_of(schedule)
    return parts, Pipeline(
        {stage.stage_index: stage.submod for stage in stages},
        num_stages,
        schedule=parallelism.pipeline_parallel_schedule,
        group=parallel_dims.get_mesh("pp").get_group(),
        device=device,
        hidden_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
    )
