"""Experts that a real engine says its tokens went through: with them the trainer has the same log-probabilities."""

import asyncio
import math
import sys
from dataclasses import replace

import cloudpickle
import numpy as np
import pytest
from started_meshes import meshes_of

from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.data.storage.routed_experts import is_recorded
from titan_rl.data.types import Group, Prompt, Provenance, Request, Rollout
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.interfaces.score import Score
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.titan_config import build_titan

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PROMPT = np.arange(10, 90, dtype=np.int32)
"""Two whole blocks of the cache and a half."""


def be_noisy(engine) -> None:
    """Let each router choose by scores that are a little off, and others in each step, and weigh as it is."""
    import torch
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    generator = torch.Generator().manual_seed(3)

    def compute(router):
        def routed(hidden_states, router_logits, indices_type, *, input_ids=None):
            noise = 0.02 * torch.rand(router_logits.shape, generator=generator)
            chosen = (router_logits.float() + noise).topk(router.top_k, dim=-1).indices
            weights = router_logits.float().softmax(-1).gather(1, chosen)
            return weights / weights.sum(-1, keepdim=True), chosen.to(torch.int32)

        return routed

    def of(worker):
        for module in worker.model_runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router._compute_routing = compute(module.router)

    engine.on_worker(of)


def finished(episode: Episode, sample: int) -> Rollout:
    return episode.finish(Prompt("a", "", "", {}), sample, Score("ok", {"right": float(sample % 2)}))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("routing")
    make_tiny(folder / "model", seed=1, architecture="qwen3_moe", num_layers=2, tie_word_embeddings=False)

    async def run() -> dict:
        tables = {"algorithm": {"routing": "replay"}, "optimizer": {"lr": 0.0}}
        async with meshes_of(str(folder / "model"), folder, **tables) as meshes:
            await meshes.trainer.begin_at(0)
            await meshes.weights.stage(0)
            await meshes.weights.announce(0)
            leader, found = meshes.generators.replicas[0].leader, {}

            async def asked(tokens, seeds, num_tokens=24, **settings):
                request = Request(tokens, seeds, num_tokens, 1.0, routed_experts=True, **settings)
                return await leader.generate.call_one(request)

            async def worst(rollouts: list[Rollout]) -> tuple[float, float]:
                layout = build_titan(meshes.config).layout
                batches = step_batches([Group("a", rollouts)], GRPO(), meshes.config, layout)
                [metrics] = await meshes.trainer.train(batches, 1)
                return math.log(metrics.agreement_max), metrics.loss_metrics["routing_changed"]

            async def sampled() -> list[Rollout]:
                episodes = [Episode(PROMPT) for _ in range(4)]
                for episode, completion in zip(episodes, await asked(PROMPT, [1, 2, 3, 4]), strict=True):
                    episode.add_completion(completion, "")
                return [finished(episode, sample) for sample, episode in enumerate(episodes)]

            async def two_turns() -> Rollout:
                episode = Episode(PROMPT)
                for turn in range(2):
                    episode.add_completion((await asked(episode.tokens, [7]))[0], "")
                    if not turn:
                        episode.add_reply([], episode.tokens[-3:], np.full(3, Provenance.TOOL))
                return finished(episode, 1)

            found["plain"] = await sampled(), None
            found["plain"] = found["plain"][0], await worst(found["plain"][0])
            turns = [await two_turns(), replace(await two_turns(), sample=2)]
            found["two turns"] = turns, await worst(turns)
            [silent] = await leader.generate.call_one(Request(PROMPT, [1], 4, 1.0))
            found["not asked"] = silent.routed_experts
            await leader.examine.call_one(cloudpickle.dumps(be_noisy))
            noisy = await sampled()
            found["noisy"] = noisy, await worst(noisy)
            own = [replace(rollout, routed_experts=None) for rollout in noisy]
            found["noisy, by the trainer's own"] = own, await worst(own)
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["plain", "two turns", "noisy"])
def test_trainer_and_generator_agree_with_the_same_experts(found, name):
    rollouts, (worst, changed) = found[name]
    print(f"worst ratio of {name}: {math.exp(worst):.8f}, changed {changed:.2%}")
    assert worst < 2e-6
    assert (changed > 0.001) == (name == "noisy")


def test_without_them_a_noisy_router_shows(found):
    _, (worst, changed) = found["noisy, by the trainer's own"]
    assert worst > 0.01 and changed == 0


@pytest.mark.parametrize("name", ["plain", "two turns", "noisy"])
def test_each_token_but_the_last_has_its_experts(found, name):
    for rollout in found[name][0]:
        assert rollout.routed_experts.shape == (len(rollout.tokens), 2, 2) and rollout.routed_experts.dtype == np.uint8
        assert is_recorded(rollout.routed_experts).tolist() == [True] * (len(rollout.tokens) - 1) + [False]


def test_samples_of_a_prompt_in_the_cache_have_its_experts(found):
    """The two whole blocks of the prompt were computed once."""
    first, *others = (rollout.routed_experts[:64] for rollout in found["noisy"][0])
    assert all(np.array_equal(first, other) for other in others)


def test_only_who_asks_gets_them(found):
    assert found["not asked"] is None
