"""Every kernel in every form that a launch or the tuner may choose compiles for Hopper, without a GPU.

test_kernels_room.py compiles each kernel as it is launched as a rule; here are the tuner's candidates, the choice in
their place (trainer/model/determinism.py), and the losses' settings.
"""

import importlib
import itertools
import os
import shutil
from pathlib import Path

import pytest
import test_kernels_room as room
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from titan_rl.kernels import linear_logprob, policy_loss

HOPPER, AMPERE = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
SHARED = {90: 227 << 10, 80: 163 << 10}
"""Bytes that a program may have."""
BUNDLED = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
PTXAS = os.environ.get("TRITON_PTXAS_PATH") or (BUNDLED.exists() and str(BUNDLED)) or shutil.which("ptxas")
needs_ptxas = pytest.mark.skipif(not PTXAS, reason="this triton comes without ptxas, which makes machine code")


def function_of(kernel) -> JITFunction:
    """Within a tuner and a heuristic."""
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


TUNED = ("_statistics_kernel", "_gradient_kernel")


def of_config(config, dtype: str, **more) -> tuple[dict, dict]:
    without = dict.fromkeys(("HAS_BIAS", "HAS_CAP", "HAS_MASK"), False) | dict.fromkeys(("bias", "mask"))
    constants = config.kwargs | {"EVEN_D": True} | without | more
    return constants, room.TYPES | dict.fromkeys(("hidden", "weight", "grad"), dtype)


@needs_ptxas
@pytest.mark.confirms
@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("config", linear_logprob._CONFIGS, ids=lambda c: "x".join(map(str, c.kwargs.values())))
def test_every_candidate_of_the_tuner(name, config):
    more = {"HAS_ENTROPY": False} if name == "_gradient_kernel" else {}
    constants, types = of_config(config, "*bf16", **more)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = compiled(getattr(linear_logprob, name), constants, types=types, **options)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED[90]
    assert ("wgmma.mma_async" in made.asm["ptx"]) == (config.kwargs["BLOCK_S"] >= 64)


@needs_ptxas
@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
def test_the_choice_in_the_tuners_place_fits(name, dtype, target):
    config = linear_logprob._fixed_config(linear_logprob._CONFIGS, 4 if dtype == "*fp32" else 2)
    more = {"HAS_ENTROPY": True} if name == "_gradient_kernel" else {}
    constants, types = of_config(config, dtype, HAS_BIAS=True, HAS_CAP=True, HAS_MASK=True, **more)
    del constants["bias"], constants["mask"]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    made = compiled(getattr(linear_logprob, name), constants, target, types, **options)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED[target.arch]


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
