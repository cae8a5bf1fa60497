"""vLLM's loader, kept to the files that the trainer reads.

By itself vLLM reads whatever else lies in a directory: a ``consolidated.safetensors`` before the rest, and without an
index every ``*.safetensors``, of which the last wins. How linear layers are packed is said here, too (vllm_linear.py).
"""

from typing import Any

from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import register_model_loader

from titan_rl.compat.vllm.loading import FileLoader, has_load_format
from titan_rl.config.model_directory.directory import weight_files
from titan_rl.generator.vllm_linear import widen_linears

FORMAT = "titan_rl"


class DirectoryLoader(FileLoader):
    def files_of(self, directory: str) -> tuple[list[str], str]:
        return [str(file) for file in weight_files(directory)], SAFE_WEIGHTS_INDEX_NAME

    def load_model(self, vllm_config: VllmConfig, *arguments: Any, **keywords: Any) -> nn.Module:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        return super().load_model(vllm_config, *arguments, **keywords)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint's tensors; vLLM packs them afterwards."""
        super().load_weights(model, model_config)
        widen_linears(model, self._max_num_seqs)


def register() -> None:
    if not has_load_format(FORMAT):
        register_model_loader(FORMAT)(DirectoryLoader)
