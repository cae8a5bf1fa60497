"""Data set of software-engineering tasks: small Python repositories, each with one planted bug, as JSON lines.

    python make_repositories.py OUT_FOLDER [--seed 1]    writes train.jsonl and held_out.jsonl
    python make_repositories.py OUT_FOLDER --micro       writes micro-train.jsonl and micro-held_out.jsonl
    python make_repositories.py OUT_FOLDER --check       as well proves every row that it writes

Libraries of held-out rows are in no row to train on. Standard library alone; the same seed gives the same bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from micro import micro_rows
from repository import Library, make_row
from running import Outcome, evaluate, write

_ROOMS = "arithmetic business numerals parsing planning prose rules searching sequences simulation structures web"
LIBRARIES: dict[str, Library] = {
    library.name: library for room in _ROOMS.split() for library in import_module(f"libraries.{room}").LIBRARIES
}
_NUM_HELD_OUT = 5
"""Libraries."""
_DRAWS = (40, 120, 360)
"""Arguments for each function, attempt by attempt."""
_NUM_PROCESSES = 2
_MICRO_TRAIN, _MICRO_HELD_OUT = 1200, 200
_SECONDS = 30.0
"""For a command of a solution."""
Row = dict[str, Any]


def _made(work: tuple[str, str, int], seed: int) -> Row:
    """Row of a library, a bug and a number; tried with more calls where too few show the bug."""
    name, bug_name, number = work
    library = LIBRARIES[name]
    [bug] = [each for each in library.planted if each.name == bug_name]
    for draws in _DRAWS[:-1]:
        try:
            return make_row(library, bug, seed, number, draws)
        except ValueError:
            continue
    return make_row(library, bug, seed, number, _DRAWS[-1])


def make(seed: int, variants: int, looks: bool, pool: ProcessPoolExecutor) -> dict[str, list[Row]]:
    """Rows by file name. Errors: ValueError."""
    held_out = set(Random(f"{seed} held out").sample(sorted(LIBRARIES), _NUM_HELD_OUT))
    works = [
        (name, bug.name, variant)
        for name, library in sorted(LIBRARIES.items())
        for bug in library.planted
        for variant in range(variants)
    ]
    rows: dict[str, list[Row]] = {"train.jsonl": [], "held_out.jsonl": []}
    for (name, _, _), row in zip(works, pool.map(partial(_made, seed=seed), works, chunksize=8), strict=True):
        if looks:
            row["solution"] = [f"cat {row['patch'].split()[1].removeprefix('a/')}", *row["solution"]]
        rows["held_out.jsonl" if name in held_out else "train.jsonl"].append(row)
    for file, each in rows.items():
        Random(f"{seed} {file}").shuffle(each)
    return rows


def make_micro(seed: int) -> dict[str, list[Row]]:
    rows = list(islice(micro_rows(seed), _MICRO_TRAIN + _MICRO_HELD_OUT))
    Random(f"{seed} micro order").shuffle(rows)
    return {"micro-train.jsonl": rows[:_MICRO_TRAIN], "micro-held_out.jsonl": rows[_MICRO_TRAIN:]}


def faults_of(row: Row) -> list[str]:
    """What is wrong with a row; empty where all that it promises holds."""
    is_micro = row["instance_id"].startswith("micro/")
    buggy = row["files"]
    faults = _form_faults(row, is_micro)
    faults += [f"before: {fault}" for fault in _run_faults(row, buggy, {"FAIL_TO_PASS": False, "PASS_TO_PASS": True})]
    solved = _changed(buggy, row["solution"], "")
    if solved != _changed(buggy, ["git apply -"], row["patch"]):
        faults.append("the solution and the patch leave different files")
    if solved == buggy:
        faults.append("the solution changes nothing")
    faults += [f"after: {fault}" for fault in _run_faults(row, solved, {"FAIL_TO_PASS": True, "PASS_TO_PASS": True})]
    return [f"{row['instance_id']}: {fault}" for fault in faults]


def _form_faults(row: Row, is_micro: bool) -> list[str]:
    num_lines = sum(len(text.splitlines()) for text in row["files"].values())
    counts = {when: sum(call["when"] == when for call in row["calls"]) for when in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    modules = {path.partition("/")[0].removesuffix(".py") for path in row["files"] if path.endswith(".py")}
    holds = {
        "one line of a command": all("\n" not in command for command in row["solution"]),
        "no module of the standard library": not modules & set(sys.stdlib_module_names),
    }
    if is_micro:
        holds |= {
            "2 to 4 lines": 2 <= num_lines <= 4,
            "a short statement": len(row["problem_statement"]) <= 100,
            "a short command": len(row["solution"][0]) <= 30,
        }
    else:
        holds |= {
            "3 to 8 files": 3 <= len(row["files"]) <= 8,
            "30 to 200 lines": 30 <= num_lines <= 200,
            "3 to 8 calls of each kind": all(3 <= count <= 8 for count in counts.values()),
            "visible tests": row["PASS_TO_PASS"] != [],
            "1 to 3 commands": 1 <= len(row["solution"]) <= 3,
        }
    return [f"not so: {name}" for name, is_so in holds.items() if not is_so]


def _run_faults(row: Row, files: dict[str, str], expected: dict[str, bool]) -> list[str]:
    calls = [(call["function"], call["arguments"]) for call in row["calls"]]
    outcomes, passed = evaluate(files, calls, row["PASS_TO_PASS"])
    faults = [] if passed else ["visible tests fail"]
    for call, outcome in zip(row["calls"], outcomes, strict=True):
        right = Outcome(True, json.dumps(call["expected"], sort_keys=True))
        if (outcome == right) != expected[call["when"]]:
            faults.append(f"{call['when']} {call['function']}{call['arguments']} gives {outcome}")
    return faults


def _changed(files: dict[str, str], commands: list[str], stdin: str) -> dict[str, str]:
    """Files after commands of bash."""
    with tempfile.TemporaryDirectory() as folder:
        write(folder, files)
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        for command in commands:
            subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                input=stdin,
                text=True,
                stdout=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_text() for path in paths}


def shared_faults(rows: dict[str, list[Row]]) -> list[str]:
    """Rows that are there twice, and code of held-out rows that is also in rows to train on."""
    names = [row["instance_id"] for each in rows.values() for row in each]
    statements = [row["problem_statement"] for each in rows.values() for row in each]
    faults = [] if len(set(names)) == len(names) else ["an instance_id is there twice"]
    faults += [] if len(set(statements)) == len(statements) else ["a problem_statement is there twice"]
    train, held_out = (
        {text for row in rows.get(file, []) for path, text in row["files"].items() if path != "tests/__init__.py"}
        for file in ("train.jsonl", "held_out.jsonl")
    )
    return faults + [f"a file is in both sets: {text[:60]!r}" for text in sorted(train & held_out)]


def _timed(what: str, action: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = action()
    print(f"{what}: {time.monotonic() - began:.1f} s")
    return result


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    """Exit code: 1 where a row does not hold what it promises."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", type=int, default=2, help="rows for each bug of each library (default: 2)")
    parser.add_argument("--look", action="store_true", help="let each solution begin with cat of the file to change")
    parser.add_argument("--micro", action="store_true", help="make the rows for very small models instead")
    parser.add_argument("--check", action="store_true", help="prove every row")
    options = parser.parse_args()
    options.out_folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(_NUM_PROCESSES) as pool:
        if options.micro:
            made = _timed("made", partial(make_micro, options.seed))
        else:
            made = _timed("made", partial(make, options.seed, options.variants, options.look, pool))
        for file, rows in made.items():
            path = options.out_folder / file
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e6:.2f} MB")
        if not options.check:
            return 0
        written = {file: _read(options.out_folder / file) for file in made}
        every = [row for rows in written.values() for row in rows]
        proved = _timed("checked", lambda: list(pool.map(faults_of, every, chunksize=8)))
    faults = [fault for faults in proved for fault in faults] + shared_faults(written)
    print("\n".join([*faults, f"{len(every)} rows, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
