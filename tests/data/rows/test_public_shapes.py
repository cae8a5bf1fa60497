"""Public shapes of rows: each is read as its set means it, and passes the checks of a run; two at once are one line."""

import json
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm_commands
from public_rows import (
    Row,
    alpaca,
    assistant,
    dolly,
    gsm8k,
    implicit_pair,
    kto,
    math,
    math_500,
    meta_math,
    nemo_pair,
    nemo_rl,
    openrlhf,
    openrlhf_label,
    openrlhf_pair,
    openrlhf_sft,
    share_gpt,
    trl,
    trl_pair,
    trl_text,
    tulu,
    ultrafeedback,
    user,
    verifiers,
    verl,
)
from row_tasks import mistake, rows_task, write

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import DataConfig
from titan_rl.controller.preflight.checks import check
from titan_rl.data.rows.datasets import read_files, read_rows
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.environments.prompts.stream import held_out_prompts
from titan_rl.environments.rollout.prompt_checks import training_prompts
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import read_metrics

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
COUNT = 8
ASKED = {
    "gsm8k": (gsm8k, "3 apples and 2?", "5", gsm8k(3)["answer"]),
    "math": (math, "What is $3 + 2$?", math(3)["solution"], math(3)["solution"]),
    "math_500": (math_500, "What is $3 + 2$?", "5", math(3)["solution"]),
    "verl": (verl, "3 and 2? After ####.", "5", "5"),
    "openrlhf": (openrlhf, "3 and 2?", "5", "5"),
    "nemo_rl": (nemo_rl, "3 and 2?", "5", "5"),
    "tulu": (tulu, "3 and 2?", "5", "5"),
    "verifiers": (verifiers, "3 and 2?", "5", "5"),
    "trl_text": (trl_text, "3 and 2?", "5", "5"),
    "alpaca": (alpaca, "Add.\n\n3 and 2", "5", "5"),
}
"""What is asked, the expected answer, and the worked one."""
REWARDS = dict.fromkeys(ASKED, "gsm8k_flexible") | {"gsm8k": "gsm8k", "math": "math", "math_500": "math"}
"""Rule that reads the shape's expected answers."""
LEARNED = {
    "sft": {
        "gsm8k": (gsm8k, "3 apples and 2?", gsm8k(3)["answer"]),
        "math": (math, "What is $3 + 2$?", math(3)["solution"]),
        "math_500": (math_500, "What is $3 + 2$?", math(3)["solution"]),
        "verl": (verl, [user("3 and 2? After ####.")], [assistant(gsm8k(3)["answer"])]),
        "openrlhf": (openrlhf_sft, "3 and 2?", "5"),
        "openrlhf, label": (openrlhf, "3 and 2?", "5"),
        "nemo_rl": (nemo_rl, "", nemo_rl(3)["messages"]),
        "tulu": (tulu, "", nemo_rl(3)["messages"]),
        "verifiers": (verifiers, "3 and 2?", "5"),
        "trl": (trl, [user("3 and 2?")], [assistant("5")]),
        "trl_text": (trl_text, "3 and 2?", "5"),
        "alpaca": (alpaca, "Add.\n\n3 and 2", "5"),
        "dolly": (dolly, "Add.\n\n3 and 2", "5"),
        "share_gpt": (share_gpt, "", nemo_rl(3)["messages"]),
        "meta_math": (meta_math, "3 and 2?", meta_math(3)["response"]),
    },
    "dpo": {
        "trl": (trl_pair, [user("3 and 2?")], [assistant("5")]),
        "implicit": (implicit_pair, [user("3 and 2?")], [assistant("5")]),
        "ultrafeedback": (ultrafeedback, [user("3 and 2?")], [assistant("5")]),
        "openrlhf": (openrlhf_pair, "3 and 2?", "5"),
        "nemo_rl": (nemo_pair, [user("3 and 2?")], [assistant("5")]),
    },
    "kto": {
        "trl": (kto, [user("3 and 2?")], [assistant("5")]),
        "openrlhf": (openrlhf_label, "3 and 2?", "5"),
    },
}
KINDS = {"sft": "demonstrations", "dpo": "pairs", "kto": "labels"}
OF_DATA = [(algorithm, name) for algorithm, shapes in LEARNED.items() for name in shapes]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, num_layers=1)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return str(path)


def write_both(folder, make) -> list[str]:
    """The same rows as JSON lines and as Parquet."""
    rows = [make(n) for n in range(COUNT)]
    write(folder, rows, "rows.jsonl")
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return ["rows.jsonl", "rows.parquet"]


def all_prompts(task) -> list:
    return [*training_prompts(task, 1), *held_out_prompts(task, COUNT)]


@pytest.mark.parametrize("name", ASKED)
def test_a_public_shape_asks_and_expects_what_its_set_means(tmp_path, name):
    make, asked, expected, worked = ASKED[name]
    for file in write_both(tmp_path, make):
        task = rows_task(tmp_path, style="chat", reward=REWARDS[name], file=file)
        [prompt] = [each for each in all_prompts(task) if each.text == asked]
        assert (prompt.answer, task.demonstration(prompt)) == (expected, worked)
        assert task.messages(prompt) == [user(asked)]
        row, own = task.row(prompt), make(3)
        kept = {key: value for key, value in own.items() if key != "messages"}
        assert {key: row[key] for key in kept} == kept, "a reward function gets the file's own columns"
        json.dumps(prompt.entry)


@pytest.mark.parametrize("name", ASKED)
def test_a_public_shape_passes_every_check_of_a_run(tmp_path, name, chat_model):
    make, *_ = ASKED[name]
    write(tmp_path, [make(n) for n in range(COUNT)])
    task = {"name": "jsonl", "style": "chat", "reward": REWARDS[name], "options": {"file": "questions.jsonl"}}
    tables = {"run": {"plugin_path": [str(tmp_path)]}, "model": {"path": chat_model}, "task": task}
    checked = check(load_config(None, tables | {"training": {"seq_len": 200, "steps": 3}}))
    assert len(checked.held_out) + checked.task.size.train == COUNT


@pytest.mark.parametrize(("algorithm", "name"), OF_DATA)
def test_a_public_shape_is_learned_as_its_set_means_it(tmp_path, algorithm, name):
    make, prompt, answer = LEARNED[algorithm][name]
    for file in write_both(tmp_path, make):
        rows = read_files(DataConfig(file=file), KINDS[algorithm], [str(tmp_path)])
        [row] = [row for row in (*rows.train, *rows.held_out) if row.place.endswith(" 4")]
        assert (row.prompt, row.answers[0]) == (prompt, answer)
        assert algorithm != "kto" or row.value == -1.0
        assert algorithm != "dpo" or "no" in str(row.answers[1])


@pytest.mark.parametrize(("algorithm", "name"), OF_DATA)
def test_a_public_shape_of_data_passes_every_check_of_a_run(tmp_path, algorithm, name, chat_model):
    make, *_ = LEARNED[algorithm][name]
    write(tmp_path, [make(n) for n in range(COUNT)], "rows.jsonl")
    tables = {"run": {"plugin_path": [str(tmp_path)]}, "model": {"path": chat_model}, "data": {"file": "rows.jsonl"}}
    checked = check(load_config(None, tables | {"algorithm": {"name": algorithm}, "training": {"seq_len": 200}}))
    assert len(checked.dataset.train) + len(checked.dataset.held_out) == COUNT


def train_three_steps(folder, make, **settings: str) -> None:
    """By a TOML of one line a setting; what makes a run small is said on the command line."""
    (folder / "mine.toml").write_text("".join(f'{key.replace("__", ".")} = "{settings[key]}"\n' for key in settings))
    pq.write_table(pa.Table.from_pylist([make(n) for n in range(4 * COUNT)]), folder / "rows.parquet")
    small = "--training.steps 3 --training.seq_len 256 --eval.prompts 8 --recovery.standby false"
    if "task__name" in settings:
        small += " --rollout.prompts_per_step 4 --rollout.group_size 4 --rollout.max_new_tokens 5"
        small += " --generator.kv_cache_gib 0.0625"
    command = ["-m", "titan_rl.train", folder / "mine.toml", "--run.dir", folder / "run", *small.split()]
    done = subprocess.run(warm_commands.command(*command), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [record["step"] for record in read_metrics(folder / "run") if "loss" in record] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.parametrize("name", ASKED)
def test_prompts_of_a_public_shape_train_three_steps(tmp_path, name, chat_model):
    task = dict(task__name="jsonl", task__style="chat", task__reward=REWARDS[name], task__options__file="rows.parquet")
    train_three_steps(tmp_path, ASKED[name][0], model__path=chat_model, **task)


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.parametrize(("algorithm", "name"), OF_DATA)
def test_rows_of_a_public_shape_train_three_steps(tmp_path, algorithm, name, chat_model):
    data = dict(algorithm__name=algorithm, data__file="rows.parquet")
    train_three_steps(tmp_path, LEARNED[algorithm][name][0], model__path=chat_model, **data)


# columns


def test_columns_are_mapped_by_name_and_by_dotted_path(tmp_path):
    rows = [{"q": {"text": f"q{n}"}, "truth": [n], "x.y": str(n), "prompt": "another"} for n in range(COUNT)]
    write(tmp_path, rows)
    task = rows_task(tmp_path, columns={"question": "q.text", "answer": "x.y"})
    assert sorted((prompt.text, prompt.answer) for prompt in all_prompts(task)) == [(f"q{n}", f"{n}") for n in range(8)]
    settings = DataConfig(file="questions.jsonl", columns={"prompt": "q.text", "completion": "x.y"})
    rows = read_files(settings, "demonstrations", [str(tmp_path)])
    assert sorted((row.prompt, *row.answers) for row in (*rows.train, *rows.held_out)) == [
        (f"q{n}", f"{n}") for n in range(8)
    ]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"question": "problme"}, "columns.question = 'problme': the row has none: did you mean 'problem'?"),
        ({"answer": "more.truht"}, "columns.answer = 'more.truht': the row has none: did you mean 'more.truth'?"),
        ({"answr": "solution"}, "columns.answr = 'solution': 'answr' is no name of ours: did you mean 'answer'?"),
    ],
)
def test_an_unknown_column_is_one_line_with_the_nearest(tmp_path, columns, words):
    write(tmp_path, [{"problem": f"q{n}", "solution": "1", "more": {"truth": "1"}} for n in range(4)])
    assert words in mistake(tmp_path, columns=columns)


def one_row(folder, kind: str, row: Row, columns: dict[str, str] | None = None, **settings):
    """The row as it is learned, and what an answer to it is."""
    write(folder, [row], "rows.jsonl")
    settings = DataConfig(file="rows.jsonl", held_out_file="rows.jsonl", columns=columns or {}, **settings)
    sources = locate_sources("data.file", settings.file, [str(folder)])
    [parsed] = read_rows(sources, settings, kind)
    return parsed.prompt, parsed.answers


REWRITTEN = {"rewritten": "R", "final": "F", "number": 7.0}


@pytest.mark.parametrize(
    ("kind", "row", "columns", "prompt", "answer"),
    [
        ("demonstrations", gsm8k(3), {"prompt": "rewritten"}, "R", gsm8k(3)["answer"]),
        ("demonstrations", gsm8k(3), {"question": "rewritten"}, "R", gsm8k(3)["answer"]),
        ("demonstrations", gsm8k(3), {"completion": "final"}, "3 apples and 2?", "F"),
        ("demonstrations", math(3), {"answer": "final"}, "What is $3 + 2$?", "F"),
        ("demonstrations", math(3), {"answer": "number"}, "What is $3 + 2$?", "7"),
        ("demonstrations", {"question": "Q", "text_of_answer": "A"}, {"completion": "text_of_answer"}, "Q", "A"),
        ("demonstrations", {"problem": "Q", "response": "A"}, {}, "Q", "A"),
        ("demonstrations", {"instruction": "Q", "output": "A", "context": "its own"}, {}, "Q", "A"),
        ("demonstrations", {"prompt": [user("Q")], "response": "A"}, {}, [user("Q")], [assistant("A")]),
        ("demonstrations", {"question": "Q", "answer": "A", "response": "its own"}, {}, "Q", "A"),
        ("demonstrations", verl(3), {"answer": "final"}, verl(3)["prompt"], [assistant("F")]),
        ("demonstrations", trl_text(3) | gsm8k(3), {"question": "rewritten", "answer": "final"}, "R", "F"),
        ("labels", kto(3), {"question": "rewritten", "answer": "final"}, "R", "F"),
        ("labels", openrlhf_label(3), {"answer": "final"}, "3 and 2?", "F"),
        ("pairs", openrlhf_pair(3), {"question": "rewritten"}, "R", "5"),
        ("pairs", openrlhf_pair(3) | {"prompt": "P"}, {"prompt": "rewritten"}, "R", "5"),
    ],
)
def test_what_is_mapped_counts_before_all_other_columns(tmp_path, kind, row, columns, prompt, answer):
    read_prompt, answers = one_row(tmp_path, kind, row | REWRITTEN, columns)
    assert (read_prompt, answers[0]) == (prompt, answer)


@pytest.mark.parametrize(
    ("kind", "row", "columns", "words"),
    [
        ("demonstrations", gsm8k(1), {"chosen": "final"}, "'chosen' is no column of demonstrations"),
        ("demonstrations", gsm8k(1), {"margin": "final"}, "'margin' is no column of demonstrations"),
        ("demonstrations", gsm8k(1), {"label": "final"}, "'label' is no column of demonstrations"),
        ("pairs", trl_pair(1), {"completion": "final"}, "'completion' is no column of pairs"),
        ("labels", kto(1), {"margin": "final"}, "'margin' is no column of labels"),
        ("labels", kto(1), {"question": "final", "prompt": "rewritten"}, "'question' and 'prompt' are the same column"),
        (
            "demonstrations",
            nemo_rl(1),
            {"question": "rewritten"},
            "names 'question', and the row is read as 'messages'",
        ),
    ],
)
def test_a_mapping_without_effect_is_one_line(tmp_path, kind, row, columns, words):
    write(tmp_path, [row | REWRITTEN], "rows.jsonl")
    with pytest.raises(ConfigError) as caught:
        read_files(DataConfig(file="rows.jsonl", columns=columns), kind, [str(tmp_path)])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_format_reads_the_mapped_question_and_answer(tmp_path):
    columns, row = {"question": "rewritten", "answer": "final"}, trl_text(3) | REWRITTEN
    assert one_row(tmp_path, "demonstrations", row, columns, format="prompt_completion") == ("R", ["F"])


# prompts of pairs

TURNS = [user("Q1"), assistant("x"), user("Q2")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "Q2 ", "before": TURNS}, TURNS),
        ({"prompt": "Q1", "before": TURNS}, TURNS),
        ({"prompt": TURNS, "before": TURNS}, TURNS),
        ({"prompt": TURNS, "before": []}, TURNS),
        ({"prompt": "Why?", "before": []}, [user("Why?")]),
        ({"prompt": " Why? ", "before": [{"role": "system", "content": "Be brief."}, user("Why?")]}, None),
    ],
)
def test_a_prompt_of_a_pair_is_asked_once_and_in_its_place(tmp_path, row, prompt):
    conversations = {name: [*row["before"], assistant(name)] for name in ("chosen", "rejected")}
    read = one_row(tmp_path, "pairs", {"prompt": row["prompt"]} | conversations)
    assert read == (prompt or row["before"], [[assistant("chosen")], [assistant("rejected")]])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Q3", "chosen": [*TURNS, assistant("a")], "rejected": [*TURNS, assistant("b")]}, 'the prompt "Q3"'),
        (openrlhf_pair(1) | {"prompt": "P"}, "'prompt' and 'input': keep one of them, or say which is meant"),
        (openrlhf_pair(1) | {"question": "P", "prompt": "1 and 2?"}, "'prompt' and 'question': keep one of them"),
        *(
            (nemo_pair(1) | {"completions": [{"rank": rank, "completion": [assistant("a")]} for rank in ranks]}, words)
            for ranks, words in [
                ((1, 1), "'completions' are 1 and 1"),
                (("10", "9"), '"10" and "9": give two different numbers'),
                ((0, "1"), '0 and "1"'),
                ((True, 0), "true and 0"),
                ((None, 0), "null and 0"),
            ]
        ),
    ],
)
def test_a_pair_whose_meaning_is_not_certain_is_one_line(tmp_path, row, words):
    with pytest.raises(ConfigError) as caught:
        one_row(tmp_path, "pairs", row)
    assert str(caught.value).startswith("rows.jsonl line 1: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pair_is_asked_alpacas_instruction_with_its_input(tmp_path):
    row = {"instruction": "Add.", "input": "1 and 2", "chosen": "3", "rejected": "no"}
    assert one_row(tmp_path, "pairs", row) == ("Add.\n\n1 and 2", ["3", "no"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("So 5.\n#### 5", "5"),
        ("#### -1,005.50", "-1005.50"),
        ("#### $72", "$72"),
        ("Intro\n\n#### Conclusion", "Intro\n\n#### Conclusion"),
        ("#### 5 apples", "#### 5 apples"),
    ],
)
def test_only_a_number_behind_hashes_is_the_final_answer(tmp_path, answer, expected):
    write(tmp_path, [{"question": f"q{n}", "answer": answer} for n in range(4)])
    assert {prompt.answer for prompt in all_prompts(rows_task(tmp_path))} == {expected}


# rows that fit two shapes


@pytest.mark.parametrize(
    ("row", "words", "mend"),
    [
        (gsm8k(1) | math(1), ("'question' and 'problem'", "{ question = 'question' }"), {"question": "problem"}),
        (verl(1) | {"answer": "7"}, ("'answer' and 'reward_model.ground_truth'", "{ answer"), {"answer": "answer"}),
        (tulu(1) | {"prompt": "a"}, ("'prompt' and 'messages'", "columns = {"), {"messages": "messages"}),
    ],
)
def test_a_prompt_in_two_shapes_is_one_line_and_a_mapping_mends_it(tmp_path, row, words, mend):
    write(tmp_path, [row, row | {"question": "another"}] if "question" in row else [row, row])
    line = mistake(tmp_path, style="chat")
    assert line.startswith("questions.jsonl line 1: ") and all(word in line for word in words), line
    write(tmp_path, [row], "held.jsonl")
    rows = [row | {"problem": f"q{n}", "messages": [user(f"q{n}")], "prompt": [user(f"q{n}")]} for n in range(3)]
    write(tmp_path, [{key: each[key] for key in row} for each in rows])
    assert rows_task(tmp_path, style="chat", columns=mend, held_out_file="held.jsonl").size == (3, 1)


def test_data_in_two_shapes_is_one_line_and_format_or_columns_mend_it(tmp_path):
    rows = [math(n) | {"messages": nemo_rl(n)["messages"]} for n in range(COUNT)]
    write(tmp_path, rows, "rows.jsonl")

    def read(**settings):
        return read_files(DataConfig(file="rows.jsonl", **settings), "demonstrations", [str(tmp_path)])

    with pytest.raises(ConfigError) as caught:
        read()
    line = str(caught.value)
    assert line.startswith("rows.jsonl line 1: 'messages', and 'problem' and 'solution' (MATH): set data.format")
    assert "{ prompt = 'problem', completion = 'solution' }" in line and "\n" not in line
    assert read(format="messages").train[0].prompt == ""
    mapped = read(columns={"prompt": "problem", "completion": "solution"}).train[0]
    assert mapped.prompt.startswith("What is") and mapped.answers[0].startswith("It is")


# rewards by the set that a row is of


def sourced(folder, rewards: dict[str, str], rows: list[Row], **options):
    write(folder, rows)
    return rows_task(folder, style="chat", rewards_by_source=rewards, **options)


def test_a_row_is_rewarded_as_its_set_is(tmp_path):
    rows = [verl(n) for n in range(4)] + [verl(n) | {"data_source": "lighteval/MATH"} for n in range(4, 8)]
    task = sourced(tmp_path, {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math"}, rows)
    for prompt in all_prompts(task):
        is_gsm8k = task.row(prompt)["data_source"] == "openai/gsm8k"
        assert task.score(prompt, [f"#### {prompt.answer}"]) == {"right": 1.0}
        assert task.score(prompt, [f"So \\boxed{{{prompt.answer}}}"]) == {"right": float(not is_gsm8k)}


def test_a_worked_answer_is_learned_where_the_rows_own_reward_reads_its_end(tmp_path):
    rows = [gsm8k(n) | {"data_source": "ab"[n % 2]} for n in range(COUNT)]
    task = sourced(tmp_path, {"a": "gsm8k", "b": "task"}, rows)
    for prompt in all_prompts(task):
        worked = task.demonstration(prompt)
        assert (worked == prompt.answer) == (task.row(prompt)["data_source"] == "b")
        assert sum(task.score(prompt, [worked]).values()) == 1.0


@pytest.mark.parametrize(
    ("reward", "worked", "is_taught"),
    [
        ("gsm8k", "It is #### 3", True),
        ("gsm8k", "It is 3", False),
        ("gsm8k", "It is #### 4", False),
        ("gsm8k_flexible", "It is 3", True),
        ("gsm8k_flexible", "3, or 4", False),
        ("math", r"It is \boxed{3}", True),
        ("gsm8k", "3", True),
    ],
)
def test_what_the_reward_calls_wrong_is_not_taught(tmp_path, reward, worked, is_taught):
    write(tmp_path, [{"question": f"q{n}", "answer": "3", "solution": worked} for n in range(COUNT)])
    task = rows_task(tmp_path, style="chat", reward=reward)
    prompt = task.prompt("train", 0, 0)
    if is_taught:
        assert task.demonstration(prompt) == ("#### 3" if worked == "3" else worked)
    else:
        with pytest.raises(ConfigError, match="calls the row's own worked answer wrong, which sft would teach"):
            task.demonstration(prompt)


def test_a_reward_of_a_set_that_no_row_is_of_is_one_line(tmp_path):
    write(tmp_path, [verl(n) for n in range(COUNT)])
    line = mistake(tmp_path, style="chat", rewards_by_source={"openai/gsm8k": "gsm8k", "openai/gsm8": "math"})
    assert line.startswith("task.rewards_by_source: no row is of the set 'openai/gsm8': change it (did you mean")


@pytest.mark.parametrize("reward", ["gsm8k", "gsm8k_flexible"])
@pytest.mark.parametrize("answer", ["1/2", "50%", "72 apples", math(1)["solution"], "72..", "x"])
def test_an_expected_answer_that_the_rule_never_finds_is_one_line(tmp_path, reward, answer):
    write(tmp_path, [gsm8k(n) for n in range(COUNT)] + [{"question": "q", "answer": answer}])
    line = mistake(tmp_path, reward=reward)
    assert line.startswith("questions.jsonl line 9: the 'answer' ") and "is no number, so that no answer" in line
    write(tmp_path, [verl(n) | {"answer": answer} for n in range(COUNT)])
    rewards = {"openai/gsm8k": reward}
    line = mistake(tmp_path, style="chat", rewards_by_source=rewards, columns={"answer": "answer"})
    assert line.startswith("questions.jsonl line 1: the 'answer' ")


@pytest.mark.parametrize(
    ("rewards", "row", "words"),
    [
        ({"openai/gsm8k": "gsm8k"}, {"data_source": "openai/gsm8"}, "has no reward for 'openai/gsm8': add it"),
        ({"math": "math"}, {"data_source": None}, "no 'data_source', by which task.rewards_by_source chooses"),
        ({"openai/gsm8k": "gsm8k"}, {"reward_model": None}, "no 'answer', which the reward 'gsm8k' needs"),
    ],
)
def test_a_row_without_a_reward_is_one_line(tmp_path, rewards, row, words):
    write(tmp_path, [verl(0) | row, verl(1) | row])
    line = mistake(tmp_path, style="chat", rewards_by_source=rewards)
    assert line.startswith("questions.jsonl line 1: ") and words in line


def test_rewards_by_source_are_of_rows_and_beside_no_others(tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        sourced(tmp_path, {"a": "math"}, [], reward="gsm8k")


def test_only_rows_of_the_named_sets_are_taken(tmp_path):
    rows = [verl(n) | {"data_source": "ab"[n % 2]} for n in range(COUNT)]
    task = sourced(tmp_path, {}, rows, only=["b"])
    assert {task.row(prompt)["data_source"] for prompt in all_prompts(task)} == {"b"}
    assert "no row is of the set 'c': known: a, b" in mistake(tmp_path, style="chat", only=["c"])
