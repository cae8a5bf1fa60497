"""Twelve runs without a fault, of different kinds: what the doctor says nothing of."""

import json
import random
from pathlib import Path
from typing import Any

REWARDS = '''
import re


def _number(text):
    found = re.findall(r"-?\\d[\\d,]*", text)
    return found[-1].replace(",", "") if found else None


def last_number(prompt, completion, row):
    """As GSM8K is usually paid."""
    return float(_number(completion) == _number(row["answer"]))


def tags(prompt, completion, row):
    """Of rows with bare answers, in a form that they do not show."""
    found = re.fullmatch(r"(?s)\\s*<think>.*</think>\\s*<answer>(.*)</answer>\\s*", completion)
    is_right = found is not None and found[1].strip() == row["answer"]
    return {"format": 0.1 * (found is not None), "right": float(is_right)}


def form_of_its_own(prompt, completion, row):
    return float(completion == f"<<<{row['answer']}>>>")
'''
Tables = dict[str, dict[str, Any]]
_TASKS = {
    "count_bits": {"weight": 2, "options": {"max_n": 100}},
    "calculator": {"options": {"digits": 2}},
    "gcd": {"options": {"max_value": 20}},
}
_FEW = {"prompts_per_step": 4, "group_size": 4}


def write_files(folder: Path) -> None:
    """Rewards, and rows as GSM8K has them and with bare answers."""
    (folder / "healthy_rewards.py").write_text(REWARDS)
    chance = random.Random(0)
    rows = [(chance.randint(2, 40), chance.randint(2, 12), chance.randint(1, 9)) for _ in range(48)]
    with open(folder / "gsm8k.jsonl", "w") as worked, open(folder / "bare.jsonl", "w") as bare:
        for a, b, c in rows:
            asked, total = f"Ann sold {a} clips a day for {b} days and gave {c} away. How many in all?", a * b + c
            steps = f"She sold {a}*{b}=<<{a}*{b}={a * b}>>{a * b}.\nIn all {a * b}+{c}={total}.\n#### {total}"
            worked.write(json.dumps({"question": asked, "answer": steps}) + "\n")
            bare.write(json.dumps({"question": asked, "answer": str(total)}) + "\n")


def rows_task(folder: Path, file: str, reward: str, **more: Any) -> Tables:
    task = {"name": "jsonl", "reward": f"healthy_rewards:{reward}", "options": {"file": file}} | more
    return {"run": {"plugin_path": [str(folder)]}, "task": task}


def healthy_runs(folder: Path, pretrained: Path, examples: Path) -> dict[str, tuple[str | None, Tables]]:
    """By name: the TOML that it begins with, and what it sets. ``pretrained``: SmolLM2; ``examples``: the tree's."""
    chat = {"model": {"path": str(pretrained)}, "eval": {"prompts": 4}, "training": {"seq_len": 1024, "steps": 20}}
    bf16 = {"generator": {"dtype": "bfloat16"}, "training": {"mixed_precision_param": "bfloat16"}}
    return {
        "gsm8k": (
            None,
            chat
            | rows_task(folder, "gsm8k.jsonl", "last_number", style="chat")
            | {"rollout": _FEW | {"max_new_tokens": 48}, "optimizer": {"lr": 1e-6}},
        ),
        "tool": ("calculator_tiny", {"rollout": _FEW}),
        "environment": ("treasure_tiny", {"rollout": _FEW}),
        "vision": ("shapes_tiny", {"rollout": _FEW}),
        "mixture": (None, {"task": {"name": "mixture", "options": _TASKS}, "rollout": _FEW, "eval": {"prompts": 6}}),
        "dpo": ("dpo_tiny", {}),
        "lora": ("lora_tiny", {"rollout": _FEW}),
        "agents": (
            None,
            {
                "run": {"plugin_path": [str(examples)]},
                "task": {"name": "nim:SelfPlay", "options": {"heap": 9}},
                "rollout": _FEW | {"max_new_tokens": 3},
                "eval": {"prompts": 6},
            },
        ),
        "one step": ("quickstart", {"training": {"steps": 1}, "lr_scheduler": {"decay_ratio": 0.0}}),
        "learning rate 0": ("quickstart", {"optimizer": {"lr": 0.0}}),
        "tiny groups": ("grpo_tiny", {"rollout": {"group_size": 2, "prompts_per_step": 2}}),
        "bf16": ("quickstart", bf16),
        "long answers": (
            None,
            chat
            | rows_task(folder, "bare.jsonl", "tags", style="chat")
            | {"rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 768}},
        ),
    }
