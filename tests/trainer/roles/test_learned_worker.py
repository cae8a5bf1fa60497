"""A critic or an implicit reward model in processes of its own: steps, non-finite values, checkpoints and snapshots
come out as they do beside the policy, whatever layout either has."""

import math
import traceback
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import batch_of
from layout_ranks import EPS, whole_tensors
from rank_processes import run_ranks
from transformers import AutoModelForSequenceClassification

from titan_rl.config.load import load_config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.models.builtin.tiny import make_tiny

ADAM = {"lr": 1e-3, "eps": EPS}
DP2, TP2, PP2, CP2 = (
    dict.fromkeys([f"{kind}_degree"], 2)
    for kind in ("data_parallel_shard", "tensor_parallel", "pipeline_parallel", "context_parallel")
)
NUM_STEPS, BAD_STEP = 3, 1


@dataclass(frozen=True)
class Case:
    role: str
    policy: dict = field(default_factory=dict)
    own: dict = field(default_factory=dict)
    update: str = ""
    fault: str = ""
    """Whose numbers are bad in ``BAD_STEP``."""

    @property
    def alone(self) -> "Case":
        return replace(self, policy={}, own={})


CASES = {
    "critic": Case("critic"),
    "critic, policy bad": Case("critic", fault="policy"),
    "critic, critic bad": Case("critic", fault="role"),
    "critic, one and dp2": Case("critic", {}, DP2),
    "critic, cp2 and cp2": Case("critic", CP2, CP2),
    "critic, pp2 and tp2": Case("critic", PP2, TP2),
    "before": Case("implicit_reward", update="before"),
    "before, policy bad": Case("implicit_reward", update="before", fault="policy"),
    "before, dp2 and one": Case("implicit_reward", DP2, update="before"),
    "after": Case("implicit_reward", update="after"),
}


def tables(case: Case, models: Path, placement: str) -> dict:
    role = {"path": str(models / case.role), "optimizer": ADAM, "updates": 2, "placement": placement}
    if placement == "own":
        role["parallelism"] = case.own
    common = {"optimizer": ADAM, "parallelism": case.policy}
    if case.role == "critic":
        ppo = {"name": "ppo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "updates_per_batch": 2}
        return common | {"algorithm": ppo, "critic": role}
    prime = {"name": "prime", "discount": 0.9, "updates_per_batch": 2}
    role |= {"beta": 0.5, "update": case.update}
    return common | {"algorithm": prime, "implicit_reward": role, "reference": {"path": str(models / "reference")}}


def batches_of(step: int, case: Case, **layout) -> list:
    """The two updates of a step; ``batch.rows[group]``."""
    shape = dict(with_outcomes=case.role != "critic", row_tokens=40)
    batches = [batch_of(2 * step + i, prompts="pq"[i], **shape, **layout) for i in range(2)]
    if step == BAD_STEP and case.fault == "policy":
        row = next(row for rows in batches[0].rows for row in rows if row.owners)
        row.logprob_S[0] = np.nan
    return batches


def spoil(role, *, yes: bool) -> None:
    """Have its gradients fail, as if of numbers that are too large."""
    if not yes:
        role.__dict__.pop("_gradients", None)
        return
    gradients = role._gradients

    def failing(rows):
        gradients(rows)
        raise FloatingPointError("the gradient norm is nan")

    role._gradients = failing


def run_steps(side, case: Case, pull) -> list:
    """Of each step, what came of its updates; a checkpoint and a snapshot of all but the last are on the way."""
    from titan_rl.trainer.state.snapshot_kinds import make_snapshots

    snapshots = make_snapshots(dist.get_rank(), side, load_config(None, {}))
    side.before_update = snapshots.before_update
    told = []
    for step in range(NUM_STEPS):
        role = getattr(side, "role", None) or side.learned_here
        if role is not None:
            spoil(role, yes=case.fault == "role" and step == BAD_STEP)
        told.append([_plain(answer) for answer in side.train_step(pull(step), [True, True])])
        if step == NUM_STEPS - 2:
            snapshots.take(step)
    return [told, snapshots]


def _plain(answer):
    if isinstance(answer, NonfiniteBatch):
        return str(answer)
    numbers = answer.loss_metrics | {"loss": answer.loss, "grad_norm": answer.grad_norm}
    return {name: value for name, value in numbers.items() if "seconds" not in name}


def state_of(side) -> dict[str, torch.Tensor]:
    shards = side.role.shards() if hasattr(side, "role") else side.shards()
    return whole_tensors(shards)


def study(case: Case, models: Path, out: Path, rank: int, world_size: int) -> dict:
    from titan_rl.trainer.join import join_rank
    from titan_rl.trainer.state.checkpoint_state import BackgroundSave
    from titan_rl.trainer.state.snapshot import load_snapshot
    from titan_rl.trainer.titan_config import build_titan

    config = load_config(None, tables(case, models, "own"))
    titan = build_titan(config)
    joined = (config, str(models / "tiny"), "", rank, world_size)
    side = join_rank(*joined, str(out / "meeting"))
    shape = dict(num_ranks=titan.batch_degree, row_multiple=titan.row_multiple)

    def pull(step: int) -> list:
        batches = batches_of(step, case, **shape)
        groups = side.share([[batch.rows[group] for batch in batches] for group in range(titan.batch_degree)])
        return [[row for rows in updates for row in rows] for updates in zip(*groups, strict=True)]

    told, snapshots = run_steps(side, case, pull)
    after = state_of(side)
    load_snapshot(side, snapshots.slot_of(NUM_STEPS - 2))
    again = [_plain(answer) for answer in side.train_step(pull(NUM_STEPS - 1), [True, True])]
    from_snapshot = state_of(side)
    saver = BackgroundSave(side)
    saver.begin(out / "checkpoint")
    saver.wait()
    dist.barrier()
    side = join_rank(*joined, str(out / "again"))
    side.load_checkpoint(out / "checkpoint")
    return dict(told=told, again=again, after=after, from_snapshot=from_snapshot, from_checkpoint=state_of(side))


def _rank(rank: int, world_size: int, cases: list[str], models: Path, out: Path) -> None:
    """Each case has process groups of its own, as after a repair."""
    torch.set_num_threads(1)
    for name, case in ((name, CASES[name]) for name in cases):
        folder = out / name
        folder.mkdir(exist_ok=True)
        try:
            found = study(case, models, folder, rank, world_size)
        except Exception:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            raise
        if dist.get_rank() == 0:
            torch.save(found, folder / ("policy.pt" if rank == 0 else "role.pt"))


def _layouts(name: str) -> str:
    return repr((CASES[name].policy, CASES[name].own))


@pytest.fixture(scope="module")
def studies(models, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("studies")
    by_layouts = groupby(sorted(CASES, key=_layouts), key=_layouts)  # DTensor takes meshes of like names for the same
    for _, names in by_layouts:
        names = list(names)
        count = sum(math.prod(layout.values()) for layout in (CASES[names[0]].policy, CASES[names[0]].own))
        run_ranks(_rank, count, count, names, models, out)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("tiny", "reference", "implicit_reward"), 1):
        make_tiny(folder / name, seed=seed, hidden_size=64, num_layers=2, tie_word_embeddings=False)
    torch.manual_seed(1)  # of the head, which the files do not have
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "tiny", num_labels=1)
    with torch.no_grad():
        critic.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    critic.save_pretrained(folder / "critic")
    return folder


@pytest.fixture(scope="module")
def beside(models):
    """The same steps with the role in the policy's process."""
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    known = {}

    def steps_of(case: Case) -> dict:
        if (key := (case.role, case.update, case.fault)) not in known:
            config = load_config(None, tables(case.alone, models, "with_trainer"))
            learner = Learner(config, build_titan(config), models / "tiny")
            told, _ = run_steps(learner, case, lambda step: [batch.rows[0] for batch in batches_of(step, case)])
            policy, role = state_of(learner), whole_tensors(learner.learned.shards())
            known[key] = dict(told=told, policy=policy, role=role)
        return known[key]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield steps_of
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.parametrize("name", CASES)
def test_it_learns_as_it_does_beside_the_policy(studies, beside, name):
    case = CASES[name]
    policy, role = (torch.load(studies / name / f"{side}.pt") for side in ("policy", "role"))
    wanted = beside(case)
    for updates, expected in zip(policy["told"], wanted["told"], strict=True):
        for update, other in zip(updates, expected, strict=True):
            assert update == (pytest.approx(other, rel=2e-5, abs=1e-6) if isinstance(other, dict) else other)
    for side, found in (("policy", policy), ("role", role)):
        for weight, tensor in wanted[side].items():
            assert (found["after"][weight] - tensor).norm() <= 2e-5 * tensor.norm() + 1e-6, weight
            assert torch.equal(found["after"][weight], found["from_snapshot"][weight]), weight
            assert torch.equal(found["after"][weight], found["from_checkpoint"][weight]), weight
    assert policy["again"] == policy["told"][-1] and role["again"] == []
    assert sorted(path.name for path in (studies / name / "checkpoint").iterdir() if path.is_dir()) == [case.role]
    bad = [isinstance(update, str) for updates in policy["told"] for update in updates]
    assert bad == ([False] * 6 if not case.fault else [False] * 2 + [True, case.fault == "role"] + [False] * 2)
