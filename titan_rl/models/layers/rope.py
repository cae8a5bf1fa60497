"""Rotary embeddings with the frequencies that a Hugging Face config.json asks for.

TorchTitan's CosSinRoPE rotates halves, as Hugging Face does, so weights need no permutation. It has fewer scalings,
so the frequencies come from transformers.
"""

from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import CosSinRoPE
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = ("linear", "llama3", "yarn", "longrope")
_caches: WeakValueDictionary[tuple, torch.Tensor] = WeakValueDictionary()
"""Live caches, by what determines them."""


class HuggingFaceRoPE(CosSinRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        inv_freq: tuple[float, ...]
        """Inverse frequency of each pair of dimensions, ``dim / 2`` of them."""
        attention_scaling: float = 1.0
        """Factor on cosine and sine (YaRN, LongRoPE)."""

    def _precompute_cache(self) -> torch.Tensor:
        """Cache shared by layers with the same frequencies: nothing writes to it."""
        config, device, dtype = self.config, torch.get_default_device(), torch.get_default_dtype()
        assert isinstance(config, HuggingFaceRoPE.Config)
        key = type(self), config.max_seq_len, config.inv_freq, config.attention_scaling, device, dtype
        cache = _caches.get(key)
        if cache is None or cache.device.type != device.type:  # a module that moves takes its buffers along
            cache = _caches[key] = self._cosines_and_sines()
        return cache

    def _cosines_and_sines(self) -> torch.Tensor:
        config = self.config
        assert isinstance(config, HuggingFaceRoPE.Config)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), torch.tensor(config.inv_freq))
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * config.attention_scaling

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys; head dimensions beyond the cache's ``dim`` stay."""
        dim = rope_cache.shape[-1] // 2
        if dim == query.shape[-1]:
            return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)
        new_query, new_key = CosSinRoPE.apply_rotary_emb(query[..., :dim], key[..., :dim], rope_cache)
        return torch.cat([new_query, query[..., dim:]], dim=-1), torch.cat([new_key, key[..., dim:]], dim=-1)


class InterleavedRoPE(HuggingFaceRoPE):
    """Rotary embedding of neighboring dimensions, as in GLM-4 and DeepSeek-V3.

    What it turns comes back in halves, of queries as of keys, which leaves their products as they are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = (_in_halves(x, rope_cache.shape[-1] // 2) for x in (query, key))
        return HuggingFaceRoPE.apply_rotary_emb(query, key, rope_cache)


class MultimodalRoPE(HuggingFaceRoPE):
    """Rotary embedding of which each section turns by a position of its own: of time, row or column.

    Source: M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceRoPE.Config):
        sections: tuple[int, ...] = ()
        """Pairs of dimensions that turn by each of the three positions, ``dim / 2`` in all."""

    def _reshape_cache(self, query: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Cosines and sines [1, L, 1, 2 dim] of positions [1, L, 3]; of [1, L] or none, as of text alone."""
        if positions is None or positions.ndim == 2:
            return super()._reshape_cache(query, positions)
        config = self.config
        assert isinstance(config, MultimodalRoPE.Config)
        axis_P = [axis for axis, count in enumerate(config.sections) for _ in range(count)]  # of each pair
        axis_C = torch.tensor(axis_P * (self.cache.shape[-1] // len(axis_P)), device=positions.device)
        index_LC = positions[0, :, axis_C]
        return self.cache.gather(0, index_LC)[None, :, None]


def _in_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of the first ``dim`` dimensions, the even ones before the odd ones."""
    return torch.cat([x[..., :dim:2], x[..., 1:dim:2], x[..., dim:]], dim=-1)


def num_positions(hf: PreTrainedConfig) -> int:
    """Number of positions that a model supports.

    LongRoPE has other frequencies beyond the positions of pre-training, for a whole sequence at once: a rollout that
    crosses that line would change under its own feet, so it must end there.
    """
    parameters = hf.rope_parameters
    if parameters.get("rope_type") == "longrope":
        return min(hf.max_position_embeddings, parameters["original_max_position_embeddings"])
    return hf.max_position_embeddings


def cut_positions(model_config: Decoder.Config, num_positions: int) -> None:
    """Limit the rotary caches of a model's config to the positions of a run.

    They are held in fp32: of 131,072 positions and heads of 128 that is 128 MiB. Frequencies stay as they are.
    """
    for layer in model_config.layers:
        attention = getattr(layer, "attention", None)
        rope = getattr(attention, "rope", None)
        if attention is not None and rope:  # a family of the user's own may have layers without
            attention.rope = replace(rope, max_seq_len=min(rope.max_seq_len, num_positions))


def rope_config(
    hf: PreTrainedConfig,
    head_dim: int,
    layer_type: str | None = None,
    rope: type[HuggingFaceRoPE] = HuggingFaceRoPE,
) -> HuggingFaceRoPE.Config:
    """Config of the rotary embedding; ``layer_type``: selects parameters that differ by type.

    Errors: ValueError for a rope type whose frequencies depend on the length at run time, and for an odd number of
    turned dimensions.
    """
    parameters = hf.rope_parameters[layer_type] if layer_type else hf.rope_parameters
    rope_type, theta = parameters["rope_type"], parameters["rope_theta"]
    dim, scaling = int(head_dim * parameters.get("partial_rotary_factor", 1.0)), 1.0
    if dim % 2:
        raise ValueError(f"partial_rotary_factor of {head_dim} dimensions are {dim}, and rotary embeddings turn pairs")
    if rope_type == "default":
        inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    elif rope_type in _FIXED:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf, layer_type=layer_type)
    else:
        raise ValueError(
            f"rope type {rope_type!r} is not supported: use a model with default, {', '.join(_FIXED[:-1])} or longrope"
        )
    return rope.Config(
        dim=dim,
        max_seq_len=num_positions(hf),
        theta=theta,
        inv_freq=tuple(inv_freq.tolist()),
        attention_scaling=scaling,
    )
