"""GLM-4.5's layer for multi-token prediction (arXiv 2412.19437, section 2.2; arXiv 2508.06471), by which it drafts.

At a token it reads the token's embedding and the hidden state that the policy ended with at the token before; it
predicts the token after, by the policy's own output head:

    policy's last state at t-1 ─▶ hnorm ─┐
    embedding of token t ─────────▶ enorm ┴▶ eh_proj ─▶ block ─▶ hidden at t ─▶ norm ─▶ policy's head ─▶ token t+1

How the tokens behind it are drafted is in drafting.py.

Dimensions: B rows, L tokens of a row, D features, S chosen positions; J tokens of a draft.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.model import BaseModel
from transformers import PreTrainedConfig

from titan_rl.models.families.drafting import DraftAttention, DraftDecoder, DraftPlan, PolicyStates
from titan_rl.models.families.glm4 import moe_layer_config
from titan_rl.models.layers.attention import BlockPlan
from titan_rl.models.layers.decoder import decoder_config
from titan_rl.models.layers.layer_configs import FROM_FILE, norm
from titan_rl.models.layers.moe import ExpertBlock
from titan_rl.models.weights.names import Names

_OF_BLOCK = ("enorm", "hnorm", "eh_proj")


class PredictionBlock(ExpertBlock):
    """A block of the policy's, behind what joins a hidden state and an embedding."""

    @dataclass(kw_only=True, slots=True)
    class Config(ExpertBlock.Config):
        enorm: RMSNorm.Config
        hnorm: RMSNorm.Config
        eh_proj: Linear.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.enorm, self.hnorm, self.eh_proj = (getattr(config, name).build() for name in _OF_BLOCK)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it reads two states)
        self,
        embedded_BLD: torch.Tensor,
        hidden_BLD: torch.Tensor,
        attention_masks: DraftPlan,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        joined = torch.cat([self.enorm(embedded_BLD), self.hnorm(hidden_BLD)], dim=-1)
        plan: Any = attention_masks  # which the block hands to attention as it is
        return super().forward(self.eh_proj(joined), plan, positions)


class PredictionLayer(DraftDecoder, Qwen3Model):
    """Statistics of tokens as they are drafted, averaged over the first, second, ... token of a draft."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True
        number: int = 0
        """Of the layer, behind the policy's own."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.tok_embeddings = self.lm_head = None  # the policy's
        [layer] = self.layers.values()
        self.layers = type(self.layers)({str(config.number): layer})

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (it cannot do without the policy's states)
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: BlockPlan | None = None,
        logit_index_S: torch.Tensor | None = None,
        *,
        states: PolicyStates,
        num_drafts: int,
        head: Callable[..., torch.Tensor],
        target_S: torch.Tensor,
        **statistics: Any,
    ) -> torch.Tensor:
        """Means of log-probabilities and entropies, [2, S], of ``num_drafts`` tokens that are drafted one by one.

        ``head``: the policy's."""
        assert logit_index_S is not None and attention_masks is not None and positions is not None, "rows are packed"
        # vLLM masks what is read at a text's first hidden state
        states = states.without_embeddings(positions == 1)
        drafts = self.drafts(states.hidden_BLD, states, attention_masks, positions, logit_index_S, num_drafts)
        return self.mean_statistics(head, drafts, target_S, **statistics)


class PredictionNames(Names):
    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        assert isinstance(model_config, PredictionLayer.Config)
        layer = {hf: titan for hf, titan in self.from_hf_map.items() if hf.startswith("model.layers.")}
        layer |= {f"model.layers.{{}}.{name}.weight": f"layers.{{}}.{name}.weight" for name in _OF_BLOCK}
        self.from_hf_map = layer | {f"model.layers.{model_config.number}.shared_head.norm.weight": "norm.weight"}


def _layer(hf: PreTrainedConfig, number: int) -> PredictionBlock.Config:
    common, width = moe_layer_config(hf, number, block=ExpertBlock), hf.hidden_size
    common.attention.inner_attention = DraftAttention.Config()
    return PredictionBlock.Config(
        **{field.name: getattr(common, field.name) for field in fields(ExpertBlock.Config)},
        enorm=norm(hf, width),
        hnorm=norm(hf, width),
        eh_proj=Linear.Config(in_features=2 * width, out_features=width, param_init=FROM_FILE),
    )


def prediction_layer_config(hf: PreTrainedConfig) -> PredictionLayer.Config:
    """TorchTitan's config of the first such layer. ``hf``: the policy's."""
    one, number = copy(hf), hf.num_hidden_layers
    one.num_hidden_layers = 1
    config = decoder_config(
        one, model=PredictionLayer, block=ExpertBlock, layer=lambda hf, *_, **__: _layer(hf, number)
    )
    assert isinstance(config, PredictionLayer.Config)
    config.number = number
    return config
