"""Devices of a run, and the device that its trainer computes on, as recorded for resume and replay."""

import pickle
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.placement import most_samples
from titan_rl.config.sections.schema import Config
from titan_rl.data.callbacks import RecordEvent
from titan_rl.environments.interfaces.task import Task, parts_of
from titan_rl.models.device import DEVICE_TYPE
from titan_rl.trainer.model.determinism import RankPlatform, rank_platform, tolerance
from titan_rl.trainer.titan_config import TitanConfig, build_titan

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


def check_placement(config: Config, titan: TitanConfig, task: Task, *, on_cpu: bool) -> None:
    """Errors: ConfigError for a run whose trainer and generators cannot take turns."""
    if config.placement.mode == "colocated":
        _check_colocated(config)
    if config.placement.helper_generators:
        _check_helpers(config, titan, task, on_cpu=on_cpu)


def _check_colocated(config: Config) -> None:
    setting = "placement.mode = 'colocated'"
    if config.rollout.max_staleness:
        raise ConfigError(
            f"{setting}: generators sleep while the trainer works, so rollout.max_staleness = "
            f"{config.rollout.max_staleness} has no effect here; set it to 0"
        )
    if config.recovery.warm_spares:
        raise ConfigError(
            f"{setting}: a spare engine would hold its weights in the trainer's turn: take recovery.warm_spares = 0"
        )


def _check_helpers(config: Config, titan: TitanConfig, task: Task, *, on_cpu: bool) -> None:
    count, ranks = config.placement.helper_generators, config.generator.tensor_parallel
    setting = f"placement.helper_generators = {count}"
    if config.placement.mode == "colocated":
        raise ConfigError(f"{setting}: colocated engines are on the trainer's devices anyway; leave one of both out")
    if config.hosts.is_on:
        raise ConfigError(f"{setting}: helpers are for a run on one host; leave it out where [hosts] is given")
    if config.generator.update == "drain":
        raise ConfigError(
            f"{setting}: a helper goes on with its answers under another version, which generator.update = 'drain' "
            f"rules out; take 'in_flight'"
        )
    if any(part.has_agent or part.sessions is not None for part in parts_of(task)):
        raise ConfigError(
            f"{setting}: an episode of task.name = {config.task.name!r} has a time limit of its own, or a place that "
            f"others wait for, and would keep both while a helper sleeps; leave it out"
        )
    if count * ranks > titan.world_size:
        most = titan.world_size // ranks
        mend = f"set it to {most} at most" if most else "leave it out, or lower generator.tensor_parallel"
        raise ConfigError(
            f"{setting}: with generator.tensor_parallel = {ranks} helpers need {count * ranks} devices of the trainer, "
            f"which has {titan.world_size}; {mend}"
        )
    rollout, generator = config.rollout, config.generator
    groups = rollout.prompts_per_step * (1 + rollout.max_staleness)
    of_each = most_samples(generator.max_num_seqs, rollout.group_size, is_helper=False) // rollout.group_size
    room = generator.replicas * of_each
    if groups <= room:
        raise ConfigError(
            f"{setting}: {groups} groups are sampled at once at most, and engines have room for {room}, so that none "
            f"waits for a helper; lower generator.max_num_seqs, or leave this out"
        )
    if on_cpu and not config.rollout.max_staleness:
        raise ConfigError(
            f"{setting}: with rollout.max_staleness = 0 generators have all cores while the trainer waits; set that "
            f"above 0, or leave this out"
        )


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
