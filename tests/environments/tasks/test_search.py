"""The search task: BM25 against its formula, what the model is shown, and which answers are right."""

import asyncio
import inspect
import json
import math
import random
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from titan_rl.actors import verifier
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.demonstrations import demonstrate
from titan_rl.environments.tasks.search.bm25 import BM25, K1, B, Passage, terms_of
from titan_rl.environments.tasks.search.search_task import normalized
from titan_rl.models.builtin.tokenizer import character_tokenizer

CORPUS = [
    {"title": "Emma", "contents": "Emma is a novel by Jane Austen."},
    {"title": "Persuasion", "contents": "A novel by Jane Austen, her last."},
    {"contents": "Middlemarch was written by George Eliot."},
]
ROWS = [
    {"question": "Who wrote Emma?", "golden_answers": ["Jane Austen", "Austen"]},
    {"question": "Who wrote Middlemarch?", "answer": "George Eliot"},
]
HELD_OUT = [{"question": "Who?", "answer": "nobody"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def task_of(folder, style="chat", rows=ROWS, corpus=CORPUS, held_out=HELD_OUT, **options):
    write(folder / "rows.jsonl", rows * 5)
    write(folder / "corpus.jsonl", corpus)
    files = {"file": "rows.jsonl", "corpus": "corpus.jsonl", "held_out_file": "held_out.jsonl"}
    write(folder / "held_out.jsonl", held_out)
    return make_task(TaskConfig(name="search", style=style, options=files | options), [str(folder)])


def prompt_of(task, question: str):
    return next(prompt for prompt in PromptStream(task, 1) if question in prompt.text)


def by_formula(texts: list[str], query: str) -> list[float]:
    """BM25, one term and one passage at a time."""
    documents = [terms_of(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for term in terms_of(query):
            holding = sum(term in other for other in documents)
            frequency = document.count(term)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            score += idf * frequency * (K1 + 1) / (frequency + K1 * (1 - B + B * len(document) / mean))
        scores.append(score)
    return scores


def test_scores_are_the_formula_s():
    draw, words = random.Random(1), ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    for _ in range(50):
        texts = [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(draw.randint(1, 12))]
        query = " ".join(draw.choices([*words, "nine"], k=draw.randint(1, 6)))
        index = BM25(Passage("", text) for text in texts)
        assert index.scores(query).tolist() == pytest.approx(by_formula(texts, query), rel=1e-5, abs=1e-6)


def test_passages_with_a_term_come_best_first_and_others_not_at_all():
    index = BM25(Passage(row.get("title", ""), row["contents"]) for row in CORPUS)
    assert [each.title for each in index.search("Emma, by Austen", 3)] == ["Emma", "Persuasion", ""]
    assert [each.title for each in index.search("last novel", 1)] == ["Persuasion"]
    assert index.search("zebra", 3) == [] and index.search("", 3) == []


def test_a_search_is_a_tool_s_result_and_the_answer_ends_the_episode(tmp_path):
    task = task_of(tmp_path, passages=2, passage_characters=50)
    prompt = prompt_of(task, "Emma")
    environment = task.environment(prompt)

    async def step(query: str):
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        return await environment.step(f"<tool_call>{call}</tool_call>")

    async def play():
        return await asyncio.gather(step("Emma novel"), step("zebra"), step(" ")), await environment.step("done")

    (found, nothing, empty), over = asyncio.run(play())
    assert found.messages[0]["role"] == "tool"
    assert found.messages[0]["content"] == (
        "[1] Emma: Emma is a novel by Jane Austen.\n[2] Persuasion: A novel by Jane Austen, her last."
    )
    assert nothing.messages[0]["content"] == "no passage has any of these words"
    assert empty.messages[0]["content"].startswith("error") and empty.calls[0].status == "error"
    assert not over.messages


def test_the_best_are_the_same_as_by_sorting_all():
    draw = random.Random(2)
    texts = [" ".join(draw.choices("abcd", k=draw.randint(1, 6))) for _ in range(60)]
    index = BM25(Passage(str(number), text) for number, text in enumerate(texts))
    for query in ("a", "b c", "a b c d", "d d"):
        scores = index.scores(query).tolist()
        best = sorted((number for number, score in enumerate(scores) if score > 0), key=lambda n: (-scores[n], n))
        for count in (1, 3, 60):
            assert [int(each.title) for each in index.search(query, count)] == best[:count]


def test_postings_take_few_bytes():
    words = [f"word{number}" for number in range(500)]
    draw = random.Random(3)
    texts = [" ".join(draw.sample(words, 50)) for _ in range(200)]
    index = BM25(Passage("", text) for text in texts)
    stored = [value for value in vars(index).values() if hasattr(value, "nbytes")]
    assert sum(value.nbytes for value in stored) <= 8 * 200 * 50 + 8 * 501


def test_the_index_is_built_before_the_first_episode_and_once(tmp_path):
    task = task_of(tmp_path)
    task.prepare_episodes()
    (tmp_path / "corpus.jsonl").unlink()
    assert asyncio.run(task._search("Emma")).startswith("[1] Emma")


def test_a_verifier_that_has_started_has_the_index_of_every_task(tmp_path, monkeypatch):
    task_of(tmp_path)  # for its files
    options = {"file": "rows.jsonl", "corpus": "corpus.jsonl"}
    config = load_config(
        None, {"run": {"plugin_path": [str(tmp_path)]}, "task": {"name": "mixture"}}, with_models=False
    )
    config.task.options = {"one": {"name": "search", "options": options}, "two": {"name": "gcd"}}
    monkeypatch.setattr(verifier, "GradedScorer", lambda *given: SimpleNamespace(start=AsyncMock(return_value=7)))
    monkeypatch.setattr(verifier, "load_tokenizer", lambda *given: None)
    started = verifier.Verifier("model")
    assert asyncio.run(inspect.unwrap(verifier.Verifier.start._method)(started, config)) == 7
    (tmp_path / "corpus.jsonl").unlink()
    assert asyncio.run(started.task.parts["one"]._search("Emma")).startswith("[1] Emma")


def test_a_search_leaves_the_event_loop_to_others(tmp_path, monkeypatch):
    task, threads = task_of(tmp_path), []
    search = BM25.search
    monkeypatch.setattr(BM25, "search", lambda *given: (threads.append(threading.current_thread()), search(*given))[1])
    asyncio.run(task._search("Emma"))
    assert threads and threading.main_thread() not in threads


def test_all_that_is_promised_is_shown(tmp_path):
    corpus = [{"title": f"{number} {'T' * 5000}", "contents": "word " * 400} for number in range(30)]
    task = task_of(tmp_path, corpus=corpus, passages=4, passage_characters=890)
    call = json.dumps({"name": "search", "arguments": {"query": "word"}})
    reply = asyncio.run(task.environment(prompt_of(task, "Emma")).step(f"<tool_call>{call}</tool_call>"))
    lines = reply.messages[0]["content"].splitlines()
    assert len(lines) == 4 and all(len(line) > 890 for line in lines)


def test_an_alias_that_normalizes_to_nothing_is_left_out_and_a_row_without_another(tmp_path):
    rows = [{"question": "Type?", "golden_answers": ["type A", "A"]}, {"question": "Band?", "golden_answers": ["The"]}]
    task = task_of(tmp_path, rows=rows)
    prompts = task.every_prompt()
    assert {prompt.text.split("\n")[0] for prompt in prompts} == {"Type?"} and task.left_out == 5
    assert prompts[0].entry["row"]["golden_answers"] == ["type A"]


def test_held_out_rows_are_those_of_the_sets_asked_for(tmp_path):
    held_out = [
        {"question": f"{name} {n}?", "answer": "b", "data_source": name} for name in ("nq", "popqa") for n in "12"
    ]
    task = task_of(tmp_path, held_out=held_out, held_out_only=["nq"])
    asked = {prompt.text.split("\n")[0] for prompt in held_out_prompts(task, 4)}
    assert asked == {"nq 1?", "nq 2?"} and task.size.held_out == 2


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("<answer>Jane Austen</answer>", True),
        ("It is so. <answer> the jane  AUSTEN. </answer>", True),
        ("<answer>Austen</answer>", True),
        ("Jane Austen", False),
        ("<answer>Jane Austen or George Eliot</answer>", False),
        ("<answer>Jane</answer><answer>Jane Austen</answer>", False),
        ("<answer></answer>", False),
        (f"<answer>{'the ' * 400}Austen</answer>", False),
    ],
)
def test_right_is_what_equals_one_of_the_answers(tmp_path, answer, is_right):
    task = task_of(tmp_path)
    assert task.score(prompt_of(task, "Emma"), ["...", answer]) == {"exact": float(is_right)}


@pytest.mark.parametrize("style", ["compact", "chat"])
def test_a_worked_example_searches_and_is_right(tmp_path, style):
    task = task_of(tmp_path, style)
    for row in ROWS:
        prompt = prompt_of(task, row["question"])
        assert task.score(prompt, task.demonstration(prompt)) == {"exact": 1.0}
    if style == "compact":
        rollout = asyncio.run(demonstrate(prompt, task, character_tokenizer(), 10.0))
        assert len(rollout.turns) == 2 and "=[1] " in character_tokenizer().decode(rollout.tokens)


def test_normalized_answers_are_squad_s():
    assert normalized("The  Beatles, (a band)!") == "beatles band" and normalized("An U.S. flag") == "us flag"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(rows=[{"question": "Who?"}]), "golden_answers"),
        (dict(rows=[{"question": "Who?", "answer": "the"}]), "no rows"),
        (dict(rows=[{"question": "Who?", "golden_answers": []}]), "no rows"),
        (dict(rows=[{"question": "Who?", "golden_answers": [1]}]), "give text"),
        (dict(corpus=[{"title": "Emma"}]), "'text' or 'contents'"),
        (dict(corpus=[]), "no passage"),
        (dict(passages=0), "task.options.passages"),
        (dict(passages=20), "20 passages have at most 90 each"),
        (dict(held_out_only=["nq"]), "held_out_only"),
        (dict(top_k=0), "task.options.top_k"),
    ],
)
def test_mistakes_are_one_line(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        task = task_of(tmp_path, **changes)
        task.check_ready()
        task.prompt("train", 1, 0)
    [line] = str(caught.value).splitlines()
    assert words in line
    with pytest.raises(ConfigError, match="needs task.options.corpus"):
        make_task(TaskConfig(name="search", options={"file": "rows.jsonl"}), [str(tmp_path)])
