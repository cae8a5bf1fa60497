"""A checkpoint is data: reading one runs nothing, whatever it holds, and gives back what was saved."""

import pickle
import warnings
import zipfile
from io import BytesIO

import made_run
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.trainer.state.plain_state import (
    PlainPlanner,
    StateError,
    _plain_value,
    load_state,
    read_metadata,
    state_flaw,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path):
    return made_run.save(RunDir(tmp_path / "run"), 2)


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


def loaded(folder, value=0):
    state = {"model": {"w": torch.zeros(4)}, "scheduler": {"last_epoch": value}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's of the one process, which a replay would print
        load_state(state, folder, no_dist=True)
    return state


def test_what_was_saved_is_read(checkpoint):
    state = loaded(checkpoint)
    assert torch.equal(state["model"]["w"], torch.ones(4)) and state["scheduler"]["last_epoch"] == 2
    assert state_flaw(checkpoint) is None


def test_an_interrupt_is_no_damage_of_the_checkpoint(checkpoint, monkeypatch):
    def interrupted(planner, item, value):
        raise KeyboardInterrupt

    monkeypatch.setattr(PlainPlanner, "load_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loaded(checkpoint)


def test_what_an_early_python_3_11_saved_is_read(tmp_path, monkeypatch):
    """Up to 3.11.3 it pickles a member of an enumeration as an attribute of it."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    checkpoint = made_run.save(RunDir(tmp_path / "run"), 2)
    monkeypatch.undo()
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    test_what_was_saved_is_read(checkpoint)


@pytest.mark.parametrize(
    ("kind", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_no_other_attribute_is_read(checkpoint, kind, name):
    class Attribute:
        def __reduce__(self):
            return getattr, (kind, name)

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(StateError):
        read_metadata(checkpoint)


def test_metadata_that_runs_code_is_refused_and_not_run(checkpoint, canary):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(made_run.Payload(canary)))
    with pytest.raises(StateError, match="pathlib"):
        read_metadata(checkpoint)
    with pytest.raises(StateError, match="names"):
        loaded(checkpoint)
    assert not canary.exists()
    with pytest.raises(CheckpointException):  # the payload is one: DCP's own reader runs it
        dcp.load({"model": {"w": torch.zeros(4)}}, checkpoint_id=checkpoint)
    assert canary.exists()


def test_an_item_that_runs_code_is_refused_and_not_run(tmp_path, canary):
    state = {"model": {"w": torch.ones(4)}, "scheduler": {"last_epoch": made_run.Payload(canary)}}
    checkpoint = made_run.save(RunDir(tmp_path / "run"), 2, state)
    assert not canary.exists()
    assert "scheduler.last_epoch is no plain value" in state_flaw(checkpoint)
    with pytest.raises(StateError, match="Weights only"):
        loaded(checkpoint)
    assert not canary.exists()
    dcp.load({"scheduler": {"last_epoch": 0}}, checkpoint_id=checkpoint)  # DCP's own planner runs it
    assert canary.exists()


def test_an_item_that_is_packed_is_refused_and_not_unpacked(tmp_path):
    """Kilobytes would become gigabytes: what torch writes is not compressed."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    assert len(packed.getvalue()) < 1 << 12
    with pytest.raises(ValueError, match="compressed"):
        _plain_value(packed)


def test_metadata_that_is_mostly_a_hole_is_not_read(checkpoint):
    with open(checkpoint / ".metadata", "r+b") as file:
        file.truncate(1 << 40)
    flaw = state_flaw(checkpoint)
    assert flaw is not None and "at most 64 MiB are read" in flaw


def test_a_rank_local_metadata_is_not_taken_instead(checkpoint, canary):
    """DCP looks for one if the common one cannot be read."""
    (checkpoint / ".metadata").write_bytes(b"")
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(made_run.Payload(canary)))
    with pytest.raises(StateError, match="metadata"):
        loaded(checkpoint)
    assert not canary.exists()


@pytest.mark.parametrize(
    "change",
    [
        b"Metadata\nN}\x8c\x07version\x8c\x01xs\x86b.",
        b"_MEM_FORMAT_ENCODING\nK\x00\x85R}\x8c\x07version\x8c\x01xsb.",  # of its member 0
    ],
)
def test_classes_and_their_members_cannot_be_changed(checkpoint, change):
    """A pickle can set an attribute of what it names without calling anything."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x04ctorch.distributed.checkpoint.metadata\n" + change)
    with pytest.raises(StateError, match="would change"):
        read_metadata(checkpoint)
    assert Metadata.version is None and not hasattr(_MEM_FORMAT_ENCODING(0), "version")


CHANGES = {
    "a file outside": lambda m: [setattr(place, "relative_path", "../../x") for place in m.storage_data.values()],
    "beyond the file's end": lambda m: [setattr(place, "offset", 10**9) for place in m.storage_data.values()],
    "a length below 0": lambda m: [setattr(place, "length", -1) for place in m.storage_data.values()],
    "a huge tensor": lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([1 << 62])),
    "no places": lambda m: setattr(m, "storage_data", None),
    "places of another kind": lambda m: setattr(m, "storage_data", {"model.w": "x"}),
    "no tensors": lambda m: setattr(m, "state_dict_metadata", [1]),
    "an entry of another kind": lambda m: m.state_dict_metadata.update({"model.w": 3}),
    "an extension": lambda m: [setattr(p, "transform_descriptors", ["zstd/1"]) for p in m.storage_data.values()],
}


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_does_not_describe_the_files_is_refused(checkpoint, change):
    metadata = read_metadata(checkpoint)
    metadata.storage_meta = None
    CHANGES[change](metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert state_flaw(checkpoint) == "its .metadata does not describe the files beside it"


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_metadata_that_is_none_is_refused(checkpoint, data):
    (checkpoint / ".metadata").write_bytes(data)
    assert ".metadata" in state_flaw(checkpoint)


def test_the_planner_is_dcps_but_for_values():
    assert issubclass(PlainPlanner, dcp.DefaultLoadPlanner)
    own = {name for name, value in vars(PlainPlanner).items() if callable(value)}
    assert own == {"load_bytes"}
