"""The channel serves any vLLM: it finds the backend by name, through vLLM's plugins."""

import os
import subprocess
import sys

import pytest
from tree import SUPPORT

from titan_rl.mesh.resources.cores import Threads, generator_environment
from titan_rl.models.builtin.tiny import make_tiny


@pytest.mark.slow
def test_a_plain_vllm_takes_weights_from_the_channel(tmp_path):
    make_tiny(tmp_path, seed=1, architecture="qwen3", num_layers=2, tie_word_embeddings=False)
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "models" / "plain_vllm.py"), str(tmp_path)],
        env=os.environ | generator_environment(Threads(1, 1), on_cpu=True),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    name, difference = done.stdout.splitlines()[-1].split()
    assert name == "difference" and float(difference) < 1e-5
