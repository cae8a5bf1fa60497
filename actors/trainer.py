"""The trainer actor: one rank of the TorchTitan model, or of a role that learns beside it. The arithmetic is in
trainer/step/learner.py and trainer/roles/learned/worker.py."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monarch.actor import Actor, endpoint

from titan_rl.config.device_defaults import generator_on
from titan_rl.config.sections.kinds import Quantization
from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Row, StepMetrics
from titan_rl.mesh.channel.batches import RowsHandle, pull_rows
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import Interner, SlotLayout, Units
from titan_rl.mesh.channel.snapshots.keeper import fetch_step
from titan_rl.mesh.channel.transports import Place, here
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.mesh.processes.fault_injection import inject_fault
from titan_rl.mesh.processes.remote_eval import run_examination
from titan_rl.mesh.resources.imports import import_all
from titan_rl.mesh.supervision.abort_collectives import check_peers
from titan_rl.mesh.telemetry.step_record import RankReport
from titan_rl.mesh.telemetry.stragglers import runnable_seconds
from titan_rl.trainer.memory.cpu_allocator import CpuAllocator, large_blocks_mapped, release
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.snapshot import Snapshots, load_snapshot
from titan_rl.trainer.state.snapshot_kinds import make_snapshots

if TYPE_CHECKING:  # a process has these imported once it has joined
    from titan_rl.models.weights.quantized_files import Quantizer
    from titan_rl.models.weights.shards import Shard
    from titan_rl.trainer.memory.parameter_memory import TrainedTensor
    from titan_rl.trainer.objective.preparation import RowColumns
    from titan_rl.trainer.rank_interface import TrainerRank
    from titan_rl.trainer.step.learner import Gradients, Learner


class Trainer(Actor):
    """Rank of the trainer. All ranks are called together, in the same order, since each call may hold collectives."""

    IMPORTS = "trainer"

    def __init__(self, model_path: str, kept: str = ""):
        """``kept``: where the run keeps the policy (``trainer.roles.names.role_paths``)."""
        self.model_path, self.kept = model_path, kept
        self._config: Config | None = None
        """None until it has tried to join."""
        self._learner: TrainerRank | None = None
        """None until it has joined."""
        self.saver: BackgroundSave | None = None
        self.gradients: Gradients | NonfiniteBatch | None = None
        """Those that ``optim_step`` applies."""
        self.opening: Snapshots | None = None
        self.snapshots: Snapshots | None = None
        """Of the learner before, until they are opened anew."""
        self.writer: WeightWriter | None = None
        self.heap = CpuAllocator()
        self.moved: list[TrainedTensor] = []
        """What lies on the host while generators have the device."""

    @endpoint
    def prepare(self) -> None:
        """Import everything in advance, in a standby."""
        import_all(self.IMPORTS)

    @endpoint
    def join(self, config: Config, rank: int, world_size: int, rendezvous: str, device: int | None = None) -> None:
        """Meet the other ranks in a new process group, build this rank's part of the model, load the file's weights.

        At the start, and again when a rank was replaced or a setting has changed: the process and its snapshots stay.
        ``rendezvous``: where the ranks find each other (mesh/resources/rendezvous.py). ``device``: this rank's GPU.
        """
        from titan_rl.models.device import take_device
        from titan_rl.trainer.join import join_rank

        if self._config is not None:
            self._let_go()
        take_device(device)
        self._config, self.rank = config, rank
        with large_blocks_mapped() if device is None else nullcontext():
            self._learner = join_rank(config, self.model_path, self.kept, rank, world_size, rendezvous)
            # before anybody has a view of what is trained, which may move
            keeps = bool(config.recovery.snapshot_every)
            self.opening = make_snapshots(rank, self.learner, config, before=self.snapshots) if keeps else None
        # made here and not at the first checkpoint: it makes process groups, and a peer that dies during that hangs us
        self.saver = BackgroundSave(self.learner)

    @property
    def config(self) -> Config:
        assert self._config is not None
        return self._config

    @property
    def learner(self) -> "TrainerRank":
        assert self._learner is not None
        return self._learner

    @property
    def policy_side(self) -> "Learner":
        """Learner of a rank that holds the policy."""
        from titan_rl.trainer.step.learner import Learner

        assert isinstance(self._learner, Learner)
        return self._learner

    @endpoint
    def offload(self) -> None:
        """Release this rank's device to generators until ``onload``. Background copies finish first."""
        from titan_rl.trainer.memory.offloading import offload

        inject_fault("offload")
        if self.learner.device.type != "cpu":  # a CPU is its own host, and nothing moves
            if self.writer is not None:
                self.writer.wait()
            if self.saver is not None:
                self.saver.wait_until_copied()
        if self.snapshots is not None:
            self.snapshots.offload()
        if not self.moved:
            self.moved = offload(self.learner)

    @endpoint
    def onload(self) -> None:
        from titan_rl.trainer.memory.offloading import onload

        inject_fault("onload")
        if self.writer is not None:
            self.writer.drop_old_versions()
        onload(self.learner, self.moved)
        self.moved = []

    def _let_go(self) -> None:
        """Of the learner before and all views of it: the next one needs the memory. Its snapshots stay."""
        from titan_rl.trainer.distributed.process_group import leave_group

        self._withdraw()
        leave_group()
        for snapshots in (self.snapshots, self.opening):
            if snapshots is not None:
                snapshots.let_go()
        self._learner = self.opening = self.saver = self.gradients = None
        self.moved = []
        release()

    def _withdraw(self) -> None:
        if self.writer is not None:
            self.writer.withdraw()
            self.writer = None

    @endpoint
    def open_snapshots(self) -> RegionHandle:
        """Open the snapshot region; its handle, for keepers."""
        assert self.opening is not None
        self.snapshots = snapshots = self.opening
        snapshots.open()
        self.learner.before_update = self._before_update
        return snapshots.region.handle(over_rdma=self.config.hosts.is_on)

    def _before_update(self) -> None:
        """Parameters may change only when nobody copies them any more."""
        if self.writer is not None:
            self.writer.wait_until_copied()
        if self.saver is not None:
            self.saver.wait_until_copied()
        if self.snapshots is not None:
            self.snapshots.before_update()
        inject_fault("update")

    def _end_step(self, snapshot: int | None) -> None:
        check_peers()
        if snapshot is not None:
            self._take(snapshot)
        if self.learner.device.type == "cpu":
            self.heap.end_step()

    def _take(self, step: int) -> None:
        assert self.snapshots is not None
        self.snapshots.take(step)

    def _begin_step(self) -> None:
        """All ranks have ended the one before, since all are called together."""
        inject_fault()
        if self.snapshots is not None:
            self.snapshots.settle()

    @endpoint
    def take_settings(self, config: Config) -> None:
        """Apply changed settings of optimizer, schedule and algorithm from the next update on."""
        self._config = config
        self.learner.take_settings(config)

    @endpoint
    def take_snapshot(self, step: int) -> None:
        """Begin to copy the state, which is that after ``step``."""
        self._take(step)

    @endpoint
    def snapshot_steps(self) -> list[int]:
        """Steps of complete snapshots in this process's own memory."""
        return self.snapshots.steps() if self.snapshots is not None else []

    @endpoint
    def restore(self, step: int, kept: RegionHandle | None) -> None:
        """Load the state after a step from a kept snapshot, or from this process's own if ``kept`` is None."""
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        slot = self._own_slot(step) if kept is None else fetch_step(kept, step)
        with leave_group_on_error():
            load_snapshot(self.learner, slot)

    def _own_slot(self, step: int) -> torch.Tensor:
        assert self.snapshots is not None
        return self.snapshots.slot_of(step)

    @endpoint
    def place(self) -> Place:
        return here()

    @endpoint
    def holdings(self) -> Units:
        """Parameter boxes that this rank can serve to generators."""
        return holdings(self._sent, Interner())

    @property
    def _sent(self) -> "list[Shard]":
        """What generators are sent: weights, with adapters merged, or adapters alone."""
        learner = self.policy_side
        if not self.config.sends_adapters:
            return learner.sent()
        assert learner.policy.adapters is not None, "[lora] is on"
        return learner.policy.adapters.shards

    @endpoint
    def open_region(
        self, layout: SlotLayout, over_rdma: bool, on_host: bool, over_tcp: bool = False, epoch: int = 0
    ) -> RegionHandle:
        """Open this rank's weight region; its handle.

        ``over_rdma``, ``over_tcp``: transports of its readers. ``on_host``, ``epoch``: as to ``WeightWriter``.
        """
        self._withdraw()
        learner = self.policy_side
        self.writer = writer = WeightWriter(self.rank, self._sent, layout, learner.device, on_host, epoch)
        learner.before_update = self._before_update
        return writer.region.handle(over_rdma, over_tcp)

    @endpoint
    def sft(self, batches: list[RowsHandle], num_steps: int) -> list[float]:
        """Run the next of ``num_steps`` supervised steps; ``batches[group]`` holds that group's rows of every step.
        Losses, one a step."""
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        with leave_group_on_error():
            return self.learner.sft(self._pull(batches), self.config.sft.lr, num_steps)

    @endpoint
    def train(
        self,
        batches: list[RowsHandle],
        role_outputs: list[list[RowsHandle]],
        has_signal: list[bool],
        snapshot: int | None,
    ) -> tuple[list[StepMetrics | NonfiniteBatch], float, RankReport]:
        """A step of the run: of each update StepMetrics of all ranks together, or NonfiniteBatch; the seconds for which
        this rank worked (mesh/telemetry/stragglers.py); and what else is recorded of it
        (mesh/telemetry/step_record.py).

        ``batches[group]`` holds that group's rows of every update, ``role_outputs[i][group]`` what roles in other
        found of them, ``has_signal`` whether an update has an advantage.
        ``snapshot``: the step that this is, if a snapshot of it is to be taken.
        """
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        with leave_group_on_error():
            self._begin_step()
            start = runnable_seconds()
            with self.learner.spans.span("rows"):
                rows, columns = self._pull(batches), self._pull_role_outputs(role_outputs)
            answers = self.learner.train_step(rows, has_signal, columns)
            seconds = runnable_seconds() - start
            with self.learner.spans.span("snapshot"):
                self._end_step(snapshot)
            return answers, seconds, self._report()

    def _report(self) -> RankReport:
        group, *_ = self.learner.share(range(self.learner.titan.batch_degree))
        return RankReport(self.learner.spans.take(), group, list(self.learner.step_values))

    @endpoint
    def forward_backward(
        self, batches: list[RowsHandle], role_outputs: list[list[RowsHandle]]
    ) -> StepMetrics | NonfiniteBatch:
        """Compute the gradients of one update, for a custom training loop; their metrics, or NonfiniteBatch."""
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        with leave_group_on_error():
            self._begin_step()
            [rows] = self._pull(batches)
            self.gradients = outcome = self.policy_side.gradients(rows, self._pull_role_outputs(role_outputs))
            return outcome if isinstance(outcome, NonfiniteBatch) else outcome.metrics

    @endpoint
    def optim_step(self, has_signal: bool, snapshot: int | None) -> StepMetrics | NonfiniteBatch:
        """Apply the gradients of ``forward_backward``, as one update of ``train``."""
        from titan_rl.trainer.distributed.process_group import leave_group_on_error

        with leave_group_on_error():
            inject_fault()
            outcome = self.gradients
            assert outcome is not None
            is_finite = not isinstance(outcome, NonfiniteBatch)
            answer = self.policy_side.apply_gradients(outcome, has_signal) if is_finite else outcome
            self._end_step(snapshot)
            return answer

    @endpoint
    def evaluate(self, batches: list[RowsHandle], role_outputs: list[list[RowsHandle]], name: str) -> StepMetrics:
        """StepMetrics of all ranks together, of the loss on rows that nothing is learned from, given
        as to ``train``. ``name``: of the algorithm whose loss it is; empty: the run's."""
        from titan_rl.algorithms.registry import make_algorithm
        from titan_rl.config.sections.schema import AlgorithmConfig
        from titan_rl.trainer.distributed.process_group import leave_group_on_error
        from titan_rl.trainer.step.evaluation import evaluate

        with leave_group_on_error():
            learner, own = self.policy_side, self.policy_side.algorithm
            algorithm = make_algorithm(AlgorithmConfig(name=name), [], on_data=True) if name else own
            [rows] = self._pull(batches)
            return evaluate(learner, rows, algorithm, self._pull_role_outputs(role_outputs))

    @endpoint
    def examine(self, code: bytes) -> tuple[bytes, str]:
        """Result of a pickled function of this rank's learner, pickled, and its error or an empty text."""
        return run_examination(code, self.learner)

    def _pull(self, batches: list[RowsHandle]) -> list[list[Row]]:
        """The rows of each update that this rank takes part in."""
        groups = [pull_rows(handle, self.config.mesh.step_timeout) for handle in self.learner.share(batches)]
        return [[row for rows in updates for row in rows] for updates in zip(*groups, strict=True)]

    def _pull_role_outputs(self, role_outputs: list[list[RowsHandle]]) -> "list[RowColumns]":
        """Role outputs for the rows of this rank's groups."""
        shares = [handle for handles in role_outputs for handle in self.learner.share(handles)]
        return [entry for handle in shares for entry in pull_rows(handle, self.config.mesh.step_timeout)]

    @endpoint
    def stage(self, version: int, epoch: int = 0) -> None:
        """Begin to copy the weights into this rank's region; the next update waits until they are copied. Errors:
        ValueError if the regions of that epoch were closed, or are not open yet."""
        assert self.writer is not None
        self.writer.stage(version, epoch)

    @endpoint
    def begin_checkpoint(self, folder: str, shards: str = "", copies: bool = True) -> None:
        """Copy the state; a thread writes it into ``folder``, or a store's ``shards``, while training goes on.
        ``copies``: else it writes the state itself, and the next update waits for it."""
        assert self.saver is not None
        self.saver.begin(Path(folder), shards, copies=copies)

    @endpoint
    def checkpoint_outcome(self) -> str | None:
        """None while a checkpoint is being written, then why that failed, or "" if it did not."""
        assert self.saver is not None
        return self.saver.outcome()

    @endpoint
    def load_checkpoint(self, folder: str) -> None:
        """Load all of this rank's state. Errors: DCP's own, for an incomplete folder."""
        self.learner.load_checkpoint(Path(folder))

    @endpoint
    def load_role(self, role: str, path: str) -> None:
        """Load other weights into a role of these processes."""
        if role in self.learner.roles:
            self.learner.roles[role].model.load(path)

    @endpoint
    def digests(self) -> dict[str, str]:
        """Checksums of this rank's weights, by frozen role."""
        return self.learner.digests()

    @endpoint
    def save_hf(
        self,
        folder: str,
        adapter: str = "",
        beside: str = "",
        dtype: str = "auto",
        quantization: Quantization = "none",
    ) -> None:
        """Write the model as a Hugging Face directory, quantized as engines quantize it, and besides, where there are
        such, its adapters to ``adapter`` and the model that learns beside it into the folder ``beside``."""
        quantizer = None if quantization == "none" else self._quantizer(quantization)
        self.learner.save_hf(folder, adapter, beside, dtype, quantizer)

    def _quantizer(self, scheme: Quantization) -> "Quantizer":
        from titan_rl.models.device import DEVICE_TYPE
        from titan_rl.models.weights.quantized_files import Quantizer

        def codes_of(weight_OI: torch.Tensor, scheme: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # an import of 6 s, and the rank that writes needs it alone
            from titan_rl.generator.weights.quantization.e4m3 import quantize_weight

            return quantize_weight(weight_OI, scheme)

        dtype = generator_on(self.config.generator, on_cpu=DEVICE_TYPE == "cpu").dtype
        return Quantizer(scheme, getattr(torch, dtype), codes_of)
