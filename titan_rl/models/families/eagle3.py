"""EAGLE-3 (arXiv 2503.01840): a draft head of one layer, over what a policy's own layers found.

At a token it reads the token's embedding, which is the policy's, and three hidden states that the policy had at the
token before; it predicts the token after, as the policy does there:

    policy's states at t-1 ─▶ fc ─▶ hidden ─┐
    embedding of token t ───────────────────┴▶ layer ─▶ hidden at t ─▶ norm ─▶ head ─▶ token t+1

For the next token that it drafts, its own hidden state stands in the place of the policy's, which are not there yet.
Its attention sees what an engine has then: keys and values of the policy's states for the text, and its own for the
tokens of the draft. All drafts of a row are made at once: the second token of a draft, at each place, behind the first
that was drafted at the place before, and so on ("training-time test", section 3.2).

Dimensions: B rows, L tokens of a row, T = B L, D features, S chosen positions; N query heads, G heads of keys, H head
size; M segments of a block, Q queries and K keys of each; J tokens of a draft.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.model import BaseModel
from transformers import PreTrainedConfig

from titan_rl.config.model_directory.draft_heads import EMBEDDING, NUM_STATES, TABLES
from titan_rl.models.layers.attention import BlockPlan, PackedAttention, gather
from titan_rl.models.layers.cpu_attention import scaled_dot_product_attention
from titan_rl.models.layers.cpu_products import with_lean_linears
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
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


_UNSEEN = -1e9
"""Score of a key that is not there; a finite one, since other keys multiply it by zero."""


@dataclass(frozen=True)
class PolicyStates:
    """What a draft head reads of the policy, for the tokens of a row."""

    embedded_BLD: torch.Tensor
    hidden_BLD: torch.Tensor
    """The policy's hidden states side by side, [B, L, 3 D]."""
    before_L: torch.Tensor
    """The place in the row of the token before each; that of a text's first token is its own."""
    has_before_L: torch.Tensor


@dataclass(frozen=True)
class DraftPlan:
    """Attention of one token of a draft, at every place of a row."""

    plan: BlockPlan
    """Of the text."""
    places: list[torch.Tensor]
    """The place of the token m before each, for m = 0, 1, ..."""
    has_before_T: torch.Tensor
    """Whether a text has a token before each."""
    number: int
    """Of the token in its draft, from 0."""
    drafted: list[tuple[torch.Tensor, torch.Tensor] | None]
    """Keys and values [T, G, H] of each token of the draft at every place, of which attention fills in its own."""

    def own(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, values and presence [T] of the draft's tokens behind the first, as seen from each place."""
        seen = zip(self.drafted[1 : self.number + 1], reversed(self.places[: self.number]), strict=True)
        return [(each[0][at_T], each[1][at_T], self.has_before_T[at_T]) for each, at_T in seen if each is not None]


class DraftAttention(PackedAttention):
    """Attention to the text up to the draft's first token, and to the draft's own tokens behind that.

    A draft's tokens become keys that all queries have in common by one more feature each: a query has its score there,
    and the value gives back the probability, which weighs the token's own value.
    """

    _FEATURES = 8  # kernels want head sizes that are multiples of it

    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        pass

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (a draft's plan is another one)
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: DraftPlan,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        drafting = attention_masks
        q_TNH, k_TGH, v_TGH = (x_BLNH.flatten(0, 1) for x_BLNH in (q_BLNH, k_BLNH, v_BLNH))
        drafting.drafted[drafting.number] = k_TGH, v_TGH
        scale = float(self.scale or scale or q_TNH.shape[-1] ** -0.5)
        if not drafting.number:
            keywords: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            out_TNH = self._attention(q_TNH, k_TGH, v_TGH, drafting.plan, slice(None), **keywords)
        else:
            out_TNH = self._behind_the_text(q_TNH, drafting, scale)
        return out_TNH.view(q_BLNH.shape)

    def _behind_the_text(self, q_TNH: torch.Tensor, drafting: DraftPlan, scale: float) -> torch.Tensor:
        text = drafting.drafted[0]
        assert text is not None, "the first token comes first"
        k_TGH, v_TGH = text
        (heads, size), groups = q_TNH.shape[1:], k_TGH.shape[1]
        own, repeats = drafting.own(), heads // groups
        more = -(-len(own) // self._FEATURES) * self._FEATURES
        scores = [(q_TNH * key_TGH.repeat_interleave(repeats, dim=1)).sum(-1) for key_TGH, _, _ in own]
        are_there_TJ = torch.stack([is_there_T for _, _, is_there_T in own], dim=-1)
        score_TNJ = torch.stack(scores, dim=-1).masked_fill(~are_there_TJ[:, None], _UNSEEN)
        q_TNE = torch.cat([q_TNH, F.pad(score_TNJ, (0, more - len(own)))], dim=-1)
        k_TGE, v_TGE = (F.pad(x_TGH, (0, more)) for x_TGH in text)
        own_JE = F.pad(torch.eye(len(own), more, device=q_TNH.device, dtype=q_TNH.dtype), (size, 0))
        outputs = []
        for block in drafting.plan.blocks:
            own_MGJE = own_JE.expand(len(block.key_DK), groups, -1, -1)
            out_MNQE = scaled_dot_product_attention(
                gather(q_TNE, block.query_DQ),
                torch.cat([gather(k_TGE, block.key_DK), own_MGJE], dim=2),
                torch.cat([gather(v_TGE, block.key_DK), own_MGJE], dim=2),
                attn_mask=F.pad(block.sees_before(drafting.number), (0, len(own)), value=True)[:, None],
                scale=scale,
                enable_gqa=repeats > 1,
            )
            outputs.append(out_MNQE.transpose(1, 2).flatten(0, 1))
        out_TNE = torch.cat(outputs).index_select(0, drafting.plan.output_T)
        out_TNH = out_TNE[..., :size]
        for number, (_, value_TGH, _) in enumerate(own):
            out_TNH = out_TNH + out_TNE[..., size + number, None] * value_TGH.repeat_interleave(repeats, dim=1)
        return out_TNH


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


class Eagle3Head(PackedDecoder, Llama3Model):
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
        **statistics: Any,
    ) -> torch.Tensor:
        """Means of log-probabilities and entropies, [2, S], of ``num_drafts`` tokens that are drafted one by one."""
        assert logit_index_S is not None and attention_masks is not None, "rows are packed, and positions chosen"
        places = [torch.arange(tokens.shape[1], device=tokens.device)]
        for _ in range(num_drafts):
            places.append(states.before_L[places[-1]])
        drafted: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_drafts
        policy_BLD, outputs = self.fc(states.hidden_BLD), []
        hidden_BLD = policy_BLD
        for number in range(num_drafts):
            plan = DraftPlan(attention_masks, places, states.has_before_L, number, drafted)
            before_BLD = hidden_BLD[:, states.before_L]
            drafted_BLD = self.layers["0"](states.embedded_BLD, before_BLD, plan, positions)
            # of a text's first token a head has no state of its own
            hidden_BLD = torch.where(states.has_before_L[:, None], drafted_BLD, policy_BLD)
            chosen_SD = hidden_BLD.flatten(0, 1).index_select(0, logit_index_S)
            outputs.append(self.lm_head(self.norm(chosen_SD), **statistics))
        return torch.stack(outputs).mean(0)


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
