"""The channel as a vLLM weight-transfer backend, registered under its own name.

``record_needs`` asks a worker what it stores, and the plan is made from that. A draft model's tensors are among it, and
are part of a version if the draft model learns beside the policy. ``init_weight_transfer_engine`` gives
each worker its part of the plan. From then on an update is a version number. A worker that has not fetched the version
yet fetches it itself; titan_rl's generators fetch while the engine runs, so that only the apply stops it.

vLLM repacks weights after loading (on a CPU it leaves empty parameters behind). So each module is filled again and goes
through vLLM's own processing, one module after the other.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from titan_rl.compat.vllm.layers import forget_packed_experts
from titan_rl.compat.vllm.loading import give_new_memory, has_weight_transfer, process_layer
from titan_rl.config.model_directory.directory import stored_tensors
from titan_rl.generator.weights.adapter_reader import AdapterReader
from titan_rl.generator.weights.quantization.linear import is_quantized_from, quantized_layers, weight_size
from titan_rl.generator.weights.vllm_head import widen_head_once
from titan_rl.generator.weights.vllm_loader import round_parameters
from titan_rl.generator.weights.vllm_recording import Recorded, Target, record
from titan_rl.mesh.channel.plan import DRAFTER, Box, PlanError
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader

BACKEND = "titan_rl"
Shapes = Iterable[tuple[str, tuple[int, ...]]]
"""Of a checkpoint's tensors, by name."""
_FETCH_SECONDS = 600.0


@dataclass(kw_only=True)
class ChannelInit(WeightTransferInitInfo):
    setups: dict[int, ReaderSetup]
    """By tensor-parallel rank; a worker's own is enough."""


@dataclass(kw_only=True)
class ChannelUpdate(WeightTransferUpdateInfo):
    version: int


@dataclass(frozen=True)
class _Fill:
    """Values in the reader's buffer, and the part of a parameter that they fill."""

    target: Target
    need: Box
    box: Box
    values: torch.Tensor

    def run(self, parameter: torch.Tensor) -> None:
        view = parameter.as_strided(self.need.size, self.target.stride, self.target.offset)
        view[self.box.within(self.need)].copy_(self.values)


class ChannelEngine(WeightTransferEngine):
    init_info_cls, update_info_cls = ChannelInit, ChannelUpdate
    supports_draft_weight_update = True
    recorded: list[Recorded]
    _prefix = ""
    """Of the modules' names in ``fills``: those of the model that an update is for."""

    def record_needs(
        self, checkpoint: Shapes, drafter: torch.nn.Module | None = None, drafter_checkpoint: Shapes = ()
    ) -> list[Recorded]:
        """Boxes that this worker stores of the checkpoint's tensors (name, shape), and of the draft model's."""
        widen_head_once(self.model)
        self.recorded = record(self.model, checkpoint)
        if drafter is not None:
            drafted = record(drafter, drafter_checkpoint)
            _check_apart(self.model, drafter, drafted)
            self.recorded += [_of_drafter(copy) for copy in drafted]
        return self.recorded

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """By vLLM, for the draft model."""
        super().set_weight_update_target(model, model_config)
        self._prefix = DRAFTER

    def reset_weight_update_target(self) -> None:
        super().reset_weight_update_target()
        self._prefix = ""

    def init_transfer_engine(self, init_info: ChannelInit) -> None:
        setup = init_info.setups[get_tensor_model_parallel_rank()]
        threads = torch.get_num_threads()  # as many as this process has cores: the others are the trainer's
        if setup.adapter_scale is None:
            reader = WeightReader(setup, self.device, threads)
        else:
            base = stored_tensors(self.model_config.model)
            reader = AdapterReader(setup, self.device, self.recorded, base, threads)
        targets: dict[tuple[str, Box], list[Target]] = defaultdict(list)
        for copy in self.recorded:
            targets[copy.name, copy.box].append(copy.target)
        fills: dict[str, list[_Fill]] = defaultdict(list)
        for name, need, box, values in reader.pieces():
            for target in targets[name, need]:
                fills[target.module].append(_Fill(target, need, box, values))
        # one assignment: an update that is being applied keeps the connection that it began with
        self._connection = reader, fills

    @property
    def reader(self) -> WeightReader:
        return self._connection[0]

    @property
    def fills_drafter(self) -> bool:
        """Whether a draft model's weights are part of each version."""
        return any(module.startswith(DRAFTER) for module in self._connection[1])

    @property
    def bytes_stored(self) -> int:
        """Bytes of the parameters that the channel fills, each counted once."""
        filled = [copy for copy in self.recorded if self.fills_drafter or not copy.name.startswith(DRAFTER)]
        boxes = {(copy.target.module, copy.target.parameter, copy.target.offset): copy for copy in filled}
        return sum(copy.box.numel * getattr(torch, copy.dtype).itemsize for copy in boxes.values())

    def start_weight_update(self) -> None:
        widen_head_once(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ChannelUpdate) -> None:
        """Errors: TornRead if no complete copy of the version can be read; the model is then unusable."""
        reader, fills = self._connection
        if reader.held != update_info.version:
            asyncio.run(reader.fetch(update_info.version, _FETCH_SECONDS))
        for path, module in self.model.named_modules():
            if (name := self._prefix + path) in fills:
                self._fill(module, fills[name])

    def _fill(self, module: torch.nn.Module, fills: list[_Fill]) -> None:
        names = give_new_memory(module)
        filled: dict[str, int] = defaultdict(int)
        for fill in fills:
            filled[fill.target.parameter] += fill.values.numel()
        for name in names:
            if filled[name] < (parameter := getattr(module, name)).numel():
                parameter.data.zero_()  # the rest is padding of the vocabulary, or a bias that another rank adds
        for fill in fills:
            fill.run(getattr(module, fill.target.parameter).data)
        round_parameters(module, self.model_config.dtype)
        if current_platform.is_cpu():
            forget_packed_experts(module)
        process_layer(module)

    def misquantized(self) -> list[str]:
        """Layers that multiply by something else than the version's weights in E4M3, whatever multiplies them."""
        _, fills = self._connection
        wrong = []
        for name, layer in quantized_layers(self.model).items():
            weight_OI = torch.zeros(weight_size(layer), dtype=self.model_config.dtype, device=self.device)
            for fill in fills[name]:
                if fill.target.parameter == "weight":
                    fill.run(weight_OI)
            if not is_quantized_from(layer, weight_OI):
                wrong.append(name)
        return wrong

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the next fetch writes into what was copied from

    def shutdown(self) -> None:
        pass


def _check_apart(policy: torch.nn.Module, drafter: torch.nn.Module, recorded: list[Recorded]) -> None:
    """Errors: PlanError if what a version brings a draft model would overwrite the policy's."""
    of_policy, modules = {id(parameter) for parameter in policy.parameters()}, dict(drafter.named_modules())
    for copy in recorded:
        if id(getattr(modules[copy.target.module], copy.target.parameter)) in of_policy:
            raise PlanError(f"vLLM shares {copy.name} of the draft model with the policy")


def _of_drafter(copy: Recorded) -> Recorded:
    """Copy of a draft model's loader, under the names that its tensors and modules have in a version."""
    target = replace(copy.target, module=f"{DRAFTER}{copy.target.module}")
    return replace(copy, name=f"{DRAFTER}{copy.name}", target=target)


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack modules that share another module's weight.

    Layerwise reload repacks a layer when its own weights arrive. A tied output head gets none: on a CPU it would
    silently keep the packed copy of the old version.
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
    if not has_weight_transfer(BACKEND):
        WeightTransferEngineFactory.register_engine(BACKEND, ChannelEngine)


def transfer_engine(worker: Any) -> ChannelEngine:
    """Channel engine of a worker, for ``collective_rpc``."""
    return worker.weight_transfer_engine


def load_version(worker: Any, version: int) -> None:
    """Fill a worker's policy with a version; its draft model, too, if that learns. Errors: as ``receive_weights``."""
    drafter = [worker.start_draft_weight_update] if transfer_engine(worker).fills_drafter else []
    for start in (worker.start_weight_update, *drafter):
        start()
        worker.update_weights(dict(version=version))
        worker.finish_weight_update()
