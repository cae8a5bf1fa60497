"""How vLLM loads a model: its class, loaders, a CPU's kernels, and its reload of one layer after the other."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from titan_rl.compat.reach import VLLM, Reach
from titan_rl.compat.torch.tensors import non_persistent_buffers

_RELOAD = "vllm.model_executor.model_loader.reload"
_INFO = f"{_RELOAD}.types:LayerReloadingInfo"
_KERNELS = "vllm.triton_utils.dispatcher"
_KERNEL_OWNERS = ("vllm.", "titan_rl.")
REACHES = (
    Reach("vllm.model_executor.models.registry:_run_in_subprocess", "look at a model's class in the engine's process"),
    Reach(f"{_KERNELS}:_rebind_kernels", "look for Triton's kernels in the modules that can have them"),
    Reach(f"{_KERNELS}:sys", "look for Triton's kernels in the modules that can have them"),
    Reach("vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER", "register a loader once"),
    Reach(
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader._prepare_weights",
        "keep a loader to the files that the trainer reads",
    ),
    Reach(
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
        "register the weight channel once",
    ),
    Reach(f"{_RELOAD}.layerwise:_get_original_loader", "record the loader of a layer that vLLM quantizes as it loads"),
    Reach(f"{_RELOAD}.layerwise:get_layerwise_info", "find what a reload knows of a layer"),
    Reach(f"{_RELOAD}.layerwise:_layerwise_process", "process a layer once its weights are new"),
    Reach(f"{_RELOAD}.layerwise:_place_kernel_tensors", "give a layer its own parameters back"),
    Reach(f"{_RELOAD}.meta:materialize_layer", "give a layer unprocessed memory"),
    Reach(f"{_RELOAD}.meta:restore_layer_on_meta", "record a loader without memory"),
    Reach(f"{_RELOAD}.utils:get_layer_params_buffers", "put a layer's own parameters aside"),
    Reach(f"{_INFO}.restore_metadata", "name the parameters that got new memory"),
    Reach(f"{_INFO}.kernel_tensors", "put a layer's own parameters aside"),
    Reach(f"{_INFO}.kernel_non_persistent_buffers", "put a layer's own buffers aside"),
)
VLLM.require(REACHES)

import vllm.model_executor.models.registry as registry
import vllm.triton_utils.dispatcher as dispatcher
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.triton_utils.dispatcher import _rebind_kernels


def inspect_models_here() -> None:
    """Have vLLM look at a model's class in this process, which loads it anyway, and not in one with imports of its own.

    That one keeps CUDA uninitialized in a process which forks engines; none is forked from an engine's."""
    registry._run_in_subprocess = lambda inspect: inspect()


def rebind_kernels_of_vllm() -> None:
    """Have vLLM look for Triton's kernels, which a CPU's replace, in its own modules alone.

    Looking in all that are imported takes longer than to load a small model."""
    dispatcher._rebind_kernels = _rebind_in_own_modules


def _rebind_in_own_modules(overrides: list[tuple[Callable, Any]]) -> None:
    own = {name: module for name, module in sys.modules.items() if name.startswith(_KERNEL_OWNERS)}
    dispatcher.sys = SimpleNamespace(modules=own)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
    try:
        _rebind_kernels(overrides)
    finally:
        dispatcher.sys = sys  # pyright: ignore[reportPrivateImportUsage]


def has_load_format(name: str) -> bool:
    """Whether a loader is registered under this name."""
    return name in _LOAD_FORMAT_TO_MODEL_LOADER


def has_weight_transfer(name: str) -> bool:
    """Whether a weight-transfer backend is registered under this name."""
    return name in WeightTransferEngineFactory._registry


class FileLoader(DefaultModelLoader):
    """vLLM's loader of safetensors, of those files of a directory that a subclass names."""

    def files_of(self, directory: str) -> tuple[list[str], str]:
        """Paths of the files, and the name of their index."""
        raise NotImplementedError

    def _prepare_weights(
        self,
        model_name_or_path: str,
        subfolder: str | None,
        revision: str | None,
        fall_back_to_pt: bool,
        allow_patterns_overrides: list[str] | None,
    ) -> tuple[str, list[str], bool, str]:
        """Directory, files, whether they are safetensors, name of the index."""
        files, index = self.files_of(model_name_or_path)
        return model_name_or_path, files, True, index


def give_new_memory(layer: torch.nn.Module) -> list[str]:
    """Give a layer that is being reloaded unprocessed memory; the names of the parameters that got it."""
    info = get_layerwise_info(layer)
    materialize_layer(layer, info)
    parameters, _ = info.restore_metadata
    return list(parameters)


def process_layer(layer: torch.nn.Module) -> None:
    """Process a layer whose unprocessed memory is filled, as vLLM does behind its loaders."""
    _layerwise_process(layer, get_layerwise_info(layer))


@contextmanager
def unprocessed_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Meanwhile a model in use has its unprocessed parameters, on meta, and loaders that copy at once, not those that
    wait for a whole layer to quantize it. Only between two engine steps."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = non_persistent_buffers(layer)
        restore_layer_on_meta(layer, info)
    for parameter in model.parameters():
        if hasattr(parameter, "weight_loader"):
            parameter.weight_loader = _get_original_loader(parameter)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()
