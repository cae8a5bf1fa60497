"""What the kernels' tests share: memory that shows what nobody wrote, and Triton's interpreter in a process."""

import os
import subprocess
import sys

import torch


def run_interpreted(file: str) -> None:
    """Run the functions ``check_*`` of a test file, as pytest runs tests, with Triton's interpreter.

    It must be chosen before Triton is imported, and nothing else of the session should see it.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "python_functions=check_*"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, file], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


def poison(monkeypatch) -> None:
    """Memory that torch gives out uninitialized holds NaN, or 157 where that cannot be."""

    def poisoning(allocate):
        def allocated(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else 157)

        return allocated

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
