"""Modules that each kind of actor imports, by name, for standbys and fork servers."""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

SHARED = ("torch", "transformers.models.auto.tokenization_auto", "transformers.utils.type_validators")
"""What all kinds import."""
IMPORTS = {
    "trainer": ("titan_rl.models.device", "titan_rl.trainer.join", "titan_rl.trainer.state.snapshot"),
    "generator": (
        "titan_rl.generator.engine",
        "titan_rl.generator.weights.vllm_recording",
        "vllm.v1.worker.gpu_worker",
        "vllm.model_executor.layers.quantization.online.base",
    ),
    "verifier": (
        "titan_rl.environments.reasoning_gym.task",
        "titan_rl.environments.agents.endpoint",
        "titan_rl.environments.rollout.demonstrations",
        "titan_rl.environments.rollout.group",
        "titan_rl.environments.rollout.suites",
    ),
}
"""None of them may start a thread that a fork would lose, which Monarch's do."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, and leave to it only what is made afterwards: what imports make stays, and looking
    through it again and again takes a fourth of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


def import_shared() -> None:
    with collector_paused():
        for module in SHARED:
            importlib.import_module(module)


def import_all(kind: str) -> None:
    """Of a kind of actor."""
    with collector_paused():
        for module in SHARED + IMPORTS[kind]:
            importlib.import_module(module)
