"""Tasks from a data file: every mistake in one line with its place, and streams that never meet what is held out."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import TaskConfig
from titan_rl.environments.base import make_task
from titan_rl.environments.checks import check_demonstrations, check_known, training_prompts
from titan_rl.environments.episode import demonstrate, encode_prompt
from titan_rl.environments.prompts import PromptStream, held_out_prompts, sft_stream
from titan_rl.environments.rows import key
from titan_rl.models.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


def sums(count: int) -> list[dict]:
    return [{"question": f"{n}+{n}=", "answer": 2 * n} for n in range(count)]


def write(folder: Path, rows: list, name: str = "questions.jsonl") -> Path:
    (folder / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return folder / name


def rows_task(folder: Path, *, style: str = "compact", system_prompt: str = "", reward: str = "", **options):
    options = {"file": "questions.jsonl"} | options
    task = TaskConfig(name="jsonl", style=style, system_prompt=system_prompt, reward=reward, options=options)
    return make_task(task, [str(folder)])


def mistake(folder: Path, **settings) -> str:
    """The one line of the ConfigError that the settings or the file earn."""
    with pytest.raises(ConfigError) as caught:
        held_out_prompts(rows_task(folder, **settings), 1)
    [line] = str(caught.value).splitlines()
    return line


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


# reading


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_rows_become_prompts_with_answers(tmp_path, column):
    write(tmp_path, [{column: f"q{n}", "answer": n, "level": n % 3} for n in range(10)])
    task = rows_task(tmp_path)
    prompts = [*training_prompts(task, 1), *held_out_prompts(task, 100)]
    assert sorted((p.text, p.answer, task.messages(p)) for p in prompts) == [
        (f"q{n}", str(n), f"q{n}") for n in range(10)
    ]
    first = prompts[0]
    number = int(first.answer)
    assert task.row(first) == {column: f"q{number}", "answer": number, "level": number % 3}
    assert first.entry["place"] == f"questions.jsonl line {number + 1}"
    assert task.score(first, ["0", f" {number}\n"]) == {"exact": 1.0} and task.score(first, [f"{number}."]) == {
        "exact": 0.0
    }


def test_parquet_is_read_like_json_lines(tmp_path):
    rows = [{"question": f"q{n}", "answer": n, "tags": ["a", "b"], "more": {"x": None}} for n in range(20)]
    write(tmp_path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "questions.parquet")
    lines, table = rows_task(tmp_path), rows_task(tmp_path, file="questions.parquet")
    for ours, theirs in zip(training_prompts(lines, 1), training_prompts(table, 1), strict=True):
        assert (ours.id, ours.text, ours.answer, lines.row(ours)) == (
            theirs.id,
            theirs.text,
            theirs.answer,
            table.row(theirs),
        )
        json.dumps(theirs.entry)


def test_what_json_cannot_hold_becomes_text_or_is_refused(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "day": pa.array([0, 1], pa.date32())})
    pq.write_table(table, tmp_path / "days.parquet")
    prompt = held_out_prompts(rows_task(tmp_path, file="days.parquet"), 1)[0]
    assert prompt.entry["row"]["day"] in ("1970-01-01", "1970-01-02")
    pq.write_table(table.append_column("image", pa.array([b"x", b"y"])), tmp_path / "bytes.parquet")
    assert mistake(tmp_path, file="bytes.parquet").startswith("bytes.parquet row 1: column 'image' holds bytes")


def test_blank_lines_a_byte_order_mark_and_extra_columns_are_taken(tmp_path):
    (tmp_path / "data.json").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n\n  \r\n'
        b'{"prompt": "b", "answer": "2", "messages": null, "x": [1]}\n\n'
    )
    assert rows_task(tmp_path, file="data.json").size == (1, 1)


NO_PROMPT = "no 'prompt', 'question' or 'messages'"
NO_ANSWER = "no 'answer', which an exact match needs unless task.reward is set"
GOOD = '{"prompt": "good", "answer": 1}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"promt": "a", "answer": 1}', f"{NO_PROMPT}; it has 'promt', 'answer'"),
        ('{"prompt": null, "answer": 1}', f"{NO_PROMPT}; it has 'prompt', 'answer', but 'prompt' is null"),
        ("{}", f"{NO_PROMPT}; it is empty"),
        ('{"prompt": "a", "question": "a", "answer": 1}', "'prompt' and 'question': keep one"),
        ('{"prompt": 7, "answer": 1}', "'prompt' is 7: give text"),
        ('{"prompt": "  ", "answer": 1}', "'prompt' is empty"),
        ('{"prompt": "a", "anwser": 1}', f"{NO_ANSWER}; it has 'anwser', 'prompt'"),
        ('{"prompt": "a", "answer": null}', "no 'answer'"),
        ('{"prompt": "a", "answer": " "}', "an empty 'answer' would pay for saying nothing"),
        ('{"prompt": "a", "answer": true}', "'answer' is true: give text or a number"),
        ('{"prompt": "a", "answer": [1]}', "'answer' is [1]: give text or a number"),
        ('{"prompt": "a\\ud800", "answer": 1}', "'prompt' holds half a character"),
        ('{"prompt": "a", ', "not JSON"),
        ('["prompt"]', "a list: each line must be one JSON object"),
        ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_its_line(tmp_path, line, words):
    write(tmp_path, [GOOD, GOOD.replace("good", "better"), line, GOOD])
    assert mistake(tmp_path).startswith(f"questions.jsonl line 3: {words}")


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    (tmp_path / "questions.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    assert mistake(tmp_path).startswith("questions.jsonl line 2: not JSON")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "'messages' is \"hello\""),
        ([], "'messages' is []"),
        (["hello"], "message 1 is \"hello\""),
        ([{"role": "user"}], "message 1 has 'role'"),
        ([{"role": "user", "content": "a", "name": "x"}], "message 1 has 'role', 'content', 'name'"),
        ([{"role": "usr", "content": "a"}], "message 1: role 'usr' is unknown: did you mean 'user'?"),
        ([{"role": "user", "content": 3}], "message 1: 'content' is 3"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the last of 'messages'"),
    ],
)  # fmt: skip
def test_bad_messages_are_named(tmp_path, messages, words):
    write(tmp_path, [{"messages": messages, "answer": 1}])
    assert mistake(tmp_path, style="chat").startswith(f"questions.jsonl line 1: {words}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(file="question.jsonl"), ["task.options.file", "question.jsonl", "did you mean 'questions.jsonl'?"]),
        (dict(file="questions.txt"), ["task.options.file", ".jsonl", ".parquet"]),
        (dict(held_out_file="nowhere.jsonl"), ["task.options.held_out_file", "nowhere.jsonl"]),
        (dict(held_out_file="questions.jsonl"), ["task.options.file", "nothing to train on"]),
        (dict(held_out_file="a.jsonl", held_out_share=0.1), ["held_out_file", "held_out_share", "exclude"]),
        (dict(held_out_share=0.0), ["task.options.held_out_share", "greater than 0"]),
        (dict(held_out_share=1), ["task.options.held_out_share", "less than 1"]),
        (dict(held_out_share="0.2"), ["task.options.held_out_share"]),
        (dict(file=3), ["task.options.file = 3"]),
        (dict(fiel="x"), ["task.options.fiel", "'file'"]),
    ],
)
def test_mistakes_in_the_options_are_told(tmp_path, options, words):
    write(tmp_path, sums(10))
    line = mistake(tmp_path, **options)
    assert all(word in line for word in words), line


def test_a_file_must_be_named_and_hold_rows_of_more_than_one_question(tmp_path):
    with pytest.raises(ConfigError, match="needs task.options.file"):
        make_task(TaskConfig(name="jsonl"), [])
    write(tmp_path, ["", ""])
    assert mistake(tmp_path).endswith("questions.jsonl holds no rows")
    write(tmp_path, [GOOD, GOOD])
    assert "one question only, questions.jsonl line 1" in mistake(tmp_path)
    (tmp_path / "bad.parquet").write_text("no")
    assert "bad.parquet is not Parquet" in mistake(tmp_path, file="bad.parquet")


def test_files_are_looked_for_in_the_folders_in_turn(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [{"prompt": f"{name} {n}", "answer": 1} for n in range(4)])
    folders = [str(tmp_path / name) for name in ("none", "first", "second")]
    for file, expected in (("questions.jsonl", "first"), (str(tmp_path / "second" / "questions.jsonl"), "second")):
        task = make_task(TaskConfig(name="jsonl", options={"file": file}), folders)
        assert held_out_prompts(task, 1)[0].text.startswith(expected)


# streams


@pytest.mark.parametrize("count", [2, 3, 7, 100])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.99])
def test_each_epoch_has_every_training_row_once_in_another_order(tmp_path, count, share):
    write(tmp_path, sums(count))
    task = rows_task(tmp_path, held_out_share=share)
    train, held_out = task.size
    assert train >= 1 and held_out >= 1 and train + held_out == count
    for seed in range(3):
        stream = PromptStream(task, seed)
        epochs = [texts(islice(stream, train)) for _ in range(3)]
        assert len({frozenset(epoch) for epoch in epochs}) == 1 and all(len(set(epoch)) == train for epoch in epochs)
        assert not set(epochs[0]) & set(texts(held_out_prompts(task, count)))
        assert stream.position == 3 * train
        assert train < 10 or epochs[0] != epochs[1] != epochs[2]


def test_about_the_share_is_held_out_and_a_row_stays_on_its_side_when_others_come(tmp_path):
    write(tmp_path, sums(1000))
    task = rows_task(tmp_path)
    held_out = set(texts(held_out_prompts(task, 1000)))
    assert 170 < len(held_out) < 230
    write(tmp_path, sums(1100))
    assert held_out <= set(texts(held_out_prompts(rows_task(tmp_path), 2000)))
    assert not held_out & set(texts(training_prompts(rows_task(tmp_path), 1)))


def test_rows_with_the_words_of_a_held_out_row_are_never_trained_on(tmp_path):
    write(tmp_path, [{"prompt": f"what is {n} ?", "answer": 1} for n in range(50)])
    write(
        tmp_path,
        [{"messages": [{"role": "user", "content": f" what is\n{n} ?"}], "answer": 1} for n in range(20)],
        "held.jsonl",
    )
    task = rows_task(tmp_path, held_out_file="held.jsonl", style="chat")
    assert task.size == (30, 20)
    trained = {key(text) for text in texts(islice(PromptStream(task, 1), 90))}
    assert trained == {f"what is {n} ?" for n in range(20, 50)}
    assert all(task.is_held_out(prompt) for prompt in held_out_prompts(task, 100))


def test_repeated_rows_stand_on_one_side(tmp_path):
    write(tmp_path, sums(30) * 3)
    task = rows_task(tmp_path)
    trained, held_out = texts(training_prompts(task, 1)), texts(held_out_prompts(task, 100))
    assert not set(trained) & set(held_out) and len(trained) + len(held_out) == 90


def test_held_out_sets_are_all_there_is_or_the_first_of_a_larger_one(tmp_path):
    write(tmp_path, sums(200))
    task = rows_task(tmp_path)
    everything = held_out_prompts(task, 256)
    assert len(everything) == task.size.held_out < 256
    assert held_out_prompts(task, 10) == everything[:10]
    assert len({prompt.id for prompt in everything}) == len(everything) == len(set(texts(everything)))


def test_streams_differ_by_seed_and_name_and_ids_lead_back(tmp_path):
    write(tmp_path, sums(60))
    task = rows_task(tmp_path)
    streams = [PromptStream(task, 1), PromptStream(task, 2), sft_stream(task, 1)]
    prompts = [list(islice(stream, 100)) for stream in streams]
    assert len({tuple(texts(each)) for each in prompts}) == 3
    for stream, given in zip(streams, prompts, strict=True):
        assert [stream.by_id(prompt.id) for prompt in given] == given and len({p.id for p in given}) == 100
    resumed = PromptStream(task, 1, position=90)
    assert [next(resumed) for _ in range(10)] == prompts[0][90:]


def test_other_processes_have_the_same_stream(tmp_path):
    write(tmp_path, sums(60))
    program = (
        "import sys\nfrom itertools import islice\nfrom titan_rl.config.schema import TaskConfig\n"
        "from titan_rl.environments.base import make_task\nfrom titan_rl.environments.prompts import PromptStream\n"
        "task = make_task(TaskConfig(name='jsonl', options={'file': 'questions.jsonl'}), [sys.argv[1]])\n"
        "print(*(prompt.text for prompt in islice(PromptStream(task, 3), 120)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == texts(islice(PromptStream(rows_task(tmp_path), 3), 120))


def test_the_order_of_rows_is_fixed_for_all_time(tmp_path):
    """A resumed run must go on in the order in which it began, also under a later release."""
    write(tmp_path, sums(12))
    task = rows_task(tmp_path)
    assert texts(held_out_prompts(task, 100)) == ["10+10=", "8+8="]
    assert texts(islice(PromptStream(task, 1), 10)) == [
        "4+4=",
        "7+7=",
        "0+0=",
        "1+1=",
        "5+5=",
        "2+2=",
        "9+9=",
        "11+11=",
        "6+6=",
        "3+3=",
    ]


def test_prompts_carry_their_rows_so_others_need_no_file(tmp_path):
    file = write(tmp_path, sums(10))
    prompt = next(PromptStream(rows_task(tmp_path), 1))
    file.unlink()
    task = rows_task(tmp_path)
    assert task.messages(prompt) == prompt.text and task.row(prompt)["question"] == prompt.text
    assert task.score(prompt, [task.demonstration(prompt)]) == {"exact": 1.0} and task.reply(prompt, ["1"]) is None


# messages


def test_chats_begin_with_the_system_prompt_unless_a_row_has_its_own(tmp_path):
    asked = {"role": "user", "content": "2?"}
    rows = [{"messages": [asked]}, {"messages": [{"role": "system", "content": "Own."}, asked]}, {"prompt": "1?"}]
    write(tmp_path, [row | {"answer": 1} for row in rows])
    write(tmp_path, [{"prompt": "held?", "answer": 1}], "held.jsonl")
    settings = dict(style="chat", held_out_file="held.jsonl")
    task = rows_task(tmp_path, system_prompt="Be brief.", **settings)
    by_place = {
        p.entry["place"]: [(m["role"], m["content"]) for m in task.messages(p)] for p in training_prompts(task, 1)
    }
    assert by_place == {
        "questions.jsonl line 1": [("system", "Be brief."), ("user", "2?")],
        "questions.jsonl line 2": [("system", "Own."), ("user", "2?")],
        "questions.jsonl line 3": [("system", "Be brief."), ("user", "1?")],
    }
    plain = rows_task(tmp_path, **settings)
    assert plain.messages(held_out_prompts(plain, 1)[0]) == [{"role": "user", "content": "held?"}]


def test_messages_from_parquet_lose_their_empty_keys(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{n}?", "name": None}], "answer": "1"} for n in range(5)]
    kind = pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()})
    table = pa.Table.from_pylist(rows, pa.schema({"messages": pa.list_(kind), "answer": pa.string()}))
    pq.write_table(table, tmp_path / "chat.parquet")
    task = rows_task(tmp_path, file="chat.parquet", style="chat")
    [prompt] = held_out_prompts(task, 1)
    assert task.messages(prompt) == [{"role": "user", "content": prompt.text}]


def test_messages_need_the_chat_style(tmp_path):
    write(tmp_path, [{"messages": [{"role": "user", "content": "a"}], "answer": 1}])
    assert mistake(tmp_path).startswith("questions.jsonl line 1: 'messages' need task.style = 'chat'")


# what the tokenizer and SFT need


def test_characters_that_the_tokenizer_does_not_know_are_named(tmp_path):
    write(tmp_path, [*sums(20), {"prompt": "3×4=", "answer": 12}])
    task = rows_task(tmp_path)
    with pytest.raises(ConfigError, match="^questions.jsonl line 21: .*'×' in the prompt"):
        check_known(task, TOKENIZER, [*training_prompts(task, 1), *held_out_prompts(task, 100)])
    write(tmp_path, [*sums(20), {"prompt": "price=", "answer": "3€"}])
    task = rows_task(tmp_path)
    with pytest.raises(ConfigError, match="^questions.jsonl line 21: .*'€' in the answer"):
        check_known(task, TOKENIZER, [*training_prompts(task, 1), *held_out_prompts(task, 100)])
    write(tmp_path, sums(20))
    check_known(task := rows_task(tmp_path), TOKENIZER, training_prompts(task, 1))


def test_sft_needs_answers_and_says_so(tmp_path):
    (tmp_path / "rows_reward.py").write_text("def reward(prompt, completion, row):\n    return 1.0\n")
    write(tmp_path, sums(20))
    task = rows_task(tmp_path)
    check_demonstrations(task, seed=1)
    rollout = demonstrate(prompt := next(sft_stream(task, 1)), task, TOKENIZER)
    assert TOKENIZER.decode(rollout.tokens) == f"{prompt.text}{prompt.answer}<eos>"
    write(tmp_path, [*sums(20), {"prompt": "a"}, {"prompt": "b"}])
    task = rows_task(tmp_path, reward="rows_reward:reward", held_out_share=0.01)
    with pytest.raises(ConfigError, match=r"^questions.jsonl line 2[12]: no 'answer' to learn from.*sft.steps"):
        check_demonstrations(task, seed=1)


def test_prompts_are_tokenized_as_they_are(tmp_path):
    write(tmp_path, sums(5))
    task = rows_task(tmp_path)
    prompt = next(PromptStream(task, 1))
    assert TOKENIZER.decode(encode_prompt(task, TOKENIZER, prompt)) == prompt.text
