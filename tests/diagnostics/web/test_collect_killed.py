"""A collection as people meet it: 200 pairs, two people, a server killed twice; and what is trained on it."""

import json
import math
import threading
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import running
from collecting import Browser, Server
from row_tasks import write

from titan_rl.cli import main
from titan_rl.records.metrics import read_metrics

pytestmark = pytest.mark.slow
PAIRS, PLANTED = 200, 20
KILLED_AT = (133, 307)
"""Judgements after which the server is killed while the next one is under way."""


def choice_of(who: str, item: dict) -> str:
    """Ann and Bob think alike but in every fifth pair; Bob gets three planted pairs wrong."""
    number, first = int(item["prompt"].split()[0]), item["answers"][0]
    if item["prompt"].endswith("times one="):
        is_wrong = who == "Bob" and number < 3
        return "first" if (first == str(number)) != is_wrong else "second"
    if number % 10 == 0:
        return "tie"
    if number % 10 == 5:
        return "both_bad" if who == "Bob" else "tie"
    wanted = "ab"[number % 2] if number % 5 != 1 or who == "Ann" else "ab"[number % 2 - 1]
    return "first" if first.endswith(wanted) else "second"


def rows() -> list[dict]:
    return [{"prompt": f"{n} and one=", "answers": [f"{n + 1} a", f"{n + 1} b"]} for n in range(PAIRS)]


def planted() -> list[dict]:
    return [{"prompt": f"{n} times one=", "chosen": str(n), "rejected": str(n + 7)} for n in range(PLANTED)]


def label(server: list[Server], start, browsers: list[Browser]) -> int:
    """Judge all that is open; the number of judgements that were under way when the server died."""
    count, broken = 0, 0
    with httpx.Client(base_url=server[0].address, timeout=20) as client:
        clients = [client]
        for browser in browsers:
            item = browser.begin(clients[0])
            while item is not None:
                judgement = browser.judgement(item)
                if count in KILLED_AT:
                    threading.Timer(0.001, server[0].process.kill).start()
                try:
                    item = browser.send(clients[0], item, judgement)
                    count += 1
                except httpx.TransportError:
                    assert server[0].kill() == -9
                    broken += 1
                    server[0] = start()
                    clients[0] = httpx.Client(base_url=server[0].address, timeout=20)
                    item = browser.send(clients[0], item, judgement)  # the same again, as the page does
                    count += 1
    return broken


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> SimpleNamespace:
    """A collection that was killed twice, and what the browsers were told."""
    folder = tmp_path_factory.mktemp("collected")
    write(folder, rows(), "pairs.jsonl")
    write(folder, planted(), "planted.jsonl")
    out, arguments = folder / "out", ["--labellers", "2", "--seed", "3"]
    arguments += ["--pairs", folder / "pairs.jsonl", "--planted", folder / "planted.jsonl", "--out", out]
    torn = []

    def start() -> Server:
        if len(torn) == 1:  # as a machine that went down in the middle of a write leaves it
            with open(out / "judgements.jsonl", "ab") as journal:
                journal.write(b'{"id": "half a li')
        torn.append(True)
        return Server(*arguments)

    server = [Server(*arguments)]
    browsers = [Browser(who, lambda item, who=who: choice_of(who, item)) for who in ("Ann", "Bob")]
    broken = label(server, start, browsers)
    said = server[0].interrupt()
    return SimpleNamespace(out=out, browsers=browsers, broken=broken, said=said)


def test_nothing_that_was_called_saved_is_lost_and_nothing_counts_twice(collected):
    assert collected.broken == len(KILLED_AT)
    assert [len(browser.saved) for browser in collected.browsers] == [PAIRS + PLANTED] * 2
    journal = [json.loads(line) for line in (collected.out / "judgements.jsonl").read_text().splitlines()]
    kept = Counter((each["item"], each["who"]) for each in journal)
    assert set(kept.values()) == {1} and len(kept) == 2 * (PAIRS + PLANTED)
    items = items_of(collected.out)
    own = {(each["item"], each["who"]): each["choice"] for each in journal}
    for browser in collected.browsers:
        for name, (shown, choice) in browser.saved.items():
            if choice in ("first", "second"):
                choice = "ab"[items[name]["answers"].index(shown["answers"][choice == "second"])]
            assert own[name, browser.who] == choice


def items_of(folder: Path) -> dict[str, dict]:
    return {each["id"]: each for each in map(json.loads, (folder / "items.jsonl").read_text().splitlines())}


def by_hand(browsers: list[Browser], items: dict[str, dict]) -> tuple[float, Counter]:
    """Alpha of two people without missing values, by its definition, from what they were shown and chose; an answer is
    its place in the item."""
    values = []
    for name, (item, _) in browsers[0].saved.items():
        if not item["prompt"].endswith("times one="):
            chosen = []
            for browser in browsers:
                shown, choice = browser.saved[name]
                is_side = choice in ("first", "second")
                answer = shown["answers"][choice == "second"] if is_side else None
                chosen.append("ab"[items[name]["answers"].index(answer)] if is_side else choice)
            values.append(tuple(chosen))
    every = [value for pair in values for value in pair]
    observed = sum(one != other for one, other in values) / len(values)
    pairs = list(combinations(every, 2))
    expected = sum(one != other for one, other in pairs) / len(pairs)
    return 1 - observed / expected, Counter(values)


def test_the_report_has_alpha_as_by_hand_and_what_each_made_of_planted_pairs(collected, capsys):
    assert main(["collect", "--report", str(collected.out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    alpha, votes = by_hand(collected.browsers, items_of(collected.out))
    assert found["alpha"] == pytest.approx(alpha, abs=1e-12) and 0.5 < alpha < 0.9
    assert (found["judgements"], found["complete"], found["alpha_items"]) == (2 * PAIRS, PAIRS, PAIRS)
    agreed = sum(count for (one, other), count in votes.items() if one == other and one in "ab")
    assert found["decided"] == {"preferred": agreed, "ties": 20, "both bad": 0, "no majority": PAIRS - agreed - 20}
    planted = {person["name"]: person["planted"]["correct"] for person in found["labellers"]}
    assert planted == {"Ann": PLANTED, "Bob": PLANTED - 3}
    assert f"preferences.jsonl: {agreed} rows" in collected.said and found["rows"]["preferences.jsonl"] == agreed


def test_dpo_trains_on_the_file(collected, tmp_path):
    path: Path = collected.out / "preferences.jsonl"
    settings = dict(algorithm__name="dpo", data__file=str(path), data__examples_per_step=8)
    assert running.train(tmp_path / "run", training__steps=3, sft__steps=0, eval__prompts=4, **settings) == 0, (
        running.output(tmp_path / "run")[-3000:]
    )
    losses = {int(record["step"]): record["loss"] for record in read_metrics(tmp_path / "run") if "loss" in record}
    assert sorted(losses) == [1, 2, 3] and losses[1] == pytest.approx(math.log(2)) != pytest.approx(losses[3])
