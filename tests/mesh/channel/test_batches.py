"""Rows arrive as they were staged, each group's alone, and nothing stays behind."""

import multiprocessing
import os
from dataclasses import replace

import numpy as np
import pytest

from titan_rl.data.types import Row, Segment
from titan_rl.mesh.channel.batches import StagedRows, pull_rows
from titan_rl.mesh.channel.tcp.client import Refused
from titan_rl.mesh.channel.tcp.server import block_server
from titan_rl.mesh.resources.host_identity import HOST_ID
from titan_rl.mesh.resources.network import HOST_ADDRESS


def row_of(seed: int) -> Row:
    random = np.random.default_rng(seed)
    columns = [random.integers(0, 9, 5), random.integers(0, 9, 5), [Segment(0, 5)]]
    return Row(*columns, *(random.normal(size=3).astype(np.float32) for _ in range(5)))


def same(a: Row, b: Row) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def test_each_group_pulls_its_own():
    rows = [[row_of(0), row_of(1)], [row_of(2)], []]
    with StagedRows(rows, over_rdma=False) as handles:
        pulled = [pull_rows(handle, 1.0) for handle in handles]
    for wanted, got in zip(rows, pulled, strict=True):
        assert len(wanted) == len(got) and all(same(a, b) for a, b in zip(wanted, got, strict=True))


def _check(handle) -> None:
    assert same(pull_rows(handle, 1.0)[0], row_of(7))


def test_another_process_can_pull():
    with StagedRows([[row_of(7)]], over_rdma=False) as [handle]:
        child = multiprocessing.get_context("spawn").Process(target=_check, args=(handle,))
        child.start()
        child.join(60)
    assert child.exitcode == 0


def test_a_wrong_byte_is_seen():
    with StagedRows([[row_of(1)]], over_rdma=False) as [handle], pytest.raises(ValueError, match="checksum"):
        pull_rows(replace(handle, checksum=handle.checksum ^ 1), 1.0)


def test_memory_goes_with_the_block():
    with StagedRows([[row_of(1)]], over_rdma=False) as [handle]:
        assert os.path.exists(f"/proc/{handle.pid}/fd/{handle.fd}")
    with pytest.raises(FileNotFoundError):
        pull_rows(handle, 1.0)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_rows_reach_another_host_over_tcp(monkeypatch, transport):
    """By itself only if the controller's host was told an address; and to its own host by memory."""
    monkeypatch.setenv(HOST_ADDRESS, "127.0.0.1")
    rows = [[row_of(0), row_of(1)], [row_of(2)], []]
    with StagedRows.by(rows, transport) as handles:
        region = handles[0].tcp[0].region
        monkeypatch.setenv(HOST_ID, "another")
        pulled = [pull_rows(handle, 5.0) for handle in handles]
        assert block_server().bytes_sent[region] == sum(handle.nbytes for handle in handles)
        monkeypatch.delenv(HOST_ID)
        pull_rows(handles[0], 5.0)
        again = handles[0].nbytes if transport == "tcp" else 0
        assert block_server().bytes_sent[region] == sum(handle.nbytes for handle in handles) + again
    for wanted, got in zip(rows, pulled, strict=True):
        assert len(wanted) == len(got) and all(same(a, b) for a, b in zip(wanted, got, strict=True))
    monkeypatch.setenv(HOST_ID, "another")
    with pytest.raises(Refused):
        pull_rows(handles[0], 5.0)


def test_a_run_on_one_host_opens_no_port(monkeypatch):
    monkeypatch.delenv(HOST_ADDRESS, raising=False)
    with StagedRows.by([[row_of(0)]], "auto") as [handle]:
        assert handle.tcp is None
