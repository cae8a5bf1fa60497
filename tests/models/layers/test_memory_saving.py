"""Norm and feed-forward against torch's own operations: the same values, and less kept for the backward."""

import pytest
import torch
import torch.nn.functional as F

from titan_rl.models.layers.memory_saving import _GateAndProject, _Normalize

SHAPE = (1, 7, 24)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The output, the inputs' gradients, and the bytes beyond the inputs that were kept for them."""
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*inputs)
    torch.manual_seed(1)
    return out, torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype)), sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype):
    inputs = leaves(dtype, SHAPE, SHAPE[-1:])
    out, gradients, kept = with_gradients(lambda x_D, weight_D: _Normalize.apply(x_D, weight_D, 1e-5), inputs)
    wanted, wanted_gradients, torch_kept = with_gradients(
        lambda x_D, weight_D: F.rms_norm(x_D, SHAPE[-1:], weight_D, 1e-5), inputs
    )
    assert torch.equal(out, wanted)
    for found, exactly in zip(gradients, wanted_gradients, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, exactly)
    assert kept == 4 * 7 < torch_kept / 20  # a scale for each token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_projection(dtype):
    inputs = leaves(dtype, SHAPE, SHAPE, (16, SHAPE[-1]))
    out, gradients, kept = with_gradients(_GateAndProject.apply, inputs)
    wanted, wanted_gradients, torch_kept = with_gradients(
        lambda gate_F, up_F, down_DF: F.linear(F.silu(gate_F) * up_F, down_DF), inputs
    )
    assert torch.equal(out, wanted)
    assert all(map(torch.equal, gradients, wanted_gradients))
    assert kept == 0 < torch_kept
