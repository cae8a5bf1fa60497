"""The actors' endpoints as stubs: what each is called with, and what it answers. The actors say what each does."""

from titan_rl.config.sections.kinds import Quantization
from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import (
    Completion,
    EngineStatistics,
    Group,
    Prompt,
    Request,
    Rollout,
    Sampling,
    StepMetrics,
)
from titan_rl.mesh.channel.batches import RowsHandle
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import AdapterForm, SlotLayout, Units
from titan_rl.mesh.channel.reader import ReaderSetup
from titan_rl.mesh.channel.relay.gathering import Fetched, Route
from titan_rl.mesh.channel.relay.memory import RelayHandle
from titan_rl.mesh.channel.transports import Place
from titan_rl.mesh.hosts.host_path import NOWHERE, HostPath
from titan_rl.mesh.supervision.remote_call import PreparedEndpoints, stub
from titan_rl.mesh.telemetry.step_record import RankReport


class TrainerEndpoints(PreparedEndpoints):
    """Endpoints of ``actors.trainer.Trainer``."""

    @stub
    def join(self, config: Config, rank: int, world_size: int, rendezvous: str, device: int | None = None) -> None: ...

    @stub
    def offload(self) -> None: ...

    @stub
    def onload(self) -> None: ...

    @stub
    def open_snapshots(self) -> RegionHandle: ...

    @stub
    def take_settings(self, config: Config) -> None: ...

    @stub
    def take_snapshot(self, step: int) -> None: ...

    @stub
    def snapshot_steps(self) -> list[int]: ...

    @stub
    def restore(self, step: int, kept: RegionHandle | None) -> None: ...

    @stub
    def place(self) -> Place: ...

    @stub
    def holdings(self) -> Units: ...

    @stub
    def open_region(
        self, layout: SlotLayout, over_rdma: bool, on_host: bool, over_tcp: bool = False, epoch: int = 0
    ) -> RegionHandle: ...

    @stub
    def sft(self, batches: list[RowsHandle], num_steps: int) -> list[float]: ...

    @stub
    def train(
        self,
        batches: list[RowsHandle],
        role_outputs: list[list[RowsHandle]],
        has_signal: list[bool],
        snapshot: int | None,
    ) -> tuple[list[StepMetrics | NonfiniteBatch], float, RankReport]: ...

    @stub
    def forward_backward(
        self, batches: list[RowsHandle], role_outputs: list[list[RowsHandle]]
    ) -> StepMetrics | NonfiniteBatch: ...

    @stub
    def optim_step(self, has_signal: bool, snapshot: int | None) -> StepMetrics | NonfiniteBatch: ...

    @stub
    def evaluate(self, batches: list[RowsHandle], role_outputs: list[list[RowsHandle]], name: str) -> StepMetrics: ...

    @stub
    def examine(self, code: bytes) -> tuple[bytes, str]: ...

    @stub
    def stage(self, version: int, epoch: int = 0) -> None: ...

    @stub
    def begin_checkpoint(self, folder: HostPath, shards: str = "", copies: bool = True) -> None: ...

    @stub
    def checkpoint_outcome(self) -> str | None: ...

    @stub
    def load_checkpoint(self, folder: HostPath) -> None: ...

    @stub
    def load_role(self, role: str, path: HostPath) -> None: ...

    @stub
    def digests(self) -> dict[str, str]: ...

    @stub
    def save_hf(
        self,
        folder: HostPath,
        adapter: HostPath = NOWHERE,
        beside: HostPath = NOWHERE,
        dtype: str = "auto",
        quantization: Quantization = "none",
    ) -> None: ...


class GeneratorEndpoints(PreparedEndpoints):
    """Endpoints of ``actors.generator.Generator``."""

    @stub
    def start(self, rank: int, rendezvous_file: str, devices: tuple[int, ...] = ()) -> None: ...

    @stub
    def place(self) -> Place: ...

    @stub
    def needs(self, adapters: dict[str, AdapterForm] | None = None, *, drafter: bool = False) -> Units: ...

    @stub
    def connect(self, setup: ReaderSetup) -> RelayHandle | None: ...

    @stub
    def fetch(self, version: int, timeout: float, route: Route | None = None) -> Fetched: ...

    @stub
    def apply(self, version: int) -> EngineStatistics: ...

    @stub
    def sleep(self) -> None: ...

    @stub
    def seconds_awake(self) -> float: ...

    @stub
    def account(self) -> tuple[int, int, int]: ...

    @stub
    def generate(self, request: Request) -> list[Completion]: ...

    @stub
    def abort(self, request_id: str) -> None: ...

    @stub
    def take_statistics(self) -> EngineStatistics: ...

    @stub
    def examine(self, code: bytes) -> tuple[bytes, str]: ...


class VerifierEndpoints(PreparedEndpoints):
    """Endpoints of ``actors.verifier.Verifier``."""

    @stub
    def start(self, config: Config) -> int: ...

    @stub
    def run_group(self, prompt: Prompt, sampling: Sampling, reference: bytes) -> Group: ...

    @stub
    def move_group(self, prompt_id: str, reference: bytes | None) -> None: ...

    @stub
    def end_group(self, prompt_id: str) -> None: ...

    @stub
    def demonstrate(self, prompts: list[Prompt]) -> list[Rollout]: ...

    @stub
    def examine(self, code: bytes) -> tuple[bytes, str]: ...


class RoleEndpoints:
    """Endpoints of ``actors.role.Role``."""

    @stub
    def join(self, config: Config, rank: int, world_size: int, rendezvous: str, device: int | None = None) -> None: ...

    @stub
    def compute_outputs(self, batches: list[RowsHandle]) -> list[RowsHandle] | None: ...

    @stub
    def load_role(self, path: HostPath) -> None: ...

    @stub
    def digests(self) -> dict[str, str]: ...
