"""vLLM's loader, kept to the files that the trainer reads.

By itself vLLM reads whatever else lies in a directory: a ``consolidated.safetensors`` before the rest, and without an
index every ``*.safetensors``, of which the last wins. How linear layers are packed is said here, too (vllm_linear.py).
"""

from typing import Any

from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from titan_rl.config.model_directory.directory import weight_files
from titan_rl.generator.vllm_linear import widen_linears

FORMAT = "titan_rl"


class DirectoryLoader(DefaultModelLoader):
    def _prepare_weights(self, model_name_or_path: str, *_: Any, **__: Any) -> tuple[str, list[str], bool, str]:
        """Its folder, its files, whether they are safetensors, the name of its index."""
        files = [str(file) for file in weight_files(model_name_or_path)]
        return model_name_or_path, files, True, SAFE_WEIGHTS_INDEX_NAME

    def load_model(self, vllm_config: VllmConfig, *arguments: Any, **keywords: Any) -> nn.Module:
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        return super().load_model(vllm_config, *arguments, **keywords)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """vLLM packs them after this."""
        super().load_weights(model, model_config)
        widen_linears(model, self._max_num_seqs)


def register() -> None:
    if FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(FORMAT)(DirectoryLoader)
