"""EAGLE-3 (arXiv 2503.01840): a draft head of one layer, over what a policy's own layers found.

At a token it reads the token's embedding, which is the policy's, and three hidden states that the policy had at the
token before; it predicts the token after, as the policy does there:

    policy's states at t-1 ─▶ fc ─▶ hidden ─┐
    embedding of token t ───────────────────┴▶ layer ─▶ hidden at t ─▶ norm ─▶ head ─▶ token t+1

How the tokens behind it are drafted is in drafting.py.

Dimensions: B rows, L tokens of a row, D features, S chosen positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.model import BaseModel
from transformers import PreTrainedConfig

from titan_rl.config.model_directory.draft_heads import EMBEDDING, NUM_STATES, TABLES
from titan_rl.models.families.drafting import DraftAttention, DraftDecoder, DraftPlan, PolicyStates
from titan_rl.models.layers.attention import BlockPlan
from titan_rl.models.layers.cpu_products import with_lean_linears
from titan_rl.models.layers.decoder import decoder_config
from titan_rl.models.layers.layer_configs import FROM_FILE, layer_config, norm
from titan_rl.models.weights.names import Names

_LAYER = {
    **{f"self_attn.{name}_proj": f"attention.qkv_linear.w{name}" for name in "qkv"},
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "hidden_norm": "hidden_norm",
    "post_attention_layernorm": "ffn_norm",
}


class Eagle3Block(TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        hidden_norm: RMSNorm.Config

    def __init__(self, config: Config):
        super().__init__()
        assert config.feed_forward is not None
        self.attention, self.feed_forward = config.attention.build(), config.feed_forward.build()
        self.attention_norm, self.hidden_norm = config.attention_norm.build(), config.hidden_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(
        self,
        embedded_BLD: torch.Tensor,
        hidden_BLD: torch.Tensor,
        attention_masks: DraftPlan,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs = torch.cat([self.attention_norm(embedded_BLD), self.hidden_norm(hidden_BLD)], dim=-1)
        hidden_BLD = hidden_BLD + self.attention(inputs, attention_masks, positions)
        return hidden_BLD + self.feed_forward(self.ffn_norm(hidden_BLD))


class Eagle3Head(DraftDecoder, Llama3Model):
    """Statistics of tokens as they are drafted, averaged over the first, second, ... token of a draft."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        sequence_parallel: bool = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.tok_embeddings = None  # the policy's
        fc = Linear.Config(in_features=NUM_STATES * config.dim, out_features=config.dim, param_init=FROM_FILE)
        self.fc = with_lean_linears(fc).build()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a head cannot do without the policy's states)
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: BlockPlan | None = None,
        logit_index_S: torch.Tensor | None = None,
        *,
        states: PolicyStates,
        num_drafts: int,
        target_S: torch.Tensor,
        **statistics: Any,
    ) -> torch.Tensor:
        """Means of log-probabilities and entropies, [2, S], of ``num_drafts`` tokens that are drafted one by one."""
        assert logit_index_S is not None and attention_masks is not None, "rows are packed, and positions chosen"
        policy_BLD = self.fc(states.hidden_BLD)
        drafts = self.drafts(policy_BLD, states, attention_masks, positions, logit_index_S, num_drafts)
        return self.mean_statistics(self.lm_head, drafts, target_S, **statistics)


class Eagle3Names(Names):
    ignored = (*TABLES, EMBEDDING)

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        layer = {f"midlayer.{theirs}.weight": f"layers.{{}}.{ours}.weight" for theirs, ours in _LAYER.items()}
        self.from_hf_map = layer | {f"{name}.weight": f"{name}.weight" for name in ("fc", "norm", "lm_head")}


def _layer(hf: PreTrainedConfig, number: int, **_: Any) -> Eagle3Block.Config:
    """The only layer, whose attention reads embeddings beside hidden states."""
    common = layer_config(hf, number, block=TransformerBlock)
    linear = common.attention.qkv_linear
    assert isinstance(linear, QKVLinear.Config)
    linear.wq.in_features = linear.wkv.in_features = 2 * hf.hidden_size
    common.attention.inner_attention = DraftAttention.Config()
    parts = {name: getattr(common, name) for name in ("attention", "feed_forward", "attention_norm", "ffn_norm")}
    return Eagle3Block.Config(**parts, hidden_norm=norm(hf, hf.hidden_size))


def eagle3_config(hf: PreTrainedConfig) -> Eagle3Head.Config:
    """TorchTitan's config of a head."""
    config = decoder_config(hf, model=Eagle3Head, block=Eagle3Block, layer=_layer)
    assert isinstance(config, Eagle3Head.Config)
    config.enable_weight_tying = False  # whatever config.json says: embeddings are the policy's
    config.lm_head.out_features = getattr(hf, "draft_vocab_size", None) or hf.vocab_size
    return config
