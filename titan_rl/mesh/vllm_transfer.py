"""The channel as a vLLM weight-transfer backend, registered under its own name.

vLLM repacks linear weights after loading (on a CPU it leaves empty parameters behind), so every update goes
through its layerwise reload.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from titan_rl.mesh.channel import WeightReader, WeightVersion

BACKEND = "titan_rl"


@dataclass(kw_only=True)
class ChannelInit(WeightTransferInitInfo):
    reader: Any
    """A WeightReader: the engine runs in this process."""


@dataclass(kw_only=True)
class ChannelUpdate(WeightTransferUpdateInfo):
    version: Any
    """A WeightVersion that the reader has fetched."""


class ChannelEngine(WeightTransferEngine):
    init_info_cls, update_info_cls = ChannelInit, ChannelUpdate
    reader: WeightReader

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        self.reader = init_info.reader

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ChannelUpdate) -> None:
        version: WeightVersion = update_info.version
        self.model.load_weights(self.reader.tensors(version))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)

    def shutdown(self) -> None:
        pass


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack modules that share another one's weight.

    Layerwise reload repacks a layer when its own weights arrive. A tied output head gets none: on a CPU it would
    go on with the packed copy of the old version, in silence.
    """
    owners: set[int] = set()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        if weight.data_ptr() in owners and (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
        owners.add(weight.data_ptr())


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelEngine)
