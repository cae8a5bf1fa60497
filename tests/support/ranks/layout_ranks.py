"""Ranks in processes of their own, which train one model from one directory in layout after layout."""

import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from batches import batch_of, poison, spoil_a_weight, with_fault
from rank_processes import run_ranks

from titan_rl.config.load import load_config
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.types import StepMetrics
from titan_rl.mesh.resources.listeners.gloo import guard_gloo

NUM_STEPS, NUM_MORE = 3, 2
# Adam divides each element's step by the root of its own second moment, so an element whose gradient is rounding and
# nothing else moves by a whole learning rate, in a direction that is rounding too. With eps at 1e-5, about 1e-2 of a
# typical element's gradient here, such elements stay, and what is left is the layout's own error.
EPS = 1e-5


@dataclass(frozen=True)
class Layout:
    model: str
    parallelism: dict[str, int | str] = field(default_factory=dict)
    checkpointing: str = "none"
    start_from: str = ""
    """The layout whose checkpoint is loaded first."""
    faults: tuple[str, ...] = ()
    """Faults that one sample of a further batch has, one after the other."""
    lora: dict = field(default_factory=dict)
    float8: str = "none"
    engine_ranks: int = 0
    """Of an engine beside batch-invariant layers; 0: plain layers."""
    dtype: str = "float32"


@dataclass
class Study:
    """What came of a layout; tensors are whole, put together from all ranks' boxes."""

    loaded: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]
    metrics: list[list[StepMetrics]]
    """Of each rank: of ``NUM_STEPS`` steps, and of ``NUM_MORE`` after the checkpoint."""
    after_resuming: list[list[StepMetrics]]
    """Of each rank: of those after the checkpoint, by a learner that loaded it; in the second, its moments show."""
    found: list[dict[str, str]]
    """Of each rank: what was said of each fault."""


def whole_tensors(shards) -> dict[str, torch.Tensor]:
    """Adapters merged; NaN where no rank has a value."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(s.name, s.shape, s.start, s.merged().detach().clone()) for s in shards])
    whole = {}
    for name, shape, start, tensor in (box for boxes in everyone for box in boxes):
        place = tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))
        whole.setdefault(name, torch.full(shape, torch.nan))[place] = tensor
    return whole


EXPERTS = (4, 4, 2)
"""Layers, experts and those of a token, of the model that has some."""


def _train(learner, titan, step: int) -> StepMetrics:
    # in the second step rows are few and uneven, as if the packer knew nothing of stages; in the third two groups have
    # no signal, and on some ranks rows that others have a gradient for; there each token has a sampling mask, and
    # every second sample has penalties, and tokens go through given experts where the model has any
    shape = dict(row_tokens=200) if step == 1 else dict(row_tokens=40, row_multiple=titan.row_multiple)
    shape |= dict(num_still=2, masked=True, penalties=Penalties(1.2, 0.3, 0.2)) if step == 2 else {}
    if step == 2 and learner.policy.replays_routing:
        shape |= dict(experts=EXPERTS)
    batch = batch_of(step, num_ranks=titan.batch_degree, **shape)
    metrics = learner.train(batch.rows[titan.batch_rank(dist.get_rank())], batch.has_signal)
    metrics.seconds_forward_backward = metrics.seconds_optimizer = 0.0
    return metrics


def _everyones(value) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _learner(layout: Layout, models: Path):
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    config = load_config(
        None,
        {
            "rollout": {"temperature": 0.8},
            "optimizer": {"lr": 1e-3, "eps": EPS},
            "training": {"steps": 10, "mixed_precision_param": layout.dtype},
            "parallelism": dict(layout.parallelism),
            "activation_checkpoint": {"mode": layout.checkpointing},
            "lora": layout.lora,
            "float8": {"recipe_name": layout.float8},
            "debug": {"batch_invariant": layout.engine_ranks > 0},
            "generator": {"tensor_parallel": max(layout.engine_ranks, 1)},
            "algorithm": {"routing": "replay" if layout.model == "moe" else "own"},
        },
    )
    titan = build_titan(config)
    assert titan.world_size == dist.get_world_size()
    return Learner(config, titan, models / layout.model), titan


def _study(layout: Layout, models: Path, out: Path) -> Study:
    from titan_rl.trainer.state.checkpoint_state import BackgroundSave

    learner, titan = _learner(layout, models)
    first = 0
    if layout.start_from:
        learner.load_checkpoint(out.parent / layout.start_from / "checkpoint")
        first = NUM_STEPS
    shards = learner.shards()
    loaded = whole_tensors(shards)
    metrics = [_train(learner, titan, step) for step in range(first, first + NUM_STEPS)]
    trained = whole_tensors(shards)  # those of before: they must have stayed current
    saver = BackgroundSave(learner)
    saver.begin(out / "checkpoint")
    learner.save_hf(out / "saved", out / "adapter")
    more = range(first + NUM_STEPS, first + NUM_STEPS + NUM_MORE)
    metrics += [_train(learner, titan, step) for step in more]  # while the checkpoint is being written
    saver.wait()
    resumed, _ = _learner(layout, models)
    resumed.load_checkpoint(out / "checkpoint")
    again = [_train(resumed, titan, step) for step in more]
    found = {fault: _meet(learner, titan, fault) for fault in layout.faults}
    return Study(loaded, trained, _everyones(metrics), _everyones(again), _everyones(found))


def _meet(learner, titan, fault: str) -> str:
    """What a batch with a fault comes to."""
    if fault == "gradient":
        poison(learner)
    if fault == "weights" and dist.get_rank() == dist.get_world_size() - 1:
        spoil_a_weight(learner)
    batch = with_fault(batch_of(9, num_ranks=titan.batch_degree, row_multiple=titan.row_multiple), fault, "p1", 2)
    return str(learner.train(batch.rows[titan.batch_rank(dist.get_rank())], True))


@dataclass
class Step:
    """What one step of a layout makes of the weights."""

    loaded: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]
    metrics: list[list[StepMetrics]]
    """Of each rank."""
    logprobs: list[torch.Tensor]
    """Of the tokens of each of the first rank's rows, before the step, by batch-invariant layers."""


def one_step(layout: Layout, models: Path, out: Path) -> Step:
    learner, titan = _learner(layout, models)
    loaded, logprobs = whole_tensors(learner.shards()), []
    if layout.engine_ranks:
        rows = learner.policy.fit(batch_of(0).rows[0])
        logprobs = [output[0] for output in learner.policy.measure(rows) if output is not None]
    metrics = _everyones([_train(learner, titan, 0)])
    return Step(loaded, whole_tensors(learner.shards()), metrics, logprobs)


def one_packed_step(layout: Layout, models: Path, out: Path) -> Step:
    """With the form of attention that a GPU has."""
    with patch("titan_rl.trainer.model.sharded_model.attention_form", lambda *_: "packed"):
        return one_step(layout, models, out)


def _rank(rank: int, world_size: int, port: int, models: Path, out: Path, layouts: dict[str, Layout], study) -> None:
    torch.set_num_threads(1)
    guard_gloo()  # as a trainer's ranks do
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, wait_for_workers=False)
    # one process group for all layouts: DTensor remembers the groups of meshes that look alike
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    for name, layout in layouts.items():
        try:
            found = study(layout, models, out / name)
        except Exception:
            (out / f"{name}.rank{rank}.error").write_text(traceback.format_exc())
            raise
        if rank == 0:
            torch.save(asdict(found), out / f"{name}.pt")
    dist.destroy_process_group()


def run_layouts(world_size: int, models: Path, out: Path, layouts: dict[str, Layout], study=_study) -> None:
    """What ``study`` makes of every layout, as a dict, in ``out``; where one fails the rest is missing."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    run_ranks(_rank, world_size, world_size, store.port, models, out, layouts, study)


TOLERANCE = 1e-5


MODELS = {
    "llama": dict(architecture="llama", tie_word_embeddings=True),
    "qwen3": dict(architecture="qwen3", tie_word_embeddings=False),
    "moe": dict(architecture="qwen3_moe", tie_word_embeddings=False),
}


def parallelism(**degrees: int | str) -> dict[str, int | str]:
    names = {
        "dp": "data_parallel_shard_degree",
        "replicate": "data_parallel_replicate_degree",
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "cp": "context_parallel_degree",
        "ep": "expert_parallel_degree",
        "schedule": "pipeline_parallel_schedule",
    }
    return {names.get(name, name): value for name, value in degrees.items()}


def assert_close(metrics: dict, reference: dict) -> None:
    for name, value in reference.items():
        if name in ("num_trained_tokens", "learning_rate"):
            assert metrics[name] == value, name
        else:
            assert metrics[name] == pytest.approx(value, rel=TOLERANCE), name


def assert_same_tensors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
