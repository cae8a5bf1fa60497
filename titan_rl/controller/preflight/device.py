"""Device that the trainer computes on, as a run records it for resume and replay."""

import pickle
from dataclasses import asdict

import torch

from titan_rl.config.sections.schema import Config
from titan_rl.controller.run_device import device_type, is_on_cpu
from titan_rl.data.callbacks import RecordEvent
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.trainer.model.determinism import TrainedOn, tolerance, trained_on
from titan_rl.trainer.titan_config import build_titan

TRAINER_DEVICE = "trainer_device"
"""The kind of event."""


async def trainer_device(trainer: TrainerMesh, config: Config) -> TrainedOn:
    """Its first rank's; a CPU has one kind, about which nobody need be asked."""
    if is_on_cpu(config):
        return TrainedOn("cpu", torch=torch.__version__)
    answers = await trainer.call(TrainerEndpoints.examine(pickle.dumps(trained_on)))
    answer, failure = answers[0]
    if failure:
        raise RuntimeError(f"the trainer's first rank cannot say what it computes on: {failure}")
    return pickle.loads(answer)


async def note_trainer_device(trainer: TrainerMesh, config: Config, record_event: RecordEvent) -> None:
    record_event(TRAINER_DEVICE, **asdict(await trainer_device(trainer, config)))


def tolerance_here(config: Config) -> float:
    """How far a step that this run does again may be off: 0 on a CPU."""
    titan = build_titan(config)
    return tolerance([TrainedOn(device_type(config), titan.debug.deterministic)], titan.training.mixed_precision_param)
