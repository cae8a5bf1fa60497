"""The package as pip builds and installs it: what a wheel holds, and that it works away from the tree."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pydantic
import pytest
from tree import TREE

from titan_rl import __version__

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "titan_rl", "actors", "configs", "kernels", "recipes")
LINKS = sorted(path.name for path in (TREE / "titan_rl").iterdir() if path.is_symlink())
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated")


def copy_tree(to: Path) -> Path:
    """What a wheel is made of, links as links."""
    to.mkdir()
    for name in SOURCES:
        if (TREE / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(TREE / name, to / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(TREE / name, to / name)
    return to


def build(tree: Path, to: Path) -> subprocess.CompletedProcess:
    command = [*PIP, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(to), str(tree)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    done = build(copy_tree(folder / "tree"), folder)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """An environment's bin/, with the wheel and, beside it, what this one has."""
    home = wheel.parent / "venv"
    venv.create(home, symlinks=True)
    command = [*PIP, "--python", str(home / "bin" / "python"), "install", "-q", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, timeout=200)
    [packages] = home.glob("lib/python*/site-packages")
    (packages / "those_of_the_tests.pth").write_text(str(Path(pydantic.__file__).parents[1]))
    return home / "bin"


def run(program: Path, *arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [program, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def test_a_wheel_holds_all_rooms_the_tomls_the_licence_and_no_tests(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = {path.relative_to(TREE) for form in ("*.py", "*.json") for path in (TREE / "titan_rl").rglob(form)}
    ours |= {
        Path("titan_rl") / path.relative_to(TREE)
        for room in ("actors", "kernels")
        for path in (TREE / room).glob("*.py")
    }
    ours |= {Path("titan_rl") / path.relative_to(TREE) for path in (TREE / "configs").rglob("*.toml")}
    ours |= {Path("titan_rl") / path.relative_to(TREE) for path in (TREE / "recipes").rglob("*.*")}
    ours |= {path.relative_to(TREE) for name in ("devices.toml", "page.*") for path in (TREE / "titan_rl").rglob(name)}
    assert {str(path) for path in ours} | {"titan_rl/py.typed"} == {
        name for name in held if name.startswith("titan_rl/")
    }
    assert {name.partition("/")[0] for name in held} == {"titan_rl", f"titan_rl-{__version__}.dist-info"}
    assert f"titan_rl-{__version__}.dist-info/licenses/LICENSE" in held


def test_its_description_is_whole(wheel):
    text = zipfile.ZipFile(wheel).read(f"titan_rl-{__version__}.dist-info/METADATA").decode()
    described = message_from_string(text)
    assert described["Version"] == __version__ and described["License-Expression"] == "Apache-2.0"
    assert (
        described["Requires-Python"] and described["Summary"] and "Typing :: Typed" in described.get_all("Classifier")
    )


def test_it_runs_from_an_empty_folder(installed, tmp_path):
    """A wrong value in one of its own TOMLs proves that it was read: one line, and nothing is started."""
    assert run(installed / "titan-rl", "--version", cwd=tmp_path).stdout == f"titan-rl {__version__}\n"
    done = run(installed / "titan-rl", "train", "quickstart", "--task.options=3", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("titan-rl: task.options = 3"), done.stderr
    done = run(installed / "python", "-m", "titan_rl.train", "--config", "quickstart", "--sft.steps=x", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("titan-rl: sft.steps = 'x'"), done.stderr
    assert not list(tmp_path.iterdir())


def test_its_actors_and_tomls_are_its_own(installed, tmp_path):
    program = (
        "import titan_rl.actors.classes, titan_rl.kernels.pack_cast as kernels, titan_rl.config.shipped as shipped; "
        "print(titan_rl.actors.classes.__file__, kernels.__file__, *shipped.shipped().values(), sep='\\n')"
    )
    done = run(installed / "python", "-c", program, cwd=tmp_path)
    files = done.stdout.split()
    assert len(files) >= 5 and all(str(installed.parent) in file for file in files), done.stderr


@pytest.mark.slow
def test_the_quickstart_takes_its_first_steps_from_it(installed, tmp_path):
    """Real actors, whose modules come from the wheel alone."""
    small = [
        "--training.steps=2",
        "--sft.steps=2",
        "--eval.prompts=16",
        "--rollout.prompts_per_step=4",
        "--run.dir=run",
    ]
    done = run(installed / "titan-rl", "train", "quickstart", *small, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert '"step": 2' in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_make_dist_builds_a_wheel_from_an_sdist_that_holds_the_same(wheel, tmp_path):
    """`make dist`: `python -m build` makes the sdist, and of that the wheel."""
    tree = copy_tree(tmp_path / "tree")
    printed = subprocess.run(["make", "-n", "dist"], cwd=TREE, capture_output=True, text=True, check=True).stdout
    command = printed.splitlines()[-1].split()
    assert command[1:3] == ["-m", "build"]
    subprocess.run([sys.executable, *command[1:]], cwd=tree, check=True, capture_output=True, timeout=200)
    [built], [sdist] = (tree / "dist").glob("*.whl"), (tree / "dist").glob("*.tar.gz")
    assert zipfile.ZipFile(built).namelist() == zipfile.ZipFile(wheel).namelist()
    assert sdist.name == f"titan_rl-{__version__}.tar.gz"


@pytest.mark.parametrize("lost", [LINKS[:1], LINKS], ids=" ".join)
def test_a_checkout_without_links_builds_no_wheel(lost, tmp_path):
    """As git leaves it with core.symlinks = false: a text file for each link."""
    tree = copy_tree(tmp_path / "tree")
    for name in lost:
        (tree / "titan_rl" / name).unlink()
        (tree / "titan_rl" / name).write_text(f"../{name}")
    done = subprocess.run([sys.executable, "setup.py", "bdist_wheel"], cwd=tree, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode and ", ".join(lost) in line
    mend = line.partition("core.symlinks true; ")[2]
    subprocess.run(mend, shell=True, check=True, cwd=tree)
    assert all((tree / "titan_rl" / name).resolve() == (tree / name).resolve() for name in lost)


def test_pip_says_it_too(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    (tree / "titan_rl" / "actors").unlink()
    done = build(tree, tmp_path)
    assert done.returncode and "lost its links" in done.stderr and not list(tmp_path.glob("*.whl"))
