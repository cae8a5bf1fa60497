"""Decoding settings of training answers, as their requests carry them."""

from titan_rl.config.sections.schema import RolloutConfig
from titan_rl.data.types import Decoding


def decoding_of(rollout: RolloutConfig) -> Decoding:
    """Decoding settings of a run's training answers."""
    return Decoding(rollout.top_p, rollout.top_k, rollout.min_p, tuple(rollout.stop))
