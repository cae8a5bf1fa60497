"""torch's pipeline schedules: the stages of a rank, and a step of microbatches that were cut before."""

from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from titan_rl.compat.reach import TORCH, Reach

_SCHEDULES = "torch.distributed.pipelining.schedules"
REACHES = (
    Reach(f"{_SCHEDULES}:PipelineScheduleSingle._stage", "find the stage of a rank"),
    Reach(f"{_SCHEDULES}:PipelineScheduleMulti._stages", "find the stages of a rank"),
    Reach(f"{_SCHEDULES}:PipelineScheduleSingle._step_microbatches", "take a step of microbatches that are cut"),
    Reach(f"{_SCHEDULES}:PipelineScheduleMulti._step_microbatches", "take a step of microbatches that are cut"),
)
TORCH.require(REACHES)

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def stages_of(schedule: Any) -> list[Any]:
    """The stages that a schedule runs on this rank."""
    return schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]


def step_microbatches(
    schedule: Schedule,
    arguments: list[tuple[torch.Tensor, ...]] | None,
    keywords: list[dict[str, Any]],
    targets: list[torch.Tensor] | None,
) -> None:
    """Forward and backward of microbatches: ``step`` would cut one batch, and not everything can be cut.

    ``arguments``: of the first stage, None elsewhere; ``targets``: of the last stage's loss, None elsewhere.
    """
    schedule._step_microbatches(arguments, keywords, targets, return_outputs=False)
