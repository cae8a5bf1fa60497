"""Files that nobody's program wrote, each met by the command or the reader that would open it: a program of its own.

    python forged_files.py FOLDER

For each case a line of JSON: its name, the exit code, what was said, seconds of computing, and the largest memory that
the process held (MiB) meanwhile. A case that does not end is ended by the kernel, with this process.
"""

import contextlib
import ctypes
import io
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from titan_rl import cli
from titan_rl.config.command_line import EXIT_OK, EXIT_USER
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.model_directory.tensor_names import expected_tensors
from titan_rl.data.rows.file_sources import Source
from titan_rl.data.storage.files import replace_text
from titan_rl.data.text.chat_template import message, render
from titan_rl.data.text.template_limits import checking
from titan_rl.data.types import Group, Rollout, Turn
from titan_rl.environments.prompts.row_files import parse_row, read_rows
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import SCHEMA, write_rollouts

HANGS_SECONDS = 40
"""Of computing, after which a case is taken for one that does not end."""
HUGE = 60_000_000_000
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
Forge = Callable[[Path], None]
Meet = Callable[[Path], int]


class Payload:
    """A pickle that makes a folder when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("code_was_run",)


# what is forged: each of these puts something in the place of a file


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)  # an address has a hundred bytes
        listener.bind(path.name)


def link(target: str) -> Forge:
    def forge(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return forge


def sparse(size: int, begin: bytes = b"", end: bytes = b"") -> Forge:
    """A hole that is stored nowhere."""

    def forge(path: Path) -> None:
        with open(path, "wb") as file:
            file.write(begin)
            file.truncate(size)
            file.seek(size - len(end))
            file.write(end)

    return forge


def content(data: bytes) -> Forge:
    def forge(path: Path) -> None:
        path.write_bytes(data)

    return forge


def changed(**values: Any) -> Forge:
    def forge(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return forge


KINDS = {"a pipe": pipe, "a socket": unix_socket, "a device": link("/dev/zero"), "a hole": sparse(HUGE)}
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


# run directories


def make_run(root: Path) -> None:
    run_dir = RunDir(root)
    run_dir.rollouts.mkdir(parents=True)
    replace_text(run_dir.config, json.dumps({"run": {"seed": 1}}))
    ledger = Ledger(run_dir.ledger)
    ledger.issue(["train/0000000"], 2)
    ledger.settle({"train/0000000": [None, None]}, 1)
    ledger.close()
    write_rollouts(run_dir.rollouts, 1, [Group("train/0000000", [_rollout(number) for number in range(2)])])
    (root / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "loss": 0.25}\n')
    (root / "trace.jsonl").write_text('{"step": 1, "spans": [["controller", "step", 1.0, 2.0]]}\n')


def _rollout(sample: int) -> Rollout:
    return Rollout(
        "train/0000000",
        sample,
        tokens=np.array([5, 6, 7, 8], np.int32),
        provenance=np.array([0, 0, 1, 1], np.int8),
        logprobs=np.array([0, 0, -0.5, -0.25], np.float32),
        versions=np.array([-1, -1, 0, 0], np.int32),
        turns=[Turn(2, 4, "stop")],
        status="ok",
        reward=1.0,
        reward_parts={"score": 1.0},
        text="12",
    )


def command(*arguments: str) -> Meet:
    return lambda root: cli.main([arguments[0], str(root), *arguments[1:]])


def sql(*statements: str) -> Forge:
    """In a ledger whose tables are gone."""

    def forge(path: Path) -> None:
        path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    return forge


ENDLESS = "as with recursive n(i) as (select 1 union all select i + 1 from n) select "
AS_PROMPTS, AS_SAMPLES = (
    "i as id, 1 as samples, 0 as retries from n",
    "i as prompt_id, 1 as sample, 'trained' as state, 1 as step, null as reason from n",
)
PROMPTS = "create table prompts (id text primary key, samples integer not null, retries integer not null)"
SAMPLES = "create table samples (prompt_id text, sample integer, state text, step integer, reason text)"


def beside(suffix: str, forge: Forge) -> Forge:
    return lambda path: forge(Path(f"{path}{suffix}"))


def table(name: str, make: Callable[[], pa.Array]) -> Forge:
    """Rollouts with one column of another's making."""

    def forge(path: Path) -> None:
        rows = pq.read_table(path, schema=SCHEMA)
        column = make()
        columns = {
            field: rows[field].take(pa.array(np.zeros(len(column), np.int64))) for field in ("prompt_id", "sample")
        }
        pq.write_table(pa.table({**columns, name: column}), path, compression="zstd")

    return forge


def long_text() -> pa.Array:
    return pa.array(["a" * (150 << 20)])


def alike(rows: int, size: int) -> Callable[[], pa.Array]:
    def make() -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["b" * size]))

    return make


def long_lists() -> pa.Array:
    return pa.array([np.zeros(8 << 20, np.int32)], pa.list_(pa.int32()))


def no_columns(path: Path) -> None:
    """Rows of nothing."""
    whole = pa.table({"a": pa.nulls(20_000_000, pa.int8())})
    pq.write_table(whole, path)


# models


def make_model(root: Path) -> None:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    _tokenizer().save(str(root / "tokenizer.json"))
    tensors, begin = {}, 0
    shapes = expected_tensors(CONFIG)
    assert shapes is not None, "a type that the table tells"
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        tensors[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(tensors).encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(begin))


def _tokenizer() -> Tokenizer:
    words = {word: number for number, word in enumerate(["<unk>", "<eos>", *"abcdef"])}
    return Tokenizer(models.WordLevel(words, unk_token="<unk>"))


def load(root: Path) -> int:
    load_config(None, {"model": {"path": str(root)}, "task": {"style": "compact"}})
    return EXIT_OK


def header(tensors: str, data: int = 0) -> Forge:
    return content(struct.pack("<Q", len(tensors)) + tensors.encode() + bytes(data))


def pickled(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload()))


def only_pickles(path: Path) -> None:
    pickled(path.with_name("pytorch_model.bin"))
    path.unlink()


# templates


def template(source: str) -> Meet:
    def meet(path: Path) -> int:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
        tokenizer.chat_template = source
        with checking():
            render(tokenizer, [message("user", "a"), message("assistant", "b"), message("user", "c")])
        return EXIT_OK

    return meet


def loops(depth: int) -> str:
    return "{% for i in range(100000) %}" * depth + "x" + "{% endfor %}" * depth


DOUBLES = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
SQUARES = "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}"
BRANCHES = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}"

# data files


def read(path: Path) -> int:
    read_rows([Source(path.name, (path,))], parse_row)
    return EXIT_OK


def columns(**values: Any) -> Forge:
    return lambda path: pq.write_table(pa.table(values), path, compression="zstd")


def arrow_folder(state: Any, data: bytes = b"") -> Forge:
    def forge(path: Path) -> None:
        path.mkdir()
        (path / "state.json").write_text(json.dumps(state))
        (path / "data.arrow").write_bytes(data)

    return forge


def packed_arrow(path: Path) -> None:
    """A dictionary of one text, and a million rows of it."""
    column = alike(1_000_000, 4000)()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"question": column.type})) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], ["question"]))
    arrow_folder({"_data_files": [{"filename": "data.arrow"}]}, sink.getvalue().to_pybytes())(path)


# the cases: what is made, what is forged below it, and who meets it


def cases() -> dict[str, tuple[Callable[[Path], None], str, Forge, Meet]]:
    found = {}
    for name, file, meet in (
        ("metrics", "metrics.jsonl", command("hack-check")),
        ("trace", "trace.jsonl", command("trace")),
        ("rollouts", "rollouts/step-000001.parquet", command("show")),
        ("ledger", "ledger.db", command("ledger")),
    ):
        for kind, forge in KINDS.items():
            found[f"{name}: {kind}"] = (make_run, file, forge, meet)
        found[f"{name}: a link to itself"] = (make_run, file, link(Path(file).name), meet)
        found[f"{name}: no text"] = (make_run, file, content(b"\xff\xfe\x00" * 99), meet)
    in_run = {
        "metrics: a line without an end": ("metrics.jsonl", content(b"1" * (5 << 20)), command("hack-check")),
        "metrics: a hole behind a line": ("metrics.jsonl", sparse(HUGE, b'{"step": 1}\n'), command("ledger")),
        "metrics: numbers that are none": (
            "metrics.jsonl",
            content(b'{"step": 1, "reward": NaN\n{"step": ' + b"9" * 5000 + b"}\n" + DEEP + b"\n"),
            command("hack-check"),
        ),
        "trace: a line without an end": ("trace.jsonl", content(b"[" * (5 << 20)), command("trace")),
        "trace: a folder": ("trace.jsonl", folder, command("trace")),
        "ledger: a view that does not end": ("ledger.db", endless_view, command("ledger")),
        "ledger: a view for samples": (
            "ledger.db",
            sql(PROMPTS, f"create view samples {ENDLESS}{AS_SAMPLES}"),
            command("ledger"),
        ),
        "ledger: other tables": ("ledger.db", sql("create table x (y)"), command("ledger")),
        "ledger: a column that computes for ever": ("ledger.db", endless_column, command("ledger")),
        "ledger: a pipe for its log": ("ledger.db", beside("-wal", pipe), command("ledger")),
        "ledger: a device for its log": ("ledger.db", beside("-wal", link("/dev/zero")), command("ledger")),
        "ledger: a hole behind its head": ("ledger.db", torn, command("ledger")),
        "rollouts: a long text": (PARQUET, table("text", long_text), command("show")),
        "rollouts: millions of rows that are alike": (PARQUET, table("text", alike(5_000_000, 1)), command("show")),
        "rollouts: a text for many rows": (PARQUET, table("text", alike(20_000, 20_000)), command("show")),
        "rollouts: a list of millions": (PARQUET, table("tokens", long_lists), command("show")),
        "rollouts: rows of nothing": (PARQUET, no_columns, command("show")),
        "rollouts: the end alone": (PARQUET, content(b"\xff\xff\xff\x7fPAR1"), command("show")),
        "rollouts: a folder": (PARQUET, folder, command("show")),
    }
    found |= {name: (make_run, *parts) for name, parts in in_run.items()}
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        for kind, forge in KINDS.items():
            found[f"{file}: {kind}"] = (make_model, file, forge, load)
    in_model = {
        "generation_config.json: a pipe": ("generation_config.json", pipe),
        "tokenizer_config.json: a device": ("tokenizer_config.json", link("/dev/zero")),
        "chat_template.jinja: a pipe": ("chat_template.jinja", pipe),
        "chat_template.jinja: too long": ("chat_template.jinja", content(b"a" * (2 << 20))),
        "vocab.json: a hole": ("vocab.json", sparse(HUGE)),
        "config.json: deep": ("config.json", content(DEEP)),
        "config.json: a list of millions": ("config.json", content(b"[" + b"[]," * (5 << 20) + b"[]]")),
        "config.json: a thousand million layers": ("config.json", changed(num_hidden_layers=10**9)),
        "config.json: a million million in a row": ("config.json", changed(hidden_size=10**12)),
        "config.json: experts without end": (
            "config.json",
            changed(model_type="qwen3_moe", num_hidden_layers=9999, num_experts=9999, head_dim=2),
        ),
        "config.json: a number of a thousand digits": ("config.json", changed(sliding_window=10**1000)),
        "config.json: a number that Python refuses": ("config.json", content(b'{"a": ' + b"9" * 9999 + b"}")),
        "index: names outside": (
            "model.safetensors.index.json",
            content(b'{"weight_map": {"a": "../../etc/passwd"}}'),
        ),
        "index: a pipe": ("model.safetensors.index.json", pipe),
        "weights: a header of 17 MiB": (WEIGHTS, header("{}" + " " * (17 << 20))),
        "weights: a header beyond the file": (WEIGHTS, content(struct.pack("<Q", 1 << 62) + b"{}")),
        "weights: shapes of a million sizes": (
            WEIGHTS,
            header('{"a": {"dtype": "F32", "shape": [' + "9999999999," * 500_000 + '1], "data_offsets": [0, 4]}}', 4),
        ),
        "weights: a pickle": (WEIGHTS, pickled),
        "weights: only pickles": (WEIGHTS, only_pickles),
    }
    found |= {name: (make_model, *parts, load) for name, parts in in_model.items()}
    templates = {
        "three loops": loops(3),
        "a long text": "{{ 'a' * 2000000000 }}",
        "a text that doubles": DOUBLES,
        "a power": "{{ 10 ** 10 ** 8 }}",
        "squares": SQUARES,
        "a tree of calls": BRANCHES,
        "a call of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "a wide field": "{{ '%2000000000d' | format(1) }}",
        "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "thirty blocks": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "a way out": "{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__ }}",
    }
    found |= {f"template: {name}": (nothing, "", nothing, template(text)) for name, text in templates.items()}
    data = {
        "a pipe.jsonl": pipe,
        "a device.jsonl": link("/dev/zero"),
        "a hole.jsonl": sparse(1_500_000_000, b'{"question": "'),
        "a long line.jsonl": content(b'{"question": "' + b"a" * (17 << 20)),
        "deep.jsonl": content(DEEP),
        "no text.jsonl": content(b'{"question": "\xff"}'),
        "torn.parquet": content(b"PAR1" + bytes(99)),
        "another kind.parquet": content(b"ARROW1" + bytes(99)),
        "long text.parquet": lambda path: columns(question=long_text())(path),
        "alike.parquet": lambda path: columns(question=alike(5_000_000, 1)())(path),
        "many.parquet": lambda path: columns(question=alike(20_000, 20_000)())(path),
        "outside": arrow_folder({"_data_files": [{"filename": "../../etc/passwd"}]}),
        "torn": arrow_folder({"_data_files": [{"filename": "data.arrow"}]}, b"\xff\xff\xff\xff\xff\xff\xff\x7f"),
        "packed": packed_arrow,
    }
    found |= {f"data: {name}": (nothing, name, forge, read) for name, forge in data.items()}
    return found


PARQUET, WEIGHTS = "rollouts/step-000001.parquet", "model.safetensors"
endless_view = sql(f"create view prompts {ENDLESS}{AS_PROMPTS}", SAMPLES)


def endless_column(path: Path) -> None:
    """Each row has a check, which is made when the file is looked over."""
    sql(
        PROMPTS,
        SAMPLES,
        "create table entries (number, content, hash, check (length(hex(zeroblob(4000000 + number))) > 0))",
    )(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma ignore_check_constraints = on")
        connection.executemany("insert into entries values (?, 0, 0)", [(number,) for number in range(3000)])
        connection.commit()


def torn(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(HUGE)


def nothing(path: Path) -> None:
    """Nothing is made."""


# the program


def meet_all(root: Path) -> None:
    wanted = sys.argv[2:]
    for name, case in cases().items():
        if not wanted or any(word in name for word in wanted):
            print(json.dumps(_meet(root / "case", name, *case)), flush=True)
    os.chdir("/")


def _meet(root: Path, name: str, make: Callable[[Path], None], file: str, forge: Forge, meet: Meet) -> dict[str, Any]:
    shutil.rmtree(root, ignore_errors=True)
    if make is nothing:
        root.mkdir()
    make(root)
    place = root / file
    forge(place)
    os.chdir(root.parent)
    target = place if make is nothing else root
    pa.default_memory_pool().release_unused()  # what it took to make them is none of theirs
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory is counted anew
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + HANGS_SECONDS, resource.RLIM_INFINITY))
    said, begun = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = meet(target)
        except ConfigError as error:
            code, _ = EXIT_USER, said.write(f"titan-rl: {error}\n")
        except Exception as error:
            code, _ = 1, said.write(f"Traceback: {type(error).__name__}: {error}\n")
    return {
        "name": name,
        "code": code,
        "said": said.getvalue(),
        "seconds": round(time.process_time() - begun, 2),
        "mib": _largest() >> 10,
        "code_was_run": (root.parent / "code_was_run").exists(),
    }


def _largest() -> int:
    """KiB that were held at once."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    meet_all(Path(sys.argv[1]))
