"""Recipes with a tiny model in the place of theirs, and rows in the schema of their data."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat_models import make_chat_reward_model
from public_rows import gsm8k, math_500, verl

from titan_rl.config.io.overrides import override_arguments
from titan_rl.config.load import ConfigError
from titan_rl.data.text.messages import message
from titan_rl.diagnostics.recipes.recipe import Recipe, shipped_recipes

RECIPES = shipped_recipes()
VARIANTS = [(name, variant.name) for name, recipe in RECIPES.items() for variant in recipe.expected.variants]

README_ROWS = ("What", "Model", "Data", "Hardware", "Seconds a step", "Published", "Measured here")
"""Rows of a README's first table."""
_ROW = re.compile(r"\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|")


def readme_rows(recipe: Recipe) -> dict[str, str]:
    """Rows of the README's first table. Errors: ConfigError."""
    path = recipe.folder / "README.md"
    rows = dict(_ROW.findall(path.read_text()))
    if missing := [name for name in README_ROWS if not rows.get(name)]:
        raise ConfigError(f"{path} has no row {missing[0]!r} in its table: add it")
    return {name: rows[name] for name in README_ROWS}


def question(n: int) -> dict[str, Any]:
    """As nq_hotpotqa_train has them."""
    return {
        "id": f"train_{n}",
        "question": f"who wrote book {n}?",
        "golden_answers": ["Jane Austen"],
        "data_source": "nq",
    }


def issue(n: int) -> dict[str, Any]:
    """As swe-made's own are."""
    call = {"function": "f:f", "arguments": [n], "expected": n, "when": "FAIL_TO_PASS"}
    files = {"f.py": "def f(x):\n    return -x\n"}
    solution = ["sed -i 's/-x/x/' f.py"]
    return {"problem_statement": f"f({n}) gives {-n}", "files": files, "calls": [call], "solution": solution}


OWN = [(name, variant) for name, variant in VARIANTS if (RECIPES[name].folder / f"{variant}.toml").is_file()]
"""Those with a TOML in the recipe's folder."""
OF_CONFIGS = [each for each in VARIANTS if each not in OWN and each[1] != "smollm2_names"]
"""Those whose TOML is in configs/. Names are relations with another task, whose prompts have more than ASCII."""
DATA = {
    "gsm8k": (gsm8k, gsm8k),
    "gsm8k-thinking": (gsm8k, gsm8k),
    "dapo": (verl, math_500),
    "search-r1-like": (question, question),
    "swe-made": (issue, issue),
}
"""Of recipes on files: rows to train on, and held-out ones."""
ON_DATA = {
    "constitutional-sft": ("revisions.jsonl", "completion"),
    "constitutional-reward-model": ("pairs.jsonl", "chosen", "rejected"),
}
"""Of variants that sample nothing: the file of their rows, and its columns beside the prompt."""
_WITH_SFT = ("alphabet-sort-cpu", "smollm2_relations", "smollm2_calculator")
_THREE_STEPS = {
    "training": {"steps": 3, "seq_len": 1024},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 12},
    "eval": {"prompts": 2, "every": 3},
    "generator": {"max_num_seqs": 8},
    "recovery": {"standby": False},
}


def replaced(recipe: str, variant: str, model: Path, folder: Path) -> dict[str, Any]:
    """Overrides of model and data, the rest being the recipe's."""
    overrides: dict[str, Any] = {"model": {"path": str(model)}}
    if recipe == "constitutional":
        return overrides | _constitutional(variant, model, folder)
    if recipe not in DATA:
        return overrides
    files = {}
    for name, row in zip(("file", "held_out_file"), DATA[recipe], strict=True):
        path = folder / f"{name}.jsonl"
        start = 100 if name == "held_out_file" else 0
        path.write_text("".join(json.dumps(row(start + n)) + "\n" for n in range(20)))
        files[name] = str(path)
    overrides["task"] = {"options": files}
    if recipe == "search-r1-like":
        files["corpus"] = str(folder / "corpus.jsonl")
        Path(files["corpus"]).write_text(json.dumps({"title": "Emma", "contents": "A novel by Jane Austen."}) + "\n")
    if recipe == "dapo":
        suite = {"name": "aime", "file": files["held_out_file"], "k": 2, "max_new_tokens": 12, "temperature": 1.0}
        overrides["eval"] = {"suites": [suite]}
    return overrides


def _constitutional(variant: str, model: Path, folder: Path) -> dict[str, Any]:
    """Rows as ``titan-rl principles`` writes them, and a reward model."""
    if variant in ON_DATA:
        name, *columns = ON_DATA[variant]
        return {"data": {"file": _chats(folder / name, columns)}}
    files = {name: _chats(folder / f"{name}.jsonl", []) for name in ("file", "held_out_file")}
    reward_model = make_chat_reward_model(model, folder / "reward_model")
    return {"task": {"options": files}, "reward_model": {"path": str(reward_model)}}


def _chats(path: Path, columns: Sequence[str]) -> str:
    """File of twenty rows of messages. ``columns``: of answers."""
    rows = [
        {"prompt": [message("user", f"{path.stem} {n}?")]}
        | {column: [message("assistant", f"{column} {n}")] for column in columns}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small(recipe: str, variant: str, model: Path, folder: Path) -> dict[str, Any]:
    """Overrides of a run of three steps on a CPU."""
    overrides: dict[str, Any] = {}
    for changes in (_THREE_STEPS, replaced(recipe, variant, model, folder), _of(recipe, variant)):
        for section, keys in changes.items():
            overrides[section] = overrides.get(section, {}) | keys
    return overrides


def flags_of(overrides: dict[str, Any]) -> list[str]:
    """Overrides as arguments of the command line."""
    suites = overrides.get("eval", {}).pop("suites", [])
    tables = ["{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in suite.items()) + "}" for suite in suites]
    of_suites = [f"--eval.suites=[{', '.join(tables)}]"] if tables else []
    return [*override_arguments(overrides), *of_suites]


def _of(recipe: str, variant: str) -> dict[str, Any]:
    """What a variant has that three small steps must change too."""
    changes: dict[str, Any] = {}
    if recipe in ("reverse-text", "wordle", "swe-made") or variant in _WITH_SFT:
        changes["sft"] = {"steps": 2, "examples_per_step": 4}
    if variant == "gsm8k-ppo":
        changes["algorithm"] = {"updates_per_batch": 2}
    if recipe == "dapo":
        changes["algorithm"] = {"updates_per_batch": 2, "overlong_buffer": 4}
        changes["lr_scheduler"] = {"warmup_steps": 1}
    if variant in ("dapo-8gpu", "wordle-8gpu"):
        changes["parallelism"] = {"data_parallel_shard_degree": 1}
        changes["generator"] = {"replicas": 1, "max_num_seqs": 8}
    if recipe in ("gsm8k", "gsm8k-thinking") and variant != "gsm8k-ppo":
        changes["filter"] = {"max_refills": 1}  # no answer of a tiny model is right
    if variant == "alphabet-sort":
        changes["task"] = {"options": {"turns": 2, "max_names": 2}}
    return changes


def recipe_folder(tmp_path: Path, **changes: Any) -> Path:
    """Folder of a recipe of one's own, with a curve. ``changes``: of the variant, its label and its curve."""
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    curve = {"metric": "reward", "source": "https://example.org/run", "points": [[1, 0.25], [9, 0.75]]}
    curves = {changes.pop("label", "them"): curve | changes.pop("curve", {})}
    variant = {"name": "mine", "gpus": 0, "metric": "reward", "reference_curves": list(curves)} | changes
    (folder / "expected.json").write_text(json.dumps({"about": "a test", "curves": curves, "variants": [variant]}))
    return folder
