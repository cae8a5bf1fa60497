"""Devices of a run, and the device that its trainer computes on, as recorded for resume and replay."""

import pickle
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from titan_rl.config.sections.schema import Config
from titan_rl.data.callbacks import RecordEvent
from titan_rl.models.device import DEVICE_TYPE
from titan_rl.trainer.model.determinism import RankPlatform, rank_platform, tolerance
from titan_rl.trainer.titan_config import build_titan

if TYPE_CHECKING:  # Monarch starts threads when it is imported, and checks run before processes are forked
    from titan_rl.mesh.control.trainer_repair import TrainerMesh

_OF_HOSTS = "cuda"
"""As torch calls NVIDIA's and AMD's GPUs alike."""


def device_type(config: Config) -> str:
    """``cpu``, or torch's word for a kind of GPU."""
    if not config.hosts.is_on:
        return DEVICE_TYPE
    return _OF_HOSTS if config.hosts.gpus else "cpu"


def is_on_cpu(config: Config) -> bool:
    return device_type(config) == "cpu"


TRAINER_DEVICE = "trainer_device"
"""The kind of event."""


async def trainer_device(trainer: "TrainerMesh", config: Config) -> RankPlatform:
    """Device of the trainer's first rank; on a CPU without a call."""
    from titan_rl.mesh.members.endpoints import TrainerEndpoints

    if is_on_cpu(config):
        return RankPlatform("cpu", torch=torch.__version__)
    replies = await trainer.call(TrainerEndpoints.examine(pickle.dumps(rank_platform)))
    answer, failure = replies[0]
    if failure:
        raise RuntimeError(f"the device of the trainer's first rank is unknown: {failure}")
    return pickle.loads(answer)


async def record_trainer_device(trainer: "TrainerMesh", config: Config, record_event: RecordEvent) -> None:
    record_event(TRAINER_DEVICE, **asdict(await trainer_device(trainer, config)))


def tolerance_here(config: Config) -> float:
    """Tolerance of a repeated step on this device: 0 on a CPU."""
    titan = build_titan(config)
    return tolerance(
        [RankPlatform(device_type(config), titan.debug.deterministic)], titan.training.mixed_precision_param
    )
