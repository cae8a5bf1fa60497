"""Rows are done in a process beside, which is killed at a deadline, and replaced after whatever went wrong in it.

A GPU that hangs answers no signal, and one whose memory was misused fails in all that follows: so the next row begins
in another process. As long as all goes well one process does them all, since its imports take seconds.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]


class Worker:
    def __init__(self, *, rehearse: bool, folder: Path, module: str = "gpu_check.worker") -> None:
        """``folder``: where it may leave models for the next one."""
        reading, writing = os.pipe()
        path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "TOKENIZERS_PARALLELISM": "false"}
        if rehearse:  # Triton's own kernels, on a CPU; torch would compile with it, too
            environment |= {"TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", module, str(writing), str(folder), *(["--rehearse"] * rehearse)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,  # libraries print; standard output is for rows
            env=environment,
            pass_fds=[writing],
            start_new_session=True,
        )
        assert self._process.stdin is not None, "it is a pipe"
        self._questions = self._process.stdin
        os.close(writing)
        self._answers = os.fdopen(reading, "rb", buffering=0)

    def ask(self, row: str, deadline: float) -> dict[str, Any]:
        """Answer to a row: ``figures``, or ``failed`` and why, after which the worker takes no more. ``begun`` is false
        if no row could have been done."""
        try:
            self._questions.write(row.encode() + b"\n")
            self._questions.flush()
            line = self._line(time.monotonic() + deadline)
        except TimeoutError:
            self.kill()
            return {"failed": f"not done after {deadline:g} s: its process was killed"}
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self.kill()
            return {"failed": f"its process ended by itself, with {self._process.wait()}"}
        return json.loads(line)

    def _line(self, until: float) -> bytes:
        """Errors: TimeoutError."""
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(until - time.monotonic(), 0)):
                    raise TimeoutError
                if not (piece := self._answers.read(1 << 16)):
                    break
                line += piece
        return line

    def kill(self) -> None:
        """Kill the worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._questions.close()
        self._answers.close()


class Supervisor:
    """The worker of the moment, by its need."""

    def __init__(self, **settings: Any) -> None:
        """``settings``: a worker's."""
        self._settings = settings
        self._worker: Worker | None = None

    def ask(self, row: str, deadline: float, alone: bool) -> dict[str, Any]:
        if alone:
            self.close()
        if self._worker is None:
            self._worker = Worker(**self._settings)
        answer = self._worker.ask(row, deadline)
        if alone or "failed" in answer:
            self.close()
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
