"""MKL's functions are called once by one thread before several call them: else one of these may get a coarse one."""

import subprocess
import sys

import pytest

FIRST = """
import importlib, sys, torch
importlib.import_module(sys.argv[1])
torch.set_num_threads(2)
angles = torch.outer(torch.arange(2048.0), 1 / 10000 ** (torch.arange(0, 32, 2) / 32))
assert (angles.cos().double() - angles.double().cos()).abs().max() < 1e-6
assert "titan_rl.kernels.first_calls" in sys.modules
"""


@pytest.mark.parametrize("module", ["titan_rl.models.device", "titan_rl.generator.engine"])
def test_trainers_and_engines_begin_so(module):
    done = subprocess.run([sys.executable, "-c", FIRST, module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
