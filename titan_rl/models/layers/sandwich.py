"""Layers with sandwich normalization: norms before and after attention and feed-forward.

Outputs are normalized before they are added to the residual stream (arXiv 2105.13290, section 2.4), as in Gemma 3 and
GLM-4.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

NORMS = ("attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm")


class SandwichBlock(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        post_attention_norm: RMSNorm.Config
        post_ffn_norm: RMSNorm.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.post_attention_norm, self.post_ffn_norm = config.post_attention_norm.build(), config.post_ffn_norm.build()

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), attention_masks, positions))
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x)))


def shard_output_norms(layers: Iterable[Any], *, enable_sp: bool) -> None:
    """Declare the sharding of the norms that TorchTitan's own layers do not have."""
    for layer in layers:
        for norm in (layer.post_attention_norm, layer.post_ffn_norm):
            norm.sharding_config = norm_config(enable_sp=enable_sp)
