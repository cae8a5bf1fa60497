"""A step of PPO comes out the same however policy and critic are spread over ranks, and rows over rows."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batches import batch_of
from layout_ranks import EPS, Layout, run_layouts, whole_tensors
from transformers import AutoModelForSequenceClassification

from titan_rl.config.load import load_config
from titan_rl.models.builtin.tiny import make_tiny

LAYOUTS = {
    "dp2": dict(data_parallel_shard_degree=2),
    "hsdp2": dict(data_parallel_replicate_degree=2),
    "tp2": dict(tensor_parallel_degree=2),
    "tp2 no SP": dict(tensor_parallel_degree=2, enable_sequence_parallel=False),
    "pp2": dict(pipeline_parallel_degree=2),
}
COUNTED = ("critic_loss", "critic_grad_norm", "critic_value", "critic_return", "critic_explained_variance")


@dataclass
class Step:
    metrics: dict[str, float]
    policy: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]


def ppo_step(layout: Layout, models: Path, out: Path, **packing) -> Step:
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    adam = {"lr": 1e-3, "eps": EPS}
    tables = {
        "algorithm": {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        "critic": {"path": str(models / "critic"), "optimizer": adam, "updates": 2},
        "optimizer": adam,
        "parallelism": dict(layout.parallelism),
    }
    config = load_config(None, tables)
    titan = build_titan(config)
    learner = Learner(config, titan, models / layout.model)
    batch = batch_of(0, num_ranks=titan.batch_degree, row_multiple=titan.row_multiple, **packing)
    [metrics] = learner.train_step([batch.rows[titan.batch_rank(dist.get_rank())]], [True])
    told = metrics.loss_metrics | {"loss": metrics.loss, "grad_norm": metrics.grad_norm}
    return Step(told, whole_tensors(learner.shards()), whole_tensors(learner.learned.shards()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    make_tiny(folder / "models" / "tiny", seed=1, hidden_size=64, num_layers=2, tie_word_embeddings=False)
    torch.manual_seed(1)  # of the head, which the files do not have
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "models" / "tiny", num_labels=1)
    with torch.no_grad():
        critic.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    critic.save_pretrained(folder / "models" / "critic")
    run_layouts(2, folder / "models", folder, {name: Layout("tiny", of) for name, of in LAYOUTS.items()}, ppo_step)
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> Step:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ppo_step(Layout("tiny"), folder / "models", folder)
    dist.destroy_process_group()


def assert_same(found: dict, wanted: Step) -> None:
    for name in ("loss", "grad_norm", *COUNTED):
        assert found["metrics"][name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-7), name
    for role in ("policy", "critic"):
        for name, tensor in getattr(wanted, role).items():
            assert (found[role][name] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-7, (role, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_step_as_one_does(folder, alone, layout):
    assert_same(torch.load(folder / f"{layout}.pt"), alone)


@pytest.mark.parametrize("packing", [dict(row_tokens=40), dict(share_prefix=False), dict(row_tokens=1000)])
def test_packing_changes_nothing(folder, alone, packing):
    again = ppo_step(Layout("tiny"), folder / "models", folder, **packing)
    assert_same(vars(again), alone)


def test_the_step_is_one_to_speak_of(alone):
    assert alone.metrics["critic_loss"] > 0.1 and alone.metrics["critic_value"] != 0 and alone.metrics["loss"] != 0
