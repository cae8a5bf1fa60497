"""A rank alone computes without FSDP: the same bits, and the same gradients in the same places."""

import gc
import weakref

import pytest
import torch
from batches import batch_of

from titan_rl.config.load import load_config
from titan_rl.kernels import linear_logprob
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.model import unsharded
from titan_rl.trainer.model.gradient_sum import GradientSum
from titan_rl.trainer.model.unsharded import can_be_unsharded
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: False)
    monkeypatch.setattr(unsharded, "multiplies_wide", lambda: False)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def made(path, dtype: str = "float32", policy: str = "never", **tables) -> Learner:
    tables |= {"training": {"steps": 10, "mixed_precision_param": dtype}}
    config = load_config(None, tables | {"parallelism": {"fsdp_reshard_after_forward": policy}})
    return Learner(config, build_titan(config), path)


def gradients(learner: Learner, times: int = 1) -> list[torch.Tensor]:
    for seed in range(times):
        learner.forward_backward(batch_of(seed, row_tokens=48).rows[0])
    found = [p.grad.full_tensor().clone() for p in learner.model_parts[0].parameters() if p.requires_grad]
    learner.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("tables", [{}, {"activation_checkpoint": {"mode": "full"}}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_fsdp(model_path, dtype, tables):
    """Of several rows, and added up over two passes."""
    learner = made(model_path, dtype, **tables)
    assert learner.policy.unsharded is not None
    alone = gradients(learner, times=2)
    learner.policy.unsharded = None
    assert all(map(torch.equal, alone, gradients(learner, times=2)))
    assert all(gradient.dtype == torch.float32 for gradient in alone)


@pytest.mark.parametrize("tables", [{}, {"lora": {"rank": 4}}, {"algorithm": {"kl_coefficient": 0.1}}])
def test_weights_that_are_widened_once_are_those_that_are_widened_each_time(model_path, monkeypatch, tables):
    """Rounded to bf16 before; what is found of rows is the same to the bit, and gradients are but rounded less."""
    monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: True)
    monkeypatch.setattr(unsharded, "multiplies_wide", lambda: True)
    learner = made(model_path, "bfloat16", **tables)
    rows = learner.policy.fit(batch_of(0).rows[0])
    once, alone = learner.policy.measure(rows), gradients(learner, times=2)
    learner.policy.unsharded = None
    assert all(map(torch.equal, once, learner.policy.measure(rows)))
    for ours, fsdp_s in zip(alone, gradients(learner, times=2), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - fsdp_s).norm() <= 2**-7 * fsdp_s.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_table_that_the_head_does_not_share(tmp_path, dtype):
    """Words come back within a row, in several rows and over two passes."""
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=1, tie_word_embeddings=False)
    learner = made(tmp_path, dtype)
    alone = gradients(learner, times=2)
    assert alone[0].any() and not alone[0].any(1).all()
    learner.policy.unsharded = None
    assert all(map(torch.equal, alone, gradients(learner, times=2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_are_seen(model_path, dtype):
    """The next pass computes with what an update has made of the weights, wherever they lie by now."""
    learner, other = made(model_path, dtype), made(model_path, dtype)
    other.policy.unsharded = None
    rows = batch_of(0).rows[0]
    for one in (learner, other):
        one.train(rows, True)
        one.train(rows, True)
    first, second = (one.policy.measure(one.policy.fit(rows)) for one in (learner, other))
    assert all(map(torch.equal, first, second))


def test_nothing_is_kept_between_passes(model_path, monkeypatch):
    """Not even until cycles of references are looked for."""
    made_for_passes = []

    def watched(copies) -> GradientSum:
        one = GradientSum(copies)
        made_for_passes.append(weakref.ref(one))
        return one

    monkeypatch.setattr(unsharded, "GradientSum", watched)
    learner = made(model_path, "bfloat16")
    gc.collect()
    gc.disable()
    try:
        gradients(learner)
        assert [one() for one in made_for_passes] == [None]
    finally:
        gc.enable()
    assert list(learner.policy.unsharded.model.parameters()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_one_block(model_path, dtype):
    """From before the first forward: activations then find no gradient in their way."""
    learner = made(model_path, dtype)
    for seed in range(2):
        learner.forward_backward(batch_of(seed, row_tokens=48).rows[0])
    found = [p.grad.to_local().untyped_storage() for p in learner.model_parts[0].parameters()]
    assert len({storage.data_ptr() for storage in found}) == 1
    assert found[0].nbytes() == 4 * sum(p.numel() for p in learner.model_parts[0].parameters())


def test_adapters(model_path):
    learner = made(model_path, "bfloat16", lora={"rank": 4})
    alone = gradients(learner)
    rows = learner.policy.fit(batch_of(0).rows[0])
    with torch.no_grad():
        for name, parameter in learner.model_parts[0].named_parameters():
            if "lora_b" in name:
                parameter.fill_(0.01)
    adapted = learner.policy.measure(rows)
    with learner.policy.adapters.disabled():
        plain = learner.policy.measure(rows)
    assert not any(map(torch.equal, adapted, plain))
    with torch.no_grad():
        for name, parameter in learner.model_parts[0].named_parameters():
            if "lora_b" in name:
                parameter.zero_()
    learner.policy.unsharded = None
    assert all(map(torch.equal, alone, gradients(learner)))
    with learner.policy.adapters.disabled():
        assert all(map(torch.equal, plain, learner.policy.measure(rows)))


def test_whose_copies_are_not_wanted_keeps_fsdp(model_path):
    assert made(model_path, "bfloat16", "default").policy.unsharded is None
    assert made(model_path, "float32", "default").policy.unsharded is not None


@pytest.mark.parametrize(("policy", "on_gpu"), [("default", True), ("never", True), ("always", False)])
def test_a_lone_gpu_keeps_copies_unless_told_not_to(policy, on_gpu):
    tables = {"training": {"mixed_precision_param": "bfloat16"}, "parallelism": {"fsdp_reshard_after_forward": policy}}
    assert can_be_unsharded(build_titan(load_config(None, tables)), "cuda") == on_gpu
    tables["parallelism"]["data_parallel_shard_degree"] = 2
    assert not can_be_unsharded(build_titan(load_config(None, tables)), "cuda")
