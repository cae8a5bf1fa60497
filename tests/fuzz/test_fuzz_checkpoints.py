"""Metadata of checkpoints and the records beside them: read as data, or one line, and nothing of them is run."""

import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fuzzing import ANY_TEXT, VALUES, as_json, assert_one_line, fuzz, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.config.load import ConfigError
from titan_rl.controller.preflight.setting_changes import read_changes
from titan_rl.data.storage.shards import StoreError, shards_of
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState, _digest
from titan_rl.records.metrics import _as_record
from titan_rl.records.run_directory.controller_epochs import _read as read_epoch
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.skipped_rows import _read as read_left_out
from titan_rl.records.steps.trace import _as_step
from titan_rl.trainer.state import plain_state
from titan_rl.trainer.state.plain_state import StateError, read_metadata, state_flaw

STATE = {"model": {"w": torch.ones(4)}, "scheduler": {"last_epoch": 2}, "random_rank0": {"torch": torch.zeros(3)}}


@cache
def saved() -> dict[str, bytes]:
    """Files of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(STATE, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def flaw_of(metadata: bytes) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (saved() | {".metadata": metadata}).items():
            Path(folder, name).write_bytes(data)
        try:
            read_metadata(Path(folder))
        except StateError as error:
            assert_one_line(error)
        flaw = state_flaw(Path(folder))
        assert flaw is None or len(flaw) < 1000
        return flaw


@fuzz(data=st.builds(lambda: saved()[".metadata"]).flatmap(mutated))
def test_metadata_with_other_bytes_is_read_or_one_line(data):
    flaw_of(data)


CLASSES = [(kind.__module__, kind.__qualname__) for kind in plain_state._CLASSES] + [("torch", "float32")]
CLASSES += [("torch", "Size"), ("builtins", "getattr"), ("os", "system"), ("torch.serialization", "_get_layout")]
ARGUMENT = st.integers(0, 255).map(lambda number: bytes([number]))


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text.encode())]) + text.encode()


OPCODES = st.one_of(
    st.sampled_from([bytes([code]) for code in range(256)]),
    st.sampled_from(CLASSES).map(lambda names: short(names[0]) + short(names[1]) + b"\x93"),
    st.sampled_from(CLASSES).map(lambda names: f"c{names[0]}\n{names[1]}\n".encode()),
    st.sampled_from([b"(", b")", b"}", b"]", b"t", b"R", b"\x81", b"b", b"s", b"u", b"a", b"e", b"0", b"2", b"."]),
    st.sampled_from(["w", "model.w", "__class__", "__dict__", "size", "__reduce__"]).map(short),
    st.builds(bytes.__add__, st.sampled_from([b"K", b"q", b"h", b"\x94", b"j\xff\xff\xff", b"\x8a"]), ARGUMENT),
    st.sampled_from([b"J\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8]),
)


@fuzz(parts=st.lists(OPCODES, max_size=25))
def test_any_pickle_is_metadata_or_one_line(parts):
    flaw_of(b"\x80\x04" + b"".join(parts) + b".")


MANIFEST = {"state": {"step": 2, "stream_position": 8, "held_out_before": {"correct": 3, "count": 8}}}
MANIFEST["state"]["seconds_training"] = 1.5
MANIFEST["files"] = {"a/b.distcp": {"bytes": 1, "xxh3_128": "0"}, "c": {"bytes": 0, "xxh3_128": ""}}
SHARDS = {"at": "memory://bucket/run", "sizes": {"b.distcp": 7}}


@fuzz(manifest=st.just(MANIFEST).flatmap(spoilt), other=VALUES.map(as_json) | ANY_TEXT, is_signed=st.booleans())
def test_a_manifest_is_one_or_a_flaw(manifest, other, is_signed):
    text = other
    if is_signed and isinstance(manifest, dict):
        text = as_json(manifest | {"checksum": _digest(manifest)})
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointFolder(Path(folder), keep_latest_k=2)
        (place := checkpoints.path(2)).mkdir()
        (place / "state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        flaw = checkpoints.flaw(2)
        assert flaw is None or (flaw and len(flaw) < 2000)
        found = checkpoints.newest_complete()
        assert (found is None) == (flaw is not None)
        assert found is None or isinstance(found[1], ControllerState)


@fuzz(text=st.just(SHARDS).flatmap(spoilt).map(as_json) | ANY_TEXT)
def test_a_list_of_shards_is_one_or_an_error_of_its_own(text):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "shards.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            shards = shards_of(Path(folder))
        except StoreError:
            return
        assert shards is not None and all("/" not in name for name in shards.sizes)


LINES = [
    {"step": 3, "loss": 0.5, "reward": 1},
    {"step": 3, "spans": [["trainer 0", "forward", 0.5, 1.5]]},
    {"row": "pairs.jsonl line 9", "why": "loss", "from_step": 12},
    {"run": "0" * 32, "epoch": 3},
    [{"key": "optimizer.lr", "before": 1, "after": 2, "step": 3, "who": "a session"}],
]


@fuzz(line=st.sampled_from(LINES).flatmap(spoilt).map(as_json) | VALUES.map(as_json) | ANY_TEXT)
def test_a_record_of_a_run_is_one_or_passed_over_or_one_line(line):
    record = _as_record(line)
    assert record is None or record["step"] >= 0
    step, spans = _as_step(line)
    assert isinstance(step, int) and (step >= 0 or not spans or step < 0)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder))
        for path in (Path(folder, "lines"), run_dir.changes):
            path.write_bytes(line.encode("utf-8", "surrogatepass"))
        list(read_left_out(Path(folder, "lines")))
        for read in (lambda: read_epoch(Path(folder, "lines")), lambda: read_changes(run_dir)):
            try:
                read()
            except ConfigError as error:
                assert_one_line(error)
