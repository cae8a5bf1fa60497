"""The pull plan for DeepSeek-V3: a trainer of EP64 x PP8, a generator of TP64, sizes only.

vLLM's own DeepSeek-V3 is built on the meta device, as each of its 64 tensor-parallel ranks would build it, with one
layer of each kind, and its own loader is recorded; equal layers share a recording. The trainer's side is defined
here: each of 8 pipeline stages has 64 ranks, each with 4 experts of every layer and 1/64 of the rows of everything
else (FSDP2).

Run as a program, on one core, it prints one JSON object.
"""

import json
import os
import resource
import sys
import tempfile
import time
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from titan_rl.mesh.channel.plan import Interner, Units

_STAGES, _EXPERT_RANKS, _TENSOR_RANKS = 8, 64, 64
_LAYERS, _DENSE_LAYERS, _EXPERTS = 61, 3, 256
NETWORK_BYTES_PER_SECOND = 50e9
"""Of one GPU's network card: 400 Gb/s."""
READ_SECONDS = 20e-6
"""Overhead of one RDMA read."""


def _shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the checkpoint, as its config.json gives them: embedding, a dense and an expert layer, head."""
    hidden, dense, expert, vocabulary = 7168, 18432, 2048, 129280
    heads, nope, rope, value, query_rank, kv_rank = 128, 128, 64, 128, 1536, 512
    attention = {
        "self_attn.q_a_proj.weight": (query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), query_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }

    def mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width),
        }

    router = {"mlp.gate.weight": (_EXPERTS, hidden), "mlp.gate.e_score_correction_bias": (_EXPERTS,)}
    experts = {name: shape for index in range(_EXPERTS) for name, shape in mlp(f"mlp.experts.{index}", expert).items()}
    layers = [
        attention | mlp("mlp", dense),
        attention | router | mlp("mlp.shared_experts", expert) | experts,
    ]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index, layer in enumerate(layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


class _Ranks:
    """Replaces a vLLM process group in which this process is one rank. Nothing is ever sent."""

    class _Group:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = (lambda: rank), (lambda: size)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.local_rank = self.rank_in_group = rank
        self.world_size, self.ranks = size, list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = self._Group(rank, size)


def _vllm_config(folder: str) -> "VllmConfig":
    from transformers import DeepseekV3Config
    from vllm.engine.arg_utils import EngineArgs

    DeepseekV3Config(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        topk_method="noaux_tc",  # pyright: ignore[reportCallIssue] - kept for vLLM, though transformers does not know it
        architectures=["DeepseekV3ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return EngineArgs(
        model=folder, dtype="bfloat16", max_model_len=1024, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 28
    ).create_engine_config()


def generator_needs(interner: "Interner") -> "list[Units]":
    """Needs of each tensor-parallel rank, as recorded from vLLM's loader."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from titan_rl.compat.vllm.parallel import set_parallel_groups
    from titan_rl.generator.weights.vllm_recording import needs, record_on_meta

    checkpoint = list(_shapes().items())
    everyone = []
    with tempfile.TemporaryDirectory() as folder:
        config = _vllm_config(folder)
        for rank in range(_TENSOR_RANKS):
            set_parallel_groups(_Ranks(rank, _TENSOR_RANKS), alone=_Ranks(0, 1))
            config.compilation_config.static_forward_context.clear()
            with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                model = initialize_model(config)
            everyone.append(_all_layers(needs(record_on_meta(model, checkpoint), interner)))
    return everyone


def _all_layers(units: "Units") -> "Units":
    kinds = [units["model.layers.0."]] * _DENSE_LAYERS + [units["model.layers.1."]] * (_LAYERS - _DENSE_LAYERS)
    return {"": units[""]} | {f"model.layers.{index}.": kind for index, kind in enumerate(kinds)}


def stage_starts(sizes: list[int]) -> list[int]:
    """First layer of each stage, such that the largest stage is as small as possible."""
    ends = [0, *accumulate(sizes)]
    low, high = max(sizes), ends[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(ends, middle)) <= _STAGES else (middle + 1, high)
    return _fill(ends, low)


def _fill(ends: list[int], limit: int) -> list[int]:
    starts = [0]
    for layer in range(1, len(ends)):
        if ends[layer] - ends[starts[-1]] > limit:
            starts.append(layer - 1)
    return starts


def trainer_holdings(interner: "Interner") -> "list[Units]":
    """Holdings of each rank, stage by stage; the embedding is in the first stage, norm and head in the last."""
    import math

    from titan_rl.mesh.channel.plan import Box, Holding, split_name

    kinds: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in _shapes().items():
        unit, short = split_name(name)
        kinds.setdefault(unit, {})[short] = shape
    layers = [kinds["model.layers.0."]] * _DENSE_LAYERS + [kinds["model.layers.1."]] * (_LAYERS - _DENSE_LAYERS)
    starts = stage_starts([sum(map(math.prod, layer.values())) for layer in layers])

    def of_rank(layer: dict[str, tuple[int, ...]], rank: int) -> tuple:
        held = []
        for name, shape in layer.items():
            if name.startswith("mlp.experts."):
                if int(name.split(".")[2]) * _EXPERT_RANKS // _EXPERTS == rank:
                    held.append(Holding(name, Box((0, 0), shape)))
            else:
                rows = shape[0] // _EXPERT_RANKS
                held.append(Holding(name, Box((rank * rows,) + (0,) * (len(shape) - 1), (rows, *shape[1:]))))
        return interner.intern(tuple(held))

    ranks = []
    for stage in range(_STAGES):
        first, last = starts[stage], [*starts[1:], _LAYERS][stage]
        ends = ["model.embed_tokens.weight"] * (stage == 0)
        ends += ["model.norm.weight", "lm_head.weight"] * (stage == _STAGES - 1)
        outside = {name: kinds[""][name] for name in ends}
        for rank in range(_EXPERT_RANKS):
            of_kind = {id(layer): of_rank(layer, rank) for layer in layers[first:last]}
            units = {f"model.layers.{n}.": of_kind[id(layers[n])] for n in range(first, last)}
            ranks.append(units | ({"": of_rank(outside, rank)} if outside else {}))
    return ranks


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from titan_rl.mesh.channel.plan import Interner, Plan

    interner = Interner()
    start = time.perf_counter()
    needs = generator_needs(interner)
    recorded = time.perf_counter()
    plan = Plan(trainer_holdings(interner), needs)
    sent = [0] * plan.num_holders
    received, reads = [], []
    for reader in range(_TENSOR_RANKS):
        taken = plan.reads(reader, 0).reads
        for read in taken:
            sent[read.holder] += read.nbytes
        received.append(sum(read.nbytes for read in taken))
        reads.append(len(taken))
    seconds = max(
        max(received) / NETWORK_BYTES_PER_SECOND + max(reads) * READ_SECONDS, max(sent) / NETWORK_BYTES_PER_SECOND
    )
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - start,
                "seconds_recording": recorded - start,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "sent_max_over_mean": max(sent) * len(sent) / sum(sent),
                "received_max_over_mean": max(received) * len(received) / sum(received),
                "gigabytes_in_all": sum(received) / 1e9,
                "gigabytes_received_each": max(received) / 1e9,
                "gigabytes_sent_each": max(sent) / 1e9,
                "reads_each": max(reads),
                "plans_shared": plan.num_shared,
                "predicted_seconds": seconds,
            }
        )
    )


ENVIRONMENT = {"VLLM_MLA_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""vLLM has no MLA attention for CPUs; without it the weights are the same, and plain attention is used."""

if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    sys.exit(main())
