"""vLLM's vision models: requests whose images are laid out already, and a CPU without torchvision.

torchvision's CUDA builds break transformers beside a CPU's torch (scripts/cpu_requirements.py), so a CPU has none. vLLM
asks for it where it imports the model, for one function of arithmetic, and where it makes a processor of images, which
is not used here.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from transformers import BatchFeature
from vllm import ModelRegistry
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from titan_rl.compat.reach import VLLM, Reach

_MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForCausalLM"),
}
"""Module and class in vLLM of the model types that need torchvision there, the second also for text."""
_TRANSFORMERS = "transformers.models.qwen2_vl.image_processing"
_INPUTS = "vllm.multimodal.inputs"
REACHES = (
    Reach("vllm.inputs.engine:mm_input", "give a request's images as patches"),
    Reach(f"{_INPUTS}:MultiModalFieldConfig.flat_from_sizes", "give a request's images as patches"),
    Reach(f"{_INPUTS}:MultiModalKwargsItems.from_hf_inputs", "give a request's images as patches"),
    Reach(f"{_TRANSFORMERS}_pil_qwen2_vl:smart_resize", "import a vision model of vLLM's without torchvision"),
    Reach("vllm.multimodal.processing.context:BaseProcessingInfo.get_mm_max_tokens_per_item", "size caches of images"),
)
VLLM.require(REACHES)


def register_without_torchvision(model_type: str, most_tokens: int = 0) -> None:
    """Have vLLM take a model where there is no torchvision; where there is, nothing is changed.

    ``most_tokens``: of one image."""
    if model_type not in _MODELS or find_spec("torchvision") is not None:
        return
    with_torchvision, (module, architecture) = f"{_TRANSFORMERS}_qwen2_vl", _MODELS[model_type]
    sys.modules[with_torchvision] = importlib.import_module(f"{_TRANSFORMERS}_pil_qwen2_vl")
    try:
        models = importlib.import_module(f"vllm.model_executor.models.{module}")
    finally:
        del sys.modules[with_torchvision]
    if most_tokens:
        models.Qwen2_5_VLProcessingInfo.get_mm_max_tokens_per_item = lambda *_, **__: {"image": most_tokens}
    ModelRegistry.register_model(architecture, getattr(models, architecture))  # vLLM would import it in a new process


def image_request(
    tokens: list[int],
    patches: np.ndarray,
    grid: np.ndarray,
    places: Sequence[tuple[int, int]],
    names: Sequence[str],
    salt: str,
) -> MultiModalInput:
    """A request with images.

    ``patches``: float32 [N, D] of all images; ``grid``: int64 [images, 3], frames, rows and columns of patches;
    ``places``: each image's first token and number of tokens. ``names``, ``salt``: by which what was computed of an
    image and of the tokens is found again."""
    sizes = torch.from_numpy(grid.prod(axis=1))
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    features = BatchFeature({"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.from_numpy(grid)})
    placeholders = [PlaceholderRange(offset=start, length=length) for start, length in places]
    items = MultiModalKwargsItems.from_hf_inputs(features, fields)
    return mm_input(tokens, items, {"image": list(names)}, {"image": placeholders}, cache_salt=salt)
