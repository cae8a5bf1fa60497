"""Decoding settings of answers, as their requests carry them."""

from collections.abc import Sequence

from titan_rl.config.sections.schema import Config, RolloutConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.data.types import Decoding

CUTS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = (*CUTS, *PENALTIES)
DECODING_KEYS = tuple(f"rollout.{key}" for key in (*_NUMBERS, "thinking_budget", "stop"))


def decoding_of(rollout: RolloutConfig) -> Decoding:
    """Decoding settings of a run's training answers."""
    return _decoding(rollout, rollout.stop, rollout.thinking_budget)


def held_out_decoding(config: Config) -> Decoding:
    """Decoding settings of greedy held-out answers."""
    return Decoding(stop=tuple(config.rollout.stop), thinking_budget=_evaluated_budget(config))


def suite_decoding(suite: SuiteConfig, config: Config) -> Decoding:
    """Decoding settings of a suite's answers. ``config``: the run's, for what the suite leaves out."""
    stop = config.rollout.stop if suite.stop is None else suite.stop
    return _decoding(suite, stop, suite.thinking_budget or _evaluated_budget(config))


def _evaluated_budget(config: Config) -> int:
    return config.eval.thinking_budget or config.rollout.thinking_budget


def _decoding(settings: RolloutConfig | SuiteConfig, stop: Sequence[str], budget: int) -> Decoding:
    numbers = {key: getattr(settings, key) for key in _NUMBERS}
    return Decoding(**numbers, stop=tuple(stop), thinking_budget=budget)


def changed(settings: RolloutConfig | SuiteConfig, keys: Sequence[str]) -> list[str]:
    """Those of some keys that differ from their defaults."""
    return [key for key in keys if getattr(settings, key) != getattr(type(settings), key)]
