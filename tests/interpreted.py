"""Triton's interpreter must be chosen before Triton is imported, so its checks run in a process of their own."""

import os
import subprocess
import sys


def run_interpreted(file: str) -> None:
    """Run the functions ``check_*`` of a test file, as pytest runs tests, with Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "python_functions=check_*"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, file], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
