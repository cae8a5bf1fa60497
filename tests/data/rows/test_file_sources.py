"""Where rows come from: globs, weighted lists, directories of ``datasets``, and the Hub with and without network."""

import json
import shutil
import socket
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from public_rows import gsm8k
from row_tasks import mistake, rows_task, sums, write

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config, DataConfig, TaskConfig
from titan_rl.data.rows.datasets import make_dataset, read_files
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.data.rows.splits import RowOrder, draws_of
from titan_rl.data.storage.hub_dataset import fetch_split, parse_hub_name
from titan_rl.data.storage.hub_splits import choose_files
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.rollout.prompt_checks import training_prompts
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.sources import check_sources, find_sources, write_sources

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# GSM8K
"""
FILES = [
    "main/test-00000-of-00001.parquet",
    "main/train-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
]


def names(setting: str, files, folder: Path) -> list[str]:
    found = locate_sources(setting, files, [str(folder)])
    return [path.name for source in found for path in source.paths]


# paths


def test_a_glob_names_its_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        write(tmp_path, [{"question": f"{name} {n}", "answer": n} for n in range(3)], name)
    assert names("data.file", "*.jsonl", tmp_path) == ["a.jsonl", "b.jsonl"]
    task = rows_task(tmp_path, file="*.jsonl")
    places = {prompt.entry["place"] for prompt in [*training_prompts(task, 1), *held_out_prompts(task, 9)]}
    assert places == {f"{name} line {n}" for name in ("a.jsonl", "b.jsonl") for n in (1, 2, 3)}


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, [{"question": f"{folder} {n}", "answer": n} for n in range(3)], "a.jsonl")
    task = rows_task(tmp_path, file="*/a.jsonl")
    assert {prompt.entry["place"].split()[0] for prompt in training_prompts(task, 1)} == {"x/a.jsonl", "y/a.jsonl"}


def test_files_of_one_name_and_folder_are_told_apart_by_more(tmp_path):
    for folder in ("x/train", "y/train", "z"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, [{"question": f"{folder}{n}", "answer": n} for n in range(3)], "0.jsonl")
    write(tmp_path, sums(2), "one.jsonl")
    task = rows_task(tmp_path, file=["*/train/0.jsonl", "z/0.jsonl", "one.jsonl"])
    places = {prompt.entry["place"].split()[0] for prompt in training_prompts(task, 1)}
    assert places == {"x/train/0.jsonl", "y/train/0.jsonl", "z/0.jsonl", "one.jsonl"}


def test_a_glob_is_looked_for_in_a_folder_of_any_name(tmp_path):
    (folder := tmp_path / "exp[1]").mkdir()
    write(folder, sums(4), "a.jsonl")
    assert names("data.file", "*.jsonl", folder) == names("data.file", str(tmp_path / "*" / "a.jsonl"), folder)


@pytest.mark.parametrize("file", [["*.jsonl", "b.jsonl"], ["b.jsonl", "./b.jsonl"], ["a.jsonl", "link.jsonl"]])
def test_a_file_that_is_named_twice_is_refused(tmp_path, file):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, sums(4), name)
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    if file[0] == "*.jsonl":
        (tmp_path / "link.jsonl").unlink()
    line = mistake(tmp_path, file=file)
    assert line.startswith(f"task.options.file: {file[0]!r} and {file[1]!r} both name ") and "name it once" in line


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("data/*.jsonl", "no file matches"),
        ("*.txt", "end the glob in one of .parquet"),
        ("questions.jsnl", "the name must end in"),
        ([{"path": "a.jsonl", "wieght": 2}], "give a name, or a list of names and of {"),
        ([{"path": "a.jsonl", "weight": 0}], "weight = 0: give a number above 0"),
        ([], "name at least one"),
        (7, "give a name"),
        ("saved:tarin", "has no split 'tarin': did you mean 'train'?"),
        ("saved", "several datasets: name one of them (test, train), as in saved:train"),
    ],
)
def test_a_file_setting_that_names_nothing_is_one_line(tmp_path, file, words):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir()
    line = mistake(tmp_path, file=file)
    assert line.startswith("task.options.file = ") or str(tmp_path) in line
    assert words.replace(".parquet", ".") in line or words in line, line


def test_a_split_of_a_saved_dictionary_is_read(tmp_path):
    rows = {split: datasets.Dataset.from_list(sums(count)) for split, count in (("train", 9), ("test", 3))}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    assert sum(rows_task(tmp_path, file="saved:train").size) == 9
    rows = read_files(DataConfig(file="saved:test"), "demonstrations", [str(tmp_path)])
    read = sorted((row.prompt, *row.answers) for row in (*rows.train, *rows.held_out))
    assert read == [("0+0=", "0"), ("1+1=", "2"), ("2+2=", "4")]


# weights


@pytest.mark.parametrize(
    ("weights", "draws"), [((2.0, 1.0), (2, 1)), ((0.7, 0.3), (7, 3)), ((1, 1e-6), (1000, 1)), ((3.0,), (1,))]
)
def test_weights_become_draws_of_a_round(weights, draws):
    assert draws_of(weights) == draws


def test_weighted_sources_are_drawn_by_their_shares_and_each_epoch_by_epoch():
    order = RowOrder(sizes=(5, 20), draws=(3, 1))
    places = order.places(0, 400, "train", 1)
    assert Counter(place < 5 for place in places) == {True: 300, False: 100}
    for source, size in ((range(5), 5), (range(5, 25), 20)):
        drawn = [place for place in places if place in source]
        epochs = [drawn[start : start + size] for start in range(0, 100, size)]
        assert all(sorted(epoch) == list(source) for epoch in epochs) and epochs[0] != epochs[1]
    assert [order.places(n, 1, "train", 1)[0] for n in range(400)] == places, "a resumed run draws on"
    assert order.places(0, 400, "train", 2) != places


def test_a_weighted_file_setting_reaches_prompts_and_data(tmp_path):
    write(tmp_path, [{"question": f"a{n}", "answer": n} for n in range(8)], "a.jsonl")
    write(tmp_path, [{"question": f"b{n}", "answer": n} for n in range(80)], "b.jsonl")
    file = [{"path": "a.jsonl", "weight": 3.0}, "b.jsonl"]
    task = rows_task(tmp_path, file=file)
    drawn = [prompt.text[0] for prompt in islice(PromptStream(task, 1), 400)]
    assert Counter(drawn) == {"a": 300, "b": 100}
    every = [prompt.text for prompt in training_prompts(task, 1)]
    assert len(set(every)) == len(every) == task.size.train, "all rows are checked, however seldom they are drawn"
    data = DataConfig(file=file)
    rows = read_files(data, "demonstrations", [str(tmp_path)])
    dataset = make_dataset(rows, data, character_tokenizer(), row_tokens=64, sample_tokens=64, max_held_out=9)
    assert Counter(example.text[0] for example in dataset.draw(0, 400, seed=1)) == {"a": 300, "b": 100}


def test_a_weighted_source_without_a_row_to_train_on_is_one_line(tmp_path):
    write(tmp_path, sums(6), "a.jsonl")
    write(tmp_path, sums(2), "b.jsonl")
    task = rows_task(tmp_path, file=[{"path": "a.jsonl", "weight": 1}, "b.jsonl"], held_out_file="b.jsonl")
    with pytest.raises(ConfigError, match="no row of b.jsonl is left to train on"):
        next(PromptStream(task, 1))


def test_weights_of_held_out_rows_are_refused(tmp_path):
    write(tmp_path, sums(6))
    line = mistake(tmp_path, held_out_file=[{"path": "questions.jsonl", "weight": 2}])
    assert line.startswith("task.options.held_out_file: ") and "weights have no effect" in line


# the Hub


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("main", "train"), FILES[1:2]),
        (("main", "test"), FILES[:1]),
        (("socratic",), FILES[2:]),
        (("main",), "it has several splits: name one of test, train, as in organization/name:main:split"),
        ((), "it has several configs: name one of main, socratic"),
        (("main", "dev"), "it has no split 'dev': name one of test, train"),
    ],
)
@pytest.mark.parametrize("has_card", [True, False])
def test_a_split_is_found_by_the_card_and_without_it_by_names(words, expected, has_card):
    import yaml

    card = yaml.safe_load(CARD.split("---")[1]) if has_card else {}
    if isinstance(expected, list):
        assert choose_files([*FILES, "README.md"], card, words) == expected
        return
    with pytest.raises(ValueError) as caught:
        choose_files(FILES, card, words)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("files", "words", "expected"),
    [
        (["train.jsonl", "test.jsonl"], ("train",), ["train.jsonl"]),
        (["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"], ("train_sft",), None),
        (["en/train/0000.parquet", "en/train/0001.parquet", "fr/train/0000.parquet"], ("en", "train"), None),
        (["all.parquet", ".git/x.json", "dataset_infos.json"], (), ["all.parquet"]),
        (["a-00000-of-00002.parquet"], (), "1 of the 2 files a-* are there"),
        (["gsm8k.py", "x.csv"], (), "no Parquet or JSON lines files (.csv, .py): where the Hub has converted"),
    ],
)
def test_splits_are_found_by_folders_and_file_names(files, words, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError) as caught:
            choose_files(files, {}, words)
        assert expected in str(caught.value)
    else:
        prefix = files[0].rpartition("/")[0]
        assert choose_files(files, {}, words) == (
            expected or [f for f in files if f.startswith(prefix) and "test" not in f]
        )


def card_of(*data_files, **entry) -> dict:
    """Of one config; ``data_files``: pairs of a split and its patterns."""
    tables = [{"split": split, "path": path} for split, path in data_files]
    return {"configs": [{"config_name": "default"} | ({"data_files": tables} if tables else {}) | entry]}


@pytest.mark.parametrize(
    ("files", "card", "words", "expected"),
    [
        # what the card declares counts alone
        (
            ["data/train.csv", "results.jsonl"],
            card_of(("train", "data/train.csv")),
            "train",
            "data/train.csv is neither",
        ),
        (["results.jsonl"], card_of(("train", "data/train.csv")), "train", "no file is there for 'data/train.csv'"),
        (["a.parquet", "b.csv"], card_of(("train", ["a.parquet", "b.csv"])), "train", "b.csv is neither"),
        (["train/a.jsonl", "train/b.jsonl.gz"], card_of(("train", "train/*")), "train", "b.jsonl.gz is neither"),
        (["a.jsonl"], card_of(("train", ["a.jsonl", "b.jsonl"])), "train", "no file is there for 'b.jsonl'"),
        (["a.jsonl", "b.parquet"], card_of(("train", "*")), "train", "several formats (.jsonl, .parquet)"),
        (["a.jsonl", "b.jsonl"], card_of(("train", "a.jsonl"), ("train", "b.jsonl")), "train", "'train' twice"),
        (["a.jsonl"], {"configs": card_of()["configs"] * 2}, "train", "two configs 'default'"),
        (["a.jsonl"], {"configs": "a.jsonl"}, "train", "no list of tables"),
        (["a.jsonl"], card_of(("train", ["a.jsonl", 3])), "train", "no names of files"),
        (["a.jsonl"], card_of(data_dir="en"), "train", "config 'default' has no Parquet or JSON lines"),
        (["a.jsonl"], card_of(("train", ["**/"] * 2000 + ["a.jsonl"])), "train", "longer than 4000 characters"),
        (["en/a/train.parquet", "en/b/train.parquet"], card_of(data_dir="en"), "train", None),
        (["README.md", ".x/a.jsonl", "x/y/a.jsonl", "b.jsonl"], card_of(("train", "**/[ab].jsonl")), "train", [3, 2]),
        (["dev/train-1.jsonl", "dev/test.jsonl"], card_of(data_dir="dev"), "train", [0]),
        # without one a name must tell which rows are meant
        (["train.jsonl", "train.parquet"], {}, "train", "several formats (.jsonl, .parquet)"),
        (["train.jsonl", "extra/train.jsonl"], {}, "train", "name one of default, extra"),
        (["train.jsonl", "extra/train.jsonl"], {}, "default:train", [0]),
        (["train-1.jsonl", "train-2.jsonl.gz"], {}, "train", "train-2.jsonl.gz is neither"),
        (["train.jsonl", "results.jsonl"], {}, "train", [0]),
        (["partial-train/0000.parquet"], {}, "train", "no split 'train': name one of partial-train"),
        (["partial-train/0000.parquet"], {}, "", "name one of partial-train"),
        # shards
        (["t-00000-of-00001.jsonl", "t-00000-of-00002.jsonl", "t-00001-of-00002.jsonl"], {}, "t", "are there twice"),
        (["t-00000-of-00002-ab.jsonl", "t-00000-of-00002-cd.jsonl"], {}, "t", "are there twice"),
        (["train-00000-of-00001.jsonl", "train.jsonl"], {}, "train", "other files beside train-*"),
    ],
)
def test_a_split_is_its_own_files_or_refused(files, card, words, expected):
    """``expected``: numbers of the files, in their order; None: all."""
    if isinstance(expected, str):
        with pytest.raises(ValueError) as caught:
            choose_files(files, card, words.split(":"))
        assert expected in str(caught.value) and "\n" not in str(caught.value)
    else:
        wanted = files if expected is None else [files[number] for number in expected]
        assert choose_files(files, card, words.split(":")) == wanted


def test_patterns_of_a_card_do_not_backtrack():
    card = card_of(("train", "**/" * 40 + "*a" * 40 + "b"))
    started = time.monotonic()
    with pytest.raises(ValueError, match="no file is there"):
        choose_files(["/".join("a" * 60) + "/" + "a" * 200 + ".jsonl"], card, ("train",))
    assert time.monotonic() - started < 5


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache that ``hf download openai/gsm8k --repo-type dataset`` has filled, and no network."""
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    snapshot = repository / "snapshots" / COMMIT
    for file in FILES:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([gsm8k(n) for n in range(5 if "test" in file else 20)])
        pq.write_table(table, snapshot / file)
    (snapshot / "README.md").write_text(CARD)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch_split.cache_clear()
    yield snapshot
    fetch_split.cache_clear()


def test_without_network_a_snapshot_in_the_cache_is_read(cache, tmp_path):
    task = rows_task(tmp_path, file="openai/gsm8k:main:train", held_out_file=f"openai/gsm8k:main:test@{COMMIT}")
    assert task.size == (15, 5) and next(PromptStream(task, 1)).answer.isdecimal()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("openai/gsm8k:main", "it has several splits: name one of test, train"),
        ("openai/gsm9k:main:train", "run `hf download openai/gsm9k --repo-type dataset` and copy"),
        ("openai/gsm8k:main:train@v2", "run `hf download openai/gsm8k --repo-type dataset --revision v2`"),
    ],
)
def test_what_the_cache_has_not_is_one_line_with_the_command(cache, tmp_path, file, words):
    line = mistake(tmp_path, file=file)
    assert line.startswith(f"task.options.file = {file!r}: ") and words in line


def test_a_snapshot_of_which_shards_are_missing_is_one_line(cache, tmp_path):
    (cache / FILES[1]).rename(cache / FILES[1].replace("of-00001", "of-00003"))
    line = mistake(tmp_path, file="openai/gsm8k:main:train")
    assert "1 of the 3 files main/train-* are there" in line and "`hf download openai/gsm8k" in line


def cached_alone(cache: Path, name: str, files: list[str], card: str = "") -> None:
    """Some files of another repository, in the same cache."""
    snapshot = cache.parents[2] / f"datasets--{name.replace('/', '--')}" / "snapshots" / COMMIT
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_text('{"question": "1+1=", "answer": "2"}\n')
    if card:
        (snapshot / "README.md").write_text(card)
    (snapshot.parents[1] / "refs").mkdir(exist_ok=True)
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)


GLOB_CARD = '---\nconfigs: [{data_files: [{split: train, path: "data/*"}]}]\n---\n'
CACHED_IN_PART = [
    (["default/train/0000.jsonl"], "", "org/x:default:train", "0000.jsonl may be one of several files"),
    (["train_a.jsonl"], "", "org/x:default:train", "train_a.jsonl may be one of several files"),
    (["data/a.jsonl"], GLOB_CARD, "org/x:train", "data/a.jsonl may be one of several files"),
    (["test.jsonl"], "", "org/x", "it may have more than this split: name one of test"),
    (["extra/train.jsonl"], "", "org/x:train", "it has no config 'train': name one of extra"),
    (["main/test-00000-of-00001.parquet"], CARD, "org/x:main", "several splits: name one of test, train"),
    (["main/test-00000-of-00001.parquet"], CARD, "org/x:main:train", "no file is there for 'main/train-*'"),
    (["a.jsonl"], "---\nconfigs: [\n---\n", "org/x:train", "the front matter of its README.md is no YAML"),
]


@pytest.mark.parametrize(("files", "card", "name", "words"), CACHED_IN_PART)
def test_what_a_cache_has_in_part_is_not_taken_for_all(cache, tmp_path, files, card, name, words):
    cached_alone(cache, "org/x", files, card)
    line = mistake(tmp_path, file=name)
    assert "the Hub cannot be reached" in line and words in line


def test_a_cache_that_has_all_files_that_the_card_names_is_read(cache, tmp_path):
    cached_alone(cache, "org/x", ["data/a.jsonl"], GLOB_CARD.replace("*", "a.jsonl"))
    assert names("data.file", "org/x:train", tmp_path) == ["a.jsonl"]


def test_a_listing_that_a_download_kept_tells_whether_a_cache_has_all(cache, tmp_path):
    cached_alone(cache, "org/x", files := ["default/train/0000.jsonl", "default/train/0001.jsonl"])
    kept = cache.parents[2] / "datasets--org--x" / "trees" / f"{COMMIT}.json"
    kept.parent.mkdir()
    entry = {"size": 1, "blob_id": "a"}
    kept.write_text(json.dumps({"format_version": 1, "files": dict.fromkeys(files, entry)}))
    assert names("data.file", "org/x", tmp_path) == ["0000.jsonl", "0001.jsonl"]
    fetch_split.cache_clear()
    (cache.parents[2] / "datasets--org--x" / "snapshots" / COMMIT / files[1]).unlink()
    assert f"1 of the 2 files of the split are missing, such as {files[1]}" in mistake(tmp_path, file="org/x")


@pytest.mark.waits
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_hub_that_does_not_answer_is_given_up_within_seconds(cache, tmp_path, monkeypatch, is_silent):
    """``dataset_info`` itself is asked; then the cache serves."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and says nothing
        port = server.getsockname()[1] if is_silent else 9
        monkeypatch.setattr("huggingface_hub.HfApi.__init__", _at(f"http://127.0.0.1:{port}"))
        started = time.monotonic()
        assert sum(rows_task(tmp_path, file="openai/gsm8k:main:train").size) == 20
    assert time.monotonic() - started < 30


def _at(endpoint: str):
    def init(self, **_):
        self.endpoint, self.token, self.headers = endpoint, False, None
        self.library_name = self.library_version = self.user_agent = None

    return init


def test_with_network_only_the_files_of_the_split_are_fetched(cache, tmp_path, monkeypatch):
    """By the real client's two calls: a listing, and a file of a commit."""
    from types import SimpleNamespace

    fetched = []

    def download(repository, file, *, repo_type, revision):
        assert (repository, repo_type, revision) == ("openai/gsm8k", "dataset", COMMIT)
        fetched.append(file)
        return str(cache / file)

    siblings = [SimpleNamespace(rfilename=file) for file in (*FILES, "README.md", "gsm8k.py")]
    info = SimpleNamespace(sha=COMMIT, siblings=siblings)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, revision, timeout: info)
    kept = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, **_: kept.append(repository))
    [source] = locate_sources("data.file", "openai/gsm8k:main:train", [str(tmp_path)])
    assert fetched == ["README.md", FILES[1]] and source.commit == COMMIT
    assert kept == ["openai/gsm8k"], "its listing, for when there is no network"


@pytest.mark.parametrize("name", ["a/b.jsonl/c/d", "../a", "a b/c", "a/b:c:d:e", "gsm8k", "a/..b"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(name):
    assert parse_hub_name(name) is None


# what a run records


def recorded(tmp_path, **data) -> Config:
    return load_config(None, {"run": {"plugin_path": [str(tmp_path)]}, "algorithm": {"name": "sft"}, "data": data})


def test_a_run_is_resumed_with_its_own_files_and_weights_alone(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, sums(4), name)
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    weighted = [{"path": "a.jsonl", "weight": 2.0}, "b.jsonl"]
    write_sources(run, find_sources(recorded(tmp_path, file=weighted)))
    check_sources(run, find_sources(recorded(tmp_path, file=weighted)))
    with pytest.raises(ConfigError, match=r"data.file is not what .* \(changed: weights\)"):
        check_sources(run, find_sources(recorded(tmp_path, file=["a.jsonl", "b.jsonl"])))
    write(tmp_path, sums(5), "b.jsonl")
    with pytest.raises(ConfigError, match="changed: file 2"):
        check_sources(run, find_sources(recorded(tmp_path, file=weighted)))


def test_another_commit_of_the_hub_is_refused_if_its_rows_are_others(cache, tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    task = TaskConfig(name="jsonl", options={"file": "openai/gsm8k:main:train"})
    config = Config(task=task)
    write_sources(run, sources := find_sources(config))
    assert json.loads(run.sources.read_text())["task.options.file"]["commits"] == f"openai/gsm8k:main:train@{COMMIT}"
    newer = cache.with_name("0" * 40)
    shutil.copytree(cache, newer)
    (cache.parent.parent / "refs" / "main").write_text("0" * 40)
    fetch_split.cache_clear()
    check_sources(run, find_sources(config))  # the same rows
    pq.write_table(pa.Table.from_pylist([gsm8k(1)]), newer / FILES[1])
    with pytest.raises(ConfigError, match=f"give 'openai/gsm8k:main:train@{COMMIT}', or leave --resume out"):
        check_sources(run, find_sources(config))
    pinned = TaskConfig(name="jsonl", options={"file": f"openai/gsm8k:main:train@{COMMIT}"})
    assert find_sources(Config(task=pinned))["task.options.file"]["rows"] == sources["task.options.file"]["rows"]
