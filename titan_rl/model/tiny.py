"""Hugging Face directories small enough to train from nothing on a laptop, made on the spot."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from titan_rl.model.tokenizer import character_tokenizer

_ARCHITECTURES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def make_tiny(
    out: str | Path,
    *,
    seed: int,
    architecture: str = "llama",
    hidden_size: int = 128,
    num_layers: int = 4,
    tie_word_embeddings: bool = True,
    rope_parameters: dict | None = None,
) -> PreTrainedModel:
    """Write a randomly initialized model (0.8 M parameters as it stands) with a character tokenizer to ``out``."""
    tokenizer = character_tokenizer()
    config_class, model_class = _ARCHITECTURES[architecture]
    config = config_class(
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
    )
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model
