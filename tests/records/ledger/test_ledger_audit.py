"""Whatever a run does, its ledger proves it; whatever else is done to the file, the row is named."""

import json
import random
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.data.types import Group, Provenance, Rollout, Turn
from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.records.ledger import audit as ledger_audit
from titan_rl.records.ledger.audit import Proved, _sample_flaws, flaws, fold
from titan_rl.records.ledger.cross_checks import contradictions
from titan_rl.records.ledger.ledger import SCHEMA, Ledger, LedgerError, entry_hash
from titan_rl.records.steps.rollouts import write_rollouts

SIZE = 3
TRIGGERS = ("entries_stay", "entries_stay_as_they_are", "settled_once")


class Run:
    """A run's dealings with its ledger, in a random order."""

    def __init__(self, path: Path, seed: int):
        self.path, self.chance = path, random.Random(seed)
        self.ledger, self.pending, self.step, self.num_issued, self.size = Ledger(path), [], 0, 0, SIZE

    def issue(self) -> None:
        names = [f"train/{self.num_issued + place:08d}" for place in range(self.chance.randrange(1, 4))]
        self.num_issued += len(names)
        self.ledger.issue(names, self.size)
        self.pending += names

    def _take(self) -> list[str]:
        self.chance.shuffle(self.pending)
        count = self.chance.randrange(len(self.pending) + 1)
        taken, self.pending = self.pending[:count], self.pending[count:]
        return taken

    def train(self) -> None:
        self.step += 1
        outcomes = {
            name: [self.chance.choice([None, None, "timeout"]) for _ in range(self.size)] for name in self._take()
        }
        self.ledger.settle(outcomes, self.step)

    def discard(self) -> None:
        self.ledger.settle({name: ["infra_error"] * self.size for name in self._take()})

    def retry(self) -> None:
        self.ledger.count_retry(self.chance.choice([*self.pending, "held_out/00000001"]))

    def rewind(self) -> None:
        """To a checkpoint, maybe with groups of another size."""
        self.step = self.chance.randrange(self.step + 1)
        self.size = self.chance.choice([self.size, self.size, 2, 4])
        self.pending = self.ledger.rewind(self.step, self.size)

    def crash(self) -> None:
        """In the middle of a transaction, which the next process knows nothing of."""
        with suppress(KeyboardInterrupt), self.ledger._transaction():
            self.ledger._enter(retry="train/00000000")
            raise KeyboardInterrupt
        self.ledger = Ledger(self.path)

    def mistake(self) -> None:
        with pytest.raises(LedgerError):
            self.ledger.settle({"unknown": [None] * self.size}, self.step + 1)

    def go(self, count: int) -> None:
        acts = (self.issue, self.train, self.discard, self.retry, self.rewind, self.crash, self.mistake)
        self.issue()
        for _ in range(count):
            self.chance.choices(acts, (4, 4, 1, 2, 1, 1, 1))[0]()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_run_does_is_proved(tmp_path, seed):
    run = Run(tmp_path / "ledger.db", seed)
    for _ in range(5):
        run.go(8)
        assert flaws(run.path) == []
    run.ledger.check(len(run.pending) * run.size)


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """A ledger with every kind of entry."""
    path = tmp_path_factory.mktemp("honest") / "ledger.db"
    ledger = Ledger(path)
    ledger.issue(list("abcd"), SIZE)
    ledger.count_retry("c")
    ledger.settle({"a": [None] * SIZE, "b": [None, None, "timeout"]}, 1)
    ledger.settle({"c": ["infra_error"] * SIZE})
    ledger.settle({"d": [None] * SIZE}, 2)
    ledger.rewind(1, SIZE)
    ledger.issue(["e"], SIZE)
    ledger.settle({"d": [None] * SIZE}, 2)
    ledger.count_retry("e")
    ledger.close()
    return path


def tampered(honest: Path, tmp_path: Path, change: str, *values) -> Path:
    """A copy with one change, which no trigger resists; afterwards the triggers are as before."""
    path = tmp_path / "ledger.db"
    path.write_bytes(honest.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for name in TRIGGERS:
            connection.execute(f"drop trigger {name}")
        connection.execute("pragma ignore_check_constraints = on")
        assert connection.execute(change, values).rowcount == 1
        connection.executescript(SCHEMA)
    return path


def rows(path: Path, table: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"select * from {table}").fetchall()


def name_of(table: str, row: tuple) -> str:
    return {"entries": f"entry {row[0]} ", "prompts": f"prompt {row[0]} ", "samples": f"{row[0]} sample {row[1]} "}[
        table
    ]


KEYS = {"entries": "number = ?", "prompts": "id = ?", "samples": "prompt_id = ? and sample = ?"}


@pytest.mark.parametrize("table", KEYS)
def test_each_deleted_row_is_named(honest, tmp_path, table):
    for row in rows(honest, table):
        key = row[: KEYS[table].count("?")]
        path = tampered(honest, tmp_path, f"delete from {table} where {KEYS[table]}", *key)
        assert any(name_of(table, row) in flaw and "missing" in flaw for flaw in flaws(path)), (row, flaws(path))


STRANGE = (
    None,
    0,
    1,
    7,
    -1,
    1.5,
    "",
    "pending",
    "trained",
    "discarded",
    "timeout",
    "x",
    b"\xff",
    "f" * 64,
    '{"retry":"a"}',
)


@pytest.mark.parametrize("table", KEYS)
def test_each_changed_value_is_named(honest, tmp_path, table):
    """Each column of each row takes values that it may hold elsewhere, and such that it may not."""
    columns = {
        "entries": ("content", "hash"),
        "prompts": ("samples", "retries"),
        "samples": ("state", "step", "reason"),
    }
    count = 0
    for row in rows(honest, table):
        key = row[: KEYS[table].count("?")]
        for place, column in enumerate(columns[table], start=len(key)):
            for value in STRANGE:
                try:
                    path = tampered(
                        honest, tmp_path, f"update {table} set {column} = ? where {KEYS[table]}", value, *key
                    )
                except sqlite3.IntegrityError:  # not null
                    continue
                if value == row[place] or row in rows(path, table):
                    continue
                count += 1
                if value in (None, "x", b"\xff"):
                    assert not read_ledger(tmp_path)["adds_up"]
                assert any(name_of(table, row) in flaw for flaw in flaws(path)), (row, column, value, flaws(path))
    assert count > 50


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("samples", ("a", 3, "pending", None, None)),
        ("samples", ("a", -1, "trained", 1, None)),
        ("samples", ("z", 0, "trained", 1, None)),
        ("prompts", ("z", SIZE, 0)),
        ("entries", (0, '{"retry":"a"}', "")),
        ("entries", (10, '{"retry":"a"}', "f" * 64)),
        ("entries", (99, "what is this", "f" * 64)),
    ],
)
def test_each_added_row_is_named(honest, tmp_path, table, row):
    path = tampered(honest, tmp_path, f"insert into {table} values ({', '.join('?' * len(row))})", *row)
    assert any(name_of(table, row) in flaw for flaw in flaws(path)), flaws(path)


def test_a_reader_leaves_nothing(honest):
    before = honest.read_bytes()
    assert flaws(honest) == []
    assert honest.read_bytes() == before and list(honest.parent.iterdir()) == [honest]


def test_a_changed_hash_does_not_accuse_the_next_entry(honest, tmp_path):
    path = tampered(honest, tmp_path, "update entries set hash = ? where number = 3", "f" * 64)
    assert [flaw.split()[:2] for flaw in flaws(path)] == [["entry", "3"]]


def test_an_entry_with_a_right_hash_that_cannot_be_so_is_named(honest, tmp_path):
    """A second settlement of what is settled, chained as it should be."""
    number, _, last = rows(honest, "entries")[-1]
    content = json.dumps({"settle": {"a": [None] * SIZE}, "step": 3})
    entry = (number + 1, content, entry_hash(last, number + 1, content))
    [flaw] = flaws(tampered(honest, tmp_path, "insert into entries values (?, ?, ?)", *entry))
    assert flaw.startswith(f"entry {number + 1} settles 3 samples of a")


def test_a_dropped_trigger_or_table_is_named(honest, tmp_path):
    for what in (*(f"trigger {name}" for name in TRIGGERS), "table entries", "index samples_by_step"):
        path = tmp_path / "ledger.db"
        path.write_bytes(honest.read_bytes())
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(f"drop {what}")
        assert any(what.split()[1] in flaw for flaw in flaws(path))


def test_the_database_itself_keeps_its_entries(honest, tmp_path):
    path = tmp_path / "ledger.db"
    path.write_bytes(honest.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        for change in ("delete from entries where number = 2", "update entries set content = '' where number = 2"):
            with pytest.raises(sqlite3.IntegrityError, match="an entry cannot"):
                connection.execute(change)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: b"", "empty"),
        (lambda data: b"no database, whatever its name says", "cannot be read"),
        (lambda data: data[: len(data) // 2], "cannot be read|damaged"),
        (lambda data: data[:4096] + bytes(len(data) - 4096), "cannot be read|damaged"),
    ],
)
def test_a_damaged_file_is_one_line_and_exit_code_2(honest, tmp_path, capsys, damage, word):
    (tmp_path / "ledger.db").write_bytes(damage(honest.read_bytes()))
    [line] = flaws(tmp_path / "ledger.db")
    assert any(part in line for part in word.split("|"))
    assert main(["ledger", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.strip() == f"titan-rl: {line}" and not said.out


def test_flipped_bytes_never_raise_and_never_pass_if_a_row_differs(honest, tmp_path):
    chance, data, path = random.Random(3), honest.read_bytes(), tmp_path / "ledger.db"
    found = num_read = 0
    for _ in range(150):
        place = chance.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        said = flaws(path)
        found += bool(said)
        with suppress(ConfigError):
            read = read_ledger(tmp_path, steps=True)
            assert read["flaws"] == said
            num_read += 1
        if not said:
            assert all(rows(path, table) == rows(honest, table) for table in KEYS)
    assert found > 10 and num_read > 10


def test_a_missing_file_and_another_database_are_told(tmp_path):
    assert "not there" in flaws(tmp_path / "ledger.db")[0]
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("create table other (x)")
        connection.commit()
    assert "no table prompts" in flaws(tmp_path / "ledger.db")[0]


def test_a_ledger_of_an_earlier_release_is_read_but_not_called_proved(tmp_path, capsys):
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "create table prompts (id text primary key, retries integer not null default 0) without rowid;"
            "create table samples (prompt_id text, sample integer, state text, step integer, reason text,"
            " primary key (prompt_id, sample)) without rowid;"
            "insert into prompts values ('a', 1); insert into samples values ('a', 0, 'trained', 1, null);"
        )
    assert "cannot be proved" in flaws(path)[0]
    assert main(["ledger", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["trained"] == told["issued"] == 1 and not told["adds_up"] and not told["is_chained"]
    assert main(["ledger", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "cannot be proved" in said and "adds up" not in said
    with pytest.raises(LedgerError, match="release"):
        Ledger(path)


def test_the_command_names_each_row(honest, tmp_path, capsys):
    path = tampered(honest, tmp_path, "update samples set step = 1 where prompt_id = 'd' and sample = 2")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("delete from samples where prompt_id in ('a', 'b') and sample = 1")
    assert main(["ledger", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "does NOT add up" in said
    for line in (
        "d sample 2 was changed: its row says trained at step 1, the entries trained at step 2",
        "a sample 1 is missing",
        "b sample 1 is missing",
    ):
        assert line in said


# what the rest of the run directory knows


def rollout(name: str, sample: int, status: str = "ok") -> Rollout:
    tokens = np.zeros(2, np.int32)
    wrote = np.full(2, Provenance.MODEL, np.int8)
    return Rollout(name, sample, tokens, wrote, tokens.astype(np.float32), tokens, [Turn(0, 2, "stop")], status)


def record(root: Path, step: int, *names: str) -> None:
    (root / "rollouts").mkdir(exist_ok=True)
    groups = [Group(name, [rollout(name, sample) for sample in range(SIZE)]) for name in names]
    write_rollouts(root / "rollouts", step, groups)


@pytest.fixture
def witnessed(honest, tmp_path) -> Path:
    """The run directory of the honest ledger."""
    (tmp_path / "ledger.db").write_bytes(honest.read_bytes())
    record(tmp_path, 1, "a", "b")
    record(tmp_path, 2, "d")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "reward": 0.5}}\n' for step in (1, 2)))
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    return tmp_path


def test_a_run_directory_that_agrees_says_nothing(witnessed):
    assert contradictions(witnessed) == []
    record(witnessed, 3, "e")  # in training, and not settled yet
    assert contradictions(witnessed) == []


def test_records_of_steps_that_the_run_went_back_from_say_nothing(witnessed):
    Ledger(witnessed / "ledger.db").rewind(1, SIZE)
    assert contradictions(witnessed) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "d sample 0 was trained at step 2, says the ledger, but is not among that step's rollouts"),
        (("d", "a"), "a sample 0 is among the rollouts of step 2, but the ledger does not have it there"),
        (("d", "z"), "z sample 0 is among the rollouts of step 2, but the ledger does not have it there"),
    ],
)
def test_rollouts_that_differ_are_named(witnessed, names, said):
    record(witnessed, 2, *names)
    assert said in contradictions(witnessed)


@pytest.mark.parametrize(("lost", "kept"), [(1, 0), (2, 20), (1, 20)])
def test_a_step_whose_metrics_were_lost_is_named(witnessed, lost, kept):
    """A record that is cut is none; that of the last step before the last checkpoint may not be away either."""
    path = witnessed / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[lost - 1] = lines[lost - 1][:kept] + "\n" * bool(kept)
    path.write_text("".join(lines))
    assert contradictions(witnessed) == [
        f"step {lost} was trained, says the ledger, but metrics.jsonl has no record of it"
    ]


def test_the_metrics_of_a_step_after_the_last_checkpoint_may_be_on_their_way(witnessed):
    ledger = Ledger(witnessed / "ledger.db")
    ledger.settle({"e": [None] * SIZE}, 3)
    assert contradictions(witnessed) == []


def test_nonfinite_batches_may_be_among_a_steps_rollouts(witnessed):
    ledger = Ledger(witnessed / "ledger.db")
    ledger.issue(["f"], SIZE)
    ledger.settle({"e": [None] * SIZE}, 3)
    ledger.settle({"f": ["nonfinite"] * SIZE})
    record(witnessed, 3, "e", "f")
    assert contradictions(witnessed) == []


def test_an_end_that_was_cut_off_with_its_rows_is_seen(witnessed, capsys):
    """A ledger that is consistent in itself, but was written anew without its last step."""
    (witnessed / "ledger.db").unlink()
    ledger = Ledger(witnessed / "ledger.db")
    ledger.issue(list("abcd"), SIZE)
    ledger.close()
    assert flaws(witnessed / "ledger.db") == []
    assert main(["ledger", str(witnessed)]) == 1
    said = capsys.readouterr().out
    assert "rollouts of step 2 are recorded, but the ledger ends at step 0" in said
    assert "metrics.jsonl has step 2" in said and "a checkpoint has step 2" in said


def test_rollouts_that_cannot_be_read_are_told(witnessed):
    (witnessed / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    [said] = contradictions(witnessed)
    assert said.startswith("rollouts of step 2 cannot be read")


def test_a_small_ledger_of_billions_of_flaws_tells_a_bounded_number():
    proved = {f"train/{number}": Proved(60_000) for number in range(10_000)}
    assert len(_sample_flaws(proved, [])) == 10_000


def test_entries_that_go_back_again_and_again_are_not_all_carried_out(monkeypatch):
    """Each goes through all prompts: together they would take the square of the file's size."""
    monkeypatch.setattr(ledger_audit, "_MOST_WORK", 100)
    issue = json.dumps({"issue": [f"train/{number}" for number in range(30)], "samples": 1})
    _, cannot = fold([(1, issue, ""), *((number, '{"rewind": 0, "samples": 2}', "") for number in range(2, 7))])
    assert cannot == [f"entry {number} is one too many to be carried out" for number in (5, 6)]


def test_entries_that_nest_or_have_no_end_are_damaged():
    entries = [(1, "[" * 100_000, ""), (2, '{"rewind": Infinity, "samples": 1e999}', "")]
    assert fold(entries)[1] == ["entry 1 cannot be read", "entry 2 cannot be read"]
