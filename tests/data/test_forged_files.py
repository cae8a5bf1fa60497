"""Files from somebody else, of all kinds: each is one line with exit code 2, soon, in bounded memory, and runs nothing.

All are met by one program (support/fakes/forged_files.py), which measures itself; a few by the command line.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import forged_files
import pytest
from tree import PACKAGE

from titan_rl import cli
from titan_rl.config.io.bounded_files import (
    DEPTH,
    RefusedFile,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
)

SECONDS, MIB = 15.0, 1024
"""Of computing, and held at most, for each."""
CASES = sorted(forged_files.cases())


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """What came of each, by its name."""
    folder = tmp_path_factory.mktemp("forged")
    program = [sys.executable, forged_files.__file__, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path_of_python()})
    results = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert results, done.stderr
    return results


def path_of_python() -> str:
    return os.pathsep.join([str(PACKAGE.parent), str(Path(forged_files.__file__).parent)])


@pytest.mark.parametrize("name", CASES)
def test_a_forged_file_is_one_line_soon_and_in_bounded_memory(met, name):
    assert name in met, "it did not end, or ended its process"
    result = met[name]
    assert result["code"] == 2 and len(result["said"].splitlines()) == 1, result
    assert result["said"].startswith("titan-rl: ") and "Traceback" not in result["said"], result
    assert result["seconds"] < SECONDS and result["mib"] < MIB and not result["code_was_run"], result


def test_there_are_enough_of_them():
    assert len(CASES) >= 60


def test_what_nobody_has_forged_is_read(tmp_path, capsys):
    forged_files.make_run(tmp_path / "run")
    assert [cli.main([name, str(tmp_path / "run")]) for name in ("show", "trace", "ledger", "hack-check")] == [0] * 4
    forged_files.make_model(tmp_path / "model")
    assert forged_files.load(tmp_path / "model") == 0
    assert forged_files.template("{% for m in messages %}{{ m.content }}{% endfor %}")(tmp_path) == 0


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("ledger: a view that does not end", ["ledger", "RUN"]),
        ("rollouts: a long text", ["show", "RUN"]),
        ("trace: a hole", ["trace", "RUN"]),
        ("model.safetensors: a pipe", ["eval", "RUN", "--task", "gcd"]),
    ],
)
def test_so_it_is_at_the_command_line(tmp_path, name, arguments):
    make, file, forge, _ = forged_files.cases()[name]
    make(tmp_path / "RUN")
    forge(tmp_path / "RUN" / file)
    program = [sys.executable, "-m", "titan_rl.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and not done.stdout, done
    assert done.stderr.startswith("titan-rl: ") and len(done.stderr.splitlines()) == 1
    assert Path(file).stem in done.stderr, "for what was forged, and nothing before"


# the reader


def test_files_as_they_are_written_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, {"b": "\\u00e9"}]}\n{}')
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(tmp_path / "link") == path.read_bytes()
    assert list(read_lines(path)) == [b'{"a": [1, {"b": "\\u00e9"}]}\n', b"{}"]
    assert list(read_lines(path, start=path.stat().st_size - 2)) == [b"{}"]
    path.write_text("[1.5, null]")
    assert read_json(path) == [1.5, None]


def test_limits_are_met_exactly(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345678\n")
    assert read_bytes(path, 9) and list(read_lines(path, 9)) == [b"12345678\n"]
    with pytest.raises(RefusedFile, match="at most"):
        read_bytes(path, 8)
    with pytest.raises(RefusedFile, match="line 1 is longer"):
        list(read_lines(path, 8))
    assert parse_json("[" * DEPTH + "]" * DEPTH)
    with pytest.raises(ValueError, match="nests"):
        parse_json("[" * (DEPTH + 1) + "]" * (DEPTH + 1))


def test_a_hole_is_no_content_but_a_file_of_zeros_may_have_one(tmp_path):
    with open(tmp_path / "small", "wb") as small, open(tmp_path / "large", "wb") as large:
        small.truncate(1 << 20)
        large.truncate(1 << 40)
    assert len(read_bytes(tmp_path / "small")) == 1 << 20
    with pytest.raises(RefusedFile, match="is sparse"):
        open_file(tmp_path / "large")
    open_file(tmp_path / "large", may_be_sparse=True).close()


def test_a_file_that_is_not_there_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "a")


# every other place that opens a file

OPENERS = {
    *("open", "fdopen", "read_text", "read_bytes", "read_table", "ParquetFile", "memory_map", "OSFile"),
    *("connect", "safe_open", "load_file", "from_file", "from_pretrained", "fromfile", "memmap", "read_parquet"),
}
OWN = {
    "compat/transformers.py": "what the installed packages say of themselves",
    "config/io/bounded_files.py": "the reader itself",
    "config/shipped.py": "files of the package",
    "config/torchrun.py": "the job's own folder, of this user alone",
    "config/command_line.py": "/dev/null",
    "config/model_directory/draft_heads.py": "a tensor whose place in the file was checked",
    "config/model_directory/tokenizer_checks.py": "looked at first, by check_file",
    "config/model_directory/weight_checks.py": "tensors whose places in the file were checked",
    "controller/console/display.py": "/dev/null",
    "controller/planning/forecast/rates.py": "a file of the package",
    "controller/launching/request.py": "written, not read",
    "controller/planning/memory_plan.py": "/proc and /sys",
    "controller/preflight/role_checks.py": "a directory that find_model has looked at",
    "models/device.py": "a pipe from a child of its own",
    "data/storage/files.py": "written; samples of fixed size, for checksums",
    "data/storage/folders.py": "carried between hosts of one run in parts of fixed size",
    "data/rows/row_files.py": "looked at first, by check_table and check_file",
    "data/storage/tables.py": "looked at first, by open_file",
    "data/text/template_limits.py": "/proc",
    "data/text/tokenizer.py": "looked at first, by check_files",
    "diagnostics/web/data/evaluations.py": "DuckDB in memory, over tables that are read; it may open nothing",
    "diagnostics/web/data/index.py": "DuckDB, which reads files that check_table has looked at; it opens none itself",
    "diagnostics/web/data/watched_run.py": "looked at first, by check_file",
    "environments/reasoning_gym/constant_answers.py": "a file of the package",
    "environments/scoring/reward_model.py": "a directory that check_reward_model has looked at",
    "environments/scoring/scoring_process.py": "/dev/null",
    "environments/sandbox/groups.py": "files of the kernel, below /sys/fs/cgroup",
    "environments/sandbox/remote.py": "files of the package",
    "environments/sandbox/workspace/command_run.py": "files in memory that it has made",
    "environments/sandbox/workspace/server.py": "/proc",
    "generator/weights/adapter_reader.py": "files whose headers stored_tensors has checked",
    "generator/engine_arguments.py": "a directory that read_config has looked at",
    "generator/ranks.py": "shared memory of an engine that the process started",
    "models/weights/hf_weights.py": "files whose headers were checked",
    "models/weights/peft_files.py": "a file whose header was checked",
    "models/weights/prediction_layers.py": "files whose headers were checked",
    "diagnostics/evaluation/command.py": "a folder that is locked, not read",
    "models/builtin/eagle3.py": "files whose headers were checked; config.json, written",
    "models/builtin/smollm2.py": "a package that pip has installed",
    "models/spec.py": "a directory that read_config has looked at",
    "trainer/model/draft_head.py": "files whose headers were checked",
    "records/evaluations/reading.py": "looked at first, by check_file and check_table",
    "records/preferences/collection.py": "the lock, written",
    "records/preferences/journal.py": "written; the last byte of what read_lines has read",
    "records/ledger/ledger.py": "the run's own, whose flaws are looked for before it is continued",
    "records/ledger/audit.py": "bounded by SQLite's own limits",
    "records/steps/rollouts.py": "looked at first, by check_table",
    "records/run_directory/rundir.py": "the lock, which existing_run_dir has found to be a plain file; folders",
    "records/trackers.py": "written, not read",
    "records/steps/trained.py": "looked at first, by check_table",
    "service/records/journal.py": "written; read by open_file",
    "service/session.py": "the log, written",
    "trainer/memory/cpu_allocator.py": "/proc",
    "trainer/step/adapter_bank.py": "a file whose header was checked",
}
"""Where a file is opened besides the reader, and why that may be."""
ELSEWHERE = (
    *(
        "mesh/",
        "environments/sandbox/inside/",
        "environments/sandbox/slot.py",
        "environments/agents/",
        "trainer/snapshot",
    ),
    *("diagnostics/bench/", "diagnostics/chaos/", "diagnostics/doctor/", "kernels/", "actors/"),
)
"""Not looked into: what opens files of its own processes, and what reads only what it has started itself."""


def opened_in(path: Path) -> set[str]:
    text = path.read_text()
    ours = {"read_text", "read_bytes"} if "bounded_files import" in text else set()
    names = {name_of(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    return names & OPENERS - ours


def name_of(called: ast.expr) -> str:
    """Other things than files are opened, too: of methods called ``open`` only the system's is one of a file."""
    if isinstance(called, ast.Attribute):
        is_other = called.attr == "open" and not (isinstance(called.value, ast.Name) and called.value.id == "os")
        return "" if is_other else called.attr
    return getattr(called, "id", "")


def test_files_are_opened_by_the_one_reader_or_for_a_reason():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if not name.startswith(ELSEWHERE) and opened_in(path)}
    assert found - OWN.keys() == set(), "use config/io/bounded_files.py, or say here why not"
    assert OWN.keys() - found == set(), "nothing is opened there any more"
