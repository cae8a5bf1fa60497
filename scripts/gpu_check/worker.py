"""The process that does the rows: it is told their names by lines, and answers each with a line."""

import argparse
import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from gpu_check.checks import Checks
    from gpu_check.fixtures import Fixtures

_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("answers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    with os.fdopen(arguments.answers, "w") as answers:
        try:
            fixtures, checks = _begin(arguments.folder, arguments.rehearse)
        except Exception:  # something is not here that all rows need
            _answer(answers, next(sys.stdin), {"failed": traceback.format_exc()[-2000:], "begun": False})
            return
        for line in sys.stdin:
            _answer(answers, line, _done(fixtures, checks, line.strip()))


def _begin(folder: Path, rehearse: bool) -> "tuple[Fixtures, Checks]":
    import torch

    from gpu_check.stubs import prepare

    prepare(rehearse=rehearse)
    if not rehearse and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here: --rehearse goes the same way on a CPU")
    from gpu_check.checks import CHECKS
    from gpu_check.fixtures import Fixtures

    return Fixtures(torch.device("cpu") if rehearse else torch.device("cuda", 0), folder, rehearse=rehearse), CHECKS


def _done(fixtures: "Fixtures", checks: "Checks", name: str) -> dict[str, Any]:
    try:
        return {"figures": checks[name](fixtures), "machine": _machine(fixtures)}
    except BaseException:  # whatever is wrong in a row is told in its line
        return {"failed": traceback.format_exc()[-2000:]}
    finally:
        fixtures.clear()


def _machine(fixtures: "Fixtures") -> dict[str, str]:
    import torch
    import triton

    device = torch.cuda.get_device_name() if fixtures.bench.on_gpu else "cpu"
    return {"device": device, "torch": torch.__version__, "triton": triton.__version__}


def _answer(answers: TextIO, request: str, answer: dict[str, Any]) -> None:
    answers.write(json.dumps({"row": request.strip(), **answer}, default=str) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
