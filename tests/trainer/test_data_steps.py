"""Steps on data of others, on a trainer of one rank in this process: what must not change them, and the way back."""

import asyncio
import math

import pytest
import torch
from data_ranks import KINDS
from local_trainer import LocalTrainer, make_steps

from titan_rl.config.load import load_config
from titan_rl.controller.offline.recovery import DataRecovery
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.run_directory.summary import Progress

pytestmark = pytest.mark.usefixtures("process_group")

ALGORITHMS = ("sft", "dpo", "simpo", "orpo", "kto", "reward_model")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def made(name: str, path, *, seq_len: int = 512, share_prefix: bool = True, sft: int = 0):
    config = load_config(
        None,
        {
            "task": {"name": "gcd", "options": {"max_value": 60}},
            "algorithm": {"name": name},
            "data": {"file": "task", "made_rows": 30, "examples_per_step": 8},
            "eval": {"prompts": 10},
            "optimizer": {"lr": 1e-3},
            "sft": {"steps": sft, "examples_per_step": 4} if sft else {},
            "rollout": {} if share_prefix or name in KINDS else {"share_prefix": False},
            "training": {"steps": 20, "seq_len": seq_len},
        },
    )
    checked, steps = make_steps(config)
    return LocalTrainer(checked, path), steps


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.learner.shards()}


async def train(trainer: LocalTrainer, steps, first: int, last: int) -> list[tuple[float, float]]:
    answers = [(await steps.train(trainer, step))[1] for step in range(first, last + 1)]
    return [(answer.loss, answer.grad_norm) for answer in answers]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packing_changes_neither_loss_nor_gradient(name, model_path):
    """Nor what is measured beside the step: KTO's zero, which is not 0 from the second step on."""
    wanted = asyncio.run(train(*made(name, model_path), 1, 3))
    for layout in (dict(seq_len=48), dict(share_prefix=False), dict(seq_len=48, share_prefix=False)):
        found = asyncio.run(train(*made(name, model_path, **layout), 1, 3))
        assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-7)
        assert found[2] == pytest.approx(wanted[2], rel=1e-3)  # Adam makes the last digits of two steps larger


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_way_back_draws_the_same_data(name, model_path, tmp_path):
    """A trainer that is repaired without any state takes its SFT steps and all others again, bit for bit."""
    sft = 2 if name in ("dpo", "kto") else 0
    trainer, steps = made(name, model_path, sft=sft)

    async def whole() -> None:
        if sft:
            await trainer.sft(steps.sft_rows())
        await train(trainer, steps, 1, 3)

    asyncio.run(whole())
    again, same_steps = made(name, model_path, sft=sft)
    progress = Progress(steps_asked=20, step=3)
    recovery = DataRecovery(same_steps, CheckpointFolder(tmp_path, 1), progress, print)
    recovery._sft_rows = same_steps.sft_rows()
    assert asyncio.run(recovery.catch_up(again, None)) == 3
    ours, theirs = weights(trainer), weights(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert asyncio.run(train(trainer, steps, 4, 4)) == asyncio.run(train(again, same_steps, 4, 4))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_held_out_data_changes_nothing_and_says_what_is_preferred(name, model_path):
    trainer, steps = made(name, model_path)
    first = asyncio.run(steps.held_out(trainer)).accuracy
    if name in ("dpo", "kto"):
        assert (first.correct, first.num_ties) == (0, 10), "the policy is the reference still"
    asyncio.run(train(trainer, steps, 1, 2))
    before = weights(trainer)
    found = asyncio.run(steps.held_out(trainer))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    assert found.metrics["loss"] == asyncio.run(steps.held_out(trainer)).metrics["loss"]
    if name == "sft":
        assert found.accuracy is None
    else:
        assert found.accuracy.count == 10
    if name not in ("sft", "kto"):
        assert found.accuracy.value == pytest.approx(found.metrics["rewards/accuracies"], abs=1e-6)


def test_the_first_step_of_dpo_has_the_loss_of_even_odds(model_path):
    """The policy is the reference still, so neither answer is preferred: -log sigmoid(0)."""
    [(loss, grad_norm)] = asyncio.run(train(*made("dpo", model_path), 1, 1))
    assert loss == pytest.approx(math.log(2), abs=1e-6) and grad_norm > 0


def test_the_reference_stays_as_it_was(model_path):
    trainer, steps = made("dpo", model_path)
    before = trainer.learner.roles["reference"].model.digest()
    asyncio.run(train(trainer, steps, 1, 3))
    assert trainer.learner.roles["reference"].model.digest() == before != trainer.learner.policy.digest()
