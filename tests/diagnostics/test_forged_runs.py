"""A run directory from somebody else: no command runs what is in it or follows it elsewhere; each says what is wrong.

Nothing is started here: where a command would start processes, it meets ``Started``.
"""

import json
import os
import pickle
import shutil
import sqlite3
from contextlib import nullcontext, suppress
from pathlib import Path

import made_run
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from running import overrides

from titan_rl import cli, train
from titan_rl.config.load import ConfigError
from titan_rl.controller.loop.scaling import take_scale_request
from titan_rl.data.text.tokenizer import read_tokenizer
from titan_rl.diagnostics.replay import replay
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.run_directory.rundir import RunDir

EVIL = "from pathlib import Path\nPath({canary!r}).write_text('code of the run directory was run')\ndef f(*a): ...\n"


class Started(Exception):
    """A command found nothing wrong and would start processes."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def drive(work):
        work.close()
        raise Started

    def run_to_end(session):
        session._exits.close()
        session.ledger.close()
        session.run_dir.close()
        raise Started

    monkeypatch.setattr(replay, "drive", drive)
    monkeypatch.setattr(train, "run_to_end", run_to_end)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original") / "run"
    made_run.made_run(root)
    make_tiny(root / "base_model", seed=1)
    return root


@pytest.fixture
def run(original, tmp_path, monkeypatch):
    """A copy, to be forged; the current folder is the one that it is in."""
    shutil.copytree(original, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return RunDir(tmp_path / "run")


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


def command(name: str, run_dir: RunDir, *more: str) -> int:
    root = str(run_dir.root)
    if name == "resume":
        return train.main(["--run.dir", root, "--resume", *overrides(training__steps=made_run.STEPS), *more])
    arguments = {"replay": ["--from", "1", "--to", "2"], "ledger": [], "scale": ["--generators", "2"]}[name]
    return cli.main([name, root, *arguments, *more])


@pytest.mark.parametrize("name", ["replay", "resume"])
def test_a_run_that_nobody_touched_is_taken(run, name):
    with pytest.raises(Started):
        command(name, run)


def test_the_ledger_of_a_run_that_nobody_touched_is_told(run, capsys):
    assert command("ledger", run) == 0


# forgeries: each changes a run directory; ``canary`` would be written by its code, or is what it leads to


def checkpoint(run_dir) -> Path:
    return run_dir.checkpoints / "step-000002"


def metadata_pickle(run_dir, canary):
    (checkpoint(run_dir) / ".metadata").write_bytes(pickle.dumps(made_run.Payload(canary)))
    made_run.forge(checkpoint(run_dir))


def item_pickle(run_dir, canary):
    shutil.rmtree(checkpoint(run_dir))
    state = {"model": {"w": torch.ones(4)}, "scheduler": {"last_epoch": made_run.Payload(canary)}}
    made_run.save(run_dir, 2, state)


def manifest(**changes):
    def forge(run_dir, canary):
        made_run.forge(checkpoint(run_dir), **changes)
        (run_dir.rollouts / "step-000001.parquet").unlink()  # so that there is no other way back

    return forge


def files_outside(name):
    def forge(run_dir, canary):
        path = canary if name == "CANARY" else name
        manifest(files={str(path): {"bytes": 0, "xxh3_128": "0"}})(run_dir, canary)

    return forge


def state(**changes):
    whole = {"step": 2, "stream_position": 8, "held_out_before": None, "seconds_training": 1.0}
    return manifest(state=whole | changes)


def config(text=None, **settings):
    """config.json as text, or with changed values: ``task__reward``."""

    def forge(run_dir, canary):
        tables = json.loads(run_dir.config.read_text())
        for name, value in settings.items():
            section, key = name.split("__")
            tables[section][key] = value.replace("RUN", str(run_dir.root)) if isinstance(value, str) else value
        tables["run"]["plugin_path"] = [str(run_dir.root)]
        run_dir.config.write_text(json.dumps(tables) if text is None else text)
        (run_dir.root / "evil.py").write_text(EVIL.format(canary=str(canary)))

    return forge


def link(name):
    """In place of something of the run, a link to what is elsewhere."""

    def forge(run_dir, canary):
        path, elsewhere = run_dir.root / name, run_dir.root.parent / "elsewhere"
        if path.exists():
            path.rename(elsewhere)
        else:
            elsewhere.touch()
        path.symlink_to(elsewhere)

    return forge


def pipe(name):
    """A reader would wait for ever."""

    def forge(run_dir, canary):
        (run_dir.root / name).unlink(missing_ok=True)
        os.mkfifo(run_dir.root / name)

    return forge


def parquet(change):
    def forge(run_dir, canary):
        path = run_dir.rollouts / "step-000001.parquet"
        table = pq.read_table(path)
        pq.write_table(change(table), path)
        shutil.rmtree(run_dir.checkpoints)  # so that step 1 is needed

    return forge


def with_column(name, values, kind):
    def change(table):
        return table.set_column(table.schema.get_field_index(name), name, pa.array(values * len(table), kind))

    return parquet(change)


def file(name, content):
    def forge(run_dir, canary):
        (run_dir.root / name).write_bytes(content)
        if name.startswith("rollouts"):
            shutil.rmtree(run_dir.checkpoints)

    return forge


def sql(statement):
    def forge(run_dir, canary):
        with sqlite3.connect(run_dir.ledger) as connection:
            connection.execute(statement)

    return forge


def gone(name):
    def forge(run_dir, canary):
        path = run_dir.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return forge


def package(run_dir, canary):
    """A directory by the name of a package that processes import, in the folder that they are started from."""
    (run_dir.root / "__init__.py").write_text(EVIL.format(canary=str(canary)))


def tokenizer_code(run_dir, canary):
    path = run_dir.base_model / "tokenizer_config.json"
    wanted = json.loads(path.read_text()) | {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    path.write_text(json.dumps(wanted))
    (run_dir.base_model / "evil.py").write_text(EVIL.format(canary=str(canary)))


def both(word, *others):
    """What replay and resume say, and what ``others`` do."""
    return dict.fromkeys(("replay", "resume", *others), word)


INT32 = pa.list_(pa.int32())
FORGERIES = {
    "metadata that runs code": (metadata_pickle, both("names pathlib")),
    "an item that runs code": (item_pickle, both("no plain value")),
    "files above": (files_outside("../../x"), dict(resume="'../../x'")),
    "files elsewhere": (files_outside("CANARY"), dict(resume="which is not a file of it")),
    "files that are no list": (manifest(files=[1]), dict(resume="lists no files")),
    "files without sums": (manifest(files={"__0_0.distcp": {}}), dict(resume="does not describe")),
    "no state": (manifest(state=None), dict(resume="state.json")),
    "a step that is text": (state(step="2; rm"), dict(resume="step = '2; rm'")),
    "another step": (state(step=7), dict(resume="of step 7")),
    "a position below 0": (state(stream_position=-5), dict(resume="stream_position = -5")),
    "a huge position": (state(stream_position=10**30), dict(resume="stream_position")),
    "seconds that are none": (state(seconds_training="x"), dict(resume="seconds_training")),
    "an evaluation of nothing": (state(held_out_before={"correct": 0, "count": 0}), dict(resume="held_out_before")),
    "config: a reward": (config(task__reward="evil:f"), dict(replay="--run.plugin_path", resume="task.reward")),
    "config: an algorithm": (config(algorithm__name="evil:f"), dict(replay="algorithm.name")),
    "config: a task": (config(task__name="evil:f"), both("task.name")),
    "config: a family": (config(model__family="evil:f"), both("model.family")),
    "config: a launcher": (config(mesh__launcher="evil:f", mesh__hosts=1), dict(replay="mesh.launcher")),
    "config: a package of the folder above": (config(task__reward="run.evil:f"), dict(replay="task.reward")),
    "config: an installed module": (config(task__name="os:system"), dict(replay="'os:system'", resume="task.name")),
    "config: not JSON": (config("{"), both("config.json")),
    "config: a list": (config("[]"), both("config.json")),
    "config: deep": (config("[" * 100_000), both("config.json")),
    "config: an unknown section": (config('{"evil": {}}'), dict(replay="evil")),
    "config: text for a number": (config(training__seq_len="x"), dict(replay="seq_len")),
    "config: no text at all": (file("config.json", b"\xff\xfe\x00"), both("config.json")),
    "a package": (package, both("makes a package")),
    "no config": (gone("config.json"), both("holds no config.json")),
    "a tokenizer with code": (tokenizer_code, dict()),
    "a base model without weights": (
        gone("base_model/model.safetensors"),
        both("model.path"),
    ),
    **{
        f"a link for {name}": (
            link(name),
            both("leads out", "ledger", "scale"),
        )
        for name in ("config.json", "ledger.db", "checkpoints", "rollouts/step-000001.parquet", "metrics.jsonl")
        + ("checkpoints/step-000002/state.json", "base_model", "lock", ".scale_request.writing", "log.txt", "model")
    },
    **{
        f"a pipe for {name}": (pipe(name), both("no plain file", "ledger"))
        for name in ("config.json", "ledger.db", "metrics.jsonl", "lock", "rollouts/step-000002.parquet")
    },
    "rollouts cut short": (
        file("rollouts/step-000001.parquet", b"PAR1xx"),
        both("step-000001"),
    ),
    "rollouts that are empty": (
        file("rollouts/step-000001.parquet", b""),
        both("step-000001"),
    ),
    "rollouts of another kind": (
        parquet(lambda table: pa.table({"a": [1]})),
        both("step-000001"),
    ),
    "no rows": (parquet(lambda table: table.slice(0, 0)), both("no rollouts")),
    "tokens as text": (with_column("tokens", ["x"], pa.string()), both("step-000001")),
    "a huge token": (
        with_column("tokens", [[5, 6, 7, 2**31 - 1]], INT32),
        both("outside the model's vocabulary"),
    ),
    "a token below 0": (with_column("tokens", [[5, 6, 7, -1]], INT32), both("vocabulary")),
    "a longer list of tokens": (
        with_column("tokens", [[5] * 9], INT32),
        both("one a token"),
    ),
    "no tokens": (with_column("tokens", [None], INT32), both("step-000001")),
    "a rollout longer than a row": (
        parquet(
            lambda table: pa.Table.from_pylist(
                [
                    row | dict(tokens=[5] * 600, provenance=[0] * 599 + [1], logprobs=[0.0] * 600, versions=[0] * 600)
                    for row in table.to_pylist()
                ],
                table.schema,
            )
        ),
        both("room for 512"),
    ),
    "a provenance that there is not": (
        with_column("provenance", [[0, 0, 1, 77]], pa.list_(pa.int8())),
        both("provenance"),
    ),
    "a status that there is not": (
        with_column("status", ["evil"], pa.string()),
        both("status"),
    ),
    "a turn outside": (with_column("turn_stop", [[10**6]], INT32), both("a turn")),
    "a ledger that is none": (file("ledger.db", b"not a database" * 99), dict(ledger="ledger", resume="ledger")),
    "an empty ledger": (file("ledger.db", b""), dict(ledger="ledger.db", resume="ledger.db")),
    "no ledger": (gone("ledger.db"), dict(ledger="ledger.db", resume="ledger.db")),
    "a ledger that was changed": (sql("update samples set step = 9 where step = 2"), dict(resume="was changed")),
    "metrics that are not JSON": (file("metrics.jsonl", b"\xff{not json\n[1]\n3\n"), dict(replay="not recorded")),
    "metrics of other kinds": (
        file("metrics.jsonl", b'{"step": 1, "loss": "evil", "grad_norm": 1}\n{"step": [1]}\n{"step": 1e999}\n'),
        dict(replay="not recorded"),
    ),
    "deep metrics": (file("metrics.jsonl", b"[" * 200_000), dict(replay="not recorded")),
    "sources that are none": (file("sources.json", b"[3]"), dict(resume="sources.json")),
}


def held(run_dir) -> list[Path]:
    """Its files, without those that SQLite makes beside a ledger for as long as it is read."""
    return sorted(path for path in run_dir.root.rglob("*") if not path.name.startswith("ledger.db-"))


CASES = [
    (forgery, name) for forgery, (_, said) in FORGERIES.items() for name in said | dict.fromkeys(("replay", "resume"))
]


@pytest.mark.parametrize(("forgery", "name"), CASES)
def test_a_forgery_is_told_in_one_line_and_nothing_of_it_is_run(run, canary, capsys, forgery, name):
    """A command that does not need what is forged may go on."""
    forge, said = FORGERIES[forgery]
    forge(run, canary)
    before = held(run)
    with suppress(Started) if name not in said else nullcontext():
        assert command(name, run) == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith("titan-rl: ") and said.get(name, "") in line and "\n" not in line, line
        assert held(run) == before
    assert not canary.exists()


def test_a_tokenizer_with_code_is_refused_wherever_one_is_loaded(run, canary):
    tokenizer_code(run, canary)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        read_tokenizer(run.base_model)
    assert not canary.exists()


def test_code_of_a_record_is_imported_from_a_folder_that_the_command_gives(run, canary, tmp_path):
    config(task__reward="honest:reward")(run, canary)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "honest.py").write_text("def reward(prompt, completion, row): return 1.0\n")
    assert command("replay", run) == 2
    for form in (str(folder), json.dumps([str(folder)])):
        with pytest.raises(Started):
            command("replay", run, "--run.plugin_path", form)


@pytest.mark.parametrize(("reference", "folder"), [("evil:f", "run"), ("run.evil:f", "."), ("run:f", ".")])
def test_code_in_the_run_directory_is_not_imported_whatever_the_command_gives(run, canary, capsys, reference, folder):
    config(task__reward=reference)(run, canary)
    assert command("replay", run, "--run.plugin_path", folder) == 2
    assert "whose code is not run" in capsys.readouterr().err and not canary.exists()


def test_replay_takes_no_other_setting(run, capsys):
    assert command("replay", run, "--training.steps", "3") == 2
    assert "only --run.plugin_path" in capsys.readouterr().err
    assert command("replay", run, "--run.plugin_path", "mine,yours") == 2
    assert 'give a list, ["mine,yours"] or ["mine", "yours"]' in capsys.readouterr().err


@pytest.mark.parametrize("name", ["replay", "resume"])
def test_no_process_is_started_with_the_run_directory_as_current_folder(run, name, monkeypatch, capsys):
    """Python would take its files for modules."""
    monkeypatch.chdir(run.root)
    assert command(name, run) == 2
    assert "go to another folder" in capsys.readouterr().err


@pytest.mark.parametrize("inside", [".", "base_model"])
def test_nor_for_an_evaluation_of_a_model_in_it(run, inside, monkeypatch, capsys):
    monkeypatch.chdir(run.root / inside)
    assert cli.main(["eval", str(run.base_model), "--config", "quickstart"]) == 2
    assert "go to another folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"garbage", b"0", b"-3", b"99999", b"3 4", b"\xff", b"9" * 10_000, b""])
def test_a_request_for_generators_that_is_none_is_told_and_not_asked_again(tmp_path, content):
    run_dir = RunDir(tmp_path)
    run_dir.scale_request.write_bytes(content)
    with pytest.raises(ConfigError, match="scale_request asked for"):
        take_scale_request(run_dir)
    assert take_scale_request(run_dir) is None


def test_a_request_for_generators(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.scale_request.write_text("3\n")
    assert take_scale_request(run_dir) == 3 and take_scale_request(run_dir) is None


def test_a_forged_ledger_moves_no_cursor(run, capsys):
    """Reasons, names of prompts and the flaws that quote them are text."""
    evil = "late\x1b]0;owned\x07\x1b[2J\x9b31m[/nothing]"
    with sqlite3.connect(run.ledger) as connection:
        for (name,) in connection.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            connection.execute(f"drop trigger {name}")
        connection.execute("update samples set state = 'discarded', reason = ? where sample = 0", [evil])
        connection.execute("update samples set prompt_id = ? || prompt_id where sample = 1", [evil])
    connection.close()
    assert command("ledger", run, "--steps") == 1
    out, err = capsys.readouterr()
    assert all(sign == "\n" or sign.isprintable() for sign in out + err) and r"\x1b" in out + err
