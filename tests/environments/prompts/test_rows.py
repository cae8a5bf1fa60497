"""Rows of a data file as prompts: every row once an epoch, none of them held out, and what is asked of each."""

import asyncio
import subprocess
import sys
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mistakes import assert_one_line
from row_tasks import mistake, rows_task, sums, texts, write

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.controller.preflight.data_checks import row_notices
from titan_rl.data.rows.splits import key
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts, sft_stream
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.environments.rollout.prompt_checks import check_characters, check_demonstrations, training_prompts
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


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


def test_rows_that_lack_an_answer_which_others_have_are_named(tmp_path):
    """A reward of one's own may do without, so that nothing refuses them."""
    zero = "titan_rl.environments.rewards.unscored:zero"
    rows = [{"prompt": f"what is {n} ?", "answer": n} for n in range(9)]
    write(tmp_path, [*rows, {"prompt": "and ?"}, {"prompt": "or ?", "answer": None}])
    [line] = row_notices(rows_task(tmp_path, reward=zero), None)
    assert line in {f"2 rows have no 'answer', which others have; see questions.jsonl line {n}" for n in (10, 11)}
    write(tmp_path, [{"prompt": f"what is {n} ?"} for n in range(9)])
    assert row_notices(rows_task(tmp_path, reward=zero), None) == []


def test_rows_that_name_an_image_and_have_none_are_named(tmp_path):
    """As where the column of images has another name."""
    write(tmp_path, [{"prompt": f"<image> {n} ?", "picture": "data:", "answer": n} for n in range(2)])
    [line] = row_notices(rows_task(tmp_path), None)
    assert line in {f"<image> is text in 2 rows without 'images'; see questions.jsonl line {n}" for n in (1, 2)}


def test_a_public_set_that_is_given_an_exact_match_is_named_with_its_usual_reward(tmp_path):
    rows = [{"prompt": f"what is {n} ?", "answer": str(n), "data_source": "openai/gsm8k"} for n in range(9)]
    write(tmp_path, [*rows, {"prompt": "so ?", "answer": "1", "data_source": "mine"}])
    line = (
        "rows of 'openai/gsm8k' are right by an exact match of the whole answer; their usual reward is "
        "task.reward = 'gsm8k'"
    )
    assert row_notices(rows_task(tmp_path), None) == [line]
    assert row_notices(rows_task(tmp_path, reward="gsm8k"), None) == []
    task = TaskConfig(name="math", options={"file": "questions.jsonl"})
    assert row_notices(make_task(task, [str(tmp_path)]), None) == [], "it compares values"


def test_rows_with_the_words_of_a_held_out_row_are_never_trained_on(tmp_path):
    write(tmp_path, [{"prompt": f"what is {n} ?", "answer": 1} for n in range(50)])
    write(
        tmp_path,
        [{"messages": [{"role": "user", "content": f" what is\n{n} ?"}], "answer": 1} for n in range(20)],
        "held.jsonl",
    )
    task = rows_task(tmp_path, held_out_file="held.jsonl", style="chat")
    assert task.size == (30, 20)
    assert row_notices(task, None) == ["20 training rows are left out: held-out rows ask the same"]
    assert row_notices(rows_task(tmp_path, style="chat"), None) == [], "a share of the rows is on one side alone"
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
        "import sys\nfrom itertools import islice\nfrom titan_rl.config.sections.schema import TaskConfig\n"
        "from titan_rl.environments.registry import make_task\n"
        "from titan_rl.environments.prompts.stream import PromptStream\n"
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
    assert task.score(prompt, [task.demonstration(prompt)]) == {"exact": 1.0}


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
        check_characters(task, TOKENIZER, [*training_prompts(task, 1), *held_out_prompts(task, 100)])
    write(tmp_path, [*sums(20), {"prompt": "price=", "answer": "3€"}])
    task = rows_task(tmp_path)
    with pytest.raises(ConfigError, match="^questions.jsonl line 21: .*'€' in the answer"):
        check_characters(task, TOKENIZER, [*training_prompts(task, 1), *held_out_prompts(task, 100)])
    write(tmp_path, sums(20))
    check_characters(task := rows_task(tmp_path), TOKENIZER, training_prompts(task, 1))


def test_characters_of_a_worked_example_are_named(tmp_path):
    rows = [{"question": f"{n}+1?", "answer": f"{n} × 1\n#### {n}"} for n in range(5)]
    write(tmp_path, rows)
    check_characters(task := rows_task(tmp_path, reward="gsm8k"), TOKENIZER, training_prompts(task, 1))
    with pytest.raises(ConfigError, match=r"^questions.jsonl line \d: .*'×' in the worked example"):
        check_demonstrations(task, 1, TOKENIZER, row_tokens=64, positions=64)


def test_a_weighted_source_without_a_training_row_is_told_with_the_first_held_out_prompt(tmp_path):
    write(tmp_path, sums(20), "a.jsonl")
    write(tmp_path, sums(1), "b.jsonl")
    write(tmp_path, sums(1), "held.jsonl")
    sources = [{"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl", "weight": 9.0}]
    line = mistake(tmp_path, file=sources, held_out_file="held.jsonl")
    assert line.startswith("task.options.file: no row of ") and "b.jsonl" in line


def test_a_worked_example_that_fits_into_no_row_is_named_before_anything_starts(tmp_path):
    write(tmp_path, sums(5))  # from 0+0=0 to 4+4=8, and the end
    check_demonstrations(task := rows_task(tmp_path), 1, TOKENIZER, row_tokens=6, positions=6)
    with pytest.raises(ConfigError, match=r"^questions.jsonl line \d+: its worked example has 6 tokens.*seq_len = 5"):
        check_demonstrations(task, 1, TOKENIZER, row_tokens=5, positions=6)
    with pytest.raises(ConfigError, match=r"line \d+: its worked example has 6 tokens, and the model has 5 positions"):
        check_demonstrations(task, 1, TOKENIZER, row_tokens=6, positions=5)


@pytest.mark.parametrize(
    ("model", "seq_len", "said"),
    [
        (
            "tiny",
            2048,
            "model.path = 'tiny' has 256 positions, which leaves 240 tokens for prompts, but they have up to",
        ),
        (
            "tiny",
            128,
            "training.seq_len = 128 leaves 112 tokens for prompts, but they have up to 402 (questions.jsonl line 5; "
            "1 of 8 is too long): raise it",
        ),
        ("directory", 2048, "has 256 positions, which leaves 240 tokens for prompts, but they have up to 402"),
    ],
)
def test_questions_that_do_not_fit_are_told_before_anything_starts(tmp_path, model, seq_len, said):
    """With the tiny model, too, which is no directory yet."""
    write(tmp_path, [{"question": f"{n}" * (402 if n == 4 else 9), "answer": n} for n in range(8)])
    if model == "directory":
        make_tiny(tmp_path / "model", seed=1)
    tables = {
        "run": {"plugin_path": [str(tmp_path)]},
        "model": {"path": "tiny" if model == "tiny" else str(tmp_path / "model")},
        "task": {"name": "jsonl", "options": {"file": "questions.jsonl"}},
        "training": {"seq_len": seq_len},
    }
    assert_one_line(tables, [said])


def test_answers_that_leave_nothing_of_a_model_s_positions_are_told_without_a_negative_number(tmp_path):
    write(tmp_path, sums(8))
    tables = {
        "run": {"plugin_path": [str(tmp_path)]},
        "task": {"name": "jsonl", "options": {"file": "questions.jsonl"}},
        "training": {"seq_len": 2048},
        "rollout": {"max_new_tokens": 300},
    }
    assert_one_line(tables, ["has 256 positions, which leaves none, beside rollout.max_new_tokens = 300, for prompts"])


def test_sft_needs_answers_and_says_so(tmp_path):
    (tmp_path / "rows_reward.py").write_text("def reward(prompt, completion, row):\n    return 1.0\n")
    write(tmp_path, sums(20))
    task = rows_task(tmp_path)
    check_demonstrations(task, 1, TOKENIZER, row_tokens=64, positions=64)
    rollout = asyncio.run(demonstrate(prompt := next(sft_stream(task, 1)), task, TOKENIZER, 60))
    assert TOKENIZER.decode(rollout.tokens) == f"{prompt.text}{prompt.answer}<eos>"
    write(tmp_path, [*sums(20), {"prompt": "a"}, {"prompt": "b"}])
    task = rows_task(tmp_path, reward="rows_reward:reward", held_out_share=0.01)
    with pytest.raises(ConfigError, match=r"^questions.jsonl line 2[12]: no 'answer' to learn from.*sft.steps"):
        check_demonstrations(task, 1, TOKENIZER, row_tokens=64, positions=64)


def test_prompts_are_tokenized_as_they_are(tmp_path):
    write(tmp_path, sums(5))
    task = rows_task(tmp_path)
    prompt = next(PromptStream(task, 1))
    assert TOKENIZER.decode(encode_prompt(task, TOKENIZER, prompt)) == prompt.text
