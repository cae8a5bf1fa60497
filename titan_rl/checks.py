"""What a config says of algorithms and models, checked before any process starts. Needs torch, so it comes last."""

from pathlib import Path

from titan_rl.config import Config, ConfigError, nearest
from titan_rl.tasks.base import Task
from titan_rl.types import Prompt


def check_algorithm(config: Config) -> None:
    """Errors: ConfigError for a name that algorithms.py does not have."""
    from titan_rl.algorithms import ALGORITHMS

    if config.algorithm.name not in ALGORITHMS:
        raise ConfigError(
            f"algorithm.name = {config.algorithm.name!r} is unknown: {nearest(config.algorithm.name, ALGORITHMS)}"
        )


def check_prompts(config: Config, seq_len: int, task: Task, prompts: list[Prompt]) -> None:
    """Errors: ConfigError if a prompt, tokenized as it will be, leaves no room for an answer."""
    if config.model.path == "tiny":
        return
    from transformers import AutoTokenizer

    from titan_rl.episode import encode_prompt
    from titan_rl.model.spec import longest_rollout

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    longest = max(len(encode_prompt(task, tokenizer, prompt)) for prompt in prompts)
    room = longest_rollout(seq_len, config.model.path) - config.rollout.max_new_tokens
    if longest > room:
        raise ConfigError(
            f"training.seq_len = {seq_len} leaves {room} tokens for prompts, but they have up to {longest}: "
            f"raise it (the model's positions are the limit), or ask for less in task.options"
        )


def check_model(config: Config) -> None:
    """Errors: ConfigError for an architecture that cannot be built or laid out as ``[parallelism]`` says, or a
    directory without weights or a tokenizer."""
    from titan_rl.model.files import tensor_files
    from titan_rl.model.layout import check_layout
    from titan_rl.model.spec import read_hf_config
    from titan_rl.model.tiny import tiny_config
    from titan_rl.titan_config import build_titan

    parallelism, path = build_titan(config).parallelism, config.model.path
    if path == "tiny":
        return check_layout(tiny_config(), parallelism)
    try:
        hf = read_hf_config(path)
        tensor_files(path)
    except ValueError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from None
    check_layout(hf, parallelism)
    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(f"model.path = {path!r} holds no tokenizer: copy tokenizer.json into it")
