"""A step of PRIME comes out the same however its models are spread over ranks, and a group's samples over rows.

Some samples are rollouts of several branches, which lie in several rows and on both ranks: outcomes, baselines and
the ratios that samples are rejected by are of whole rollouts.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batches import batch_of
from layout_ranks import EPS, Layout, run_layouts, whole_tensors
from test_critic_layouts import LAYOUTS

from titan_rl.config.load import load_config
from titan_rl.models.builtin.tiny import make_tiny

COUNTED = tuple(f"implicit_reward_{name}" for name in ("loss", "grad_norm", "mean", "accuracy"))
UPDATES = ("before", "after")
ROW_TOKENS = 24
"""So few that a group does not fit into a row."""
CASES = [*((layout, "before") for layout in LAYOUTS), ("dp2", "after"), ("pp2", "after")]
ROLES = ("reference", "implicit_reward")


@dataclass
class Step:
    metrics: dict[str, float]
    policy: dict[str, torch.Tensor]
    rewarding: dict[str, torch.Tensor]


def prime_step(layout: Layout, models: Path, out: Path, update: str = "", **packing) -> Step:
    """Two updates on groups that lie on several ranks and in several rows; ``update``: as ``out``'s name ends."""
    reject = {"reject": "geometric", "reject_low": 0.95, "reject_high": 1.05}
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    adam = {"lr": 1e-3, "eps": EPS}
    tables = {
        "algorithm": {"name": "prime", "discount": 0.9, "updates_per_batch": 2} | reject,
        "reference": {"path": str(models / "reference")},
        "implicit_reward": {"path": str(models / "implicit_reward"), "beta": 0.5, "optimizer": adam, "updates": 2},
        "optimizer": adam,
        "parallelism": dict(layout.parallelism),
    }
    tables["implicit_reward"]["update"] = update or out.name.rpartition(" ")[2]
    config = load_config(None, tables)
    titan = build_titan(config)
    learner = Learner(config, titan, models / layout.model)
    shape = dict(num_ranks=titan.batch_degree, row_multiple=titan.row_multiple)
    shape |= dict(with_outcomes=True, branches=True, row_tokens=ROW_TOKENS)
    mine = titan.batch_rank(dist.get_rank())
    batches = [batch_of(seed, **shape | packing).rows[mine] for seed in (0, 1)]
    metrics = learner.train_step(batches, [True, True])[-1]
    told = metrics.loss_metrics | {"loss": metrics.loss, "grad_norm": metrics.grad_norm}
    return Step(told, whole_tensors(learner.shards()), whole_tensors(learner.learned.shards()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prime")
    for seed, name in enumerate(("tiny", *ROLES), 1):
        make_tiny(folder / "models" / name, seed=seed, hidden_size=64, num_layers=2, tie_word_embeddings=False)
    cases = {f"{name} {update}": Layout("tiny", LAYOUTS[name]) for name, update in CASES}
    run_layouts(2, folder / "models", folder, cases, prime_step)
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, Step]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {update: prime_step(Layout("tiny"), folder / "models", folder, update) for update in UPDATES}
    dist.destroy_process_group()


def assert_same(found: dict, wanted: Step) -> None:
    for name in ("loss", "grad_norm", *COUNTED):
        assert found["metrics"][name] == pytest.approx(wanted.metrics[name], rel=1e-5, abs=1e-7), name
    for role in ("policy", "rewarding"):
        for name, tensor in getattr(wanted, role).items():
            assert (found[role][name] - tensor).norm() <= 1e-5 * tensor.norm() + 1e-7, (role, name)


@pytest.mark.parametrize(("layout", "update"), CASES)
def test_two_ranks_step_as_one_does(folder, alone, layout, update):
    assert_same(torch.load(folder / f"{layout} {update}.pt"), alone[update])


@pytest.mark.parametrize("packing", [dict(row_tokens=40), dict(share_prefix=False), dict(row_tokens=1000)])
def test_packing_changes_nothing(folder, alone, packing):
    again = prime_step(Layout("tiny"), folder / "models", folder, "before", **packing)
    assert_same(vars(again), alone["before"])


def test_groups_are_spread_and_the_step_is_one_to_speak_of(alone):
    ranks = batch_of(1, num_ranks=2, row_tokens=ROW_TOKENS, branches=True).rows
    groups_of_ranks = [{owner[0] for row in rows for owner in row.owners} for rows in ranks]
    assert set.intersection(*groups_of_ranks), "no group has samples on both"
    split_of_ranks = [{number for row in rows for number in row.split} for rows in ranks]
    assert set.intersection(*split_of_ranks), "no rollout has branches on both"
    before, after = (alone[update].metrics for update in UPDATES)
    assert 0 < before["rejected_fraction"] < 1
    assert before["implicit_reward_mean"] != 0 and abs(before["loss"] - after["loss"]) > 1e-4
