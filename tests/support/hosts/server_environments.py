"""Virtual environments of other people's servers, made once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UV = (sys.executable, "-m", "uv")


def run(*command: str | Path, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, **settings)


def made(cache: pytest.Cache, package: str, python: str, *beside: str) -> Path:
    """A virtual environment's folder, with the package in it; skips where there is none to be had. ``beside``: others
    that it needs."""
    folder = cache.mkdir(f"servers-{package.replace('==', '-')}")
    stamp = folder / "installed"
    if not stamp.exists():
        shutil.rmtree(folder)
        done = run(*UV, "venv", "--python", python, folder)
        if not done.returncode:
            done = run(*UV, "pip", "install", "-q", "--python", folder / "bin/python", package, *beside)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        stamp.touch()
    return folder
