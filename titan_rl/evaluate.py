"""Held-out accuracy: greedy answers to prompts that no run trains on."""

import asyncio

from titan_rl.config import ConfigError
from titan_rl.episode import Sampling
from titan_rl.mesh.meshes import Meshes
from titan_rl.statistics import Proportion
from titan_rl.tasks.base import correct
from titan_rl.types import Prompt


async def evaluate(meshes: Meshes, prompts: list[Prompt], max_new_tokens: int) -> Proportion:
    """Share of right answers. An answer that the machinery failed to score is an error, not a wrong answer.

    Errors: ConfigError if a prompt leaves no room for an answer; RuntimeError if an answer could not be scored.
    """
    sampling = Sampling(num_samples=1, max_new_tokens=max_new_tokens, temperature=0.0, max_tokens=meshes.max_tokens)
    groups = await asyncio.gather(*(meshes.run_group(prompt, sampling) for prompt in prompts))
    if any(group.refused for group in groups):
        raise ConfigError(
            "a held-out prompt is longer than training.seq_len or the model's positions: raise training.seq_len"
        )
    rollouts = [group.rollouts[0] for group in groups]
    if failed := [rollout for rollout in rollouts if rollout.status == "infra_error"]:
        raise RuntimeError(f"{len(failed)} held-out answers could not be scored, first that to {failed[0].prompt_id}")
    await meshes.take_statistics()  # so that the next step's speeds are its own
    return Proportion(sum(correct(rollout.reward) for rollout in rollouts), len(rollouts))
