"""Rollouts made up."""

import numpy as np

from titan_rl.data.types import Rollout, Turn


def rollout_of(prompt_id: str, sample: int, **changes) -> Rollout:
    length = 4 + sample
    fields = dict(
        prompt_id=prompt_id,
        sample=sample,
        tokens=np.arange(length, dtype=np.int32),
        provenance=np.array([0, 0, *[1] * (length - 2)], np.int8),
        logprobs=np.linspace(-3, -0.1, length, dtype=np.float32),
        versions=np.array([-1, -1, *[7] * (length - 2)], np.int32),
        turns=[Turn(2, length, "stop")],
        status="ok",
        reward=1 / 3,
        reward_parts={"score": 1 / 3},
        text="a\n\u00e9\u4e2d",
    )
    return Rollout(**fields | changes)
