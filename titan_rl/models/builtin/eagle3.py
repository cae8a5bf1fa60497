"""A new EAGLE-3 head for a policy, which knows nothing yet: it learns beside it (``[drafter]``)."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from titan_rl.config.model_directory.directory import stored_tensors
from titan_rl.config.model_directory.draft_heads import ARCHITECTURES, LAYERS, NUM_STATES, POLICIES
from titan_rl.config.sections.schema import MADE_MODELS
from titan_rl.models.builtin.made import config_of
from titan_rl.models.spec import spec_of
from titan_rl.models.weights.shards import expected_shapes

_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "bos_token_id", "eos_token_id"),
)
"""Keys of config.json that are the policy's."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make_eagle3(out: Path, policy: str, seed: int) -> None:
    """Write a head with random weights, and the output head of a policy that has weights already. ``policy``: as
    ``model.path``. Errors: ValueError for one that heads are not for."""
    hf = config_of(policy)
    if hf.model_type not in POLICIES:
        raise ValueError(
            f"model type {hf.model_type!r} is given no draft head: vLLM has them for {', '.join(POLICIES)}"
        )
    if hf.num_hidden_layers <= NUM_STATES:
        raise ValueError(f"its {hf.num_hidden_layers} layers are too few: a head reads the inputs of {NUM_STATES}")
    count = hf.num_hidden_layers
    config = {key: value for key, value in hf.to_dict().items() if key in _KEPT} | {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": hf.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "float32",
        LAYERS: [1, count // 2, count - 1],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in expected_shapes(spec_of(LlamaConfig(**config), "")).items()
    }
    if policy not in MADE_MODELS:
        stored = stored_tensors(policy)
        name = _HEAD if _HEAD in stored else _EMBEDDING
        if name not in stored:
            raise ValueError(f"it holds neither {_HEAD} nor {_EMBEDDING}")
        with safe_open(stored[name].file, "pt") as weights:
            tensors[_HEAD] = weights.get_tensor(name).float()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
