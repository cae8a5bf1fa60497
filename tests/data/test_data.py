"""Data of a run without a generator: the field's shapes, what is learned of them, their order, and mistakes by line."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import byte_pair_tokenizer
from row_tasks import write

from titan_rl.algorithms.batches.batching import data_batch
from titan_rl.algorithms.offline.dpo import DPO
from titan_rl.algorithms.offline.kto import KTO
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import DataConfig, TaskConfig
from titan_rl.controller.preflight.data_checks import label_notice
from titan_rl.data.rows.datasets import Dataset, make_dataset, read_files
from titan_rl.data.rows.examples import as_pairs, make_example, mismatched
from titan_rl.data.rows.row_files import read_raw_rows
from titan_rl.data.rows.row_shapes import read_row
from titan_rl.data.text.conversation import encode_conversation
from titan_rl.data.types import Layout, Provenance
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.synthetic_data import synthetic_rows
from titan_rl.models.builtin.tokenizer import character_tokenizer

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
FORGETFUL = CHAT.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:1] }}"
)
"""Earlier answers are rendered otherwise than the last."""
MARKED = (
    "{% for m in messages %}<s>{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ '>' if loop.last }}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}<eos>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def tokenizer_with(template: str):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def learned(tokenizer, tokens, provenance) -> str:
    return tokenizer.decode(tokens[provenance == Provenance.MODEL])


# what is learned


def test_of_a_conversation_only_what_the_assistant_wrote_is_learned():
    tokenizer = tokenizer_with(CHAT)
    conversation = [user("2+2="), assistant("4"), user("and 3+3="), assistant("six")]
    tokens, provenance = encode_conversation(tokenizer, [], conversation)
    whole = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert tokenizer.decode(tokens) == whole
    assert learned(tokenizer, tokens, provenance) == "4<eos>six<eos>"
    tokens, provenance = encode_conversation(tokenizer, conversation[:3], conversation[3:])
    assert learned(tokenizer, tokens, provenance) == "six<eos>"


def test_a_template_that_writes_beginnings_otherwise_is_cut_by_its_marks_or_refused():
    conversation = [user("a"), assistant("long"), user("b"), assistant("more")]
    with pytest.raises(ConfigError, match="leaves out 'content'"):
        encode_conversation(tokenizer_with(FORGETFUL), [], conversation)
    tokenizer = tokenizer_with(MARKED)
    assert learned(tokenizer, *encode_conversation(tokenizer, [], conversation)) == "long<eos>>more<eos>"
    forgetful = MARKED.replace("m['content'] }}<eos>{% endg", "m['content'][:1] }}<eos>{% endg")
    with pytest.raises(ConfigError, match="leaves out 'content'"):
        encode_conversation(tokenizer_with(forgetful), [], conversation)


def test_a_message_that_would_end_its_turn_is_refused():
    with pytest.raises(ConfigError, match="holds '<eos>'"):
        encode_conversation(tokenizer_with(CHAT), [], [user("hi<eos>"), assistant("x")])


@pytest.mark.parametrize(
    ("columns", "kind", "expected"),
    [
        ({"messages": [user("q"), assistant("yes")]}, "demonstrations", ["yes<eos>"]),
        ({"prompt": "q=", "completion": "yes"}, "demonstrations", ["yes<eos>"]),
        ({"prompt": [user("q")], "completion": [assistant("yes")]}, "demonstrations", ["yes<eos>"]),
        ({"text": "all of it"}, "demonstrations", ["ll of it<eos>"]),
        ({"prompt": "q=", "chosen": "yes", "rejected": "no"}, "pairs", ["yes<eos>", "no<eos>"]),
        ({"chosen": "say it: yes", "rejected": "say it: no"}, "pairs", [" yes<eos>", " no<eos>"]),
        (
            {"chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
            "pairs",
            ["yes<eos>", "no<eos>"],
        ),
        ({"prompt": "q=", "completion": "yes", "label": True}, "labels", ["yes<eos>"]),
    ],
)
def test_every_shape_of_the_field_is_read(columns, kind, expected):
    tokenizer = tokenizer_with(CHAT)
    example = make_example(read_row("here", columns, kind, "auto"), tokenizer, as_chat=False)
    assert [learned(tokenizer, sample.tokens, sample.provenance) for sample in example.samples] == expected


def test_a_token_that_would_reach_over_the_join_is_never_made():
    """Else the place at which the answer begins would be wrong, or the prompt would be another than sampling meets."""
    tokenizer, prompt, completion = byte_pair_tokenizer(), "us", "er\nagain: 4"
    alone = tokenizer.encode(prompt)
    assert tokenizer.encode(prompt + completion)[: len(alone)] != alone, "the tokenizer would merge them"
    row = read_row("here", {"prompt": prompt, "completion": completion}, "demonstrations", "auto")
    [sample] = make_example(row, tokenizer, as_chat=False).samples
    assert sample.tokens[: len(alone)].tolist() == alone
    assert learned(tokenizer, sample.tokens, sample.provenance) == f"{completion}<eos>"


def test_text_becomes_a_chat_if_it_is_asked_for():
    tokenizer = tokenizer_with(CHAT)
    asked = read_row("here", {"prompt": "q", "completion": "yes"}, "demonstrations", "auto")
    [sample] = make_example(asked, tokenizer, as_chat=True).samples
    assert tokenizer.decode(sample.tokens) == "<s>user:q<eos>\n<s>assistant:yes<eos>"


@pytest.mark.parametrize(("label", "value"), [(True, 1.0), (False, -1.0), (1, 1.0), (0, -1.0)])
def test_labels_and_margins_are_kept(label, value):
    assert read_row("here", {"prompt": "q", "completion": "a", "label": label}, "labels", "auto").value == value
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert read_row("here", pair | {"margin": 2}, "pairs", "auto").value == 2.0
    assert read_row("here", pair, "pairs", "auto").value == 0.0
    for margin in (10**400, float("nan"), True, "2"):
        with pytest.raises(ConfigError, match="here: 'margin' is .*: give a number"):
            read_row("here", pair | {"margin": margin}, "pairs", "auto")


# mistakes


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        (
            {"prompt": "a", "answer": "b"},
            "demonstrations",
            "it has 'prompt', 'answer'; name its own by data.columns, such as",
        ),
        ({"massages": []}, "demonstrations", "no 'messages', no 'prompt' and 'completion', and no 'text'; it has"),
        ({"prompt": "q"}, "demonstrations", "no 'messages'"),
        ({"text": "a", "completion": "b"}, "demonstrations", "'completion' and 'text': set data.format"),
        ({"messages": [user("q")]}, "demonstrations", "the last of 'messages' is not the assistant's"),
        ({"messages": [assistant("a")]}, "demonstrations", "'messages' begins with the assistant's"),
        ({"prompt": "q", "completion": [assistant("a")]}, "demonstrations", "give both as text, or both as messages"),
        ({"prompt": "q", "chosen": "a"}, "pairs", "no 'rejected'; it has"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "pairs", "are the same"),
        ({"chosen": "abc", "rejected": "xyz"}, "pairs", "do not begin alike"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"}, "pairs", "'margin' is \"big\""),
        ({"prompt": "q", "completion": "a", "label": "good"}, "labels", "'label' is \"good\": give true"),
        ({"prompt": "q", "completion": " ", "label": True}, "labels", "'completion' is empty"),
        ({"prompt": "q", "completion": 7}, "demonstrations", "'completion' is 7: give text"),
        ({"prompt": "q", "completion": "ä"}, "demonstrations", "the model's tokenizer does not know 'ä'"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_is_named_by_its_line(tmp_path, row, kind, words):
    good = {
        "demonstrations": {"prompt": "good", "completion": "a"},
        "pairs": {"prompt": "good", "chosen": "a", "rejected": "b"},
        "labels": {"prompt": "good", "completion": "a", "label": True},
    }[kind]
    write(tmp_path, [good, good | {"prompt": "better"}, row, good], "data.jsonl")
    with pytest.raises(ConfigError) as caught:
        dataset_of(tmp_path, kind)
    [line] = str(caught.value).splitlines()
    assert line.startswith("data.jsonl line 3: ") and words in line


def dataset_of(folder, kind: str, row_tokens: int = 64, **settings) -> Dataset:
    data = DataConfig(**{"file": "data.jsonl"} | settings)
    limits = dict(row_tokens=row_tokens, sample_tokens=row_tokens, max_held_out=1000)
    return make_dataset(read_files(data, kind, [str(folder)]), data, character_tokenizer(), **limits)


def test_rows_that_are_too_long_are_refused_or_counted_and_never_cut(tmp_path):
    rows = [{"prompt": f"q{n}", "completion": "a" * (100 if n == 7 else 5)} for n in range(40)]
    write(tmp_path, rows, "data.jsonl")
    with pytest.raises(ConfigError, match=r"data.jsonl line 8: 102 tokens do not fit .* data.too_long = 'skip'"):
        dataset_of(tmp_path, "demonstrations")
    dataset = dataset_of(tmp_path, "demonstrations", too_long="skip")
    assert len(dataset.too_long) == 1 and len(dataset.train) + len(dataset.held_out) == 39
    assert {len(example.samples[0].tokens) for example in (*dataset.train, *dataset.held_out)} <= {8, 9}
    with pytest.raises(ConfigError, match="all .* rows are longer"):
        dataset_of(tmp_path, "demonstrations", row_tokens=4, too_long="skip")


def test_both_answers_of_a_pair_must_fit_into_one_row(tmp_path):
    rows = [{"prompt": f"q{n:02d}", "chosen": "a" * 20, "rejected": "b" * 20} for n in range(10)]
    write(tmp_path, rows, "data.jsonl")
    assert dataset_of(tmp_path, "pairs", row_tokens=43).train
    with pytest.raises(ConfigError, match="43 tokens do not fit .*both answers of a pair"):
        dataset_of(tmp_path, "pairs", row_tokens=42)


def test_a_format_that_the_algorithm_cannot_learn_from_is_refused(tmp_path):
    write(tmp_path, [{"text": "a"}], "data.jsonl")
    with pytest.raises(ConfigError, match="data.format = 'text': the algorithm trains on pairs"):
        dataset_of(tmp_path, "pairs", format="text")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"algorithm": {"name": "dpo"}}, "learns from pairs that others wrote: set data.file"),
        ({"algorithm": {"name": "sft"}}, "set [sft] steps for supervised steps before it, or set data.file"),
        ({"data": {"file": "task"}}, "learns from rollouts: leave out data.file, or take one of dpo, kto"),
        ({"algorithm": {"name": "sft"}, "data": {"file": "x.jsonl"}}, "there is no file"),
        ({"algorithm": {"name": "sft"}, "data": {"file": "task"}, "sft": {"steps": 3}}, "set training.steps instead"),
        ({"algorithm": {"name": "dpo", "updates_per_batch": 2}, "data": {"file": "task"}}, "data.examples_per_step"),
        ({"algorithm": {"name": "kto"}, "data": {"file": "task", "examples_per_step": 1}}, "answer: set 2 or more"),
        ({"algorithm": {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "data": {"file": "task"}}, "no meaning"),
    ],
)  # fmt: skip
def test_mistakes_in_the_settings_are_told_before_anything_starts(overrides, words):
    from titan_rl.controller.preflight.checks import check

    with pytest.raises(ConfigError) as caught:
        check(load_config(None, overrides))
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_answers_to_one_question_alone_are_no_labels_to_learn_from(tmp_path):
    """KTO's z would be made of the samples' own log-ratios."""
    from titan_rl.controller.preflight.checks import check

    write(tmp_path, [{"prompt": "1+1=", "completion": str(n), "label": n == 2} for n in range(9)], "data.jsonl")
    write(tmp_path, [{"prompt": "1+2=", "completion": "3", "label": True}], "held_out.jsonl")
    data = {"file": "data.jsonl", "held_out_file": "held_out.jsonl"}
    config = {"algorithm": {"name": "kto"}, "data": data, "run": {"plugin_path": [str(tmp_path)]}}
    with pytest.raises(ConfigError, match="all rows to train on ask the same, .* add such rows"):
        check(load_config(None, config))


@pytest.mark.parametrize(("label", "kind"), [(True, "desirable"), (False, "undesirable")])
def test_labels_of_one_kind_alone_are_told(tmp_path, label, kind):
    rows = [{"prompt": f"{n}+1=", "completion": "3", "label": label} for n in range(9)]

    def notice(rows) -> list[str]:
        write(tmp_path, rows, "data.jsonl")
        settings = DataConfig(file="data.jsonl")
        limits = dict(row_tokens=64, sample_tokens=64, max_held_out=1)
        read = read_files(settings, "labels", [str(tmp_path)])
        return label_notice(KTO(), make_dataset(read, settings, character_tokenizer(), **limits))

    assert notice(rows) == [f"all rows to train on are {kind}: nothing says what is not"]
    assert notice([row | {"label": n % 2 == 0} for n, row in enumerate(rows)]) == []


# files


def test_training_rows_that_a_held_out_row_asks_too_are_counted(tmp_path):
    write(tmp_path, [{"prompt": f"{n}+1=", "completion": "3"} for n in range(9)], "data.jsonl")
    write(tmp_path, [{"prompt": f" {n}+1= ", "completion": "3"} for n in range(7, 12)], "held_out.jsonl")
    settings = DataConfig(file="data.jsonl", held_out_file="held_out.jsonl")
    rows = read_files(settings, "demonstrations", [str(tmp_path)])
    dataset = make_dataset(rows, settings, character_tokenizer(), row_tokens=64, sample_tokens=64, max_held_out=9)
    assert (len(dataset.train), len(dataset.held_out), dataset.num_overlapping) == (7, 5, 2)


def test_parquet_and_directories_of_datasets_are_read_like_json_lines(tmp_path):
    import datasets

    rows = [{"prompt": f"q{n}", "completion": "a", "label": bool(n % 2)} for n in range(9)]
    write(tmp_path, rows, "data.jsonl")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    found = [
        [columns for _, columns in read_raw_rows(tmp_path / name)] for name in ("data.jsonl", "data.parquet", "saved")
    ]
    assert found[0] == found[1] == found[2] == rows
    assert next(iter(read_raw_rows(tmp_path / "saved")))[0] == "saved row 1"
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    state["_data_files"] = [{"filename": "../data.parquet"}]
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="names files outside of it"):
        list(read_raw_rows(tmp_path / "saved"))
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(tmp_path / "several")
    with pytest.raises(ConfigError, match=r"several datasets: name one of them \(train\), as in"):
        list(read_raw_rows(tmp_path / "several"))


# the order


def places(dataset: Dataset, first: int, count: int, seed: int = 1) -> list[str]:
    return [example.place for example in dataset.draw(first, count, seed)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("order")
    write(folder, [{"prompt": f"q{n}", "completion": "a"} for n in range(60)], "data.jsonl")
    return dataset_of(folder, "demonstrations")


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(dataset):
    size = len(dataset.train)
    epochs = [tuple(places(dataset, epoch * size, size)) for epoch in range(4)]
    assert len(set(epochs)) == 4 and all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert tuple(places(dataset, 0, size, seed=2)) != epochs[0]
    assert not {example.place for example in dataset.held_out} & set(epochs[0])


@pytest.mark.parametrize("batch", [1, 7, 16, 100])
def test_a_run_that_goes_on_in_mid_epoch_repeats_and_leaves_out_nothing(dataset, batch):
    """Wherever it stopped, in the first epoch or a later one: the rest comes as it would have come."""
    whole = places(dataset, 0, 40 * batch)
    for stop in (1, 3, 9, 25):
        again = [place for step in range(stop, 40) for place in places(dataset, step * batch, batch)]
        assert whole[: stop * batch] + again == whole


# pairs and labels


def pairs(count: int) -> list:
    tokenizer = character_tokenizer()
    rows = [{"prompt": f"{n}=", "chosen": "1" * (n % 5 + 1), "rejected": "20" * (n % 3 + 1)} for n in range(count)]
    return [
        make_example(read_row(f"row {n}", row, "pairs", "auto"), tokenizer, as_chat=False) for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("share_prefix", [True, False])
def test_a_pair_stands_in_one_row_the_chosen_one_first(share_prefix):
    config = load_config(None, {"rollout": {"share_prefix": share_prefix}})
    batch = data_batch(pairs(23), DPO(), config, Layout(2, 24))
    rows = [row for rows in batch.rows for row in rows]
    owners = [row.owners for row in rows if row.owners]
    seen = [name for row in owners for name, _, _ in row]
    assert sorted(seen) == sorted(f"row {n}" for n in range(23) for _ in range(2))
    for row in owners:
        assert [sample for _, sample, _ in row] == [0, 1] * (len(row) // 2)
        assert all(row[n][0] == row[n + 1][0] for n in range(0, len(row), 2))
    weights = np.concatenate([row.weight_S for row in rows])
    assert weights.sum() == pytest.approx(1.0, abs=1e-5) and batch.has_signal


def test_made_rows_tell_right_from_wrong_and_hold_nothing_out_twice():
    task = make_task(TaskConfig(name="gcd", options={"max_value": 60}))
    train, held_out = synthetic_rows(task, "pairs", seed=1, count=50, num_held_out=20)
    for asked in (*train, *held_out):
        right, wrong = asked.answers
        assert right != wrong
    assert not {asked.text for asked in train} & {asked.text for asked in held_out}
    labelled, _ = synthetic_rows(task, "labels", seed=1, count=50, num_held_out=20)
    assert [asked.value for asked in labelled] == [1.0, -1.0] * 50
    assert [asked.answers[0] for asked in labelled] == [answer for asked in train for answer in asked.answers]


def test_mismatched_answers_go_round_and_labelled_ones_are_paired_by_their_question():
    tokenizer = character_tokenizer()
    rows = [{"prompt": f"q{n // 2}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(6)]
    rows.append({"prompt": "alone", "completion": "x", "label": True})
    examples = [make_example(read_row("r", row, "labels", "auto"), tokenizer, as_chat=False) for row in rows]

    def mixed(these, others=(), row_tokens=64) -> list[str]:
        return [tokenizer.decode(e.samples[0].tokens) for e in mismatched(these, list(others), row_tokens)]

    assert mixed(examples[1:6:2]) == ["q0a5<eos>", "q1a1<eos>", "q2a3<eos>"]
    # never with an answer to the question itself, which would be its own z
    assert mixed(examples[:3]) == ["q0a2<eos>", "q0a2<eos>", "q1a1<eos>"]
    # a step that asks one thing only, such as what is left of one after rows were left out
    assert mixed(examples[:1], examples) == ["q0a2<eos>"] and mixed(examples[:2], examples[:2]) == []
    assert mixed(examples[-1:], examples, row_tokens=7) == ["alonea0<eos>"] and not mixed(examples[-1:], examples, 6)
    both = [[tokenizer.decode(s.tokens) for s in pair.samples] for pair in as_pairs(examples, 64)]
    assert both == [["q0a0<eos>", "q0a1<eos>"], ["q1a2<eos>", "q1a3<eos>"], ["q2a4<eos>", "q2a5<eos>"]]
