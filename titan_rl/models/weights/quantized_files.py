"""FP8 weights and scales in Hugging Face directories, in forms that vLLM and transformers load. Pure.

    per block     ``fp8`` as DeepSeek-V3 has it: codes, and ``*.weight_scale_inv`` for each block
    per channel   ``compressed-tensors`` as llm-compressor writes it: codes, and ``*.weight_scale`` for each output
    per tensor    the same, with one scale

vLLM's ``fp8`` has no scales of channels; its scale of a whole tensor has a name that transformers' has not. What is
rounded, and how, is the caller's (generator/weights/quantization/e4m3.py): layers that an engine fuses are quantized as
one here, too, since they share scales there.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from titan_rl.config.sections.kinds import FP8_BLOCK, Quantization

_LINEAR = re.compile(r"(.*\.layers\.\d+\..*\.)(\w+)_proj\.weight")
"""A linear layer of a block, of all models that ``layers_without_fp8`` finds nothing in."""
_FUSED = {**dict.fromkeys("qkv", "qkv"), **dict.fromkeys(("gate", "up"), "gate_up")}
"""Layers that engines multiply as one, in this order, and what they are then. Some files have them so."""
_HEAD = "lm_head"
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}


@dataclass(frozen=True)
class Quantizer:
    """Quantization of linear layers as engines do it."""

    scheme: Quantization
    dtype: torch.dtype
    """Of the engine, to which weights are rounded before they are quantized."""
    codes_of: Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
    """Weight [O, I] and scheme to codes [O, I] and scales: [O, 1], or one for each block. ValueError if not finite."""

    def quantize(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Put codes and scales in the place of linear layers' weights. ``device``: where they are rounded.

        Errors: ValueError for a weight that is not finite."""
        fused = defaultdict(list)
        for name in filter(is_linear, tensors):
            fused[_fused_name(name)].append(name)
        for names in fused.values():
            if len(names) > 1:
                names.sort(key=lambda name: list(_FUSED).index(_part(name)))
            sizes = [len(tensors[name]) for name in names]
            try:
                whole = torch.cat([tensors.pop(name) for name in names]).to(device)
                codes, scales = (found.cpu() for found in self.codes_of(whole, self.scheme))
            except ValueError as error:
                raise ValueError(f"{' or '.join(names)} has {error}, which E4M3 has no scale for") from None
            for name, part, scale in zip(names, codes.split(sizes), self._scales(scales, sizes), strict=True):
                tensors[name] = part.clone()
                tensors[name + ("_scale_inv" if self.scheme == "fp8_per_block" else "_scale")] = scale.clone()

    def _scales(self, scales: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        """Scales of each layer of those fused."""
        if self.scheme == "fp8_per_tensor":
            return [scales[0] for _ in sizes]
        if self.scheme == "fp8_per_block":
            assert all(size % FP8_BLOCK == 0 for size in sizes[:-1]), "blocks that two layers share were refused"
            sizes = [-(-size // FP8_BLOCK) for size in sizes]
        return list(scales.split(sizes))

    @property
    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        if self.scheme == "fp8_per_block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": [_HEAD],
            }
        group = {
            "targets": ["Linear"],
            "weights": _E4M3 | {"strategy": self.scheme.removeprefix("fp8_per_"), "dynamic": False},
            "input_activations": _E4M3 | {"strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [_HEAD],
        }


def is_linear(name: str) -> bool:
    """Whether a tensor, by Hugging Face's name, is a weight that engines quantize."""
    return _LINEAR.fullmatch(name) is not None


def _part(name: str) -> str:
    found = _LINEAR.fullmatch(name)
    assert found is not None, "it is a linear layer"
    return found[2]


def _fused_name(name: str) -> str:
    return name.removesuffix(f"{_part(name)}_proj.weight") + _FUSED.get(_part(name), _part(name))
