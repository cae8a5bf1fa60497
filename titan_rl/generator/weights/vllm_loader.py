"""vLLM's loader, kept to the files that the trainer reads.

By itself vLLM reads whatever else lies in a directory: a ``consolidated.safetensors`` before the rest, and without an
index every ``*.safetensors``, of which the last wins. How linear layers are packed (vllm_linear.py) or quantized on a
CPU (quantization/linear.py) is said here, too.
"""

from typing import Any

import torch
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader

from titan_rl.compat.vllm.loading import FileLoader, has_load_format
from titan_rl.config.model_directory.directory import weight_files
from titan_rl.generator.weights.quantization.e4m3 import Scheme
from titan_rl.generator.weights.quantization.linear import quantize_linears
from titan_rl.generator.weights.vllm_linear import widen_linears

FORMAT = "titan_rl"
EMULATED, BATCH_INVARIANT = "titan_rl_quantization", "titan_rl_batch_invariant"
"""Keys of vLLM's ``additional_config``: the scheme that a CPU emulates; in how many parts layers share
products by the trainer's functions."""
_EXACT = "e_score_correction_bias"
"""A router's bias, which the trainer has in fp32, too: it is a buffer there."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""What vLLM makes of weights that it quantizes."""


class DirectoryLoader(FileLoader):
    _emulated: Scheme | None = None
    _num_parts = 0
    """Of products of batch-invariant layers; 0: vLLM's own."""

    def files_of(self, directory: str) -> tuple[list[str], str]:
        return [str(file) for file in weight_files(directory)], SAFE_WEIGHTS_INDEX_NAME

    def load_model(self, vllm_config: VllmConfig, *arguments: Any, **keywords: Any) -> nn.Module:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        assert isinstance(vllm_config.additional_config, dict), "it is what engine_arguments sets"
        self._vllm_config, self._num_parts = vllm_config, vllm_config.additional_config.get(BATCH_INVARIANT, 0)
        is_draft = vllm_config.model_config.runner_type == "draft"  # which vLLM quantizes on no GPU, either
        self._emulated = None if is_draft else vllm_config.additional_config.get(EMULATED)
        return super().load_model(vllm_config, *arguments, **keywords)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint's tensors; vLLM packs them afterwards."""
        super().load_weights(model, model_config)
        round_parameters(model, model_config.dtype)
        if self._num_parts:
            from titan_rl.generator.batch_invariance import make_batch_invariant  # which brings TorchTitan along

            make_batch_invariant(model, self._vllm_config, self._num_parts)
        else:
            if self._emulated is not None:
                quantize_linears(model, self._emulated)
            widen_linears(model, self._max_num_seqs)


@torch.no_grad()
def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round to ``dtype`` what vLLM holds in fp32 whatever the model is in, such as ``A_log`` and GLM-4.5's gates.

    The trainer multiplies by all weights in its compute dtype; half a percent of a decay would be a disagreement.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 != dtype and not name.endswith((_EXACT, *_SCALES)):
            parameter.copy_(parameter.to(dtype))


def register() -> None:
    if not has_load_format(FORMAT):
        register_model_loader(FORMAT)(DirectoryLoader)
