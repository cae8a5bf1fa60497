"""Does titan_rl's trainer do on this machine's GPU what it promises? One command, for a machine that has little else.

    python scripts/gpu_check.py [--rows ROW ...] [--rehearse] [--list]

Prints a JSON line for each row (what was found, and its bars: gpu_check/thresholds.py) and a last one with the verdict.
The exit code is 0 only if every row holds, and 2 where nothing could be begun. ``--rehearse`` goes through the same on
a CPU with tiny sizes, where figures mean nothing; what needs a GPU is then "not measured".

Needs torch, Triton, transformers and safetensors. torchtitan, pydantic, xxhash, tomli and what they need can be carried
as wheels in a folder of PYTHONPATH; Monarch and vLLM are done without, and torch 2.11 is enough (gpu_check/stubs.py).
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from gpu_check.report import exit_code, outcome, verdict
from gpu_check.supervision import Supervisor
from gpu_check.thresholds import REHEARSAL_DEADLINE, ROWS


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="some of them; --list names all")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument("--list", action="store_true", help="names of the rows and their bars")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.list:
        print("\n".join(f"{row}: {', '.join(map(str, ROWS[row].bars)) or 'no bar'}" for row in ROWS))
        return 0
    on_gpu, outcomes, machine = not arguments.rehearse, [], {}
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        supervisor = Supervisor(rehearse=arguments.rehearse, folder=Path(folder))
        try:
            for name in arguments.rows or ROWS:
                deadline, begun = ROWS[name].deadline if on_gpu else REHEARSAL_DEADLINE, time.monotonic()
                answer = supervisor.ask(name, deadline, ROWS[name].alone)
                if not answer.get("begun", True) and not outcomes:
                    print(answer["failed"], file=sys.stderr)
                    return 2
                machine = answer.get("machine", machine)
                outcomes.append(outcome(name, answer, time.monotonic() - begun, on_gpu))
                print(json.dumps(outcomes[-1]), flush=True)
        finally:
            supervisor.close()
    last = verdict(outcomes, on_gpu, machine)
    print(json.dumps(last), flush=True)
    return exit_code(last)


if __name__ == "__main__":
    sys.exit(main())
