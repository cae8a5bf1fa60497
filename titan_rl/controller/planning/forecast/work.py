"""What a model costs for each token: FLOPs, and bytes of its weights and of its KV cache. Pure arithmetic.

Sources: a product with N parameters is 2 N FLOPs a token in the forward, and twice that in the backward (Kaplan et al.
2020, arXiv:2001.08361, section 2.1); attention over c tokens is 4 c x heads x head_dim FLOPs a layer (Chowdhery et al.
2022, arXiv:2204.02311, appendix B: 12 L H Q T with the backward).
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from titan_rl.controller.planning.memory_plan import Size


@dataclass(frozen=True)
class Work:
    """Of one model."""

    parameters: int
    active: float
    """Parameters that a token is multiplied with: of the experts those that it is sent to, of the embeddings the
    head."""
    experts: float
    """All parameters of experts; and of how many experts a token is sent to how many."""
    num_experts: int
    num_active: int
    layers: int
    hidden: int
    attention_width: int
    """heads x head_dim, on average over layers."""
    kv_width: int
    """KV heads x head_dim, on average over layers."""
    vocab: int
    around: int
    """Parameters of no layer: embeddings, head and norm."""

    @classmethod
    def of(cls, hf: PreTrainedConfig, size: Size) -> "Work":
        attention_width, kv_width = _widths(hf)
        total = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or 0
        chosen = getattr(hf, "num_experts_per_tok", 0) if total else 0
        experts = size.experts * (hf.num_hidden_layers - getattr(hf, "first_k_dense_replace", 0))
        looked_up = 0 if hf.tie_word_embeddings else hf.vocab_size * hf.hidden_size
        resting = experts * (1 - chosen / total) if total else 0.0
        return cls(
            parameters=size.parameters,
            active=size.parameters - looked_up - resting,
            experts=experts,
            num_experts=total,
            num_active=chosen,
            layers=hf.num_hidden_layers,
            hidden=hf.hidden_size,
            attention_width=attention_width,
            kv_width=kv_width,
            vocab=hf.vocab_size,
            around=size.around,
        )

    def forward_flops(self, tokens: float, attended: float) -> float:
        """Of so many tokens that attend to so many in all (``attended``: pairs of tokens)."""
        return 2 * self.active * tokens + 4 * self.layers * self.attention_width * attended

    def kv_bytes(self, element: int) -> float:
        """Of one token."""
        return 2.0 * self.layers * self.kv_width * element

    def touched(self, tokens: float) -> float:
        """Parameters that a step of so many tokens reads: of E experts, each token to k of them by chance, those that
        are met, E (1 - (1 - k / E)^tokens) of them on average."""
        if not self.num_experts:
            return self.parameters
        met = 1 - (1 - self.num_active / self.num_experts) ** tokens
        return self.parameters - self.experts * (1 - met)


def _widths(hf: PreTrainedConfig) -> tuple[int, int]:
    """Of attention and of its cache. Latents stand for keys and values at once; linear attention has neither."""
    if (latents := getattr(hf, "kv_lora_rank", None)) is not None:
        keys = hf.qk_nope_head_dim + hf.qk_rope_head_dim
        return hf.num_attention_heads * (keys + hf.v_head_dim) // 2, (latents + hf.qk_rope_head_dim) // 2
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    kinds = getattr(hf, "layer_types", None) or ["full_attention"]
    attending = sum(kind != "linear_attention" for kind in kinds)
    attention, cache = (heads * head_dim for heads in (hf.num_attention_heads, hf.num_key_value_heads))
    return attention * attending // len(kinds), cache * attending // len(kinds)


@dataclass(frozen=True)
class Batch:
    """Of one step."""

    groups: int
    group_size: int
    prompt: float
    """Tokens of a prompt."""
    answer: float
    """Of an answer, on average."""
    longest: float
    share_prefix: bool = True
    """Whether the trainer takes a group's prompt once."""

    @property
    def answers(self) -> int:
        return self.groups * self.group_size

    @property
    def generated(self) -> float:
        return self.answers * self.answer

    @property
    def trained(self) -> float:
        """Tokens that pass the trainer: the last one of an answer is only a target."""
        prompts = self.groups * (1 if self.share_prefix else self.group_size)
        return prompts * self.prompt + self.answers * max(self.answer - 1, 1)

    @property
    def attended(self) -> float:
        """Pairs of tokens there: of a prompt with itself, of an answer with itself and its prompt."""
        prompts = self.groups * (1 if self.share_prefix else self.group_size)
        return prompts * self.prompt**2 / 2 + self.answers * self.answer * (self.prompt + self.answer / 2)
