"""The trainer actor: one rank of the TorchTitan model. Its arithmetic is in trainer/learner.py."""

from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from monarch.actor import Actor, endpoint

from titan_rl.config.schema import Config
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
    def join(self, rank: int, world_size: int, rendezvous_file: str) -> None:
        """Meet the other ranks in a new process group, build this rank's part of the model, load the file's weights.

        At the start, and again when a rank was replaced: the process and its snapshots stay. ``rendezvous_file``: where
        the ranks find each other; it must not exist yet.
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
            store=dist.FileStore(rendezvous_file, world_size),  # a file opens no port
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=self.titan.comm.init_timeout_seconds),
        )
        self.learner = Learner(self.config, self.titan, self.model_path)
        # made here and not at the first checkpoint: it makes process groups, and a peer that dies during that hangs us
        self.saver = BackgroundSave(self.learner)

    def _withdraw(self) -> None:
        if self.writer is not None:
            self.writer.withdraw()
            self.writer = None

    @endpoint
    def open_snapshots(self) -> RegionHandle:
        """From now on snapshots are taken here; where another process can read them."""
        self.snapshots = Snapshots(self.rank, self.learner)
        self.learner.before_update = self._wait_for_copies
        return self.snapshots.region.handle(over_rdma=False)

    def _wait_for_copies(self) -> None:
        """Parameters may change only when nobody copies them any more."""
        for copier in (self.snapshots, self.writer):
            if copier is not None:
                copier.wait_until_copied()

    @endpoint
    def take_snapshot(self, step: int) -> None:
        """Begin to copy the state, which is that after ``step``."""
        self.snapshots.take(step)

    @endpoint
    def snapshot_steps(self) -> list[int]:
        """Of complete snapshots in this process's own memory."""
        return self.snapshots.steps() if self.snapshots is not None else []

    @endpoint
    def restore(self, step: int, replica: RegionHandle | None) -> None:
        """The state after a step: from the replica in another process, or from this one's snapshots before ``join``."""
        slot = fetch_step(replica, step) if replica is not None else self.snapshots.slot_of(step)
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
    def sft(self, batches: list[RowsHandle]) -> list[float]:
        """Supervised steps; ``batches[group]`` holds that group's rows of every step. The losses."""
        with self._peers_are_told():
            return self.learner.sft(self._pull(batches), self.config.sft.lr)

    @endpoint
    def train(self, batches: list[RowsHandle], has_signal: list[bool], snapshot: int | None):
        """A step of the run; ``batches[group]`` holds that group's rows of every update, ``has_signal`` whether an
        update has an advantage. Of each update StepMetrics of all ranks together, or BadNumbers; and the seconds for
        which this rank worked (mesh/stragglers.py).

        ``snapshot``: the step that this is, if a snapshot of it is to be taken.
        """
        with self._peers_are_told():
            fail_if_told()
            start = seconds_wanted()
            answers = self.learner.train_step(self._pull(batches), has_signal)
            seconds = seconds_wanted() - start
            if snapshot is not None:
                self.snapshots.take(snapshot)
            return answers, seconds

    @endpoint
    def evaluate(self, batch: list[RowsHandle], name: str):
        """StepMetrics of all ranks together, of the loss on rows that nothing is learned from; ``batch[group]`` holds
        that group's. ``name``: of the algorithm whose loss it is; empty: the run's."""
        from titan_rl.algorithms.registry import make_algorithm
        from titan_rl.config.schema import AlgorithmConfig
        from titan_rl.trainer.evaluation import evaluate

        with self._peers_are_told():
            own = self.learner.algorithm
            algorithm = make_algorithm(AlgorithmConfig(name=name), [], on_data=True) if name else own
            return evaluate(self.learner, self._pull(batch), algorithm)

    @contextmanager
    def _peers_are_told(self):
        """A rank that fails leaves the process group at once, or peers with no direct link to it would wait on."""
        import torch.distributed as dist

        try:
            yield
        except BaseException:  # any error is raised again once the peers can know
            with suppress(Exception):
                dist.destroy_process_group()
            raise

    def _pull(self, batch: list[RowsHandle]):
        return pull_rows(batch[self.titan.batch_rank(self.rank)], self.config.mesh.step_timeout)

    @endpoint
    def publish(self, version: int) -> None:
        """Begin to stage the weights for the generators; the next update waits until they are copied."""
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
        """All of this rank's state. Errors: what DCP raises for a folder that is not complete."""
        from titan_rl.trainer.state import load_learner

        load_learner(self.learner, Path(folder))

    @endpoint
    def save_hf(self, folder: str) -> None:
        """Write the model as a Hugging Face directory."""
        self.learner.save_hf(folder)
