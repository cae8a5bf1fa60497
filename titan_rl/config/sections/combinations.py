"""Settings that exclude each other, across sections. What needs torch or a model is checked in preflight."""

from titan_rl.config.errors import ConfigError
from titan_rl.config.sections.schema import MADE_MODELS, Config


def check_combinations(config: Config) -> None:
    """Errors: ConfigError."""
    rollout, algorithm = config.rollout, config.algorithm
    if algorithm.updates_per_batch > rollout.prompts_per_step:
        raise ConfigError(
            f"algorithm.updates_per_batch = {algorithm.updates_per_batch} is more than "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: an optimizer step needs a group of its own"
        )
    _check_lengths_and_filters(config)
    if config.generator.update == "drain" and config.generator.kv == "recompute":
        raise ConfigError(
            "generator.kv = 'recompute' has nothing to recompute with generator.update = 'drain', which leaves no "
            "request running: leave one of them out"
        )
    if config.model.path in MADE_MODELS and config.task.style == "chat":
        raise ConfigError("task.style = 'chat' needs a chat model: set model.path, or task.style = 'compact'")
    if config.task.system_prompt and config.task.style != "chat":
        raise ConfigError("task.system_prompt needs task.style = 'chat': set it, or write the text into the prompts")


def _check_lengths_and_filters(config: Config) -> None:
    buffer, longest, filters = config.algorithm.overlong_buffer, config.rollout.max_new_tokens, config.filter
    if buffer > longest:
        raise ConfigError(
            f"algorithm.overlong_buffer = {buffer} is more than rollout.max_new_tokens = {longest}, of which it is the "
            f"last part: lower it"
        )
    if filters.min_pass_rate > filters.max_pass_rate:
        raise ConfigError(
            f"filter.min_pass_rate = {filters.min_pass_rate} is more than filter.max_pass_rate = "
            f"{filters.max_pass_rate}: no group would be left"
        )
