"""An engine that sleeps holds neither weights nor KV: the trainer has the device.

    awake ──fall_asleep──▶ asleep ──wake_weights──▶ of no version ──the channel fills it──▶ wake_cache ──▶ awake

On GPUs this is vLLM's sleep mode at level 2, which keeps a draft model in the host's memory. On a CPU vLLM has none:
here what the channel fills, what vLLM packed of it and the KV give their pages back, and keep their addresses; a draft
model stays. Each function is run by a worker (``collective_rpc``).
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.platforms import current_platform

from titan_rl.compat.vllm.layers import drop_packed_weights
from titan_rl.generator.weights.vllm_backend import transfer_engine
from titan_rl.generator.weights.vllm_head import widen_head_once
from titan_rl.mesh.channel.plan import DRAFTER
from titan_rl.mesh.resources.released_memory import drop_contents, give_back


def fall_asleep(worker: Any) -> None:
    """Release weights and KV. The caller has reset the prefix cache, running requests included."""
    if not current_platform.is_cpu():
        worker.sleep(level=2)
        return
    model = worker.model_runner.model
    widen_head_once(model)  # forgets the wide copy
    drop_packed_weights(model)
    for storage in _distinct([*_weights(worker), *worker.model_runner.kv_caches]):
        drop_contents(storage)
    give_back()


def wake_weights(worker: Any) -> None:
    """Allocate the weights' memory again; it holds no version yet."""
    if not current_platform.is_cpu():
        worker.wake_up(tags=["weights"])


def wake_cache(worker: Any) -> None:
    if not current_platform.is_cpu():
        worker.wake_up(tags=["kv_cache"])


def _weights(worker: Any) -> Iterator[torch.Tensor]:
    """All of the policy that the channel fills, and nothing else: what it does not fill would stay empty."""
    modules = dict(worker.model_runner.model.named_modules())
    for copy in transfer_engine(worker).recorded:
        if not copy.name.startswith(DRAFTER):
            yield getattr(modules[copy.target.module], copy.target.parameter)


def _distinct(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())
