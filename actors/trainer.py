"""The trainer actor: one rank of the TorchTitan model. Its arithmetic is in learner.py."""

import os
from datetime import timedelta
from pathlib import Path

from monarch.actor import Actor, current_rank, endpoint

from titan_rl.channel.batches import RowsHandle, pull_rows
from titan_rl.channel.plan import Interner, SlotLayout, Units
from titan_rl.channel.region import RegionHandle
from titan_rl.channel.transports import Place, here
from titan_rl.channel.weights import WeightWriter, holdings
from titan_rl.config import Config
from titan_rl.mesh.logs import send_output_to


class Trainer(Actor):
    """A rank. All ranks are called together, in the same order, since each call may hold collectives."""

    def __init__(self, logs: str | None, config: Config, model_path: str, world_size: int):
        send_output_to(logs, f"trainer{current_rank().rank}")
        self.config, self.model_path, self.world_size = config, model_path, world_size
        self.rank = current_rank().rank

    @endpoint
    def open_store(self) -> tuple[str, int]:
        """Rank 0 alone: where the ranks meet."""
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
        return "127.0.0.1", self.store.port

    @endpoint
    def start(self, address: tuple[str, int]) -> int:
        """Join the process group and build the model; this process's id."""
        import torch.distributed as dist

        from titan_rl.learner import Learner
        from titan_rl.model.device import DEVICE_TYPE, local_device
        from titan_rl.titan_config import build_titan

        self.titan = titan = build_titan(self.config)
        if DEVICE_TYPE != "cpu":
            import torch

            torch.accelerator.set_device_index(local_device(self.rank).index)
        store = dist.TCPStore(*address, self.world_size, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo" if DEVICE_TYPE == "cpu" else "nccl",
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=titan.comm.init_timeout_seconds),
        )
        self.learner = Learner(self.config, titan, self.model_path)
        return os.getpid()

    @endpoint
    def place(self) -> Place:
        return here()

    @endpoint
    def holdings(self) -> Units:
        """What this rank can give to generators."""
        return holdings(self.learner.shards(), Interner())

    @endpoint
    def open_region(self, layout: SlotLayout, over_rdma: bool) -> RegionHandle:
        """This rank's side of the weight channel."""
        self.writer = WeightWriter(self.rank, self.learner.shards(), layout, self.learner.device)
        self.learner.before_update = self.writer.wait_until_copied
        return self.writer.region.handle(over_rdma)

    @endpoint
    def warm_up(self, batches: list[RowsHandle]) -> list[float]:
        """Supervised steps; ``batches[group]`` holds that group's rows of every step."""
        return self.learner.warm_up(self._pull(batches), self.config.warmup.lr)

    @endpoint
    def train(self, batch: list[RowsHandle], has_signal: bool):
        """One optimizer step on the rows of this rank's group; StepMetrics of all ranks together."""
        return self.learner.train(self._pull(batch), has_signal, self.config.algorithm)

    def _pull(self, batch: list[RowsHandle]):
        return pull_rows(batch[self.titan.batch_rank(self.rank)], self.config.mesh.step_timeout)

    @endpoint
    def publish(self, version: int) -> None:
        """Begin to lay the weights down for the generators; the next update waits until they are."""
        self.writer.publish(version)

    @endpoint
    def save_checkpoint(self, folder: str) -> None:
        from titan_rl.checkpoint import save_learner

        save_learner(self.learner, Path(folder))

    @endpoint
    def load_checkpoint(self, folder: str) -> None:
        from titan_rl.checkpoint import load_learner

        load_learner(self.learner, Path(folder))

    @endpoint
    def save_hf(self, folder: str) -> None:
        self.learner.save_hf(folder)
