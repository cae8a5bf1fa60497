"""Attention of rows that share a prefix, both ways: blocks through SDPA with a dense mask, and one call of a
flash-attention kernel. Time and memory of forward and backward, and errors against blocks in fp32 on a small row."""

from collections.abc import Callable
from typing import Any

import torch

import titan_rl.models.device  # isort: skip  # noqa: F401  (before any other torchtitan module)

from gpu_check.bench import mib, relative_error
from gpu_check.fixtures import Fixtures
from titan_rl.data.types import Segment
from titan_rl.models.layers import attention
from titan_rl.models.layers.attention import Form, PackedAttention, plan_attention

_HEADS, _KEY_HEADS, _SIZE = 32, 8, 128
_SHAPES = ((512, 8, 2048), (1024, 8, 1000), (1024, 8, 1013), (1024, 8, 4096), (1024, 2, 15000))
"""Tokens of the prefix, samples behind it, tokens of each."""
_SMALL = (40, 4, 60)
_TINY = ((8, 2, 16),)
_RATIOS = ("packed_seconds_of_blocks", "packed_peak_of_blocks")
Run = Callable[[], tuple[torch.Tensor, ...]]


def check(fixtures: Fixtures) -> dict[str, Any]:
    measured = [_measured(fixtures, shape) for shape in (_TINY if fixtures.rehearse else _SHAPES)]
    ratios = {name: [one[name] for one in measured if name in one] for name in _RATIOS}
    figures = {"shapes": measured} | _errors(fixtures, _TINY[0] if fixtures.rehearse else _SMALL)
    figures |= {name: max(of_shapes) for name, of_shapes in ratios.items() if of_shapes}
    return figures | ({} if _has_packed() else {"why_not": "this tree has no packed form"})


def _has_packed() -> bool:
    return hasattr(attention, "attention_form")


def _forms(device: torch.device) -> list[Form]:
    """On a CPU the packed form is its reference."""
    return ["blocks", "packed"] if _has_packed() else ["blocks"]


def _segments(prefix: int, count: int, length: int) -> list[Segment]:
    behind = [Segment(prefix + i * length, length, ((0, prefix),)) for i in range(count)]
    return [Segment(0, prefix), *behind]


def _pass(fixtures: Fixtures, form: Form, shape: tuple[int, int, int], dtype: torch.dtype) -> Run:
    """Forward and backward of one layer; the output and the gradients of queries, keys and values."""
    torch.manual_seed(0)
    total = shape[0] + shape[1] * shape[2]
    forms: list[Form] = [form] if form == "packed" else []
    plan = plan_attention(_segments(*shape), total, fixtures.device, *forms)
    sizes = (_HEADS, _KEY_HEADS, _KEY_HEADS) if fixtures.bench.on_gpu else (4, 2, 2)
    leaves = [torch.randn(1, total, heads, _SIZE).to(fixtures.device, dtype).requires_grad_() for heads in sizes]
    upstream = torch.randn_like(leaves[0], requires_grad=False)
    layer = PackedAttention.Config().build()

    def run() -> tuple[torch.Tensor, ...]:
        out = layer(*leaves, attention_masks=plan, enable_gqa=True)
        return out, *torch.autograd.grad(out, leaves, upstream)

    return run


def _errors(fixtures: Fixtures, shape: tuple[int, int, int]) -> dict[str, float]:
    exact = [one.detach().float() for one in _pass(fixtures, "blocks", shape, torch.float32)()]
    errors = {}
    for form in _forms(fixtures.device):
        pairs = zip(_pass(fixtures, form, shape, torch.bfloat16)(), exact, strict=True)
        errors[f"{form}_error"] = max(relative_error(*pair) for pair in pairs)
    return errors


def _measured(fixtures: Fixtures, shape: tuple[int, int, int]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": list(shape)}
    for form in _forms(fixtures.device):
        try:
            run = _pass(fixtures, form, shape, torch.bfloat16)
            held = fixtures.bench.held()
            row[f"{form}_seconds_first"] = fixtures.bench.once(run)
            row[f"{form}_seconds"] = fixtures.bench.seconds(run)
            row[f"{form}_peak_mib"] = mib(fixtures.bench.peak(run) - held)
        except torch.OutOfMemoryError as error:  # dense masks of long samples may not fit: a figure, too
            row[f"{form}_failed"] = str(error).splitlines()[0][:200]
        finally:
            run = None
            fixtures.bench.empty_cache()
    return row | _ratios(row)


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    if "packed_peak_mib" not in row:
        return {}
    if "blocks_peak_mib" not in row:  # where blocks do not fit, any time and memory is less
        return dict.fromkeys(_RATIOS, 0.0)
    packed, blocks = ((row[f"{form}_seconds"], max(row[f"{form}_peak_mib"], 1)) for form in ("packed", "blocks"))
    return {name: one / other for name, one, other in zip(_RATIOS, packed, blocks, strict=True)}
