"""A checkpoint whose large files are in a store: as whole as one on the disk, refused where it is not, gone with it."""

import json
from pathlib import Path

import made_run
import pytest
import torch
from test_checkpoint_folder import cut_short, flip_a_bit, state_of
from test_plain_state import loaded

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check_checkpoints
from titan_rl.data.storage.shards import SHARDS, Shards, StoreError, open_file, shards_of, write_shards
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.trainer.state.plain_state import StateError, load_state, state_flaw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def folder(tmp_path, store) -> CheckpointFolder:
    run_dir = RunDir(tmp_path / "run")
    run_dir.checkpoints.mkdir(parents=True)
    return CheckpointFolder.of(run_dir, 2, str(store))


def save(folder: CheckpointFolder, step: int) -> Path:
    """As a rank and the controller do."""
    writing = folder.begin(step)
    made_run.write_state(Path(folder.shards(writing)), step)
    assert [state_flaw(part) for part in folder.gather(writing)] == [None]
    return folder.commit(writing, state_of(step))


def places(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "run").iterdir())


def test_it_is_read_where_it_was_written(folder, store):
    saved = save(folder, 3)
    assert sorted(path.name for path in saved.iterdir()) == [".metadata", SHARDS, "state.json"]
    assert folder.newest_complete() == (saved, state_of(3)) and state_flaw(saved) is None
    state = loaded(saved)
    assert torch.equal(state["model"]["w"], torch.ones(4)) and state["scheduler"]["last_epoch"] == 3
    assert list(store.iterdir()) == [store / "run"]


def test_a_url_is_a_store(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.checkpoints.mkdir(parents=True)
    folder = CheckpointFolder.of(run_dir, 1, "memory://bucket")
    writing = folder.begin(1)
    made_run.write_state(folder.shards(writing), 1)
    folder.gather(writing)
    saved = folder.commit(writing, state_of(1))
    assert shards_of(saved).at.startswith("memory://bucket/run/000001-")
    assert folder.flaw(1) is None and loaded(saved)["scheduler"]["last_epoch"] == 1


@pytest.mark.parametrize("hurt", [cut_short, flip_a_bit, Path.unlink])
def test_damage_in_the_store_is_seen(folder, store, hurt):
    save(folder, 1)
    saved = save(folder, 2)
    [shard] = Path(shards_of(saved).at).glob("*.distcp")
    hurt(shard)
    assert folder.flaw(2) and folder.newest_complete()[1] == state_of(1)


def test_what_is_in_the_store_goes_with_its_checkpoint(folder, store):
    for step in (1, 2, 3):
        save(folder, step)
    assert [name[:6] for name in places(store)] == ["000002", "000003"]
    begun = folder.begin(4)
    made_run.write_state(Path(folder.shards(begun)), 4)
    assert len(places(store)) == 3
    save(folder, 5)  # what an interrupted save left behind goes, too
    assert [name[:6] for name in places(store)] == ["000003", "000005"]


def test_a_host_that_has_another_place_under_that_name_is_noticed(folder):
    writing = folder.begin(1)
    with pytest.raises(StoreError, match="the same place on all hosts"):
        folder.gather(writing)
    made_run.write_state(Path(folder.shards(writing)), 1)
    next(Path(folder.shards(writing)).glob("*.distcp")).unlink()
    (Path(folder.shards(writing)) / "other").write_text("of a rank that is here")
    [part] = folder.gather(writing)
    assert "does not describe the files" in state_flaw(part)


def test_a_record_that_names_another_place_is_neither_read_nor_removed(folder, tmp_path):
    saved, precious = save(folder, 1), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    for at in (str(precious), f"{folder._store.url}/../../precious", f"{folder._store.base}er/run"):
        write_shards(saved, Shards(at, shards_of(saved).sizes))
        assert "not below checkpoint.store" in folder.flaw(1)
    for at in (str(precious), f"{folder._store.url}/../../precious"):
        write_shards(saved, Shards(at, {"file": 4}))
        folder.abandon(saved.rename(saved.with_name("writing-old-step-000001")))
        assert (precious / "file").exists()
        saved.mkdir()


@pytest.mark.parametrize(
    "said",
    ["", "[]", '{"at": 1, "sizes": {}}', '{"at": "/x", "sizes": {"../y": 1}}', '{"at": "/x", "sizes": {"y": -1}}'],
)
def test_what_does_not_say_where_files_are_is_no_checkpoint(folder, said):
    saved = save(folder, 1)
    (saved / SHARDS).write_text(said)
    with pytest.raises(StoreError, match=SHARDS):
        open_file(saved, "x")
    assert SHARDS in folder.flaw(1)
    with pytest.raises(StateError):
        load_state({}, saved, no_dist=True)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("checkpoints", "absolute path"),
        ("nonsense://bucket", "nonsense"),
        ("zip://x::s3://bucket", "chain"),
        ("/proc/store", "PermissionError|FileNotFoundError|OSError"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(store, said):
    with pytest.raises(ConfigError, match=f"checkpoint.store = .*({said})"):
        check_checkpoints(load_config(None, {"checkpoint": {"store": store}}))


def test_one_that_can_is_left_as_it_was(tmp_path):
    check_checkpoints(load_config(None, {"checkpoint": {"store": str(tmp_path / "new")}}))
    assert list((tmp_path / "new").iterdir()) == []


def test_sizes_and_places_are_kept_as_they_were_said(tmp_path):
    write_shards(tmp_path, Shards("s3://b/run/1", {"__0_0.distcp": 12}))
    assert shards_of(tmp_path) == Shards("s3://b/run/1", {"__0_0.distcp": 12})
    assert json.loads((tmp_path / SHARDS).read_text())["at"] == "s3://b/run/1" and shards_of(tmp_path / "no") is None
