"""Devices of a run's trainer and engines: this machine's, or those of its hosts."""

from titan_rl.config.sections.schema import Config
from titan_rl.models.device import DEVICE_TYPE

_OF_HOSTS = "cuda"
"""As torch calls NVIDIA's and AMD's GPUs alike."""


def device_type(config: Config) -> str:
    """``cpu``, or torch's word for a kind of GPU."""
    if not config.hosts.is_on:
        return DEVICE_TYPE
    return _OF_HOSTS if config.hosts.gpus else "cpu"


def is_on_cpu(config: Config) -> bool:
    return device_type(config) == "cpu"
