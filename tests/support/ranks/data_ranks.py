"""Ranks in processes of their own, which take steps of runs without a generator: a case is an algorithm in a layout."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import torch
from batches import poison, with_fault
from layout_ranks import EPS, _everyones, whole_tensors
from local_trainer import LocalTrainer, make_steps

from titan_rl.config.load import load_config

NUM_STEPS = 2
KINDS = {"sft": "demonstrations", "kto": "labels"}
"""What an algorithm's rows are, if not pairs."""


@dataclass(frozen=True)
class Case:
    algorithm: dict
    """The section."""
    parallelism: dict = field(default_factory=dict)
    seq_len: int = 512
    share_prefix: bool = True
    num_examples: int = 7
    """Of a step: a number that no layout divides."""
    meets_a_bad_row: bool = False
    """In one step more."""


@dataclass
class Steps:
    """What came of a case; numbers are those of every rank."""

    steps: list[list[dict[str, float]]]
    held_out: list[dict[str, float]]
    largest: list[list[float]]
    """Advantage of each step's samples: a margin, or what KTO's z makes of a label."""
    blamed: list[list[str]]
    """The row of a further step whose gradient is not finite, and what was said of that step; or nothing."""
    trained: dict[str, torch.Tensor]


def begins_at(case: Case) -> str:
    """The model that a case starts from: a reward model with a head that already says something."""
    return "reward_model" if case.algorithm["name"] == "reward_model" else "tiny"


def config_of(case: Case, folder: Path):
    """``folder``: of the models and the rows."""
    name = case.algorithm["name"]
    tables = {
        "algorithm": case.algorithm,
        "model": {"path": str(folder / "tiny")},
        "data": {
            "file": str(folder / f"{KINDS.get(name, 'pairs')}.jsonl"),
            "examples_per_step": case.num_examples,
            "held_out_share": 0.3,
        },
        "optimizer": {"lr": 1e-3, "eps": EPS},
        "rollout": {} if case.share_prefix or name in KINDS else {"share_prefix": False},
        "training": {"steps": 10, "seq_len": case.seq_len},
        "parallelism": case.parallelism,
    }
    if name in ("dpo", "kto"):
        # not the policy as it begins: KTO's zero and DPO's rewards are then something from the first step on
        tables["reference"] = {"path": str(folder / "reference")}
    return load_config(None, tables)


def data_steps(case: Case, folder: Path, out: Path) -> Steps:
    checked, steps = make_steps(config_of(case, folder))
    trainer = LocalTrainer(checked, folder / begins_at(case))

    async def train() -> tuple[list, list, dict]:
        told, largest = [], []
        for step in range(1, NUM_STEPS + 1):
            batch, metrics = await steps.train(trainer, step)
            told.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm})
            told[-1] |= steps.means(metrics, steps.examples(step)) | {"count": metrics.num_trained_tokens}
            largest.append(max(abs(float(v)) for rows in batch.rows for row in rows for v in row.advantage_S))
        found = await steps.held_out(trainer)
        accuracy = {"accuracy": found.accuracy.value} if found.accuracy else {}
        return told, largest, found.metrics | accuracy

    told, largest, held_out = asyncio.run(train())
    trained = whole_tensors(trainer.learner.shards())
    blamed = asyncio.run(meet_a_bad_row(trainer, steps)) if case.meets_a_bad_row else []
    return Steps(_everyones(told), _everyones(held_out), _everyones(largest), _everyones(blamed), trained)


async def meet_a_bad_row(trainer: LocalTrainer, steps) -> list[str]:
    place = steps.examples(NUM_STEPS + 1)[0].place
    batch = await steps.batch(trainer, NUM_STEPS + 1)
    poison(trainer.learner)
    [found] = await trainer.train([with_fault(batch, "gradient", place, 0)], NUM_STEPS + 1)
    return [place, str(found)]
