"""Ranks in processes of their own: a step that asks its roles, whatever layout policy and reference have."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from batches import batch_of
from layout_ranks import EPS, Layout, _everyones, whole_tensors

from titan_rl.config.load import load_config
from titan_rl.data.types import StepMetrics

NUM_STEPS, UPDATES = 2, (0, 1)


@dataclass
class Study:
    trained: dict[str, torch.Tensor]
    metrics: list[list[StepMetrics]]
    """Of each rank: of each update."""
    digests: list[tuple[dict[str, str], dict[str, str]]]
    """Of each rank: the weights of the role's models before and after."""


ALGORITHMS = {
    "asks for all": ("reference", {"name": "role_algorithms:AsksForAll"}),
    "distillation": ("teacher", {"name": "distillation"}),
    "top_k": ("teacher", {"name": "distillation", "top_k": 4}),
    "teachers": ("teacher", {"name": "distillation", "top_k": 4}),
    "sdpo": ("", {"name": "sdpo", "distillation_weight": 0.5}),
    "sdpo by words": ("", {"name": "sdpo", "top_k": 4}),
}
"""The role that each needs, if any, and its section of the TOML."""


_OF_SELF_TEACHERS = ("llama", "qwen3", "dp2", "pp2")
"""Layouts of algorithms without another model: the reference of each, rows that ranks share out, and stages."""
_OF_TEACHERS = (*_OF_SELF_TEACHERS, "dp2 own", "pp2 own")
"""Layouts of several teachers."""


def with_algorithms(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Each layout with each of the algorithms, whose name then ends that of the layout."""
    return {
        f"{name}, {algorithm}": layout
        for name, layout in layouts.items()
        for algorithm, (role, _) in ALGORITHMS.items()
        if name in (_OF_TEACHERS if algorithm == "teachers" else layouts if role else _OF_SELF_TEACHERS)
    }


def steps_with_roles(layout: Layout, models: Path, out: Path) -> Study:
    """``layout.start_from``: if set, the role is asked as if it lived elsewhere, on the same ranks."""
    from titan_rl.trainer.roles.frozen_worker import FrozenRoleWorker
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    role, algorithm = ALGORITHMS[out.name.rpartition(", ")[2]]
    placement = "own" if layout.start_from else "with_trainer"
    paths = [str(models / name) for name in (f"{layout.model}_reference", layout.model)]
    by_task = out.name.endswith(", teachers")  # the second of which is the student as it was at first
    settings = {"by_task": dict(zip(("gcd", "lcm"), paths, strict=True))} if by_task else {"path": paths[0]}
    settings["placement"] = placement
    config = load_config(
        None,
        {
            "run": {"plugin_path": [str(Path(__file__).parent)]},
            "algorithm": {**algorithm, "updates_per_batch": 2},
            **({role: settings} if role else {}),
            **({"task": {"name": "mixture", "options": {"gcd": {}, "lcm": {}}}} if by_task else {}),
            "optimizer": {"lr": 1e-3, "eps": EPS},
            "parallelism": dict(layout.parallelism),
        },
    )
    titan = build_titan(config)
    learner = Learner(config, titan, models / layout.model)
    lone = FrozenRoleWorker(config, titan, role, paths[0], "") if layout.start_from else None
    digests = (lone or learner).digests
    before, metrics = digests(), []
    for step in range(NUM_STEPS):
        batches = [
            _batch(2 * step + update, titan, reprompts=not role, tasks=by_task, apart=bool(update)).rows
            for update in UPDATES
        ]
        mine = titan.batch_rank(dist.get_rank())
        found = _found(lone, batches, mine)
        for update in learner.train_step([rows[mine] for rows in batches], [True] * len(batches), found):
            update.seconds_forward_backward = update.seconds_optimizer = 0.0
            metrics.append(update)
    assert len(before) == (0 if not role else 2 if by_task else 1)
    return Study(whole_tensors(learner.shards()), _everyones(metrics), _everyones((before, digests())))


def _batch(seed: int, titan, **kind: bool):
    """With tasks that are not apart, rows hold those of several teachers."""
    layout = dict(num_ranks=titan.batch_degree, row_tokens=60, row_multiple=titan.row_multiple)
    return batch_of(seed, **kind, **layout)


def _found(lone, batches, group: int) -> list:
    """What the role's ranks told of this group's rows, as the channel would bring it."""
    if lone is None:
        return []
    told = _everyones(lone.find([[rows[g] for rows in batches] for g in range(len(batches[0]))]))
    return [entry for rank in told if rank is not None for entry in rank[group]]
