"""``python -m gpu_day.model FOLDER``: a Qwen3 of 1.51B random parameters, prompts, a reward, and a TOML for both.

What is answered is noise, of full length each: a step costs what it costs for a real model of this shape.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from titan_rl.models.builtin.tokenizer import character_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = SHAPE | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
_MODULE = "noise"
_REWARD = '''def reward(prompt, completion, row):
    """Of noise: what differs within a group."""
    return float(len(completion) % 7)
'''
_TOML = """# The work that TRL gets, too (trl_steps.py).

[model]
path = "model"

[task]
name = "jsonl"
reward = "noise:reward"
options = { file = "prompts.jsonl" }

[rollout]
prompts_per_step = 16
group_size = 8
max_new_tokens = 512

[generator]
max_num_seqs = 256

[optimizer]
lr = 1e-6

[training]
seq_len = 8192

[eval]
prompts = 8

[recovery]
standby = false
"""
_PROMPTS, _PROMPT_CHARACTERS = 64, 100


def write(folder: Path, shape: dict[str, Any] = SHAPE) -> None:
    """Write the model's directory, prompts, the module of the reward and the TOML into a folder."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=8192, eos_token_id=1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder / "model")
    character_tokenizer().save_pretrained(folder / "model")
    numbers = (str(7**place % 10**_PROMPT_CHARACTERS).zfill(_PROMPT_CHARACTERS) for place in range(_PROMPTS))
    rows = [json.dumps({"question": number, "answer": "-"}) for number in numbers]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (folder / f"{_MODULE}.py").write_text(_REWARD)
    (folder / "noise.toml").write_text(_TOML)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write(Path(sys.argv[1]))
