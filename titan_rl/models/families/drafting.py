"""What draft heads share: the policy's states, which they read, and attention as while an engine drafts.

At a token a head reads the token's embedding, which is the policy's, and what the policy found at the token before. For
the next token that it drafts, its own hidden state stands in the place of the policy's, which is not there yet. Its
attention sees what an engine has then: keys and values of the policy's states for the text, and its own for the tokens
of the draft. All drafts of a row are made at once: the second token of a draft, at each place, behind the first that
was drafted at the place before, and so on ("training-time test", arXiv 2503.01840, section 3.2).

Dimensions: B rows, L tokens of a row, T = B L, D features, S chosen positions; N query heads, G heads of keys, H head
size; M segments of a block, Q queries and K keys of each; J tokens of a draft.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from titan_rl.models.layers.attention import BlockPlan, PackedAttention, gather
from titan_rl.models.layers.cpu_attention import scaled_dot_product_attention
from titan_rl.models.layers.decoder import PackedDecoder

_UNSEEN = -1e9
"""Score of a key that is not there; a finite one, since other keys multiply it by zero."""


@dataclass(frozen=True)
class PolicyStates:
    """What a draft head reads of the policy, for the tokens of a row."""

    embedded_BLD: torch.Tensor
    hidden_BLD: torch.Tensor
    """The policy's hidden states, side by side if there are several."""
    before_L: torch.Tensor
    """The place in the row of the token before each; that of a text's first token is its own."""
    has_before_L: torch.Tensor

    def without_embeddings(self, at_BL: torch.Tensor) -> "PolicyStates":
        """With zeros in the place of the embeddings of some tokens."""
        return replace(self, embedded_BLD=self.embedded_BLD.masked_fill(at_BL[..., None], 0))


class DraftCache:
    """Keys and values [T, G, H] of each token of a draft, at every place, by its number from 0.

    Neither a dataclass nor a container: of those FSDP hands copies to a module, which would fill them in vain."""

    def __init__(self) -> None:
        self.by_number: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


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
    cache: DraftCache
    """In which attention fills in the token's own."""

    def own(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Keys, values and presence [T] of the draft's tokens behind the first, as seen from each place."""
        seen = []
        for number in range(1, self.number + 1):
            (k_TGH, v_TGH), at_T = self.cache.by_number[number], self.places[self.number - number]
            seen.append((k_TGH[at_T], v_TGH[at_T], self.has_before_T[at_T]))
        return seen


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
        drafting.cache.by_number[drafting.number] = k_TGH, v_TGH
        scale = float(self.scale or scale or q_TNH.shape[-1] ** -0.5)
        if not drafting.number:
            keywords: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            out_TNH = self._attention(q_TNH, k_TGH, v_TGH, drafting.plan, slice(None), **keywords)
        else:
            out_TNH = self._behind_the_text(q_TNH, drafting, scale)
        return out_TNH.view(q_BLNH.shape)

    def _behind_the_text(self, q_TNH: torch.Tensor, drafting: DraftPlan, scale: float) -> torch.Tensor:
        k_TGH, v_TGH = text = drafting.cache.by_number[0]
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


class DraftDecoder(PackedDecoder):
    """Decoder of one layer that drafts behind the text of packed rows."""

    def drafts(
        self,
        policy_BLD: torch.Tensor,
        states: PolicyStates,
        plan: BlockPlan,
        positions: torch.Tensor | None,
        index_S: torch.Tensor,
        num_drafts: int,
    ) -> Iterator[torch.Tensor]:
        """Hidden states [S, D] of the first, second, ... token of a draft. ``policy_BLD``: what the policy found."""
        [layer] = self.layers.values()
        places = [torch.arange(policy_BLD.shape[1], device=policy_BLD.device)]
        for _ in range(num_drafts):
            places.append(states.before_L[places[-1]])
        cache, hidden_BLD = DraftCache(), policy_BLD
        for number in range(num_drafts):
            draft = DraftPlan(plan, places, states.has_before_L, number, cache)
            drafted_BLD = layer(states.embedded_BLD, hidden_BLD[:, states.before_L], draft, positions)
            # of a text's first token a head has no state of its own
            hidden_BLD = torch.where(states.has_before_L[:, None], drafted_BLD, policy_BLD)
            yield hidden_BLD.flatten(0, 1).index_select(0, index_S)

    def mean_statistics(
        self, head: Callable[..., torch.Tensor], drafts: Iterator[torch.Tensor], target_S: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        """Log-probabilities and entropies [2, S], averaged over a draft's tokens, of hidden states ``drafts``.

        The head is called once: each call would read its weight, and have a gradient of it, anew."""
        assert settings.get("mask") is None and settings.get("penalties") is None, "drafts are of whole distributions"
        hidden = list(drafts)
        found_2T = head(self.norm(torch.cat(hidden)), target_S=target_S.repeat(len(hidden)), **settings)
        return found_2T.unflatten(1, (len(hidden), -1)).mean(1)
