"""Qwen2.5-VL (arXiv 2502.13923): Qwen2 with rotary positions of three axes, behind transformers' vision tower.

Dimensions: B rows, L tokens of a row, D features, N patches of a row's images, I tokens of its images.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.rope import MultimodalRoPE, rope_config
from titan_rl.models.weights.names import Names


@dataclass(frozen=True)
class ImageInputs:
    """Images of a row, as its vision tower takes them."""

    patches: torch.Tensor
    """[N, numbers of a patch]"""
    grid: torch.Tensor
    """int64 [images, 3]: frames, rows and columns of patches."""
    places_I: torch.Tensor
    """int64: tokens of the row that stand for them."""


class VisionTower(Module):
    """transformers' tower, with states as TorchTitan initializes them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        hf: PreTrainedConfig
        """``vision_config`` of config.json."""
        is_trained: bool = True
        """False below adapters, which the language model alone has."""

    def __init__(self, config: Config):
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        super().__init__()
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(config.hf).requires_grad_(config.is_trained)

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        """Frequencies of the rotary embedding."""
        rotary = self.tower.rotary_pos_emb
        device = buffer_device or rotary.inv_freq.device
        for name in ("inv_freq", "original_inv_freq"):
            setattr(rotary, name, rotary.compute_axial_rope_parameters(self.tower.config, device)[0])

    def forward(self, images: ImageInputs) -> torch.Tensor:
        """Embeddings of the images' tokens, [I, D]."""
        return self.tower(images.patches, grid_thw=images.grid).pooler_output


def recompute_tower(model: torch.nn.Module) -> None:
    """Checkpoint the activations of a model's tower, if it has one that learns; TorchTitan does it of the decoder's
    layers."""
    for module in model.modules():
        if isinstance(module, VisionTower) and next(module.parameters()).requires_grad:
            module.tower.gradient_checkpointing_enable({"use_reentrant": False})


class PackedQwen25VL(PackedDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        visual: VisionTower.Config | None = None
        sequence_parallel: bool = True

    def __init__(self, config: Config):
        super().__init__(config)
        assert config.visual is not None, "the family's config has one"
        self.visual = config.visual.build()
        self._images: ImageInputs | None = None

    def forward(
        self, tokens: torch.Tensor, *args: Any, images: ImageInputs | None = None, **kwargs: Any
    ) -> torch.Tensor:
        with self._seeing(images):
            return super().forward(tokens, *args, **kwargs)

    @contextmanager
    def _seeing(self, images: ImageInputs | None) -> Iterator[None]:
        self._images = images
        try:
            yield
        finally:
            self._images = None

    def _enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Embeddings of a row's tokens [B, L, D], those of images by the tower."""
        hidden = super()._enter(inputs)
        if (images := self._images) is None:
            return hidden
        seen_ID = self.visual(images)
        if not len(images.places_I):  # ranks call the tower together, and this one has nothing to show
            return hidden + 0.0 * seen_ID.sum().to(hidden.dtype)
        return hidden.index_copy(1, images.places_I, seen_ID[None].to(hidden.dtype))


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer, qkv_bias=True)
    sections = tuple(hf.rope_parameters["mrope_section"])
    if sum(sections) * 2 != layer_configs.head_size(hf):
        raise ValueError(f"mrope_section = {list(sections)} of heads of {layer_configs.head_size(hf)} dimensions")
    config.rope = rope_config(hf, layer_configs.head_size(hf), rope=MultimodalRoPE)
    assert isinstance(config.rope, MultimodalRoPE.Config)
    config.rope.sections = sections
    return config


def qwen2_5_vl_config(hf: PreTrainedConfig) -> PackedQwen25VL.Config:
    """``hf``: of ``with_text_sizes``."""
    config = decoder_config(hf, model=PackedQwen25VL, block=Llama3TransformerBlock, attention=attention)
    assert isinstance(config, PackedQwen25VL.Config)
    config.visual = VisionTower.Config(hf=hf.vision_config)
    return config


def with_text_sizes(hf: PreTrainedConfig) -> PreTrainedConfig:
    """A vision model's config with the sizes of its language model, as other families have them."""
    text = hf.get_text_config()
    names = ("model_type", "tie_word_embeddings", "vision_config", "image_token_id")
    vars(text).update({name: getattr(hf, name) for name in names})
    return text


class Qwen25VLNames(Names):
    """Those of Qwen2, and the tower's own."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        assert isinstance(model_config, PackedQwen25VL.Config) and model_config.visual is not None
        with torch.device("meta"):
            tower = model_config.visual.build().tower
        for name, _ in tower.named_parameters():
            template = re.sub(r"\d+", "{}", name, count=1)
            self.from_hf_map[f"visual.{template}"] = f"visual.tower.{template}"
