"""Saved adapters of clients: folders, by paths such as ``tinker://MODEL/weights/NAME``.

    checkpoints/MODEL/weights/NAME/            state.safetensors, to go on from, and PEFT's two files
    checkpoints/MODEL/sampler_weights/NAME/    PEFT's two files

A folder that has no ``checkpoint.json`` is not complete, and does not count.
"""

import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from titan_rl.config.io.bounded_files import open_file, parse_json
from titan_rl.data.storage.files import replacing
from titan_rl.service.wire.reading import BadRequest, checkpoint_name

Kind = Literal["weights", "sampler_weights"]
_SCHEME, _ABOUT, STATE = "tinker://", "checkpoint.json", "state.safetensors"
UNNAMED = "unnamed-"
"""Begin of the names of weights that last as long as their client."""
_TYPES = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint of a client's adapter."""

    model: str
    kind: Kind
    name: str
    base_model: str
    rank: int
    time: float
    user_metadata: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path by which clients name it."""
        return f"{_SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def type(self) -> str:
        return _TYPES[self.kind]


class Checkpoints:
    """Owner of the folder of checkpoints. Errors of all calls: BadRequest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, model: str, kind: Kind, name: str, *, overwrite: bool = False) -> Path:
        """Folder of a checkpoint that is to be written."""
        folder = self._folder(model, kind, name)
        if (folder / _ABOUT).is_file() and not overwrite:
            raise BadRequest(f"there is a checkpoint {name!r} of this model: take another name, or overwrite=True")
        (folder / _ABOUT).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def complete(
        self, model: str, kind: Kind, name: str, *, base_model: str, rank: int, metadata: dict[str, str]
    ) -> Checkpoint:
        """Make a written checkpoint count."""
        checkpoint = Checkpoint(model, kind, name, base_model, rank, time.time(), metadata)
        with replacing(self._folder(model, kind, name) / _ABOUT) as beside:
            beside.write_text(json.dumps(asdict(checkpoint)))
        return checkpoint

    def find(self, path: str) -> tuple[Checkpoint, Path]:
        """Checkpoint of a client's path, and its folder."""
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in _TYPES:
            raise BadRequest(f"{path[:80]!r} is no path of a checkpoint: give tinker://MODEL/weights/NAME")
        model, kind, name = parts
        folder = self._folder(model, kind, name)  # type: ignore[arg-type]
        if not (folder / _ABOUT).is_file():
            raise BadRequest(f"there is no checkpoint {path[:120]}")
        return self._read(folder), folder

    def all(self, model: str = "") -> list[Checkpoint]:
        """All checkpoints, or a model's, oldest first."""
        folders = self.folder.glob(f"{safe(model) if model else '*'}/*/*/{_ABOUT}")
        return sorted((self._read(each.parent) for each in folders), key=lambda each: each.time)

    def delete(self, path: str) -> None:
        shutil.rmtree(self.find(path)[1])

    def delete_unnamed(self, model: str = "") -> None:
        """Delete weights of samplers that clients gave no name, of all models or one."""
        for folder in self.folder.glob(f"{safe(model) if model else '*'}/sampler_weights/{UNNAMED}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, model: str, kind: Kind, name: str) -> Path:
        return self.folder / safe(model) / kind / checkpoint_name(name)

    def _read(self, folder: Path) -> Checkpoint:
        with open_file(folder / _ABOUT, 1 << 20) as file:
            return Checkpoint(**parse_json(file.read()))

    @staticmethod
    def size(folder: Path) -> int:
        """Bytes of a checkpoint's files."""
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def safe(model: str) -> str:
    """Folder of a model's id, such as ``s1f0:train:0``."""
    return checkpoint_name(model.replace(":", "-"))
