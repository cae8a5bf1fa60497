"""The trainer actor: one rank of the TorchTitan model. Its arithmetic is in learner.py."""

from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from monarch.actor import Actor, endpoint

from titan_rl.config.schema import Config
from titan_rl.data.types import StepMetrics
from titan_rl.mesh.channel.batches import RowsHandle, pull_rows
from titan_rl.mesh.channel.plan import Interner, SlotLayout, Units
from titan_rl.mesh.channel.region import RegionHandle
from titan_rl.mesh.channel.snapshot_replica import fetch_step
from titan_rl.mesh.channel.transports import Place, here
from titan_rl.mesh.channel.weights import WeightWriter, holdings
from titan_rl.mesh.stragglers import seconds_wanted
from titan_rl.mesh.supervision.fault_injection import fail_if_told
from titan_rl.trainer.snapshot import Snapshots
from titan_rl.trainer.state import BackgroundSave


class Trainer(Actor):
    """A rank. All ranks are called together, in the same order, since each call may hold collectives."""

    def __init__(self, config: Config, model_path: str):
        self.config, self.model_path = config, model_path
        self.snapshots: Snapshots | None = None
        self.writer: WeightWriter | None = None

    @endpoint
    def prepare(self) -> None:
        """Have all imports done: what a standby does while it waits for its turn."""
        import titan_rl.trainer.learner  # noqa: F401

    @endpoint
    def join(self, rank: int, world_size: int, meeting_file: str) -> None:
        """Meet the other ranks in a new process group and build this rank's part of the model, weights from the file.

        At the start, and again when a rank was replaced: the process keeps what it knows, the snapshots among it.
        """
        import torch
        import torch.distributed as dist

        from titan_rl.models.device import DEVICE_TYPE, local_device
        from titan_rl.trainer.learner import Learner
        from titan_rl.trainer.titan_config import build_titan

        self.rank, self.titan = rank, build_titan(self.config)
        self._withdraw()
        if dist.is_initialized():
            dist.destroy_process_group()
        if DEVICE_TYPE != "cpu":
            torch.accelerator.set_device_index(local_device(rank).index)
        dist.init_process_group(
            "gloo" if DEVICE_TYPE == "cpu" else "nccl",
            store=dist.FileStore(meeting_file, world_size),  # a file opens no port
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.titan.comm.init_timeout_seconds),
        )
        self.learner = Learner(self.config, self.titan, self.model_path)
        # here and not at the first checkpoint: a rank whose peer dies while groups are made waits for it in vain
        self.saver = BackgroundSave(self.learner)

    def _withdraw(self) -> None:
        if self.writer is not None:
            self.writer.withdraw()
            self.writer = None

    @endpoint
    def open_snapshots(self) -> RegionHandle:
        """From now on snapshots are taken here; where a keeper finds them."""
        self.snapshots = Snapshots(self.rank, self.learner)
        self.learner.before_update = self._wait_for_copies
        return self.snapshots.region.handle(over_rdma=False)

    def _wait_for_copies(self) -> None:
        """Parameters may change once nobody copies them any more."""
        for copier in (self.snapshots, self.writer):
            if copier is not None:
                copier.wait_until_copied()

    @endpoint
    def take_snapshot(self, step: int) -> None:
        """Begin to put the state after a step aside."""
        self.snapshots.take(step)

    @endpoint
    def snapshot_steps(self) -> list[int]:
        return self.snapshots.steps() if self.snapshots is not None else []

    @endpoint
    def restore(self, step: int, kept: RegionHandle | None) -> None:
        """The state after a step: from a keeper's region, or from the snapshots of before ``join``."""
        slot = fetch_step(kept, step) if kept is not None else self.snapshots.slot_of(step)
        Snapshots(self.rank, self.learner).load(slot)

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
        self._withdraw()
        self.writer = WeightWriter(self.rank, self.learner.shards(), layout, self.learner.device)
        self.learner.before_update = self._wait_for_copies
        return self.writer.region.handle(over_rdma)

    @endpoint
    def warm_up(self, batches: list[RowsHandle]) -> list[float]:
        """Supervised steps; ``batches[group]`` holds that group's rows of every step."""
        with self._peers_are_told():
            return self.learner.sft(self._pull(batches), self.config.sft.lr)

    @endpoint
    def train(self, batch: list[RowsHandle], has_signal: bool, snapshot: int | None):
        """One optimizer step on the rows of this rank's group: StepMetrics of all ranks together, or BadNumbers.

        ``snapshot``: the step of which the state is put aside then, if it is.
        """
        with self._peers_are_told():
            fail_if_told()
            start = seconds_wanted()
            answer = self.learner.train(self._pull(batch), has_signal)
            if isinstance(answer, StepMetrics):
                answer.seconds_wanted = seconds_wanted() - start
            if snapshot is not None:
                self.snapshots.take(snapshot)
            return answer

    @contextmanager
    def _peers_are_told(self):
        """A rank that fails leaves the group at once: peers that are no neighbours of a dead one would wait for it."""
        import torch.distributed as dist

        try:
            yield
        except BaseException:  # whatever it is, it is raised again once the peers can know
            with suppress(Exception):
                dist.destroy_process_group()
            raise

    def _pull(self, batch: list[RowsHandle]):
        return pull_rows(batch[self.titan.batch_rank(self.rank)], self.config.mesh.step_timeout)

    @endpoint
    def publish(self, version: int) -> None:
        """Begin to lay the weights down for the generators; the next update waits until they are."""
        self.writer.publish(version)

    @endpoint
    def begin_checkpoint(self, folder: str) -> None:
        """Copy the state; a thread writes it into ``folder`` while training goes on."""
        self.saver.begin(Path(folder))

    @endpoint
    def checkpoint_outcome(self) -> str | None:
        """None while a checkpoint is being written, then why that failed, or "" if it did not."""
        return self.saver.outcome()

    @endpoint
    def load_checkpoint(self, folder: str) -> None:
        from titan_rl.trainer.state import load_learner

        load_learner(self.learner, Path(folder))

    @endpoint
    def save_hf(self, folder: str) -> None:
        self.learner.save_hf(folder)
