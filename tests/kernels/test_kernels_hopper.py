"""Every kernel in every form that a launch may choose compiles for its GPUs, without one.

test_kernels_room.py compiles each kernel as it is launched as a rule; here are linear_logprob's tiles, and the losses'
settings.
"""

import importlib
import itertools
import os
import shutil
from pathlib import Path

import pytest
import test_kernels_room as room
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from titan_rl.kernels import linear_logprob, policy_loss

HOPPER, AMPERE, ADA = (GPUTarget("cuda", capability, 32) for capability in (90, 80, 89))
SHARED = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10}
"""Bytes that a program may have."""
BUNDLED = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
PTXAS = os.environ.get("TRITON_PTXAS_PATH") or (BUNDLED.exists() and str(BUNDLED)) or shutil.which("ptxas")
needs_ptxas = pytest.mark.skipif(not PTXAS, reason="this triton comes without ptxas, which makes machine code")


def function_of(kernel) -> JITFunction:
    """Within a heuristic."""
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    return kernel


def compiled(kernel, constants: dict, target: GPUTarget = HOPPER, types: dict = room.TYPES, **options):
    function = function_of(kernel)
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = [name for name in names if signature[name][0] in "*i" and name != "num_blocks"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compile(ASTSource(function, signature, constants, attributes), target=target, options=options)


def test_every_kernel_is_compiled():
    """Whoever adds one adds it there."""
    [parameters] = [mark.args[1] for mark in room.test_compiles_for_an_h200.pytestmark if mark.name == "parametrize"]
    covered = {function_of(kernel).fn.__qualname__ for kernel, *_ in parameters}
    stems = sorted(path.stem for path in room.FOLDER.glob("*.py") if not path.stem.startswith("bench"))
    modules = [importlib.import_module(f"titan_rl.kernels.{stem}") for stem in stems]
    there = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert there and there <= covered


TILES = [
    *[(kernel, "*bf16", tile, target) for kernel, tile in linear_logprob._LARGE.items() for target in (HOPPER, AMPERE)],
    *[(kernel, "*bf16", linear_logprob._SMALL, ADA) for kernel in linear_logprob._LARGE],
    *[(kernel, "*fp32", linear_logprob._LEAST, ADA) for kernel in linear_logprob._LARGE],
]


@needs_ptxas
@pytest.mark.parametrize(("kernel", "dtype", "tile", "target"), TILES)
def test_each_tile_fits_its_gpus(kernel, dtype, tile, target):
    options = {name: tile[name] for name in ("num_warps", "num_stages")}
    constants = {name: size for name, size in tile.items() if name not in options}
    constants |= dict.fromkeys(("EVEN_D", "HAS_BIAS", "HAS_CAP", "HAS_MASK"), True)
    if kernel == "gradient":
        constants["HAS_ENTROPY"] = True
    types = room.TYPES | dict.fromkeys(("hidden", "weight", "grad"), dtype)
    made = compiled(getattr(linear_logprob, f"_{kernel}_kernel"), constants, target, types, **options)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED[target.arch]
    assert made.metadata.shared <= (linear_logprob._SMALL_BYTES if target == ADA else linear_logprob._LARGE_BYTES)
    assert target != HOPPER or "wgmma.mma_async" in made.asm["ptx"]


@pytest.mark.parametrize(
    ("shared_bytes", "dtype", "tile"),
    [
        (228 << 10, torch.bfloat16, linear_logprob._LARGE["gradient"]),
        (164 << 10, torch.bfloat16, linear_logprob._LARGE["gradient"]),
        (100 << 10, torch.bfloat16, linear_logprob._SMALL),
        (64 << 10, torch.bfloat16, linear_logprob._LEAST),
        (228 << 10, torch.float32, linear_logprob._LEAST),
    ],
)
def test_a_tile_is_chosen_by_the_gpu_and_the_dtype(shared_bytes, dtype, tile, monkeypatch):
    monkeypatch.setattr(linear_logprob, "_INTERPRETED", False)
    monkeypatch.setattr(linear_logprob, "_shared_bytes", lambda device: shared_bytes)
    assert linear_logprob._blocks("gradient", torch.empty(2, 2, dtype=dtype)) is tile


KINDS, ESTIMATORS = ("clip", "dual", "cispo"), ("k1", "k2", "k3", "k3_unbiased")
EACH_ONCE = [("clip", "k1"), ("dual", "k2"), ("cispo", "k3"), ("clip", "k3_unbiased")]
OTHERS = [pair for pair in itertools.product(KINDS, ESTIMATORS) if pair not in EACH_ONCE]


@needs_ptxas
@pytest.mark.parametrize(
    ("kind", "estimator"), [*EACH_ONCE, *(pytest.param(*pair, marks=pytest.mark.confirms) for pair in OTHERS)]
)
def test_every_setting_of_the_losses(kind, estimator):
    settings = {"CISPO": kind == "cispo", "HAS_DUAL": kind == "dual", "ESTIMATOR": estimator, "BLOCK": 1024}
    for absent in ({}, {"importance": None, "reference": None}):
        assert compiled(policy_loss._token_kernel, settings | absent, num_warps=4).asm["cubin"]
        shared = settings | {"SHARED": bool(absent)}
        assert compiled(policy_loss._sequence_kernel, shared | absent, num_warps=4).asm["cubin"]
