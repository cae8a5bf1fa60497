"""Modules that each kind of actor imports, by name, for standbys and fork servers."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from titan_rl.compat.transformers import imported_faster

SHARED = (
    "torch",
    "transformers.models.auto.tokenization_auto",
    "transformers.utils.type_validators",
    "transformers.modeling_utils",
)
"""What all kinds import, without torchao."""
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
_ON_GPU = {
    "generator": (
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
        "vllm.compilation.backends",
    )
}
"""More, where there is one. None of them may initialize CUDA, which could not be used after a fork."""


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


@contextmanager
def _without_torchao() -> Iterator[None]:
    """transformers imports all of torchao wherever it is installed, which takes half a second and initializes CUDA.

    It does without from then on; whoever else asks for torchao afterwards gets it.
    """
    if "torchao" in sys.modules:
        yield
        return
    _leave_out_torchao()
    try:
        yield
    finally:
        del sys.modules["torchao"]


def _leave_out_torchao() -> None:
    sys.modules.setdefault("torchao", None)  # pyright: ignore[reportArgumentType]  # so that Python finds none


def import_shared() -> None:
    with collector_paused(), _without_torchao(), imported_faster():
        for module in SHARED:
            importlib.import_module(module)


def import_all(kind: str) -> None:
    """Of a kind of actor."""
    import_shared()
    if kind == "generator":  # vLLM imports it, too
        _leave_out_torchao()
    with collector_paused():
        for module in IMPORTS[kind]:
            importlib.import_module(module)
        for module in _ON_GPU.get(kind, ()) if sees_gpu() else ():
            importlib.import_module(module)


def sees_gpu() -> bool:
    """Whether torch, which was imported, finds a GPU for this process. It does not initialize CUDA."""
    return sys.modules["torch"].accelerator.is_available()
