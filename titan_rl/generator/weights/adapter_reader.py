"""Reader that fetches adapters alone, and merges them into the base model's weights, which lie beside the engine.

    base weights, in the model's directory ─┐
    A, B of a version, by the channel ──────┴─▶ W + (alpha / rank) B A in fp32 ─▶ what the engine stores, rounded to it

It runs beside the engine's steps, like any fetch, so that the engine stops no longer than for whole weights.

Source: LoRA, arXiv 2106.09685, section 4.1.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open

from titan_rl.config.model_directory.safetensors_files import StoredTensor
from titan_rl.generator.weights.vllm_recording import Recorded
from titan_rl.mesh.channel.plan import LORA_A, LORA_B, WEIGHT, AdapterForm, Box, Interner, Need, Units, split_name
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.channel.relay.gathering import Fetched, Route
from titan_rl.mesh.resources.background_thread import in_side_thread
from titan_rl.mesh.resources.released_memory import drop_contents


def adapter_needs(recorded: Iterable[Recorded], forms: dict[str, AdapterForm], interner: Interner) -> Units:
    """Needs of an engine that merges adapters, for the plan. ``forms``: by weights' names."""
    needs: dict[tuple[str, Need], None] = {}
    for copy in recorded:
        if (form := forms.get(copy.name)) is not None:
            unit, name = split_name(copy.name.removesuffix(WEIGHT))
            for part, box in ((LORA_A, _of_a(copy.box, form.rank)), (LORA_B, _of_b(copy.box, form.rank))):
                needs[unit, Need(f"{name}{part}", box, form.dtype)] = None
    return interner.units(needs)


def _of_a(box: Box, rank: int) -> Box:
    """Part of A [rank, inputs] that a box of its weight needs."""
    return Box((0, box.start[1]), (rank, box.size[1]))


def _of_b(box: Box, rank: int) -> Box:
    """Part of B [outputs, rank]."""
    return Box((box.start[0], 0), (box.size[0], rank))


@dataclass(frozen=True)
class _Matrix:
    """Part of an adapter's matrix that a box of its weight needs."""

    box: Box
    values: torch.Tensor
    pieces: Sequence[tuple[Box, torch.Tensor]]
    """Fetched, of which it consists."""

    def gather(self) -> torch.Tensor:
        for box, values in self.pieces:
            if (common := box.intersect(self.box)) is not None:
                self.values[common.within(self.box)].copy_(values[common.within(box)])
        return self.values


@dataclass(frozen=True)
class _Merge:
    """Box of a weight, merged."""

    name: str
    box: Box
    values: torch.Tensor
    matrices: tuple[_Matrix, _Matrix] | None
    """A and B; None: the weight has no adapter."""

    def run(self, base: torch.Tensor, scale: float) -> None:
        """``base``: the box of the base model's weight."""
        if self.matrices is not None:
            a, b = (matrix.gather() for matrix in self.matrices)
            base = torch.addmm(base.to(self.values.device, torch.float32), b, a, alpha=scale)
        self.values.copy_(base)


class AdapterReader(WeightReader):
    """Reader of one generator rank, whose pieces are whole weights."""

    def __init__(
        self,
        setup: ReaderSetup,
        device: torch.device,
        recorded: Iterable[Recorded],
        base: dict[str, StoredTensor],
        threads: int = 1,
    ):
        """``device``: where weights are merged. ``recorded``: what the engine stores. ``base``: tensors of the model's
        directory."""
        super().__init__(setup, device, threads)
        assert setup.adapter_scale is not None, "it is why this class was chosen"
        self._scale, self._device = setup.adapter_scale, device
        self._adapters: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for name, _, box, values in super().pieces():
            self._adapters[name].append((box, values))
        self._merges: dict[Path, list[_Merge]] = defaultdict(list)
        for copy in {(each.name, each.box, each.dtype): each for each in recorded}.values():
            self._merges[base[copy.name].file].append(self._merge_of(copy))
        self._has_base = False

    def _merge_of(self, copy: Recorded) -> _Merge:
        values = torch.empty(copy.box.size, dtype=getattr(torch, copy.dtype), device=self._device)
        name, matrices = copy.name.removesuffix(WEIGHT), None
        if b := self._adapters.get(f"{name}{LORA_B}"):
            rank = max(box.start[1] + box.size[1] for box, _ in b)
            boxes = {LORA_A: _of_a(copy.box, rank), LORA_B: _of_b(copy.box, rank)}
            matrices = self._matrix(f"{name}{LORA_A}", boxes[LORA_A]), self._matrix(f"{name}{LORA_B}", boxes[LORA_B])
        return _Merge(copy.name, copy.box, values, matrices)

    def _matrix(self, name: str, box: Box) -> _Matrix:
        return _Matrix(box, torch.empty(box.size, device=self._device), self._adapters[name])

    async def fetch(self, version: int, timeout: float, route: Route | None = None) -> Fetched:
        """Fetch and merge a version. Errors: as ``WeightReader.fetch``."""
        fetched = await super().fetch(version, timeout, route)
        self.held = None
        await in_side_thread(self._merge)
        self.held = version
        return fetched

    @torch.no_grad()
    def _merge(self) -> None:
        for file, merges in self._merges.items():
            with safe_open(file, "pt") as tensors:
                for merge in merges:
                    if merge.matrices is not None or not self._has_base:
                        merge.run(tensors.get_slice(merge.name)[merge.box.index], self._scale)
        self._has_base = True
        if self._device.type != "cpu":
            torch.accelerator.synchronize()  # the engine copies in a stream of its own

    def pieces(self) -> Iterator[tuple[str, Box, Box, torch.Tensor]]:
        """Merged weights, as ``WeightReader.pieces``."""
        for merge in chain.from_iterable(self._merges.values()):
            yield merge.name, merge.box, merge.box, merge.values

    def let_go(self) -> None:
        super().let_go()
        self._has_base = False
        for merge in chain.from_iterable(self._merges.values()):
            if merge.values.device.type == "cpu":
                drop_contents(merge.values.untyped_storage())
