"""A path that cannot be a run directory is one line and exit code 2, whatever the command; nothing is made."""

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import running

from titan_rl import cli, train
from titan_rl.config.load import ConfigError
from titan_rl.records.run_directory.path_checks import check_own, check_place
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir

NOBODY = 65534


def file(folder):
    (folder / "file").touch()
    return folder / "file"


def folder_of_none(folder):
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def ring(folder):
    (folder / "ring").symlink_to(folder / "ring")
    return folder / "ring"


def not_utf_8(folder):
    (path := folder / os.fsdecode(b"\xff")).mkdir()
    return path


PLACES = {
    "no UTF-8": (not_utf_8, "is not UTF-8"),
    "a file": (file, "is not a folder"),
    "below a file": (lambda folder: file(folder) / "run", "Not a directory"),
    "a long name": (lambda folder: folder / ("x" * 300), "name too long"),
    "a long name below what is not there": (lambda folder: folder / "a" / ("x" * 300), "name too long"),
    "a long path": (lambda folder: folder.joinpath(*["x" * 200] * 25), "name too long"),
    "NUL": (lambda folder: folder / "a\0b", "null byte"),
    "a link to nowhere": (folder_of_none, "leads nowhere"),
    "a ring of links": (ring, "levels of symbolic links"),
}


def run_command(name: str, place) -> int:
    if name in ("train", "resume"):
        return train.main(["--run.dir", str(place), *(["--resume"] if name == "resume" else []), *running.overrides()])
    more = {"replay": ["--from", "1", "--to", "2"], "ledger": [], "scale": ["--generators", "2"]}[name]
    return cli.main([name, str(place), *more])


@pytest.mark.parametrize("name", ["train", "resume", "replay", "ledger", "scale"])
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_one_is_one_line(tmp_path, capsys, place, name):
    make, word = PLACES[place]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run_command(name, path) == 2
    line = capsys.readouterr().err.strip()
    assert "cannot be a run directory" in line and word in line and "\n" not in line and "\0" not in line, line
    assert sorted(tmp_path.rglob("*")) == before


@contextmanager
def nobody():
    """As a user without rights."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_path():
    """A folder that everybody comes to, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(
    ("mode", "write", "word"), [(0o755, True, "write"), (0o700, False, "read"), (0o766, False, "read")]
)
def test_rights_that_are_missing_are_told(open_path, mode, write, word):
    place = open_path / "run"
    place.mkdir()
    place.chmod(mode)
    check_place(place, write=write)
    with nobody(), pytest.raises(ConfigError, match=f"no right to {word} in"):
        check_place(place, write=write)
    with nobody(), pytest.raises(ConfigError, match="cannot be a run directory"):
        check_place(place / "below", write=write)


def test_what_may_be_read_may_be_looked_at(open_path):
    (open_path / "run").mkdir(mode=0o755)
    with nobody():
        check_place(open_path / "run", write=False)


def test_a_file_system_that_is_read_only(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        check_place(tmp_path, write=False)
        with pytest.raises(ConfigError, match="no right to write"):
            check_place(tmp_path / "run", write=True)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("place", ["run", "a/b/run", "a/../run"])
def test_a_place_that_is_not_there_yet_is_fine(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    check_place(Path(place), write=True)
    check_place(tmp_path / place, write=True)
    assert not list(tmp_path.iterdir())


def test_links_within_and_names_of_others_are_passed_over(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "new").touch()
    (tmp_path / "logs" / "latest").symlink_to("new")
    (tmp_path / "mine").symlink_to("/")
    check_own(tmp_path, ["config.json"], ["logs"])
    (tmp_path / "logs" / "out").symlink_to("/etc")
    with pytest.raises(ConfigError, match="logs/out is a link that leads out"):
        check_own(tmp_path, ["config.json"], ["logs"])


@pytest.mark.parametrize(
    ("link", "is_refused"),
    [
        ("wandb", True),
        ("wandb/offline-run-20300101_000000-run", True),
        ("wandb/latest-run", True),
        ("wandb/offline-run-1/logs/debug-core.log", False),
        ("tensorboard/debug-core.log", True),
        ("logs/deep/debug-core.log", True),
        ("model/model.safetensors", True),
    ],
)
def test_of_links_that_lead_out_only_those_that_nobody_follows_are_let_pass(tmp_path, link, is_refused):
    """W&B's log of each of its sessions is a link to its cache."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "outside")
    if not is_refused:
        assert existing_run_dir(tmp_path / "run", write=True).root == tmp_path / "run"
        return
    with pytest.raises(ConfigError, match="leads out of the run directory"):
        existing_run_dir(tmp_path / "run")


def test_a_run_directory_that_is_a_link_is_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    check_place(tmp_path / "link", write=True)
    check_own(tmp_path / "link", ["config.json"], ["logs"])


def test_what_only_shows_when_it_is_written_is_one_line_too(tmp_path, monkeypatch):
    """A disk that is full, or a file system that has no locks."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    (run_dir.root / "rollouts").touch()
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        run_dir.open({})
