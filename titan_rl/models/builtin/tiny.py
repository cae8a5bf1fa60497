"""Hugging Face directories, made here, with models small enough to train from random weights on a laptop."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar

from titan_rl.models.builtin.tokenizer import character_tokenizer

if TYPE_CHECKING:  # its imports take 0.3 s, and whoever wants the config alone need not wait for them
    from transformers import PreTrainedModel

_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}


def tiny_config(
    *,
    architecture: str = "llama",
    hidden_size: int = 128,
    num_layers: int = 4,
    tie_word_embeddings: bool = True,
    rope_parameters: dict | None = None,
    norm_topk_prob: bool = True,
) -> PreTrainedConfig:
    tokenizer = character_tokenizer()
    experts = {}
    if architecture == "qwen3_moe":
        experts = dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden_size // 2, norm_topk_prob=norm_topk_prob
        )
    return _CONFIGS[architecture](
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=256,
        tie_word_embeddings=tie_word_embeddings,
        rope_parameters=rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **experts,
    )


def make_tiny(out: str | Path, *, seed: int, architecture: str = "llama", **settings: Any) -> "PreTrainedModel":
    """Write a randomly initialized model (0.8 M parameters by default) with a character tokenizer to ``out``.

    ``settings`` are ``tiny_config``'s.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(architecture=architecture, **settings)
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(out)
    character_tokenizer().save_pretrained(out)
    return model
