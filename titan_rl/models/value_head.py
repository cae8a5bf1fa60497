"""Value heads on any model family, for critics and reward models.

A head maps the last hidden states to one value in fp32. It stands where the output head stood, under TorchTitan's name
of it, so that FSDP, tensor parallelism and pipelines need to know nothing of it; it is never the embeddings. In a
directory it is ``score.weight``, as transformers' ``AutoModelForSequenceClassification`` has it for one label.

Dimensions: S chosen positions, D features.
"""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from titan_rl.config.model_directory.directory import read_object, stored_tensors
from titan_rl.config.model_directory.weight_checks import VALUE_HEAD, check_value_names
from titan_rl.models.layers.layer_configs import FROM_FILE
from titan_rl.models.weights.hf_weights import load_hf, model_tensors, save_hf
from titan_rl.models.weights.shards import Shard, decoder_of, expected_shapes


class ValueHead(Linear):
    """Values [S] in fp32 of hidden states [S, D].

    Arguments of a vocabulary head (targets, temperature) are ignored. Replicated on all tensor-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        out_features: int = 1

        def shard(self) -> None:
            whole = {"input": dense_activation_placement(tp=spmd.R)}
            self.sharding_config = ShardingConfig(
                state_shardings={"weight": dense_param_placement(tp=spmd.I)},
                in_src_shardings=whole,
                in_dst_shardings=whole,
            )

    def forward(self, input: torch.Tensor, **_: Any) -> torch.Tensor:
        weight = self.weight
        if isinstance(weight, DTensor):
            assert isinstance(input, DTensor)
            input, weight = input.to_local(), weight.to_local()
        return input.float() @ weight.float()[0]


def value_spec(spec: ModelSpec) -> ModelSpec:
    """Copy of a spec with a value head."""
    assert spec.state_dict_adapter is not None
    head = ValueHead.Config(in_features=decoder_of(spec).dim, param_init=FROM_FILE)
    model = replace(copy.deepcopy(decoder_of(spec)), lm_head=head, enable_weight_tying=False)
    return replace(spec, model=model, state_dict_adapter=_value_names(spec.state_dict_adapter))


def check_has_classifier(model_type: str) -> None:
    """Errors: ValueError for a model type without a class for sequence classification in transformers."""
    if model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(
            f"model type {model_type!r} has no class for sequence classification in transformers, so nobody could load "
            f"a critic or reward model of it: take one of another family"
        )


def has_value_head(spec: ModelSpec) -> bool:
    return isinstance(decoder_of(spec).lm_head, ValueHead.Config)


def _value_names(names: type) -> type:
    """A state-dict adapter that knows the head by its name in a directory."""

    class ValueNames(names):
        def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
            super().__init__(model_config, hf_assets_path)
            others = {
                hf_name: titan_name
                for hf_name, titan_name in self.from_hf_map.items()
                if titan_name != "lm_head.weight"
            }
            self.from_hf_map = others | {VALUE_HEAD: "lm_head.weight"}

    return ValueNames


def check_value_weights(spec: ModelSpec, path: str | Path) -> None:
    """Check a directory for a value model; ``spec``: with a value head.

    Errors: ValueError if it holds neither such a model nor one that differs by its head alone."""
    check_value_names(model_tensors(spec, path), expected_shapes(spec))


@torch.no_grad()
def load_value_model(shards: list[Shard], path: str | Path) -> dict[str, torch.dtype]:
    """``load_hf`` for a model with a value head; where the directory has none, every value is 0 at first.

    A head of zeros needs no seed and is the same for every layout. Its own gradient is not zero, so it learns from the
    first step on, and what is below it from the second.
    """
    stored = stored_tensors(path)
    heads = [shard for shard in shards if shard.name == VALUE_HEAD and VALUE_HEAD not in stored]
    for shard in heads:
        shard.tensor.zero_()
    dtypes = load_hf([shard for shard in shards if shard not in heads], path)
    return dtypes | {shard.name: torch.float32 for shard in heads}


def save_value_model(
    shards: list[Shard], source: Path, out: Path, dtypes: dict[str, torch.dtype], device: torch.device
) -> None:
    """``save_hf`` for a model with a value head: transformers loads it as ``AutoModelForSequenceClassification``."""
    save_hf(shards, source, out, dtypes, device)
    if not dist.get_rank():
        config = read_object(out / "config.json")
        (out / "config.json").write_text(json.dumps(config | _one_label(config), indent=2) + "\n")


def _one_label(config: dict) -> dict:
    """What a config.json says of a model with a value head."""
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config["model_type"])
    updated = {"architectures": [name]} if name else {}
    return updated | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
