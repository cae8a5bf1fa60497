"""Doors besides task and algorithm: a launcher and a model family of one's own. Each mistake is one line."""

import pytest

from titan_rl.config.load import ConfigError
from titan_rl.mesh.launch.base import make_launcher
from titan_rl.mesh.launch.local import LocalLauncher
from titan_rl.models.families.registry import FAMILIES, make_family

MODULE = """
import subprocess
from titan_rl.models.families.registry import FAMILIES

class Nice:
    def launch(self, command, *, environment, output):
        return subprocess.Popen(["nice", *command], env=environment, stdout=output, stderr=output)

class Wants:
    def __init__(self, cluster): ...
    launch = Nice.launch

class Odd:
    def launch(self, command): ...

class Nothing: ...

nice = Nice()
LLAMA = FAMILIES["llama"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_doors.py").write_text(MODULE)
    yield str(tmp_path)
    sys.modules.pop("my_doors", None)


def test_the_default_is_this_machine():
    assert isinstance(make_launcher("local", []), LocalLauncher) and make_family("", []) is None


@pytest.mark.parametrize("name", ["Nice", "nice"])
def test_a_launcher_is_an_object_or_its_class(folder, name):
    launcher = make_launcher(f"my_doors:{name}", [folder])
    with open("/dev/null", "w") as output:
        assert launcher.launch(["true"], environment={"PATH": "/usr/bin:/bin"}, output=output).wait(60) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("slrum", ("mesh.launcher", "local")),
        ("my_doors:Wants", ("cluster",)),
        ("my_doors:Odd", ("launch", "environment, output")),
        ("my_doors:Nothing", ("launch(command",)),
        ("my_doors:Nise", ("did you mean 'Nice'",)),
        ("my_dors:Nice", ("my_dors",)),
    ],
)
def test_a_mistake_in_a_launcher_is_one_line(folder, name, words):
    with pytest.raises(ConfigError) as caught:
        make_launcher(name, [folder])
    [line] = str(caught.value).splitlines()
    assert all(word in line for word in words), line


def test_a_family_is_resolved(folder):
    assert make_family("my_doors:LLAMA", [folder]) is FAMILIES["llama"]
    with pytest.raises(ConfigError, match="model.family = 'my_doors:nice' must name a"):
        make_family("my_doors:nice", [folder])
