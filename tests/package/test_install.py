"""scripts/install.sh, with a Python that only pretends to install; and pip's settings as uv takes them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import uv_settings
from tree import TREE

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
*torch.version.cuda*) exit {code} ;;
*) [ "$1" = -P ] && echo "titan_rl: all of it" ; exit 0 ;;
esac
"""


def install(tmp_path: Path, code: int) -> tuple[subprocess.CompletedProcess, Path]:
    """``code``: what Python ends with when it is asked whether its torch has no CUDA."""
    venv, tree = tmp_path / "venv", tmp_path / "tree"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(FAKE_PYTHON.format(code=code))
    python.chmod(0o755)
    (tree / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/install.sh", "scripts/cpu_requirements.py", "scripts/uv_settings.py"):
        shutil.copy(TREE / name, tree / name)
    command = [str(tree / "scripts" / "install.sh"), str(venv), "gpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60), venv


def test_a_cpu_build_is_no_gpu_installation(tmp_path):
    done, venv = install(tmp_path, 1)
    assert done.returncode == 2 and not (venv / ".titan_rl_installed").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith("install.sh: the torch in") and "no CUDA" in line and "install again" in line


def test_a_cuda_build_is_one(tmp_path):
    done, venv = install(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert (venv / ".titan_rl_installed").read_text().startswith("gpu ")


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_what_python_is_asked_tells_them_apart(cuda, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"class version:\n    cuda = {cuda!r}\n")
    text = (TREE / "scripts" / "install.sh").read_text()
    program = next(line for line in text.splitlines() if "torch.version.cuda" in line).split("'")[1]
    done = subprocess.run(["python3", "-c", program], cwd=tmp_path, timeout=60)
    assert done.returncode == (cuda is None)


def test_settings_of_pip_hold_for_uv():
    listing = """:env:.find-links='/wheels'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='/other'
global.index-url='https://mirror.example/simple'
download.timeout='3'
install.timeout='60'
"""
    assert sorted(uv_settings.as_uv(uv_settings.settings_of(listing))) == [
        "UV_CONSTRAINT=/etc/constraints.txt",
        "UV_DEFAULT_INDEX=https://mirror.example/simple",
        "UV_FIND_LINKS=/wheels",
        "UV_HTTP_TIMEOUT=60",
        "UV_INDEX=file:///a/simple file:///b/simple",
    ]


def test_a_setting_without_counterpart_is_left_to_pip():
    with pytest.raises(SystemExit, match="no counterpart of pip's require-hashes"):
        uv_settings.as_uv(uv_settings.settings_of("global.require-hashes='1'\n:env:.quiet='2'\n"))
