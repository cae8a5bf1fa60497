"""A verifier without tools, scorer or engine, for controller_rate.py: its groups are there at once.

Its process imports this file, which therefore imports little.
"""

from dataclasses import replace

import numpy as np
from monarch.actor import Actor, concurrent_endpoint

from titan_rl.data.types import Group, Prompt, Provenance, Rollout, Sampling, Turn
from titan_rl.mesh.supervision.remote_call import actor_of

_PROMPT, _ANSWER = 64, 32
"""Tokens."""


class InstantVerifier(Actor):
    @concurrent_endpoint
    async def run_group(self, prompt: Prompt, sampling: Sampling, reference: bytes) -> Group:
        actor_of(reference)
        if not hasattr(self, "rollouts"):
            self.rollouts = [_rollout(sample) for sample in range(sampling.num_samples)]
        return Group(prompt.id, [replace(rollout, prompt_id=prompt.id) for rollout in self.rollouts])


def _rollout(sample: int) -> Rollout:
    length, random = _PROMPT + _ANSWER, np.random.default_rng(sample)
    is_answer = np.arange(length) >= _PROMPT
    return Rollout(
        prompt_id="",
        sample=sample,
        tokens=np.where(is_answer, random.integers(3, 90, length), np.arange(length) % 90).astype(np.int32),
        provenance=np.where(is_answer, Provenance.MODEL, Provenance.TEMPLATE).astype(np.int8),
        logprobs=np.where(is_answer, -1, 0).astype(np.float32),
        versions=np.where(is_answer, 0, -1).astype(np.int32),
        turns=[Turn(_PROMPT, length, "length")],
        status="ok",
        reward=float(sample % 2),
        reward_parts={"task": float(sample % 2)},
        text="an answer of thirty-two tokens, as a small model may say it",
    )
