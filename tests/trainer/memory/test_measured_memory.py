"""What plans say that a rank holds, against what one on this CPU holds after a step."""

import pytest
import torch
from batches import batch_of

from titan_rl.config.load import load_config
from titan_rl.controller.planning.device_memory import slots_of_rank, snapshots_of_rank, trained_rank
from titan_rl.controller.planning.memory_plan import Size, activations, memory_needs
from titan_rl.controller.preflight.checks import Checked, resolve
from titan_rl.mesh.channel.memory.region import NUM_SLOTS
from titan_rl.mesh.channel.plan import Interner
from titan_rl.mesh.channel.writer import holdings
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tiny_vision import make_tiny_vision
from titan_rl.models.families.qwen2_5_vl import ImageInputs, VisionTower, recompute_tower
from titan_rl.models.spec import read_hf_config
from titan_rl.trainer.state.snapshot_kinds import CopiedSnapshots
from titan_rl.trainer.step.learner import Learner

pytestmark = pytest.mark.usefixtures("process_group")
_FIXED = 128 << 20
"""Of the activations, what does not depend on the row."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def nbytes(tensors) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=256, num_layers=4)
    return path


def checked_of(model, mode: str = "none", **sections) -> Checked:
    checked = resolve(load_config(None, {"activation_checkpoint": {"mode": mode}, **sections}))
    checked.config.model.path = str(model)
    return checked


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "adapters"])
def test_a_rank_holds_the_state_that_plans_count(lora, model):
    checked = checked_of(model, lora=lora)
    learner = Learner(checked.config, checked.titan, model)
    snapshots = CopiedSnapshots(0, learner)
    learner.forward_backward(batch_of(0).rows[0])
    parameters = [p for part in learner.model_parts for p in part.parameters()]
    gradients = nbytes(p.grad for p in parameters if p.grad is not None)
    learner.optimizer_step(True)
    size = Size.of(read_hf_config(model), None, checked.config.lora)
    told = trained_rank(size, checked.titan)
    trained = [p for p in parameters if p.requires_grad]
    states = [state for one in learner.optimizers() for state in one.state.values()]
    moments = nbytes(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert told == {"weights": nbytes(parameters), "gradients": gradients, "moments": moments}
    slots = NUM_SLOTS * snapshots.layout.nbytes
    padding = NUM_SLOTS * ((256 << 10) + 64 * 3 * len(trained))
    assert snapshots_of_rank(size, checked.titan) <= slots <= snapshots_of_rank(size, checked.titan) + padding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_channel_s_slots_have_the_bytes_that_plans_count(dtype, model):
    checked = checked_of(model, generator={"dtype": dtype})
    learner = Learner(checked.config, checked.titan, model)
    held = holdings(learner.shards(), Interner())
    size = Size.of(read_hf_config(model), None)
    tensors = {shard.name: shard.tensor for shard in learner.shards()}
    element = getattr(torch, dtype).itemsize
    told = slots_of_rank(size, checked.titan, dtype)
    assert held and told == NUM_SLOTS * sum(tensor.numel() * element for tensor in tensors.values())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_pass_keeps_about_what_plans_estimate(mode, model):
    checked = checked_of(model, mode)
    learner = Learner(checked.config, checked.titan, model)
    kept: dict[int, int] = {}

    def weights() -> set[int]:
        """Asked at each tensor: what a layer gathered for its forward is another memory each time."""
        parameters = [p for part in learner.model_parts for p in part.parameters()]
        return {local(p).untyped_storage().data_ptr() for p in parameters}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    [row] = batch_of(0, row_tokens=1000, share_prefix=False).rows[0]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner.forward_backward([row])
    training = checked.titan.training
    training.seq_len = len(row.tokens_T)
    told = activations(read_hf_config(model), training, is_kept=mode == "none")
    assert told >= sum(kept.values()) and 0.5 < (told - _FIXED) / sum(kept.values()) < 2


@pytest.mark.parametrize("is_kept", [True, False], ids=["none", "full"])
def test_a_vision_tower_keeps_about_what_plans_estimate(is_kept, tmp_path):
    make_tiny_vision(tmp_path, seed=1)
    hf = read_hf_config(tmp_path)
    training, vision, (rows, columns) = checked_of(tmp_path).titan.training, hf.vision_config, (64, 64)
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    images = ImageInputs(torch.rand(rows * columns, numbers), torch.tensor([[1, rows, columns]]), torch.arange(1))

    def kept(*, learns: bool) -> int:
        tower, saved = VisionTower(VisionTower.Config(hf=vision, is_trained=learns)), dict[int, int]()
        if not is_kept:
            recompute_tower(tower)
        weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if (storage := tensor.untyped_storage()).data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            tower(images)
        return sum(saved.values())

    training.seq_len = rows * columns // vision.spatial_merge_size**2
    told, below_adapters = (activations(hf, training, is_kept, tower_learns=learns) for learns in (True, False))
    del hf.vision_config
    told, below_adapters = (count - activations(hf, training, is_kept) for count in (told, below_adapters))
    most = 1.3 if is_kept else 4  # with the activations of a block, which are made again in the backward
    assert 0.9 < told / kept(learns=True) < most
    assert not kept(learns=False) and 0 < below_adapters < told


def test_a_cpu_s_plan_counts_the_same_state(model):
    checked = checked_of(model)
    trainer = next(need.bytes_by_reason for need in memory_needs(checked) if need.process == "trainer")
    size = Size.of(read_hf_config(model), None)
    for reason, count in trained_rank(size, checked.titan).items():
        assert trainer[reason] == count
    assert trainer["weights to send"] == slots_of_rank(size, checked.titan, "float32")
