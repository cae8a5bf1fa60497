"""An engine's RMS norms on a CPU are the trainer's: of the rounded sum, in fp32, rounded once."""

import pytest
import torch
import torch.nn.functional as F
from vllm import ir
from vllm.platforms import current_platform

from titan_rl.generator.norms import PROVIDER, fused_add_rms_norm, rms_norm

EPSILON = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _kernels():
    current_platform.import_kernels()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to the order of a sum: a rounding of fp32, which may move one in bf16 to its neighbor here and there."""
    if found.dtype == torch.float32:
        return bool(torch.allclose(found, expected, rtol=2e-6, atol=2e-6))
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    return int(steps.max()) <= 1 and float(steps.float().mean()) < 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 16), (37, 64), (5, 4, 32)])
def test_norms_are_the_trainers(dtype, shape):
    x, residual, weight = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype, seed=2), drawn(shape[-1], dtype=dtype)
    assert close(rms_norm(x, weight, EPSILON), F.rms_norm(x, shape[-1:], weight, EPSILON))
    before = x.clone(), residual.clone()
    normed, total = fused_add_rms_norm(x, residual, weight, EPSILON)
    assert torch.equal(total, x + residual) and normed.dtype == dtype
    assert close(normed, F.rms_norm(x + residual, shape[-1:], weight, EPSILON))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_a_part_of_a_row_is_normed_by_itself():
    qkv, weight = drawn(6, 3 * 64), drawn(32)
    heads = qkv[:, 64:128].view(6, 2, 32)
    assert not heads.is_contiguous()
    assert close(rms_norm(heads, weight, EPSILON), F.rms_norm(heads, (32,), weight, EPSILON))


@pytest.mark.parametrize(
    ("width", "has_weight", "variance_size", "is_ours"),
    [(32, True, None, True), (24, True, None, False), (32, False, None, False), (32, True, 16, False)],
)
def test_what_the_kernel_cannot_do_is_vllms(width, has_weight, variance_size, is_ours):
    x, weight = drawn(3, width), drawn(width) if has_weight else None
    for operator, arguments in ((ir.ops.rms_norm, (x,)), (ir.ops.fused_add_rms_norm, (x, x))):
        implementation = operator.impls[PROVIDER]
        assert implementation.supports_args(*arguments, weight, EPSILON, variance_size) == is_ours
