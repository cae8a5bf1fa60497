"""Folders brought to another host and fetched from it, through its agent: no file system needs to be shared.

Whatever travels is compared by checksums first, so what is there already stays where it is, and afterwards, so what
arrives is what was sent.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.data.storage.folders import PART_BYTES, Manifest, manifest_of, read_part, write_part

if TYPE_CHECKING:
    from titan_rl.mesh.hosts.agent import HostAgent


class WrongFiles(RuntimeError):
    """Mismatch of a file after its transfer."""


async def bring(agent: "HostAgent", folder: Path, there: str) -> None:
    """Copy a folder of this host to ``there``, except for equal files."""
    source = await asyncio.to_thread(manifest_of, folder)
    target = await agent.manifest.call_one(there)
    for name in _differing(source, target):
        for offset in range(0, max(source[name][0], 1), PART_BYTES):
            data = await asyncio.to_thread(read_part, folder / name, offset, PART_BYTES)
            await agent.write.call_one(f"{there}/{name}", offset, data)
    if differing := _differing(source, await agent.manifest.call_one(there)):
        raise WrongFiles(f"{there}/{differing[0]} on the host is not what {folder / differing[0]} is here")


async def fetch(agent: "HostAgent", there: str, folder: Path, leaving: str) -> None:
    """Copy ``there`` into a folder of this host, without names that begin with ``leaving``."""
    manifest: Manifest = await agent.manifest.call_one(there)
    source = {name: described for name, described in manifest.items() if not name.startswith(leaving)}
    target = await asyncio.to_thread(manifest_of, folder)
    for name in _differing(source, target):
        for offset in range(0, max(source[name][0], 1), PART_BYTES):
            data = await agent.read.call_one(f"{there}/{name}", offset, PART_BYTES)
            await asyncio.to_thread(write_part, _inside(folder, name), offset, data)
    if differing := _differing(source, await asyncio.to_thread(manifest_of, folder)):
        raise WrongFiles(f"{folder / differing[0]} is not what {there}/{differing[0]} is on its host")


def _differing(source: Manifest, target: Manifest) -> list[str]:
    return [name for name, described in source.items() if target.get(name) != described]


def _inside(folder: Path, name: str) -> Path:
    """Errors: WrongFiles for a name that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise WrongFiles(f"a host names a file {name!r}, which is outside of {folder}")
    return folder / name
