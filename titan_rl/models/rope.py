"""Rotary embeddings with the frequencies that a Hugging Face config.json asks for.

TorchTitan's CosSinRoPE rotates halves, as Hugging Face does, so weights need no permutation. It has fewer scalings,
so the frequencies come from transformers.
"""

from dataclasses import dataclass

import torch
from torchtitan.models.common.rope import CosSinRoPE
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class HuggingFaceRoPE(CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        inv_freq: tuple[float, ...]
        """Inverse frequency of each pair of dimensions, ``dim / 2`` of them."""
        attention_scaling: float = 1.0
        """Factor on cosine and sine (YaRN)."""

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        angles = torch.outer(torch.arange(config.max_seq_len).float(), torch.tensor(config.inv_freq))
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * config.attention_scaling


def rope_config(hf: PreTrainedConfig, head_dim: int) -> HuggingFaceRoPE.Config:
    """Errors: ValueError for a rope type whose frequencies depend on the length at run time."""
    parameters = hf.rope_parameters
    rope_type, theta = parameters["rope_type"], parameters["rope_theta"]
    if rope_type == "default":
        inv_freq, scaling = 1.0 / (theta ** (torch.arange(0, head_dim, 2).float() / head_dim)), 1.0
    elif rope_type in ("linear", "llama3", "yarn"):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf)
    else:
        raise ValueError(f"rope type {rope_type!r} is not supported: use a model with default, linear, llama3 or yarn")
    return HuggingFaceRoPE.Config(
        dim=head_dim,
        max_seq_len=hf.max_position_embeddings,
        theta=theta,
        inv_freq=tuple(inv_freq.tolist()),
        attention_scaling=scaling,
    )
