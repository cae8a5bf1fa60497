"""A tiny chat model in the place of a large one: its template reads ``enable_thinking``, and it has room for a chat."""

import json
import shutil
from pathlib import Path

from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer

POSITIONS = 4096
TEMPLATE = (  # as Qwen3's: without thinking an empty thought stands before the answer asked for, and the last one
    "{% set thought = '(no thought) ' if enable_thinking is defined and not enable_thinking else '' %}"
    "{% for m in messages %}{{ m.role }}:\n{% if m.role == 'assistant' and loop.last %}{{ thought }}{% endif %}"
    "{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}assistant:\n{{ thought }}{% endif %}"
)


def make_chat_model(path: Path) -> Path:
    """Write it, of random weights and characters."""
    make_tiny(path, seed=1, num_layers=2, hidden_size=128)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def make_chat_reward_model(model: Path, path: Path) -> Path:
    """Write a reward model of random weights that reads the tokens of a chat model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, path / name)
    return path
