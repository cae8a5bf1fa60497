"""An engine that is sent adapters alone holds the weights that it would be sent merged, to the bit where it has them
whole."""

import asyncio

import pytest
import torch
from batches import batch_of

from titan_rl.config.load import load_config
from titan_rl.config.model_directory.directory import stored_tensors
from titan_rl.generator.weights.adapter_reader import AdapterReader, adapter_needs
from titan_rl.generator.weights.vllm_recording import Recorded, Target
from titan_rl.mesh.channel.plan import AdapterForm, Box, Interner, Plan, adapted_weights
from titan_rl.mesh.channel.reader import ReaderSetup
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
RANK, ALPHA = 4, 8.0


def learner_of(path, computed_in: str) -> Learner:
    training = {"steps": 10, "mixed_precision_param": computed_in}
    tables = {"optimizer": {"lr": 1e-2}, "training": training, "lora": {"rank": RANK, "alpha": ALPHA}}
    config = load_config(None, tables)
    return Learner(config, build_titan(config), path)


def halves(shape: tuple[int, ...], dim: int) -> list[Box]:
    """Boxes of two engine ranks that cut a tensor along a dimension, or have it whole each."""
    if dim >= len(shape):
        return [Box((0,) * len(shape), shape)] * 2
    cut = shape[dim] // 2 + 1
    sizes = [[cut if d == dim else n for d, n in enumerate(shape)] for cut in (cut, shape[dim] - cut)]
    starts = [[begin if d == dim else 0 for d in range(len(shape))] for begin in (0, cut)]
    return [Box(tuple(start), tuple(size)) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize(
    ("computed_in", "dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_generators_that_get_adapters_alone_hold_the_merged_weights(tmp_path, computed_in, dtype, cut):
    """``cut``: the dimension along which two ranks of an engine share weights."""
    make_tiny(tmp_path, seed=1, num_layers=2)
    learner, interner = learner_of(tmp_path, computed_in), Interner()
    shards, adapters = learner.shards(), learner.policy.adapters.shards
    boxes = {s.name: [Box((0,) * len(s.shape), s.shape)] if cut is None else halves(s.shape, cut) for s in shards}
    recorded = [
        [Recorded(name, of_ranks[rank], dtype, Target("", "", 0, ())) for name, of_ranks in boxes.items()]
        for rank in range(1 if cut is None else 2)
    ]
    held = holdings(adapters, interner)
    forms = adapted_weights([held])
    assert set(forms.values()) == {AdapterForm(RANK, computed_in)} and len(forms) == 2 * 7
    plan = Plan([held], [adapter_needs(of_rank, forms, interner) for of_rank in recorded])
    writer = WeightWriter(0, adapters, plan.slot(0), CPU)
    region, scale = writer.region.handle(over_rdma=False), ALPHA / RANK
    readers = [
        AdapterReader(
            ReaderSetup(plan.reads(rank, 0), [region], ["shared_memory"], adapter_scale=scale),
            *(CPU, of_rank, stored_tensors(tmp_path)),
        )
        for rank, of_rank in enumerate(recorded)
    ]
    for version in range(3):
        writer.stage(version)
        merged = {shard.name: shard.merged() for shard in shards}
        wanted = {name: values.to(getattr(torch, dtype)) for name, values in merged.items()}
        for reader in readers:
            asyncio.run(reader.fetch(version, 10.0))
            assert reader.held == version
            for name, _, box, values in reader.pieces():
                assert torch.allclose(values, wanted[name][box.index], rtol=1e-6 if dtype == "float32" else 1e-2)
                assert cut is not None or torch.equal(values, wanted[name])
            reader.let_go() if version else None
        writer.wait()
        learner.train(batch_of(version).rows[0], True)
    sent, numbers = sum(read.nbytes for read in plan.reads(0, 0).reads), sum(s.tensor.numel() for s in adapters)
    if cut is None:  # and padding, of fewer than 64 bytes a matrix
        assert sent < getattr(torch, computed_in).itemsize * numbers + 64 * len(adapters)
