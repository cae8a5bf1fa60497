"""Decoding settings of answers, as their requests carry them."""

from collections.abc import Sequence

from titan_rl.config.sections.schema import RolloutConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.data.types import Decoding

CUTS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = (*CUTS, *PENALTIES)
DECODING_KEYS = tuple(f"rollout.{key}" for key in (*_NUMBERS, "stop"))


def decoding_of(rollout: RolloutConfig) -> Decoding:
    """Decoding settings of a run's training answers."""
    return _decoding(rollout, rollout.stop)


def suite_decoding(suite: SuiteConfig, stop: Sequence[str]) -> Decoding:
    """Decoding settings of a suite's answers. ``stop``: the run's, for what a suite leaves out."""
    return _decoding(suite, stop if suite.stop is None else suite.stop)


def _decoding(settings: RolloutConfig | SuiteConfig, stop: Sequence[str]) -> Decoding:
    return Decoding(**{key: getattr(settings, key) for key in _NUMBERS}, stop=tuple(stop))


def changed(settings: RolloutConfig | SuiteConfig, keys: Sequence[str]) -> list[str]:
    """Those of some keys that differ from their defaults."""
    return [key for key in keys if getattr(settings, key) != getattr(type(settings), key)]
