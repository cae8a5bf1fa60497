"""Rollouts as Parquet, one file per step: what was trained on can be read, audited and trained on again."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.data.files import replacing, wanting
from titan_rl.data.types import Group, Rollout, Turn

_SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "sample": pa.int32(),
        "tokens": pa.list_(pa.int32()),
        "provenance": pa.list_(pa.int8()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "turn_start": pa.list_(pa.int32()),
        "turn_stop": pa.list_(pa.int32()),
        "stop_reason": pa.list_(pa.string()),
        "status": pa.string(),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "text": pa.string(),
    }
)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.parquet"


def _row(rollout: Rollout) -> dict:
    plain = ("prompt_id", "sample", "tokens", "provenance", "logprobs", "versions", "status", "reward", "text")
    return {name: getattr(rollout, name) for name in plain} | dict(
        turn_start=[turn.start for turn in rollout.turns],
        turn_stop=[turn.stop for turn in rollout.turns],
        stop_reason=[turn.stop_reason for turn in rollout.turns],
        reward_parts=list(rollout.reward_parts.items()),
    )


def has_rollouts(folder: Path, step: int) -> bool:
    return _path(folder, step).is_file()


def recorded_steps(folder: Path) -> list[int]:
    """Steps whose rollouts are there, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-" + 6 * "[0-9]" + "*.parquet"))


def sample_names(folder: Path, step: int) -> set[tuple[str, int]]:
    """Prompt and number of each of a step's samples. Errors: OSError or pyarrow.ArrowException for a damaged file."""
    names = ["prompt_id", "sample"]
    return set(
        zip(*pq.read_table(_path(folder, step), columns=names, schema=_SCHEMA).to_pydict().values(), strict=True)
    )


def last_recorded(folder: Path, first: int, last: int) -> int:
    """The last step up to ``last`` that recorded steps lead to from step ``first`` without a gap."""
    step = first
    while step < last and has_rollouts(folder, step + 1):
        step += 1
    return step


def write_rollouts(folder: Path, step: int, groups: list[Group]) -> None:
    """All rollouts of a step's groups, in the order in which they were trained. Errors: DiskFull."""
    rows = [_row(rollout) for group in groups for rollout in group.rollouts]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), buffer)
    data, path = buffer.getvalue(), _path(folder, step)
    with wanting(path, data.size), replacing(path) as writing:
        writing.write_bytes(data)


def set_aside_rollouts(folder: Path, step: int) -> Path:
    """Keep a batch that was not trained on under another name; returns its new path."""
    number = 1 + sum(1 for _ in folder.glob(f"bad-{step:06d}-*.parquet"))
    return _path(folder, step).rename(folder / f"bad-{step:06d}-{number}.parquet")


def read_rollouts(folder: Path, step: int) -> list[Group]:
    """A step's groups as they were trained, without timings, which are not stored."""
    groups: dict[str, Group] = {}
    for row in pq.read_table(_path(folder, step), schema=_SCHEMA).to_pylist():
        turns = zip(row.pop("turn_start"), row.pop("turn_stop"), row.pop("stop_reason"), strict=True)
        rollout = Rollout(
            **row
            | dict(
                tokens=np.asarray(row["tokens"], np.int32),
                provenance=np.asarray(row["provenance"], np.int8),
                logprobs=np.asarray(row["logprobs"], np.float32),
                versions=np.asarray(row["versions"], np.int32),
                turns=[Turn(*turn) for turn in turns],
                reward_parts=dict(row["reward_parts"]),
            )
        )
        groups.setdefault(rollout.prompt_id, Group(rollout.prompt_id, [])).rollouts.append(rollout)
    return list(groups.values())
