"""Record of the training requests of a service, in the order in which they were done: what a replay repeats.

requests.jsonl                  a line a request: kind, model, number, seconds, digests of request and answer
requests/MODEL/NUMBER.KIND      the request as it came
requests/MODEL/NUMBER.state     the state that it loads, whatever becomes of the checkpoint
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from os.path import isfile  # says no to a name that is too long
from pathlib import Path
from typing import Literal, get_args

import xxhash

from titan_rl.config.io.bounded_files import open_file, parse_json
from titan_rl.config.load import ConfigError
from titan_rl.data.storage.files import replacing, unless_full
from titan_rl.service.records.checkpoints import safe

Kind = Literal["create_model", "load_weights", "forward_backward", "optim_step"]
_LINES, _BODIES = "requests.jsonl", "requests"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """Request that was done."""

    kind: Kind
    model: str
    number: int
    seconds: float
    body: str
    """Digest of the request."""
    answer: str
    """Digest of what was answered; empty: it was refused."""


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Journal:
    """Owner of a service's record."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file = open(root / _LINES, "a")  # noqa: SIM115  (``close`` closes it)

    def write(self, kind: Kind, model: str, number: int, seconds: float, body: bytes, answer: bytes) -> None:
        """Record a request that was done. ``answer``: empty where it was refused. Errors: DiskFull."""
        path = body_path(self._root, kind, model, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_bytes(body)
        entry = Entry(kind, model, number, round(seconds, 6), digest(body), digest(answer) if answer else "")
        self._file.write(json.dumps(asdict(entry)) + "\n")
        self._file.flush()

    def keep_state(self, model: str, number: int, state: Path) -> Path:
        """Keep the state that a request loads; where it is. It is a link: both names are of the same bytes."""
        kept = body_path(self._root, "state", model, number)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.link(state, kept)
        return kept

    def close(self) -> None:
        with unless_full():
            self._file.close()


def body_path(root: Path, kind: str, model: str, number: int) -> Path:
    """File of a request."""
    return root / _BODIES / safe(model) / f"{number:06d}.{kind}"


def is_service(root: Path) -> bool:
    """Whether a directory is a service's."""
    return isfile(root / _LINES)


def read_journal(root: Path) -> Iterator[Entry]:
    """Requests in their order. Errors: ConfigError for a line that none wrote."""
    with open_file(root / _LINES) as file:
        for number, line in enumerate(file, 1):
            try:
                entry = Entry(**parse_json(line))
                if entry.kind not in get_args(Kind) or type(entry.number) is not int:
                    raise ValueError(entry.kind)
            except (ValueError, TypeError):
                raise ConfigError(f"{root / _LINES} line {number} is no record of a request") from None
            yield entry


def read_body(root: Path, entry: Entry) -> bytes:
    """Request of an entry. Errors: ConfigError if it is not what was recorded."""
    path = body_path(root, entry.kind, entry.model, entry.number)
    try:
        with open_file(path, _MOST_BYTES) as file:
            body = file.read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if digest(body) != entry.body:
        raise ConfigError(f"{path} is not the request that was recorded: copy it again")
    return body
