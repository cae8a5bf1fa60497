"""Store of checkpoints' large files (data/storage/shards.py): commit and removal with their checkpoint.

Its folders are never renamed, which a store of objects cannot do: a checkpoint is there when its folder in the run
directory has its name, and what no such folder names is nobody's.
"""

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from titan_rl.data.storage.shards import Shards, StoreError, file_system, is_below, shards_of, write_shards

_METADATA = ".metadata"


class ShardStore:
    """Store of one run's shards. Errors of all calls: OSError, or what the file system raises; StoreError."""

    def __init__(self, base: str, name: str) -> None:
        """``base``: the whole store; ``name``: of the run's own place in it."""
        self.base = base.rstrip("/")
        self.url = f"{self.base}/{name}"

    def owns(self, shards: Shards) -> bool:
        """Whether these are in the store: in the place of a run that had another name, too, since it may be moved."""
        return is_below(shards.at, self.base)

    def place(self, name: str) -> str:
        """Place of one checkpoint's files."""
        return f"{self.url}/{name}"

    def gather(self, name: str, folder: Path) -> list[Path]:
        """Copy the ranks' small files from a place into ``folder``, with a record of where the large ones are. Returns
        the folders, itself included, with such files."""
        system, at = file_system(self.place(name))
        entries = system.find(at, detail=True)
        if not any(path.endswith(f"/{_METADATA}") for path in entries):
            raise StoreError(f"ranks' files are not in {self.place(name)}: is it the same place on all hosts?")
        parts: dict[str, dict[str, int]] = {}
        for path, about in entries.items():
            part, _, file = path.removeprefix(at).strip("/").rpartition("/")
            if file == _METADATA:
                (folder / part).mkdir(parents=True, exist_ok=True)
                (folder / part / file).write_bytes(system.cat_file(path))
            else:
                parts.setdefault(part, {})[file] = about["size"]
        for part, sizes in parts.items():
            (folder / part).mkdir(parents=True, exist_ok=True)
            write_shards(folder / part, Shards(f"{self.place(name)}/{part}".rstrip("/"), sizes))
        return [folder / part for part in parts]

    def remove(self, name: str) -> None:
        """A place with all that is in it, if it is there."""
        system, at = file_system(self.place(name))
        with suppress(FileNotFoundError):
            system.rm(at, recursive=True)

    def remove_of(self, folder: Path) -> None:
        """Remove the files of a checkpoint; a folder that names another place than one of the run's own removes
        nothing."""
        for part in (folder, *(path for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ():
            with suppress(StoreError):
                if (shards := shards_of(part)) is not None and is_below(shards.at, self.url):
                    self.remove(shards.at.removeprefix(f"{self.url}/").partition("/")[0])


def check_store(url: str) -> None:
    """Check of a store: a place for all hosts, writable and readable.

    Errors: StoreError for what is not a place that other hosts know, too, and that can be written to and read.
    """
    if "://" not in url and not Path(url).is_absolute():
        raise StoreError("hosts look for it elsewhere: give an absolute path, or a URL such as s3://bucket/runs")
    system, at = file_system(url.rstrip("/"))
    probe, payload = f"{at}/probe-{uuid4().hex}", b"titan_rl"
    try:
        system.makedirs(at, exist_ok=True)
        system.pipe_file(probe, payload)
        content = system.cat_file(probe)
        system.rm_file(probe)
    except Exception as error:  # each file system has errors of its own
        raise StoreError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    if content != payload:
        raise StoreError("what is read there is not what was written")
