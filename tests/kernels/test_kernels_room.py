"""For every kernel: alone with torch and triton, at work without triton, compiled for an H200, ready to be measured."""

import ast
import json
import os
import subprocess
import sys

import pytest
import triton
from tree import TREE
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from titan_rl.kernels import batch_invariant, block_sums, discounted_scan, linear_logprob, pack_cast, policy_loss

FOLDER = TREE / "kernels"
H200 = GPUTarget("cuda", 90, 32)


def test_kernels_import_torch_and_triton_alone():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    siblings = {file.stem for file in FOLDER.glob("*.py")}
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            known = allowed | siblings | {"liger_kernel"} if file.stem.startswith("bench") else allowed
            assert {name.partition(".")[0] for name in names} <= known, file
    assert not (FOLDER / "__init__.py").exists()


def test_references_work_without_triton():
    code = """
import sys; sys.modules["triton"] = None
import torch
from titan_rl.kernels import (
    batch_invariant, block_sums, discounted_scan, linear_logprob, pack_cast, packed_attention, policy_loss
)
ones = torch.ones(3)
linear_logprob.linear_logprob(torch.ones(3, 2), torch.ones(5, 2), torch.tensor([0, 1, 4]))
policy_loss.policy_loss(ones, ones, ones, ones, policy_loss.Objective())
discounted_scan.discounted_returns(ones, ones > 0, 0.9)
pack_cast.Staging([(3,)]).pack([ones])
block_sums.block_sums(ones.view(torch.uint8), [(0, 12)])
batch_invariant.batch_invariant_matmul(ones[None], ones[None])
row = torch.ones(3, 1, 8)
packed_attention.packed_attention(row, row, row, packed_attention.plan_packed([[(0, 3)]], 3, "cpu"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_gpu_script_rehearses(tmp_path):
    """From another folder, as in a bare environment; every row that is ours is there."""
    command = [sys.executable, str(FOLDER / "bench.py"), "--json", "--rehearse"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    everything = json.loads(done.stdout)["rows"]
    rows = [row for row in everything if row["by"] == "triton"]
    assert {row["kernel"] for row in rows} == {
        *("linear_logprob", "linear_logprob forward", "policy_loss", "discounted_scan", "pack", "unpack"),
        *("batch_invariant_matmul", "batch_invariant_log_softmax", "block_sums"),
    }
    assert all(row["same_bytes_as_reference"] for row in rows if row["kernel"] in ("pack", "unpack"))
    assert all(row["batches_with_equal_bits"] == 24 for row in rows if row["kernel"] == "batch_invariant_matmul")
    attention = {row["by"]: row for row in everything if row["kernel"] == "packed_attention"}
    assert attention.keys() == {"reference", "dense mask"}  # of which the first stands for flash attention, on a CPU
    for row in attention.values():
        assert row["output_relative_error"] < 0.01 and row["gradient_relative_error"] < 0.01, row


TYPES = {
    **dict.fromkeys(("hidden", "weight", "bias", "rows", "out", "q", "k", "v"), "*bf16"),
    **dict.fromkeys(("query_starts", "num_keys", "pages"), "*i32"),
    **dict.fromkeys(("page", "pages_stride", "page_stride", "token_stride", "group_stride", "feature_stride"), "i32"),
    **dict.fromkeys(("target", "offsets", "carries", "addresses", "table", "total"), "*i64"),
    **dict.fromkeys(("buffer", "last", "mask"), "*u8"),
    **dict.fromkeys(("S", "V", "D", "T", "M", "N", "K", "num_blocks", "num_splits", "words_per_split"), "i32"),
    **dict.fromkeys(("hidden_stride", "weight_stride", "mask_stride", "first_word"), "i32"),
    **dict.fromkeys(("inverse_temperature", "temperature", "soft_cap", "discount", "factor", "scale"), "fp32"),
    **dict.fromkeys(("lower", "upper", "dual", "kl_coefficient", "kl_clip"), "fp32"),
}
"""Of the kernels' arguments, by name; all others point to fp32."""
TILE = {
    "BLOCK_S": 128,
    "BLOCK_V": 256,
    "BLOCK_D": 64,
    "EVEN_D": True,
    "HAS_BIAS": False,
    "HAS_CAP": False,
    "HAS_MASK": False,
    "bias": None,
    "mask": None,
}
FULL_TILE = {"BLOCK_S": 64, "BLOCK_V": 128, "BLOCK_D": 64, "EVEN_D": False}
FULL_TILE |= {"HAS_BIAS": True, "HAS_CAP": True, "HAS_MASK": True}
CLIP = {"CISPO": False, "HAS_DUAL": True, "ESTIMATOR": "k3_unbiased", "BLOCK": 1024}
HEADS = {"HEADS": 12, "SHARE": 6, "SIZE": 128, "BLOCK_Q": 16, "BLOCK_K": 64, "BLOCK_H": 128}
PRODUCT = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "EVEN_K": True}


@pytest.mark.parametrize(
    ("kernel", "constants", "num_stages"),
    [
        (linear_logprob._statistics_kernel, TILE, 4),
        (linear_logprob._statistics_kernel, FULL_TILE, 3),
        (linear_logprob._gradient_kernel, TILE | {"HAS_ENTROPY": False, "grad": "*bf16"}, 4),
        (linear_logprob._gradient_kernel, FULL_TILE | {"HAS_ENTROPY": True, "grad": "*bf16"}, 3),
        (policy_loss._token_kernel, CLIP, 3),
        (
            policy_loss._token_kernel,
            CLIP | {"CISPO": True, "HAS_DUAL": False, "ESTIMATOR": "k2", "importance": None},
            3,
        ),
        (policy_loss._sequence_kernel, CLIP | {"ESTIMATOR": "k1", "SHARED": True}, 3),
        (policy_loss._sequence_kernel, CLIP | {"ESTIMATOR": "k3", "SHARED": False}, 3),
        (discounted_scan._scan_kernel, {"BLOCK": 2048}, 3),
        (discounted_scan._scan_kernel, {"BLOCK": 2048, "values": None, "returns": None}, 3),
        (pack_cast._bfloat16_kernel, {"BLOCK": 4096, "PACKING": True, "ALIGNED": True}, 3),
        (pack_cast._bfloat16_kernel, {"BLOCK": 4096, "PACKING": False, "ALIGNED": False}, 3),
        (pack_cast._fp8_kernel, {"BLOCK": 128, "PACKING": True, "ALIGNED": True}, 3),
        (pack_cast._fp8_kernel, {"BLOCK": 128, "PACKING": False, "ALIGNED": True}, 3),
        (block_sums._sum_kernel, {"BLOCK": 4096, "ROUNDS": 8, "sums": "*i64"}, 3),
        (batch_invariant._matmul_kernel, PRODUCT, 4),
        (batch_invariant._log_softmax_kernel, {"BLOCK": 4096}, 3),
        (batch_invariant._attention_kernel, HEADS, 2),
    ],
)
def test_compiles_for_an_h200(kernel, constants, num_stages):
    """Down to machine code, which needs no GPU; products must come out as Hopper's own instruction."""
    function = kernel
    while not isinstance(function, JITFunction):  # within a heuristic
        function = function.fn
    names = function.arg_names
    constants = dict(constants)
    types = TYPES | {name: constants.pop(name) for name in ("grad", "sums") if name in constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    aligned = [name for name in names if signature[name][0] in "*i"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name != "num_blocks"}
    options = {"num_warps": 8, "num_stages": num_stages}
    compiled = triton.compile(ASTSource(function, signature, constants, attributes), target=H200, options=options)
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 227 * 1024
    if constants.get("EVEN_D") or constants.get("EVEN_K"):
        assert "wgmma.mma_async" in compiled.asm["ptx"]
