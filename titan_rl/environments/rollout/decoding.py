"""Decoding settings of answers, as their requests carry them."""

from collections.abc import Sequence
from typing import NamedTuple

from titan_rl.config.sections.schema import Config, RolloutConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.data.types import Decoding

CUTS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = (*CUTS, *PENALTIES)
DECODING_KEYS = tuple(f"rollout.{key}" for key in (*_NUMBERS, "thinking_budget", "stop"))


class ThinkingBudget(NamedTuple):
    """Most tokens of a section of thinking, and the setting that says so."""

    setting: str
    tokens: int
    """0: no limit."""


def decoding_of(rollout: RolloutConfig) -> Decoding:
    """Decoding settings of a run's training answers."""
    return _decoding(rollout, rollout.stop, rollout.thinking_budget)


def held_out_decoding(config: Config) -> Decoding:
    """Decoding settings of greedy held-out answers."""
    return Decoding(stop=tuple(config.rollout.stop), thinking_budget=held_out_budget(config).tokens)


def suite_decoding(suite: SuiteConfig, config: Config) -> Decoding:
    """Decoding settings of a suite's answers. ``config``: the run's, for what the suite leaves out."""
    stop = config.rollout.stop if suite.stop is None else suite.stop
    budget = held_out_budget(config).tokens if suite.thinking_budget is None else suite.thinking_budget
    return _decoding(suite, stop, budget)


def training_budget(config: Config) -> ThinkingBudget:
    return ThinkingBudget("rollout.thinking_budget", config.rollout.thinking_budget)


def held_out_budget(config: Config) -> ThinkingBudget:
    """Budget of held-out answers, and of suites that have none of their own."""
    own = config.eval.thinking_budget
    return training_budget(config) if own is None else ThinkingBudget("eval.thinking_budget", own)


def _decoding(settings: RolloutConfig | SuiteConfig, stop: Sequence[str], budget: int) -> Decoding:
    numbers = {key: getattr(settings, key) for key in _NUMBERS}
    return Decoding(**numbers, stop=tuple(stop), thinking_budget=budget)


def changed(settings: RolloutConfig | SuiteConfig, keys: Sequence[str]) -> list[str]:
    """Those of some keys that differ from their defaults."""
    return [key for key in keys if getattr(settings, key) != getattr(type(settings), key)]
