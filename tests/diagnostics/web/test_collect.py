"""The collection page: what a browser may send, what is judged, and what the command says to a mistake."""

import asyncio
import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import running
from another_user import as_another_user, ask, needs_root
from chat_models import make_chat_model
from collecting import served
from made_rollouts import rollout_of
from made_run import made_run
from row_tasks import write
from starlette.testclient import TestClient

from titan_rl.cli import main
from titan_rl.config.load import ConfigError, load_resolved
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.controller.preflight.checks import tokenizer_of
from titan_rl.data.storage.files import DiskFull
from titan_rl.data.types import Group, Turn
from titan_rl.diagnostics.bench.page.browser import browser_page, why_no_browser
from titan_rl.diagnostics.web.collect import application as applications
from titan_rl.diagnostics.web.collect import command, generation
from titan_rl.diagnostics.web.collect import recorded as recorded_answers
from titan_rl.diagnostics.web.collect.application import MOST_BYTES, application
from titan_rl.diagnostics.web.collect.recorded import run_items
from titan_rl.diagnostics.web.collect.sources import (
    asked_item,
    check_forms,
    disguised,
    drawn,
    file_items,
    planted_items,
)
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult
from titan_rl.records.preferences.collection import Collection, Settings, create, read_collection
from titan_rl.records.preferences.items import Item, shuffled
from titan_rl.records.preferences.judgements import judgement_of, page_choices
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

UNSCORED = "titan_rl.environments.rewards.unscored:zero"
EVIL = "<script>document.title='forged'</script><img src=x onerror=\"document.title='forged'\">\x1b[2J"


def collection(folder: Path, items: list[Item] | None = None, wanted: int = 1) -> Collection:
    items = items or [Item(f"{n}? {EVIL}", (f"{EVIL} {n}", f"wrong {n}"), f"line {n}") for n in range(5)]
    create(folder, Settings("pairs" if len(items[0].answers) > 1 else "ratings", 7, wanted, {}), shuffled(items, 7))
    return Collection(folder)


@pytest.fixture
def client(tmp_path):
    opened = collection(tmp_path / "c")
    yield TestClient(application(opened), raise_server_exceptions=False)
    opened.close()


def judgement(item: str = "0000", **changes) -> dict:
    return {"id": "id-000001", "item": item, "who": "Ann", "choice": "first", "seconds": 1.0} | changes


# what a browser may send


def test_a_choice_is_in_the_journal_when_the_page_is_told(client, tmp_path):
    item = client.get("/next", params={"who": "Ann"}).json()["item"]
    assert item["answers"][0].startswith((EVIL, "wrong"))
    reply = client.post("/judgements", json=judgement(item["id"]))
    assert reply.status_code == 200 and reply.json()["saved"] == "id-000001" and reply.json()["done"] == 1
    [line] = (tmp_path / "c" / "judgements.jsonl").read_text().splitlines()
    assert json.loads(line)["item"] == item["id"] and reply.json()["item"]["id"] != item["id"]


def test_neither_what_is_planted_nor_where_it_is_from_is_sent(tmp_path):
    items = [Item(f"{n}+1=", ("2", "3"), f"secret.jsonl line {n}", planted) for n, planted in enumerate(["", "a", "b"])]
    opened = collection(tmp_path / "c", items)
    client, shown = TestClient(application(opened)), []
    while item := (reply := client.get("/next", params={"who": "Ann"})).json()["item"]:
        assert "planted" not in reply.text and "secret" not in reply.text
        shown.append(item)
        client.post("/judgements", json=judgement(item["id"], id=f"id-00{item['id']}"))
    assert len(shown) == 3 and {tuple(item) for item in shown} == {("id", "prompt", "answers", "editable")}
    opened.close()


@pytest.mark.parametrize(
    "content, kind, status",
    [
        (b"{}", "text/plain", 415),  # what a form of another page can send
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"id": 1, "id": 2}', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b" " * (MOST_BYTES + 1), "application/json", 413),
        (json.dumps(judgement(shown=[0, 1])).encode(), "application/json", 400),  # the server's own to say
        (json.dumps(judgement(time=1.0)).encode(), "application/json", 400),
        (json.dumps(judgement("9999")).encode(), "application/json", 400),
        (json.dumps(judgement(choice="a")).encode(), "application/json", 400),
        (json.dumps(judgement(who=EVIL)).encode(), "application/json", 400),
        (json.dumps(judgement(edit="\ud800")).encode(), "application/json", 400),
        (json.dumps(judgement(seconds=float("nan"))).encode(), "application/json", 400),
    ],
)
def test_anything_else_is_refused_in_one_line_and_nothing_is_written(client, tmp_path, content, kind, status):
    reply = client.post("/judgements", content=content, headers={"content-type": kind})
    assert reply.status_code == status and len(reply.json()["error"].splitlines()) == 1
    assert (tmp_path / "c" / "judgements.jsonl").read_bytes() == b""


@pytest.mark.parametrize("who", ["", " ", "<b>", "a" * 300, "\x1b[2J"])
def test_a_name_is_letters(client, who):
    assert client.get("/next", params={"who": who}).status_code == 400
    assert client.get("/next").status_code == 400


def test_a_name_that_is_in_use_is_said_to_be(client):
    known = [client.get("/next", params={"who": who}).json() for who in ("Ann", "ANN", "Bob")]
    assert [each["is_known"] for each in known] == [False, True, False]
    client.post("/judgements", json=judgement(who="Ann"))
    again = client.get("/next", params={"who": "ann"}).json()
    assert (again["who"], again["is_known"], again["done"]) == ("Ann", True, 1)


def test_only_a_rated_answer_without_calls_can_be_edited(client, tmp_path):
    assert client.get("/next", params={"who": "Ann"}).json()["item"]["editable"] is None
    assert client.post("/judgements", json=judgement(choice="tie", edit="zz")).status_code == 400
    message = {"role": "assistant", "content": "It is 42", "reasoning_content": "hm hm"}
    opened = collection(tmp_path / "r", [Item([{"role": "user", "content": "q"}], ([message],), "x")])
    item = TestClient(application(opened)).get("/next", params={"who": "Ann"}).json()["item"]
    assert item["editable"] == "It is 42" and "hm hm" in item["answers"][0]
    opened.close()


def run_app(opened: Collection, receive) -> list[dict]:
    """What is answered to a POST whose body comes from ``receive``."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/judgements", "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    asyncio.run(application(opened)(scope, receive, send))
    return sent


def test_a_body_that_never_ends_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(applications, "BODY_SECONDS", 0.05)
    opened = collection(tmp_path / "c")
    sent = run_app(opened, lambda: asyncio.sleep(60))
    assert sent[0]["status"] == 408 and b"did not end" in sent[1]["body"]
    opened.close()


def test_a_request_that_the_end_cuts_off_is_answered_and_no_error(tmp_path):
    async def cancelled():
        raise asyncio.CancelledError

    opened = collection(tmp_path / "c")
    assert run_app(opened, cancelled)[0]["status"] == 503
    opened.close()


def test_a_full_disk_is_said_and_nothing_is_called_saved(client, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titan_rl.records.preferences.journal._write_all", full)
    reply = client.post("/judgements", json=judgement())
    assert reply.status_code == 507 and "the disk is full" in reply.json()["error"]
    monkeypatch.undo()
    assert client.post("/judgements", json=judgement()).json()["done"] == 1


@pytest.mark.slow
def test_the_page_as_it_is_served_needs_its_address_and_loads_its_own_parts_alone(tmp_path):
    collection(tmp_path / "c").close()
    with served(tmp_path / "c") as address, httpx.Client() as browser:
        root, _, secret = address.rstrip("/").rpartition("/")
        other_secret = secret[:-1] + ("y" if secret.endswith("x") else "x")
        page = browser.get(address)
        parts = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
        assert page.status_code == 200 and parts == {"page.js", "page.css"} and not browser.cookies
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "access-control-allow-origin" not in page.headers and page.headers["cache-control"] == "no-store"
        for path in ("", *parts, "next?who=Ann"):
            assert browser.get(address + path).status_code == 200
            assert browser.get(f"{root}/{path}").status_code == 403
            assert browser.get(f"{root}/{other_secret}/{path}").status_code == 403
        other = {"origin": "http://evil.example"}
        assert browser.post(f"{address}judgements", json=judgement(), headers=other).status_code == 403
        assert not read_collection(tmp_path / "c").judgements


@needs_root
@pytest.mark.slow
def test_another_user_of_the_host_is_not_let_in_even_with_the_address(tmp_path):
    collection(tmp_path / "c").close()
    with served(tmp_path / "c") as address:
        place = urlsplit(address)
        opened = partial(ask, place.port, f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        assert opened().startswith(b"HTTP/1.1 200")
        assert as_another_user({"the page": opened}) == []


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_in_a_browser(tmp_path):
    """Keys and the mouse judge, hostile answers are text, an edit is kept, and nothing is asked of anybody else."""
    collection(tmp_path / "pairs").close()
    collection(tmp_path / "rated", [Item(f"{n}?", (f"a{n}\r\nb",), "x") for n in range(2)]).close()
    with served(tmp_path / "pairs") as address, browser_page() as page:
        page.goto(address)
        page.get_by_label("Your name").fill("Ann")
        page.keyboard.press("Enter")
        for count, press in enumerate(["1", "2", "0", "b"], 1):
            page.wait_for_selector(f"text={count - 1} judged, {6 - count} open")
            page.keyboard.press(press)
        page.wait_for_selector("text=4 judged")
        assert page.locator("#answers pre").all_inner_texts()[0].startswith(("<script>", "wrong"))
        page.keyboard.press("Backspace")
        page.get_by_role("button", name="Equally good").click()
        page.wait_for_selector("text=4 judged, 1 open")
        page.get_by_role("button", name="Second is better").click()
        page.wait_for_selector("text=That is all")
        page.keyboard.press("Backspace")  # the last one, too
        page.wait_for_selector("text=judge it again")
        page.get_by_role("button", name="First is better").click()
        page.wait_for_selector("text=That is all")
        assert "forged" not in page.title() and not page.elsewhere and not page.errors
    choices = [each.choice for each in read_collection(tmp_path / "pairs").judgements]
    assert choices[2:5] == ["tie", "both_bad", "tie"] and len(choices) == 7
    assert {*choices[5:]} == {"a", "b"}
    with served(tmp_path / "rated") as address, browser_page() as page:
        page.goto(address)
        page.get_by_label("Your name").fill("Bob")
        page.get_by_role("button", name="Begin").click()
        page.wait_for_selector("text=0 judged")
        page.keyboard.press("1")
        page.wait_for_selector("text=1 judged")
        page.keyboard.press("e")
        page.locator("#edit").fill("better 1")  # 1 in the text is no choice
        page.keyboard.press("Escape")
        page.keyboard.press("Backspace")  # what is written and not sent stays
        page.wait_for_selector("text=judge this one first")
        page.keyboard.press("2")
        page.wait_for_selector("text=That is all")
        page.get_by_role("button", name="Back").click()
        page.wait_for_selector("text=judge it again")
        assert page.locator("#edit").input_value() == "better 1"
        page.keyboard.press("1")
        page.wait_for_selector("text=That is all")
        assert not page.errors
    assert [(e.choice, e.edit) for e in read_collection(tmp_path / "rated").judgements] == [
        ("good", ""),
        ("bad", "better 1"),
        ("good", "better 1"),
    ]


# what is judged


def test_pairs_of_a_file_in_any_shape(tmp_path):
    chat = [{"role": "user", "content": "c?"}]
    answers = [[{"role": "assistant", "content": each}] for each in "xy"]
    rows = [
        {"prompt": "a?", "answers": ["x", "y"]},
        {"input": "b?", "chosen": "x", "rejected": "y"},
        {"prompt": chat, "answers": answers},
    ]
    items = file_items("--pairs", str(write(tmp_path, rows, "a.jsonl")), "pairs")
    assert [item.prompt for item in items] == ["a?", "b?", chat] and items[2].answers == tuple(answers)
    rated = file_items("--pairs", str(tmp_path / "a.jsonl"), "ratings")
    assert len(rated) == 6 and not any(item.planted for item in rated)
    single = write(tmp_path, [{"prompt": "a?", "completion": "x"}], "b.jsonl")
    assert [item.answers for item in file_items("--pairs", str(single), "ratings")] == [("x",)]


def test_planted_pairs_know_their_better_answer(tmp_path):
    path = str(write(tmp_path, [{"prompt": "a?", "chosen": "x", "rejected": "y"}], "a.jsonl"))
    [pair] = planted_items(path, "pairs")
    assert pair.answers["ab".index(pair.planted)] == "x"
    assert [(item.answers, item.planted) for item in planted_items(path, "ratings")] == [
        (("x",), "good"),
        (("y",), "bad"),
    ]
    with pytest.raises(ConfigError, match="'chosen', the better answer"):
        planted_items(str(write(tmp_path, [{"prompt": "a?", "answers": ["x", "y"]}], "b.jsonl")), "pairs")


def test_a_planted_row_whose_better_answer_is_not_clear_is_refused(tmp_path):
    for answers in (["y", "x"], ["v", "w"]):
        row = {"prompt": "a?", "chosen": "x", "rejected": "y", "answers": answers}
        path = str(write(tmp_path, [row], "a.jsonl"))
        for read in (planted_items, partial(file_items, "--pairs")):
            with pytest.raises(ConfigError, match=r"a.jsonl line 1: 'answers' and 'chosen': keep"):
                read(path, "pairs")


def test_planted_items_look_like_the_others():
    chat, system = [{"role": "user", "content": "q"}], [{"role": "system", "content": "Be brief."}]
    text, plain, briefed = (Item(prompt, ("x", "y"), "known line 1", "a") for prompt in ("q", chat, system + chat))
    for one in (text, plain, briefed):
        check_forms([one], {one.form})
        for other in (text, plain, briefed):
            if other is not one:
                with pytest.raises(ConfigError, match="known line 1: it is .*, and what is judged is .*write it alike"):
                    check_forms([one], {other.form})
    check_forms([], {None})


def test_a_planted_prompt_comes_as_often_as_the_others(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "x", "rejected": "y"} for n in range(20)]
    planted = planted_items(str(write(tmp_path, rows, "a.jsonl")), "ratings")
    once = [Item(f"{n}!", ("z",), "x") for n in range(3)]
    assert disguised(planted, [*once, *once], 1) == planted and len(planted) == 40
    single = disguised(planted, once, 1)
    assert [item.prompt for item in single] == [row["prompt"] for row in rows]
    assert {item.planted for item in single} == {"good", "bad"}


def test_rows_of_a_long_file_are_drawn_and_the_others_not_looked_at(tmp_path):
    rows = [{"prompt": f"{n}?", "answers": ["x", "y"]} for n in range(60)]
    path = str(write(tmp_path, [*rows, {"prompt": "long", "answers": ["x", "y" * 300_000]}], "a.jsonl"))
    found = {
        seed: [int(item.prompt[:-1]) for item in file_items("--pairs", path, "pairs", count=6, seed=seed)]
        for seed in (1, 2)
    }
    for numbers in found.values():
        assert len(numbers) == 6 and numbers == sorted(set(numbers)) and max(numbers) > 20
    assert found[1] != found[2]
    with pytest.raises(ConfigError, match="line 61"):
        file_items("--pairs", path, "pairs", count=100)
    counts = Counter(number for seed in range(400) for number in drawn(range(10), 3, seed))
    assert len(counts) == 10 and all(80 < count < 160 for count in counts.values()), "all are as likely"


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "a?", "answers": ["x"]}, "list of two"),
        ({"prompt": "a?", "answers": ["x", "x"]}, "are the same"),
        ({"prompt": "", "answers": ["x", "y"]}, "empty"),
        ({"prompt": "a?"}, "chosen"),
        ({"prompt": "a?", "answers": ["x", "y" * 200_000]}, "more than a page shows"),
    ],
)
def test_a_row_that_does_not_fit_is_named_by_its_line(tmp_path, row, said):
    path = write(tmp_path, [{"prompt": "a?", "answers": ["x", "y"]}, row], "a.jsonl")
    with pytest.raises(ConfigError, match=said) as caught:
        file_items("--pairs", str(path), "pairs")
    assert "a.jsonl line 2" in str(caught.value)


def recorded(root: Path, **settings) -> Path:
    """A run of one more step: a prompt with three answers, one with equal ones, one with answers that are cut."""
    run_dir = made_run(root, checkpoint=0, **settings)
    config = load_resolved(run_dir.config)
    task, tokenizer = make_task(config.task), tokenizer_of(config)
    stream, turns = PromptStream(task, config.run.seed), [Turn(2, 3, "stop"), Turn(3, 4, "stop")]
    answers = [
        [dict(text=f"answer {n}") for n in range(3)],
        [dict(text="same")] * 3,
        [dict(text=f"cut {n}", status="truncated") for n in range(3)],
        [dict(text=f"of two turns {n}", turns=turns) for n in range(2)],
    ]
    groups = []
    for number, changes in enumerate(answers, 50):
        prompt = stream.at(number)
        tokens = encode_prompt(task, tokenizer, prompt)
        length = len(tokens)
        of_prompt = dict(
            tokens=np.append(tokens, tokens[:2]),
            provenance=np.array([0] * length + [1, 1], np.int8),
            logprobs=np.zeros(length + 2, np.float32),
            versions=np.array([-1] * length + [1, 1], np.int32),
            turns=[Turn(length, length + 2, "stop")],
        )
        rollouts = [rollout_of(prompt.id, sample, **of_prompt | each) for sample, each in enumerate(changes)]
        groups.append(Group(prompt.id, rollouts, question=prompt.text, task=prompt.task))
    write_rollouts(run_dir.rollouts, 3, groups)
    return root


def test_two_answers_of_a_run_that_differ_and_ended(tmp_path, monkeypatch):
    root = recorded(tmp_path / "run")
    [item] = run_items(root, "pairs", step=3, count=10, seed=1)
    assert len(set(item.answers)) == 2 and item.source.startswith("step 3 train/0000050 samples")
    answers = {run_items(root, "pairs", step=3, count=10, seed=seed)[0].answers for seed in range(8)}
    assert len(answers) > 2
    rated = run_items(root, "ratings", step=3, count=10, seed=1)
    assert [each.source.split()[2] for each in rated] == ["train/0000050", "train/0000051"]
    assert run_items(root, "ratings", step=None, count=2, seed=1) == rated, "the newest step first"
    monkeypatch.setattr(recorded_answers, "MOST_CHARACTERS", 5)
    with pytest.raises(ConfigError, match="has no prompt with answers to judge"):
        run_items(root, "ratings", step=3, count=10, seed=1)


ASKED = "Reverse this text character by character, and give the reversed text within <reversed_text> tags:\n\n"


@pytest.mark.parametrize("style", ["compact", "chat"])
def test_a_runs_prompt_is_what_its_model_was_asked(tmp_path, monkeypatch, style):
    """Not the words that a page about the run shows: the task's instruction and its system prompt, too."""
    chat = {}
    if style == "chat":
        model = str(make_chat_model(tmp_path / "model"))
        chat = dict(model__path=model, task__style="chat", task__system_prompt="Be brief.")
    monkeypatch.delitem(running.SMALL, "task.options.max_value")
    root = recorded(tmp_path / "run", task__name="reverse_text", **chat)
    [item] = run_items(root, "pairs", step=None, count=1, seed=1)
    question = read_rollouts(root / "rollouts", 3)[0].question
    if style == "compact":
        assert item.prompt == f"{question}>" and isinstance(item.answers[0], str)
    else:
        system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED + question}
        assert item.prompt == [system, user] and item.answers[0][0]["role"] == "assistant"


def test_a_prompt_that_the_model_was_not_asked_is_refused(tmp_path):
    root = recorded(tmp_path / "run")
    config = json.loads((root / "config.json").read_text())
    config["task"]["options"]["max_value"] = 50
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="nobody can tell what was asked") as caught:
        run_items(root, "pairs", step=None, count=1, seed=1)
    assert "\n" not in str(caught.value)
    config["task"] |= {"name": "my.module:Task", "options": {}}
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="--run.plugin_path FOLDER"):
        run_items(root, "pairs", step=None, count=1, seed=1)


def test_tools_and_template_options_of_a_prompt_are_in_its_item(tmp_path):
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    beside = {"tools": tools, "chat_template_kwargs": {"brief": True}}
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}]} | beside for n in range(9)]
    options = {"file": str(write(tmp_path, rows, "rows.jsonl"))}
    task = make_task(TaskConfig(name="jsonl", style="chat", reward=UNSCORED, options=options))
    item = asked_item(task, task.prompt("train", 1, 0), ["x", "y"], "here")
    assert item.beside == beside and item.prompt[0]["content"] in [f"{n}?" for n in range(9)]


def test_a_model_is_asked_by_the_suites_of_an_evaluation(tmp_path, monkeypatch, capsys):
    """Prompts without an expected answer; answers that are cut, empty or the same are no pair."""
    make_tiny(tmp_path / "model", seed=1)
    prompts = write(tmp_path, [{"prompt": f"{n}+1="} for n in range(4)], "prompts.jsonl")
    texts = [("1", "2"), ("1", "1"), ("1", ""), ("3", "4")]

    def sampled(checked):
        [suite] = checked.suites
        assert (suite.config.samples, suite.config.temperature, suite.config.max_new_tokens) == (2, 0.5, 9)
        assert checked.config.run.seed == 5
        questions = []
        for prompt, pair in zip(suite.prompts, texts, strict=True):
            answers = [Answer(n, text, None, False, 0.0, "ok", 1) for n, text in enumerate(pair)]
            questions.append(Question(prompt.id, prompt.text, "", answers))
        return [SuiteResult("collect", 1, 2, False, questions, {}, {})]

    monkeypatch.setattr(generation, "sampled_answers", sampled)
    monkeypatch.setattr(command, "serve", lambda *arguments: 0)
    out = str(tmp_path / "out")
    asked = ["collect", str(tmp_path / "model"), "--prompts", str(prompts), "--temperature", "0.5", "--out", out]
    assert main(["collect", str(tmp_path / "model")]) == 2 and "is a model: give --prompts" in capsys.readouterr().err
    for more, said in (
        ([], "set --max-new-tokens lower"),
        (["--max-new-tokens", "9", "--temperature", "0"], "--temperature = 0 gives 2 times the same answer"),
        (["--max-new-tokens", "9", "--count", "5"], "--count = 5, but it has 4 rows"),
        (["--max-new-tokens", "9", "--prompts", "nowhere.jsonl"], "--prompts = 'nowhere.jsonl': there is no file"),
        (["--max-new-tokens", "9", "--optimizer.lr", "1"], "does not read it"),
    ):
        assert main([*asked, *more]) == 2 and said in capsys.readouterr().err
    assert main([*asked, "--max-new-tokens", "9", "--seed", "5"]) == 0
    other = ["--max-new-tokens", "9", "--seed", "5", "--generator.max_num_seqs", "3"]
    assert main([*asked, *other]) == 2 and "begun with another settings" in capsys.readouterr().err
    assert main([*asked, "--max-new-tokens", "9", "--seed", "5", "--prompts", os.path.relpath(prompts)]) == 0
    items = {item.prompt: item for item in read_collection(tmp_path / "out").items}
    assert {name: set(item.answers) for name, item in items.items()} == {"0+1=": {"1", "2"}, "3+1=": {"3", "4"}}
    assert items["3+1="].source == "prompts.jsonl line 4"


@pytest.mark.parametrize(
    "more, said",
    [
        (["--planted", "nowhere.jsonl"], "there is no file"),
        (["--planted", "pairs.jsonl"], "a planted pair has 'chosen'"),
        (["--planted", "chat.jsonl"], "it is messages without a system prompt, and what is judged is text"),
        (["--port", "99999"], "cannot listen at port 99999"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_sampled(tmp_path, monkeypatch, capsys, more, said):
    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "model", seed=1)
    chat = {
        name: [{"role": role, "content": name}]
        for name, role in (("prompt", "user"), ("chosen", "assistant"), ("rejected", "assistant"))
    }
    rows = {"prompts": {"prompt": "1+1="}, "pairs": {"prompt": "q", "answers": ["x", "y"]}, "chat": chat}
    for name, row in rows.items():
        write(tmp_path, [row], f"{name}.jsonl")
    monkeypatch.setattr(generation, "sampled_answers", lambda checked: pytest.fail("it was sampled"))
    assert main(["collect", "model", "--prompts", "prompts.jsonl", "--max-new-tokens", "9", "--out", "out", *more]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_settings_that_json_has_no_word_for_are_kept_as_text(tmp_path, monkeypatch):
    """A date of TOML, and nan, which is not equal to itself."""
    monkeypatch.setattr(generation, "model_items", lambda *arguments: [Item("q", ("x", "y"), "line 1")])
    monkeypatch.setattr(command, "serve", lambda *arguments: 0)
    prompts = str(write(tmp_path, [{"prompt": "1+1="}], "prompts.jsonl"))
    options = ["--model.chat_template.options", "{ today = 2026-01-01, share = nan }"]
    arguments = ["collect", str(tmp_path), "--prompts", prompts, "--out", str(tmp_path / "out"), *options]
    assert main(arguments) == 0 and main(arguments) == 0
    assert main([*arguments[:-1], "{ today = 2026-01-02, share = nan }"]) == 2


# the command


def files(folder: Path) -> list[str]:
    rows = [{"prompt": f"{n}?", "answers": ["x", "y"]} for n in range(3)]
    return ["--pairs", str(write(folder, rows, "pairs.jsonl")), "--out", str(folder / "out")]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "needs a run"),
        (["nowhere"], "nowhere"),
        (["--pairs", "nowhere.jsonl"], "there is no file"),
        (["x", "--pairs", "y.jsonl"], "leave RUN_OR_MODEL"),
        (["x", "--temperature", "0.5"], "--prompts FILE"),
        (["x", "--model.path", "y"], "--model.* is of a model"),
        (["--pairs", "y.jsonl", "--step", "3"], "--step 3 is of a run"),
        (["x", "--labellers", "0"], "--labellers 0"),
        (["x", "--seed", "-1"], "--seed -1"),
        (["--report", "nowhere"], "nowhere is no collection: No such file or directory; give"),
        (["m" * 300], "File name too long"),
        (["--pairs", "y.jsonl", "--run.plugin_path", "."], "--run.* is of a model"),
        (["--report", "x", "--pairs", "y.jsonl"], "stands alone"),
        (["x", "--json"], "--report"),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["collect", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Arguments of a collection that was begun; nothing listens."""
    monkeypatch.setattr(command, "serve", lambda folder, labellers, port: Collection(folder, labellers).close() or 0)
    arguments = files(tmp_path)
    assert main(["collect", *arguments]) == 0
    return arguments


def test_a_collection_is_gone_on_with_and_another_one_refused(begun, tmp_path, capsys):
    items = (tmp_path / "out" / "items.jsonl").read_bytes()
    assert main(["collect", *begun, "--labellers", "3"]) == 0 and main(["collect", str(tmp_path / "out")]) == 0
    assert read_collection(tmp_path / "out").settings.wanted == 3
    assert (tmp_path / "out" / "items.jsonl").read_bytes() == items
    for more, said in ((["--seed", "5"], "begun with another seed"), (["--rate"], "rate"), (["--count", "2"], "count")):
        assert main(["collect", *begun, *more]) == 2 and said in capsys.readouterr().err
    assert main(["collect", str(tmp_path / "out"), "--seed", "0"]) == 2
    assert "without --seed" in capsys.readouterr().err
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "pairs.jsonl").read_bytes())
    assert main(["collect", "--pairs", str(tmp_path / "copy.jsonl"), *begun[2:]]) == 0, "the same rows"
    with open(tmp_path / "pairs.jsonl", "a") as file:
        file.write("\n")
    assert main(["collect", *begun]) == 2 and "begun with another pairs" in capsys.readouterr().err


def test_a_count_that_is_the_default_may_be_said(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "serve", lambda *arguments: 0)
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "run")
    arguments = ["collect", "run", "--step", "3"]
    assert main(arguments) == 0 and main([*arguments, "--count", "200"]) == 0
    assert main([*arguments, "--count", "100"]) == 2


def test_a_report_beside_a_page_writes_no_rows(begun, tmp_path, capsys):
    opened = Collection(tmp_path / "out")
    opened.judge(judgement_of(judgement(choice="first"), page_choices("pairs")))
    assert main(["collect", "--report", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "served by another process" in said.err and "judgements       1" in said.out
    assert not (tmp_path / "out" / "preferences.jsonl").exists()
    opened.close()
    assert main(["collect", "--report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "preferences.jsonl").exists()


def test_files_by_a_pattern_make_a_folder_with_a_plain_name(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "serve", lambda *arguments: 0)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"prompt": "a?", "answers": ["x", "y"]}], "pairs.jsonl")
    for pattern, name in (("pair*.jsonl", "pair"), ("*.jsonl", "collection")):
        assert main(["collect", "--pairs", pattern]) == 0 and (tmp_path / "preferences" / name).is_dir()


def test_a_folder_with_something_else_is_refused(tmp_path, capsys):
    arguments = files(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert main(["collect", *arguments]) == 2 and "not empty" in capsys.readouterr().err


def test_a_start_that_was_killed_before_all_was_written_is_begun_again(begun, tmp_path):
    (tmp_path / "out" / "collection.json").unlink()
    for name in ("lock", "judgements.jsonl"):
        (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / ".collection.json.writing").write_text("{")
    assert main(["collect", *begun]) == 0 and len(read_collection(tmp_path / "out").items) == 3


def test_a_full_disk_is_a_fault_in_one_line(begun, tmp_path, monkeypatch, capsys):
    def full(folder, rows):
        raise DiskFull("the disk is full: preferences.jsonl wants 1 MB")

    monkeypatch.setattr(command, "write_rows", full)
    assert main(["collect", "--report", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "the disk is full: preferences.jsonl wants 1 MB\n"


def test_a_link_in_a_collection_leads_nowhere(begun, tmp_path, capsys):
    for name in ("preferences.jsonl", "judgements.jsonl", "lock"):
        path, outside = tmp_path / "out" / name, tmp_path / "outside"
        outside.write_text("kept")
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
        assert main(["collect", "--report", str(tmp_path / "out")]) == 2 and main(["collect", *begun]) == 2
        assert "leads out of the collection" in capsys.readouterr().err and outside.read_text() == "kept"
        path.unlink()
