"""titan_rl as a row needs it: a model's directory, packed rows, and a trainer actor in this process, which is its whole
mesh. What a Monarch process would call is called here, so that a row measures what a run does."""

import gc
import itertools
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from gpu_check.bench import Bench
from gpu_check.sizes import SIZES, TINY, Shape, Size
from titan_rl.actors.trainer import Trainer
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Provenance, Row, Sample, StepMetrics
from titan_rl.mesh.channel.batches import RowsHandle, StagedRows
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan, SlotLayout, Units, split_name
from titan_rl.mesh.channel.writer import WeightWriter
from titan_rl.mesh.telemetry.step_record import RankReport
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.spec import read_hf_config
from titan_rl.trainer.distributed.process_group import leave_group
from titan_rl.trainer.model.layout import check_products
from titan_rl.trainer.state.snapshot import Snapshots
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan


class DirectTrainer(Protocol):
    """The trainer actor where its endpoints are plain methods (stubs.py)."""

    learner: Learner
    writer: WeightWriter
    """From ``open_region`` on."""
    snapshots: Snapshots
    """From ``open_snapshots`` on."""

    def join(self, config: Config, rank: int, world_size: int, rendezvous: str) -> None: ...

    def train(
        self, batches: list[RowsHandle], found: list[list[RowsHandle]], has_signal: list[bool], snapshot: int | None
    ) -> tuple[list[StepMetrics | NonfiniteBatch], float, RankReport]: ...

    def holdings(self) -> Units: ...

    def open_region(self, layout: SlotLayout, over_rdma: bool, on_host: bool) -> RegionHandle: ...

    def stage(self, version: int) -> None: ...

    def open_snapshots(self) -> RegionHandle: ...

    def take_snapshot(self, step: int) -> None: ...

    def snapshot_steps(self) -> list[int]: ...

    def restore(self, step: int, kept: RegionHandle | None) -> None: ...


class Fixtures:
    """Models, rows and trainers of one worker."""

    def __init__(self, device: torch.device, folder: Path, *, rehearse: bool) -> None:
        self.device, self.folder, self.rehearse, self.bench = device, folder, rehearse, Bench(device)
        self._numbers = itertools.count()
        self._trainers: list[DirectTrainer] = []

    # models and rows

    def size(self, name: str) -> Size:
        return SIZES["tiny" if self.rehearse else name]

    def model(self, name: str) -> Path:
        """A directory with random weights in bf16, made once."""
        path = self.folder / ("tiny" if self.rehearse else name)
        if not (path / "tokenizer.json").exists():  # written last
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(0)
            shared = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": None}
            with torch.device(self.device):
                model = LlamaForCausalLM(LlamaConfig(**shared, eos_token_id=1, **self.size(name).as_config()))
            model.bfloat16().cpu().save_pretrained(path)
            character_tokenizer().save_pretrained(path)
        return path

    def rows(self, name: str, shape: Shape, seed: int = 0) -> list[Row]:
        shape = TINY if self.rehearse else shape
        rng, groups = np.random.default_rng(seed), []
        for group in range(shape.groups):
            prompt = rng.integers(3, self.size(name).words, shape.prompt)
            groups.append([self._sample(rng, prompt, shape, name, group, number) for number in range(shape.samples)])
        weigh = partial(token_weights, aggregation="token", max_new_tokens=shape.answer)
        return pack(groups, num_ranks=1, row_tokens=shape.row_tokens, share_prefix=True, weigh=weigh).rows[0]

    def _sample(
        self, rng: np.random.Generator, prompt: np.ndarray, shape: Shape, name: str, group: int, number: int
    ) -> Sample:
        words, length = self.size(name).words, rng.integers(shape.answer // 2, shape.answer + 1)
        tokens = np.concatenate([prompt, rng.integers(3, words, length)])
        provenance = np.full(len(tokens), Provenance.MODEL, np.int8)
        provenance[: len(prompt)] = Provenance.TEMPLATE
        likely = np.full(len(tokens), -np.log(words), np.float32)  # as a model of random weights finds it
        return Sample(tokens, provenance, likely, float(rng.normal()), f"p{group}", number)

    # a trainer

    def config(self, dtype: str = "bfloat16", kernel: str = "auto", **tables: dict[str, Any]) -> Config:
        training = {"steps": 100, "seq_len": 8192, "mixed_precision_param": dtype}
        defaults = {"optimizer": {"lr": 1e-5}, "model": {"kernel": kernel}, "training": training}
        return load_config(None, defaults | {"recovery": {"snapshot_every": 0}} | tables)

    def trainer(self, name: str, config: Config) -> DirectTrainer:
        """Trainer without Monarch, joined. Errors: ConfigError for what a run would refuse to compile."""
        check_products(read_hf_config(self.model(name)), build_titan(config))
        trainer = cast(DirectTrainer, Trainer(str(self.model(name))))  # by stubs.py's stand-in for Monarch
        self._trainers.append(trainer)
        self.join(trainer, config)
        return trainer

    def join(self, trainer: DirectTrainer, config: Config) -> None:
        """Join the trainer's process group, also again, as after a peer's death."""
        trainer.join(config, 0, 1, str(self.folder / f"rendezvous{id(self)}_{next(self._numbers)}"))

    def step(self, trainer: DirectTrainer, rows: list[Row], snapshot: int | None = None) -> StepMetrics:
        """An update, as a run makes it. Errors: RuntimeError if it was left out."""
        with StagedRows([[rows]], over_rdma=False) as handles:
            [metrics], _, _ = trainer.train(handles, [], [True], snapshot)
        if not isinstance(metrics, StepMetrics):
            raise RuntimeError(f"an update was left out: {metrics}")
        return metrics

    def plan(self, trainer: DirectTrainer) -> Plan:
        """Weight plan for one reader of the whole model in bf16."""
        interner, shards = Interner(), trainer.learner.shards()
        needs = (
            (unit, Need(name, Box((0,) * len(shard.shape), tuple(shard.shape)), "bfloat16"))
            for shard in shards
            for unit, name in [split_name(shard.name)]
        )
        return Plan([trainer.holdings()], [interner.units(needs)])

    def open_region(self, trainer: DirectTrainer, layout: SlotLayout) -> RegionHandle:
        """Open a region on the device, for a reader on the same one."""
        return trainer.open_region(layout, over_rdma=False, on_host=False)

    def clear(self) -> None:
        """Free all trainers and memory after a row."""
        for trainer in self._trainers:
            with suppress(Exception):
                trainer.writer.withdraw()
            vars(trainer).clear()
        self._trainers.clear()
        leave_group()
        gc.collect()
        self.bench.empty_cache()
