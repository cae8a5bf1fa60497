"""All that wants a GPU, on this machine: runs of the whole stack, TRL's step, kernels, the GPU check, tests for GPUs.

    scripts/gpu_day.sh [--out FOLDER] [--stages STAGE ...] [--list]

Needs titan_rl with its GPU dependencies, and nothing from the network: models are of random weights. Each stage is a
process with a deadline, whose output is FOLDER/STAGE.log, and beside it the memory of each process on the GPU. Prints
a table in Markdown with what is wanted, and writes it to FOLDER/table.md and FOLDER/figures.json. The exit code is 0 if
every stage ended well and every bar is met, 1 if not, and 2 where there is no GPU.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from gpu_day.running import WATCH_SECONDS, run
from gpu_day.runs import Figures, judged, ratio_to_trl, table
from gpu_day.stages import STAGES

from titan_rl.diagnostics.recipes.gpu_watch import gpu_watch


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of logs, runs and figures (one under /tmp)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, metavar="STAGE", help="some of them; --list names all")
    parser.add_argument("--list", action="store_true", help="the stages, with their deadlines and bars")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    if arguments.list:
        for name, stage in STAGES.items():
            print(f"{name}: at most {stage.deadline:g} s; {', '.join(map(str, stage.bars)) or 'no bar'}")
        return 0
    with gpu_watch(WATCH_SECONDS) as gpu_mib:
        if not gpu_mib:
            print("nvidia-smi finds no GPU here: this measures one", file=sys.stderr)
            return 2
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu_day_"))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Figures] = {}
    rows = []
    for name in arguments.stages or STAGES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = run(name, STAGES[name], out)
        if name == "TRL":
            found[name] |= ratio_to_trl(found.get("1.51B", {}), found[name])
        rows += judged(name, STAGES[name].bars, found[name])
        (out / "figures.json").write_text(json.dumps(found, indent=1))
        (out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))
    return int(
        any("failed_because" in figures for figures in found.values()) or any(row["met"] is False for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
