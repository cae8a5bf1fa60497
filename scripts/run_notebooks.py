"""Runs notebooks in place, each in a kernel of this Python, and stamps each with a checksum of the cells that were run.

    python scripts/run_notebooks.py [01_one_step ...]

test_notebooks.py tells by the stamp whether outputs are older than their cells. Format before running: a cell
that is formatted afterwards is another cell.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "notebooks"
_STAMP = "sources_sha256"
_CELL_SECONDS = 600


def new_kernel() -> AsyncKernelManager:
    """Of this Python, whatever kernels the user has installed under the same name."""
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))


def starting() -> dict[str, Any]:
    """What a client's ``execute`` is told of its kernel: ``!titan-rl`` is this environment's, no library warns of what
    this machine lacks, and it ends with the last cell."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"env": os.environ | {"PATH": path, "PYTHONWARNINGS": "ignore"}, "cleanup_kc": True}


def client_of(notebook: NotebookNode, folder: Path) -> NotebookClient:
    """Executes it in ``folder``: ``execute(**starting())``. What libraries write past Python's output is left out."""
    return NotebookClient(
        notebook,
        km=new_kernel(),
        timeout=_CELL_SECONDS,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--IPKernelApp.capture_fd_output=False", "--log-level=ERROR"],
        coalesce_streams=True,
        record_timing=False,
    )


def checksum(notebook: NotebookNode) -> str:
    """Of the code of its cells."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def stamp(notebook: NotebookNode) -> str:
    """The checksum of the cells that its outputs came of; empty if it was never run by this script."""
    return notebook.metadata.get("titan_rl", {}).get(_STAMP, "")


def run(path: Path) -> None:
    """Errors: CellExecutionError, and the file stays as it was."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client_of(notebook, Path(folder)).execute(**starting())
    notebook.metadata["titan_rl"] = {_STAMP: checksum(notebook)}
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        run(path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
