"""A rank's adapters: how they begin, what they add to the weights that others get, and how they are saved.

The weights themselves are never written to: ``W + (alpha / rank) B A`` is made where it is asked for, box by box, in
fp32, of A and B as the model computes with them: rounded to ``training.mixed_precision_param``. A box of W has B's rows
on the same rank, whatever the layout, but of A, whose few rows FSDP shares out, a rank has only some: after each update
all ranks exchange their parts of A, in one collective.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.sections.schema import LoraConfig
from titan_rl.data.seeds import named_seed
from titan_rl.models.weights.hf_weights import base_digest, gather_whole, slices
from titan_rl.models.weights.lora import adapter_disabled
from titan_rl.models.weights.peft_files import form_of, load_adapter, save_adapter
from titan_rl.models.weights.shards import LowRank, Shard, local_shards
from titan_rl.trainer.distributed.ranks import gathered

_A, _B = ".lora_A.weight", ".lora_B.weight"
_Shape = tuple[int, ...]
_Box = tuple[str, _Shape, _Shape, _Shape]
"""A tensor's name, a box's corner and size, and the shape of all of the tensor."""


class Adapters:
    """LoRA adapters of a rank's part of the model; all ranks create them together."""

    def __init__(
        self,
        spec: ModelSpec,
        model_parts: list[nn.Module],
        lora: LoraConfig,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """``path``: directory of the base weights. ``dtype``: in which the model computes."""
        self.base = base_digest(path)
        """Digest of the base weights."""
        self.lora, self.model_parts, self.device, self._dtype = lora, model_parts, device, dtype
        self.form = form_of(spec.name)
        """Of the adapter's files."""
        shards = local_shards(spec, model_parts, adapters=True)
        self.shards = [replace(shard, computed_in=dtype) for shard in shards]
        self._b = {shard.name.removesuffix(_B): shard for shard in self.shards if shard.name.endswith(_B)}
        self._a = _Whole([shard for shard in self.shards if shard.name.endswith(_A)], {f"{n}{_A}" for n in self._b})

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Initialize the adapters, or load ``lora.adapter``.

        B is zero; A is drawn from U(-1/sqrt(inputs), 1/sqrt(inputs)), seeded by its name, so that all layouts start
        equal."""
        if self.lora.adapter:
            load_adapter(self.shards, self.lora.adapter, self.form)
        for shard in self.shards if not self.lora.adapter else ():
            if shard.name.endswith(_B):
                shard.tensor.zero_()
                continue
            generator = torch.Generator().manual_seed(named_seed(seed, "adapter", shard.name))
            bound = 1 / math.sqrt(shard.shape[1])
            whole = torch.empty(shard.shape).uniform_(-bound, bound, generator=generator)
            shard.tensor.copy_(whole[slices(shard.start, shard.tensor.shape)])
        self.refresh()

    def refresh(self) -> None:
        """Refresh the gathered A matrices after a change; all ranks call it."""
        self._a.refresh(self.device)

    def merged(self, shards: list[Shard]) -> list[Shard]:
        """Boxes of the weights with their adapters' product; they stay current."""
        return [self._merged(shard) for shard in shards]

    def _merged(self, shard: Shard) -> Shard:
        name = shard.name.removesuffix(".weight")
        if (b := self._b.get(name)) is None:
            return shard
        rows, columns = slices(shard.start, shard.tensor.shape)
        assert slices(b.start, b.tensor.shape)[0] == rows, f"{b.name} has not the rows of its weight"
        a = self._a.tensors[f"{name}{_A}"][:, columns]
        return replace(shard, low_rank=LowRank(b.tensor, a, self.lora.alpha / self.lora.rank, self._dtype))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters inside the context."""
        with adapter_disabled(self.model_parts):
            yield

    def save(self, base: Path, out: Path) -> None:
        """Write the adapters in PEFT's format; all ranks call, rank 0 writes. ``base``: the base model."""
        dtypes = {shard.name: torch.float32 for shard in self.shards}
        everything = gather_whole(self.shards, dtypes, self.device)
        tensors = {name: tensor for name, tensor in everything if tensor is not None}
        if not dist.get_rank():
            save_adapter(tensors, self.lora, base, out, self.form)


class _Whole:
    """Whole copies of tensors of which each rank has a box, brought up to date by one collective."""

    def __init__(self, boxes: list[Shard], names: set[str]):
        """``names``: tensors to gather whole on this rank."""
        self._boxes = boxes
        self._alone = dist.get_world_size() == 1
        self._everyone: list[list[_Box]] = []
        self._longest = 0
        if self._alone:
            self.tensors = {box.name: box.tensor for box in boxes}
            return
        self._everyone = gathered([(box.name, box.start, tuple(box.tensor.shape), box.shape) for box in boxes])
        device = boxes[0].tensor.device if boxes else torch.device("cpu")
        shapes = {
            name: shape for boxes_of_rank in self._everyone for name, _, _, shape in boxes_of_rank if name in names
        }
        self.tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        counts = [sum(math.prod(size) for _, _, size, _ in boxes_of_rank) for boxes_of_rank in self._everyone]
        self._longest = max(counts)

    @torch.no_grad()
    def refresh(self, device: torch.device) -> None:
        if self._alone:
            return
        mine = torch.zeros(self._longest, device=device)
        if self._boxes:
            values = torch.cat([box.tensor.reshape(-1) for box in self._boxes])
            mine[: len(values)] = values
        gathered = [torch.empty_like(mine) for _ in self._everyone]
        dist.all_gather(gathered, mine)
        for boxes, values in zip(self._everyone, gathered, strict=True):
            self._take(boxes, values)

    def _take(self, boxes: list[_Box], values: torch.Tensor) -> None:
        first = 0
        for name, start, size, _ in boxes:
            count = math.prod(size)
            if name in self.tensors:
                self.tensors[name][slices(start, size)] = values[first : first + count].view(size)
            first += count
