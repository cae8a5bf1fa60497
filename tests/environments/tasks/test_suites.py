"""Public sets: rows in their own schemas, and what their published rules say of recorded answers."""

import asyncio
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from boxes import need_boxes
from huggingface_hub import constants

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config, TaskConfig
from titan_rl.config.sections.suites import PRESETS
from titan_rl.controller.loop.suites import sampling_of
from titan_rl.controller.preflight.recorded_config import load_recorded
from titan_rl.data.storage.hub_dataset import fetch_split, parse_hub_name
from titan_rl.data.types import Decoding
from titan_rl.environments.registry import make_task
from titan_rl.environments.rewards.answer_graders import read_flexible, read_strict
from titan_rl.environments.rollout.decoding import held_out_decoding
from titan_rl.environments.rollout.suites import make_all, make_suites, suite_sources
from titan_rl.environments.sandbox.pool import Sandbox
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.environments.tasks.suites import programs
from titan_rl.environments.tasks.suites.constraints import CONSTRAINTS, keeps
from titan_rl.environments.tasks.suites.multiple_choice import read_letter
from titan_rl.records.run_directory.rundir import RunDir

GSM8K = {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48/2=<<48/2=24>>24\n#### 72"}
MATH = {"problem": "Add the halves.", "solution": "...", "answer": r"\frac{3}{2}", "subject": "Algebra", "level": 1}
AIME = {"ID": "2024-I-1", "Problem": "Find it.", "Solution": "...", "Answer": 204}
MMLU_PRO = {"question": "Which?", "options": ["a cat", "a dog", "N/A"], "answer": "B", "answer_index": 1, "cot": ""}
MMLU = {"question": "Which?", "choices": ["a cat", "a dog"], "answer": 1, "subject": "animals"}
ARC = {"question": "Which?", "choices": {"text": ["a cat", "a dog"], "label": ["1", "2"]}, "answerKey": "2"}
IFEVAL = {
    "key": 1000,
    "prompt": "Write two words without a comma.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3.0, "relation": "less than"}],
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    '''Their sum.'''\n",
    "canonical_solution": "    return sum(numbers)\n",
    "test": "\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function that doubles.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double('a') == 'aa'"],
    "test_setup_code": "",
}


def written(tmp_path, *rows) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def suite_of(tmp_path, name, *rows, **settings):
    """A suite of these rows, with its prompts."""
    table = {"name": name, "file": written(tmp_path, *rows), **settings}
    config = load_config(None, {"eval": {"suites": [table]}})
    [suite] = make_suites(config)
    return suite.with_prompts(256)


def scored(suite, answer: str) -> float:
    return sum(suite.task.score(suite.prompts[0], [answer]).values())


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("48 + 24 = 72\n#### 72", "72", "72"),
        ("#### 1,072.", "1072", "1072"),
        ("#### -5", "-5", "-5"),
        ("#### 72\nNo: #### 71", "72", "71"),
        ("The answer is $72.", None, "72"),
        ("It is 72", None, "72"),
        ("####72", None, "72"),
        ("#### $72", None, "72"),
        ("#### seventy-two", None, None),
        ("#### 72.0", "72.0", "72.0"),
        ("#### .", None, None),
        ("", None, None),
    ],
)
def test_gsm8ks_two_rules_read_one_number(answer, strict, flexible):
    """As lm-eval 0.4.13 reads them, which said the same of 20,000 random answers."""
    assert (read_strict(answer), read_flexible(answer)) == (strict, flexible)


def test_gsm8k_is_scored_by_its_rule_and_read_by_the_other(tmp_path):
    suite = suite_of(tmp_path, "gsm8k", GSM8K)
    [prompt] = suite.prompts
    assert prompt.text.startswith(GSM8K["question"]) and "####" in prompt.text and prompt.answer == "72"
    assert (prompt.id, prompt.task) == ("eval/gsm8k/0000000", "eval/gsm8k")
    assert (scored(suite, "#### 72"), scored(suite, "72")) == (1, 0)
    assert suite.readings(prompt, "72") == {"flexible": True} and suite.final(prompt, "72") is None
    flexible = suite_of(tmp_path, "gsm8k", GSM8K, options={"rule": "flexible", "instruction": ""})
    assert scored(flexible, "72") == 1 and flexible.prompts[0].text == GSM8K["question"]
    assert flexible.readings(prompt, "72") == {"strict": False}


def test_a_public_set_can_be_trained_on(tmp_path):
    rows = [GSM8K | {"question": f"{number}?"} for number in range(20)]
    task = make_task(TaskConfig(name="gsm8k", options={"file": written(tmp_path, *rows)}))
    prompt = task.prompt("train", 1, 0)
    assert task.size.train + task.size.held_out == 20
    assert task.demonstration(prompt) == GSM8K["answer"]
    assert task.score(prompt, [task.demonstration(prompt)]) == {"right": 1.0}


@pytest.mark.parametrize(("name", "row", "right"), [("math500", MATH, "1.5"), ("aime", AIME, "204")])
def test_problems_are_compared_by_value(tmp_path, name, row, right):
    suite = suite_of(tmp_path, name, row)
    assert scored(suite, rf"So it is \boxed{{{right}}}") == 1 and scored(suite, r"\boxed{7}") == 0
    assert suite.final(suite.prompts[0], r"\boxed{ 2 04 }") == "204"


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("Answer: B", "B"),
        ("First, a cat.\n\n**Answer: B**\n", "B"),
        ("The answer is (B).", "B"),
        ("B", "B"),
        ("(B)", "B"),
        ("B. a dog", "B"),
        ("Therefore, the correct answer is B) A dog.", "B"),
        (r"\boxed{B}", "B"),
        (r"The answer is $\boxed{\text{B}}$.", "B"),
        ("Answer: B\nAnswer: A", "A"),
        ("Answer: A or B", None),
        ("Answer: A, B", None),
        ("Answer: A. Answer: B", None),
        ("Answer: not B", None),
        ("The answer is not (B)", None),
        ("B. a cat", None),
        ("B. a dog, or A", None),
        ("Answer: D", None),
        ("Answer: AB", None),
        ("Answer: B (or A)", None),
        ("A dog", None),
        ("I think B", None),
        ("Answer: Б", None),
        ("", None),
        ("Answer: " + "B" * 5000, None),
    ],
)
def test_a_last_line_names_one_letter_or_none(answer, letter):
    assert read_letter(answer, ["a cat", "a dog", "N/A"]) == letter


@pytest.mark.parametrize("row", [MMLU_PRO, MMLU, ARC])
def test_multiple_choice_of_three_schemas(tmp_path, row):
    suite = suite_of(tmp_path, "mmlu_pro", row)
    assert "A. a cat\nB. a dog" in suite.prompts[0].text and suite.prompts[0].answer == "B"
    assert (scored(suite, "Answer: B"), scored(suite, "Answer: A")) == (1, 0)


KEPT = {
    "keywords:existence": ({"keywords": ["cat", "Dog"]}, "a dog and a cat", "a cat"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "concatenate", "a Cat."),
    "keywords:frequency": ({"keyword": "a", "frequency": 2, "relation": "at least"}, "a, a", "a"),
    "keywords:letter_frequency": ({"letter": "x", "let_frequency": 2, "let_relation": "less than"}, "x", "x X"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "less than"}, "One.", "One. Two."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "second"},
        "First.\n\nSecond, then.",
        "First.\n\nThen second.",
    ),
    "punctuation:no_comma": ({}, "yes", "yes, no"),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n- two", "* one"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and *b c*", "*a* and * *"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\none\nSECTION 2\ntwo",
        "SECTION 1\none",
    ),
    "detectable_format:title": ({}, "<<A title>>\ntext", "<<>> text"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_content:number_placeholders": ({"num_placeholders": 1}, "Dear [name]", "Dear name"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye\nP.S. One more", "Bye"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it"}, "Say it: it", "It. Say it"),
    "startend:end_checker": ({"end_phrase": "the end."}, "so, The end.", "the end. Not yet"),
    "startend:quotation": ({}, '"so"', '"so" he said'),
    "change_case:english_lowercase": ({}, "all low, 1", "Not all"),
    "change_case:english_capital": ({}, "ALL UP", "NOT all"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 1, "capital_relation": "at least"},
        "one BIG word",
        "no big word",
    ),
}


def test_every_constraint_has_a_text_that_keeps_it_and_one_that_does_not():
    assert set(KEPT) == set(CONSTRAINTS)


@pytest.mark.parametrize("identifier", CONSTRAINTS)
def test_constraints(identifier):
    arguments, kept, broken = KEPT[identifier]
    assert keeps(kept, identifier, arguments | {"unused": None}) and not keeps(broken, identifier, arguments)
    assert not keeps("  \n", identifier, arguments), "an empty answer keeps to nothing"


@pytest.mark.parametrize(
    ("identifier", "arguments", "text", "kept"),
    [
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. hi", True),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "p.s.", True),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "P.S hi", False),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P. P. S hi", True),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.S. hi", False),
        ("detectable_content:postscript", {"postscript_marker": "(N.B.)"}, "so (n.b.) hi", True),
        ("detectable_format:json_format", {}, '```json {"a": 1} ```', True),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}', True),
        ("detectable_format:json_format", {}, '```jSoN\n{"a": 1}\n```', False),
        ("detectable_format:json_format", {}, '{"a": 1}\xa0', True),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "less than"},
            "X-RAY",
            True,
        ),
        ("detectable_format:title", {}, "<<a>b>>", True),
        ("detectable_format:title", {}, "so <<<a>>> it is", True),
        ("detectable_format:title", {}, "<<>>", False),
        ("detectable_format:title", {}, "<<< >>>", False),
        ("detectable_format:title", {}, ">>a<<", False),
        ("detectable_format:title", {}, "<<a\nb>>", False),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[a\nb]", False),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "*\n- a", True),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "b"},
            "a\n\n\n\nb",
            False,
        ),
    ],
)
def test_constraints_follow_the_published_rules(identifier, arguments, text, kept):
    """As lm-eval 0.4.13 verifies them."""
    assert keeps(text, identifier, arguments) is kept


def test_a_pattern_in_a_row_is_text():
    assert not keeps("aaaa", "keywords:existence", {"keywords": ["(a+)+$"]})


def test_ifeval_is_right_by_all_constraints_and_leaves_out_what_is_not_verified(tmp_path):
    spoken = IFEVAL | {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "hi"}]}
    suite = suite_of(tmp_path, "ifeval", spoken, IFEVAL, spoken)
    assert (len(suite.prompts), suite.left_out) == (1, 2) and not suite.has_votes
    assert (scored(suite, "two words"), scored(suite, "two, words"), scored(suite, "three more words")) == (1, 0, 0)


def rewarded(suite, *answers: str, monkeypatch) -> list[float]:
    async def play() -> list[float]:
        sandbox = Sandbox(2)
        monkeypatch.setattr(programs, "shared_sandbox", lambda: sandbox)
        try:
            environments = [suite.task.environment(suite.prompts[0]) for _ in answers]
            return [(await env.step(text)).reward for env, text in zip(environments, answers, strict=True)]
        finally:
            await sandbox.close()

    return asyncio.run(play())


def test_humaneval_runs_a_function_or_a_continuation_with_the_sets_tests(tmp_path, monkeypatch):
    need_boxes()
    suite = suite_of(tmp_path, "humaneval", HUMANEVAL)
    answers = (
        "```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```",
        HUMANEVAL["canonical_solution"],
        "    def total_of(some):\n        return sum(some)\n    return total_of(numbers)",
        "def total_of(some):\n    return sum(some)\n\ndef total (numbers):\n    return total_of(numbers)",
        "def total(numbers):\n    return 3",
        "raise SystemExit(0)",
        "import sys\ndef total(numbers):\n    sys.exit(0)",
        "",
    )
    assert rewarded(suite, *answers, monkeypatch=monkeypatch) == [1, 1, 1, 1, 0, 0, 0, 0]


def test_mbpp_runs_the_assertions_of_its_row(tmp_path, monkeypatch):
    need_boxes()
    suite = suite_of(tmp_path, "mbpp", MBPP)
    answers = MBPP["code"], f"Here:\n```python\n{MBPP['code']}\n```", "def double(x):\n    return 4", "double = 1"
    assert "assert double(2) == 4" in suite.prompts[0].text
    assert rewarded(suite, *answers, monkeypatch=monkeypatch) == [1, 1, 0, 0]


def test_a_scorer_tells_a_suites_answers_from_the_runs_own(tmp_path):
    suite = suite_of(tmp_path, "gsm8k", GSM8K)
    tables = [{"name": "gsm8k", "file": suite.config.file}]
    own = make_task(TaskConfig(name="gcd"))
    prompt = own.prompt("train", 1, 0)

    async def score() -> list[list[float]]:
        scorer = Scorer(TaskConfig(name="gcd"), [], 20.0, 2, tables)
        await scorer.start()
        try:
            asked = [(suite.prompts[0], ["#### 72"]), (suite.prompts[0], ["72"]), (prompt, [prompt.answer])]
            return [[s.reward for s in (await scorer.score(each, [answers]))[0]] for each, answers in asked]
        finally:
            await scorer.close()

    assert asyncio.run(score()) == [[1.0], [0.0], [1.0]]
    parts = make_all(TaskConfig(name="gcd"), tables, []).parts
    assert set(parts) == {"", "eval/gsm8k"}


def _without_network(monkeypatch, cache) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch_split.cache_clear()


def test_a_suite_without_a_file_asks_the_rows_of_its_data_set_on_the_hub(tmp_path, monkeypatch):
    repository = tmp_path / "datasets--openai--gsm8k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for split, count in (("train", 3), ("test", 2)):
        file = repository / "snapshots" / ("0" * 40) / "main" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([GSM8K] * count), file)
    _without_network(monkeypatch, tmp_path)
    config = load_config(None, {"eval": {"suites": [{"name": "gsm8k"}]}})
    [suite] = make_suites(config)
    assert [prompt.answer for prompt in suite.with_prompts(256).prompts] == ["72", "72"]
    [source] = suite_sources(config)["eval.suites.gsm8k.file"]
    assert source.commit == "0" * 40


def test_each_preset_names_a_data_set_of_the_hub():
    for preset in PRESETS.values():
        name = parse_hub_name(preset.hub)
        assert name is not None and name.words and name.repository == preset.data_set


def test_a_suite_is_sampled_by_its_own_settings_and_stops_at_the_runs_texts(tmp_path):
    table = {"name": "gsm8k", "file": written(tmp_path, GSM8K), "k": 4}
    cut = table | {"name": "cut", "suite": "gsm8k", "top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": []}
    cut |= {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    rollout = {"stop": ["Q:"], "top_p": 0.5, "presence_penalty": 1, "thinking_budget": 8, "max_new_tokens": 512}
    cut["thinking_budget"] = 32
    config = load_config(None, {"eval": {"suites": [table, cut]}, "rollout": rollout})
    decodings = [sampling_of(suite, config, 512).decoding for suite in make_suites(config)]
    penalties = dict(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5)
    own = Decoding(top_p=0.9, top_k=20, min_p=0.05, **penalties, thinking_budget=32)
    assert decodings == [Decoding(stop=("Q:",), thinking_budget=8), own]
    assert held_out_decoding(config) == decodings[0]
    config = replace(config, eval=replace(config.eval, thinking_budget=16))
    assert [sampling_of(suite, config, 512).decoding.thinking_budget for suite in make_suites(config)] == [16, 32]
    assert held_out_decoding(config) == Decoding(stop=("Q:",), thinking_budget=16)
    config = replace(config, eval=replace(config.eval, thinking_budget=0))  # no limit
    assert [sampling_of(suite, config, 512).decoding.thinking_budget for suite in make_suites(config)] == [0, 32]
    assert held_out_decoding(config) == Decoding(stop=("Q:",))
    config = load_config(None, {"eval": {"suites": [cut | {"thinking_budget": 0}]}, "rollout": rollout})
    assert [sampling_of(suite, config, 512).decoding.thinking_budget for suite in make_suites(config)] == [0]


MISTAKES = [
    ({}, "needs a name"),
    ({"name": "a b"}, "needs a name"),
    ({"name": "gsm8k"}, "eval.suites.gsm8k.file = 'openai/gsm8k:main:test'"),
    ({"name": "math500"}, "`hf download HuggingFaceH4/MATH-500 --repo-type dataset`"),
    ({"name": "gsm8k", "file": [{"path": "FILE", "weight": 2.0}]}, "weights have no effect"),
    ({"name": "x", "task": {"name": "jsonl", "options": {"file": [{"path": "a", "weight": 2.0}]}}}, "weights have no"),
    ({"name": "gsm8q"}, "did you mean 'gsm8k'?"),
    ({"name": "gsm8k", "file": "nowhere.jsonl"}, "eval.suites.gsm8k.file = 'nowhere.jsonl'"),
    ({"name": "gsm8k", "kk": 3}, "unknown key eval.suites.gsm8k.kk"),
    ({"name": "gsm8k", "k": 0}, "eval.suites.gsm8k.k = 0"),
    ({"name": "gsm8k", "k": 8, "samples": 4}, "eval.suites.gsm8k.samples = 4 is less than k = 8"),
    ({"name": "gsm8k", "k": 8, "temperature": 0.0}, "eval.suites.gsm8k.temperature = 0 gives 8 times the same answer"),
    ({"name": "gsm8k", "samples": 4, "temperature": 0}, "gives 4 times the same answer"),
    ({"name": "gsm8k", "temperature": 0.005}, "eval.suites.gsm8k.temperature = 0.005 would be sampled at 0.01"),
    ({"name": "gsm8k", "file": "FILE", "options": {"held_out_share": 0.5}}, "eval.suites.gsm8k: held_out_share is of"),
    (
        {"name": "x", "task": {"name": "jsonl", "options": {"file": "a", "held_out_file": "b"}}},
        "x: held_out_file is of",
    ),
    ({"name": "gsm8k", "temperature": 3.0}, "eval.suites.gsm8k.temperature = 3.0"),
    ({"name": "gsm8k", "k": 2, "top_p": 0.0}, "eval.suites.gsm8k.top_p = 0.0"),
    ({"name": "gsm8k", "repetition_penalty": 0}, "eval.suites.gsm8k.repetition_penalty = 0"),
    ({"name": "gsm8k", "file": "FILE", "min_p": 0.1}, "eval.suites.gsm8k.min_p = 0.1 has no effect on greedy answers"),
    ({"name": "gsm8k", "file": "FILE", "stop": [""]}, "eval.suites.gsm8k.stop"),
    ({"name": "gsm8k", "file": "FILE", "prompts": 2}, "eval.suites.gsm8k.prompts = 2, but it has 1 rows"),
    ({"name": "gsm8k", "file": "FILE", "options": {"rul": "strict"}}, "unknown key eval.suites.gsm8k.rul"),
    ({"name": "gsm8k", "file": "FILE", "system_prompt": "hi"}, "system_prompt needs style = 'chat'"),
    ({"name": "x", "task": {"name": "gcd"}, "file": "FILE"}, "put file and options into task.options"),
    ({"name": "x", "task": {"name": "mixture", "options": {}}}, "several are several suites"),
    ({"name": "x", "task": {"name": "gcd", "sandbox": {"url": "http://a"}}}, "sandbox and keep_special are the run's"),
    ({"name": "math500", "file": "FILE"}, "rows.jsonl line 1: no 'answer'"),
]


@pytest.mark.parametrize(("table", "words"), MISTAKES)
def test_a_mistake_in_a_suite_is_one_line(tmp_path, monkeypatch, table, words):
    _without_network(monkeypatch, tmp_path)
    file = written(tmp_path, GSM8K if table.get("name") != "math500" else {"problem": "1?"})
    table = {key: file if value == "FILE" else value for key, value in table.items()}
    with pytest.raises(ConfigError) as error:
        for suite in make_suites(load_config(None, {"eval": {"suites": [table]}})):
            suite.with_prompts(4)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_suite_asks_every_row_of_its_file_whatever_rewards_it(tmp_path):
    file = written(tmp_path, *({"question": f"{n}?", "answer": str(n)} for n in range(10)))
    for reward in ({}, {"reward": "gsm8k"}, {"rewards": {"task": 1.0, "math": 0.5}}):
        [suite] = make_suites(of_task({"name": "jsonl", "options": {"file": file}} | reward))
        assert [prompt.text for prompt in suite.with_prompts(4).prompts] == [f"{n}?" for n in range(10)]


def of_task(task: dict) -> Config:
    return load_config(None, {"eval": {"suites": [{"name": "x", "task": task}]}})


LONG = "Step by step. " * 40


@pytest.mark.parametrize(
    ("task", "answer", "final"),
    [
        ({"name": "jsonl"}, " 72\n", "72"),
        ({"name": "jsonl"}, LONG, LONG.strip()),
        ({"name": "jsonl", "reward": "gsm8k"}, f"{LONG}\n#### 72", "72"),
        ({"name": "jsonl", "rewards": {"gsm8k_flexible": 2.0}}, f"{LONG} 72 it is", "72"),
        ({"name": "jsonl", "reward": "math"}, rf"{LONG} \boxed{{7 2}}", "72"),
        ({"name": "math"}, rf"{LONG} \boxed{{72}}", "72"),
        ({"name": "jsonl", "reward": "math"}, LONG, None),
    ],
)
def test_a_majority_counts_what_the_reward_reads(tmp_path, task, answer, final):
    file = written(tmp_path, {"question": "1?", "answer": "72"})
    [suite] = make_suites(of_task(task | {"options": {"file": file}}))
    suite = suite.with_prompts(4)
    assert suite.has_votes and suite.final(suite.prompts[0], answer) == final


@pytest.mark.parametrize(
    "task",
    [
        {"reward": "mine:length"},
        {"rewards": {"task": 1.0, "math": 0.5}},
        {"name": "gcd", "options": {}},
        {"name": "calculator", "options": {}},
    ],
)
def test_a_reward_that_reads_no_final_answer_has_no_majority(tmp_path, monkeypatch, task):
    monkeypatch.setattr("titan_rl.environments.rewards.functions.resolve", lambda *names: length)
    options = {"file": written(tmp_path, {"question": "1?", "answer": "72"})}
    [suite] = make_suites(of_task({"name": "jsonl", "options": options} | task))
    prompt = suite.with_prompts(1).prompts[0]
    assert not suite.has_votes and suite.final(prompt, "72") is None


def length(prompt, completion, row):
    return 1.0


def test_two_suites_of_one_name_are_refused(tmp_path):
    table = {"name": "gsm8k", "file": written(tmp_path, GSM8K)}
    with pytest.raises(ConfigError, match="two of eval.suites have the name 'gsm8k'"):
        make_suites(load_config(None, {"eval": {"suites": [table, table]}}))
    greedy = table | {"name": "gsm8k-greedy", "suite": "gsm8k"}
    assert len(make_suites(load_config(None, {"eval": {"suites": [table, greedy]}}))) == 2


def test_a_record_s_suites_bring_no_code(tmp_path):
    suite = {"name": "x", "task": {"name": "evil:Task"}}
    (tmp_path / "config.json").write_text(json.dumps({"eval": {"suites": [suite]}}))
    assert load_recorded(RunDir(tmp_path), tmp_path / "config.json", []).eval.suites == []


ROWS = [
    ("gsm8k", {"question": "1?", "answer": "72"}, "no '#### ' with a number"),
    ("gsm8k", {"question": "1?"}, "no 'answer'"),
    ("mmlu_pro", MMLU_PRO | {"options": ["one"]}, "give a list of 2 to 26 texts"),
    ("mmlu_pro", MMLU | {"answer": 5}, "give the letter of one of its 2 options"),
    ("mmlu_pro", ARC | {"answerKey": "7"}, "give the letter of one of its 2 options"),
    ("ifeval", IFEVAL | {"kwargs": []}, "give a table for each"),
    ("ifeval", IFEVAL | {"instruction_id_list": ["punctuation:no_coma", "x"]}, "did you mean 'punctuation:no_comma'?"),
    ("ifeval", IFEVAL | {"instruction_id_list": ["", "x"]}, "the instruction '' is unknown"),
    ("ifeval", IFEVAL | {"kwargs": [{}, {"words": 3}]}, "'kwargs' of length_constraints:number_words"),
    ("ifeval", IFEVAL | {"kwargs": [{}, {"num_words": 3, "relation": "about"}]}, "'about' is unknown"),
    ("humaneval", HUMANEVAL | {"entry_point": "other"}, "correct the row"),
    ("humaneval", HUMANEVAL | {"entry_point": "tota"}, "correct the row"),
    ("humaneval", HUMANEVAL | {"test": "def check(candidate):\n  assert ("}, "its tests are no Python"),
    ("mbpp", MBPP | {"test_list": []}, "give a list of assertions"),
    ("math500", MATH | {"answer": True}, "give text"),
]


@pytest.mark.parametrize(("name", "row", "words"), ROWS)
def test_a_row_that_is_not_the_sets_is_named_with_its_line(tmp_path, name, row, words):
    if name in ("humaneval", "mbpp"):
        need_boxes()
    with pytest.raises(ConfigError, match=r"rows\.jsonl line 1: ") as error:
        suite_of(tmp_path, name, row)
    assert words in str(error.value) and "\n" not in str(error.value)
