"""Every algorithm without other models, and PRIME, learns to write words of the lower half, of its own samples in one
process.

The model is TorchTitan's, and the step is prepared and made as a run's.
"""

import numpy as np
import pytest
import torch

from titan_rl.algorithms.base import Needs
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.load import load_config
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Segment
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers.attention import plan_attention
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

NUM_PROMPTS, GROUP, LENGTH, MIDDLE = 4, 12, 3, 50
REWARD_KL = {"kl_coefficient": 0.01, "kl_in": "reward", "kl_estimator": "k1"}
CORRECTED = {"decoupled": True, "importance": "token", "reject": "worst_token", "reject_low": 0.01}
ALONE = sorted(name for name, cls in ALGORITHMS.items() if cls.trains_on == "rollouts" and cls().needs == Needs())
"""Algorithms that need no other model unless their settings ask for one."""
CASES = [
    *((name, {}) for name in ALONE),
    ("grpo", {"kl_coefficient": 0.01, "kl_estimator": "k3_unbiased", "entropy_coefficient": 0.001, **CORRECTED}),
    ("reinforce_pp", {"baseline": True, **REWARD_KL}),
    ("prime", {}),
    ("prime", {"decoupled": True, "process_weight": 0.5}),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=32, num_layers=1)
    return path


@torch.no_grad()
def continued(model, tokens_NL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A next token of each sequence, and its log-probability."""
    num_sequences, length = tokens_NL.shape
    segments = [Segment(n * length, length) for n in range(num_sequences)]
    last_N = torch.arange(1, num_sequences + 1) * length - 1
    logits_NV = model(
        tokens_NL.reshape(1, -1),
        positions=torch.arange(length).repeat(num_sequences)[None],
        attention_masks=plan_attention(segments, tokens_NL.numel(), torch.device("cpu")),
        logit_index_S=last_N,
    )
    words = torch.distributions.Categorical(logits=logits_NV)
    next_N = words.sample()
    return next_N, words.log_prob(next_N)


def sampled(model) -> list[Group]:
    prompts_N2 = torch.tensor([[10 + prompt, 20 + prompt] for prompt in range(NUM_PROMPTS) for _ in range(GROUP)])
    tokens_NL, logprobs = prompts_N2, [torch.zeros(len(prompts_N2), 2)]
    for _ in range(LENGTH):
        next_N, logprob_N = continued(model, tokens_NL)
        tokens_NL = torch.cat([tokens_NL, next_N[:, None]], 1)
        logprobs.append(logprob_N[:, None])
    provenance = np.array([Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * LENGTH, np.int8)
    rollouts = [
        Rollout(
            f"p{n // GROUP}",
            n % GROUP,
            tokens,
            provenance,
            logprob,
            tokens,
            [],
            "ok",
            float((tokens[2:] < MIDDLE).mean()),
        )
        for n, (tokens, logprob) in enumerate(
            zip(tokens_NL.numpy().astype(np.int32), torch.cat(logprobs, 1).numpy(), strict=True)
        )
    ]
    return [Group(f"p{p}", rollouts[p * GROUP : (p + 1) * GROUP]) for p in range(NUM_PROMPTS)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_is_rewarded_becomes_likelier(model_path, name, options):
    tables = {
        "algorithm": {"name": name, "updates_per_batch": 2, **options},
        "rollout": {"max_new_tokens": LENGTH},
        "optimizer": {"lr": 1e-2},
        "training": {"steps": 25},
    }
    config = load_config(None, tables)
    learner = Learner(config, build_titan(config), model_path)
    torch.manual_seed(0)
    rewards = []
    for _ in range(25):
        groups = sampled(learner.model_parts[0])
        rewards.append(np.mean([rollout.reward for group in groups for rollout in group.rollouts]))
        batches = step_batches(groups, learner.algorithm, config, Layout(num_ranks=1, row_tokens=256, row_multiple=1))
        found = learner.train_step([batch.rows[0] for batch in batches], [batch.has_signal for batch in batches])
        assert [update.agreement_mean for update in found] == pytest.approx([1, 1], abs=1e-4)
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.25, rewards
