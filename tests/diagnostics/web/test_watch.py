"""The page that looks inside runs: who is let in, what is shown of hostile text, what a selection asks."""

import asyncio
import base64
import io
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import duckdb
import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import watched_run
from another_user import as_another_user, ask, needs_root
from made_rollouts import rollout_of
from PIL import Image

from titan_rl.cli import main
from titan_rl.config.load import ConfigError
from titan_rl.data.images import PlacedImage
from titan_rl.data.types import Group, Provenance, Rollout, Turn, correct
from titan_rl.diagnostics.bench.page.browser import browser_page, why_no_browser
from titan_rl.diagnostics.bench.page.watch import served
from titan_rl.diagnostics.web.data.answer_selection import AnswerSelection, answer_selection_of
from titan_rl.diagnostics.web.data.evaluations import AnswersPage, Evaluations, Place
from titan_rl.diagnostics.web.data.facts import account_of, actors_of, faults_of, plain_events, state_of
from titan_rl.diagnostics.web.data.index import RolloutIndex
from titan_rl.diagnostics.web.data.selection import RIGHT, Selection, selection_of, whole_number
from titan_rl.diagnostics.web.data.watched_run import Watched, WatchedEvaluations, watched
from titan_rl.diagnostics.web.guard import Guard
from titan_rl.diagnostics.web.html.images import images_html
from titan_rl.diagnostics.web.html.timeline import busy_share, draw
from titan_rl.diagnostics.web.html.tokens import COLOURS, Tokens, facts_of
from titan_rl.diagnostics.web.views import estimates
from titan_rl.diagnostics.web.views.answer import card as answer_card
from titan_rl.diagnostics.web.views.answer import said, whole
from titan_rl.diagnostics.web.views.evaluations import columns, shown_row
from titan_rl.diagnostics.web.views.group import card, summary
from titan_rl.diagnostics.web.views.mesh import _health
from titan_rl.diagnostics.web.views.overview import _alarms, options
from titan_rl.mesh.telemetry.step_record import ActorSpan
from titan_rl.records.alarms.alarms import NAMES
from titan_rl.records.evaluations.files import write_result
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult
from titan_rl.records.plot import curves_of, panels_of
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import write_rollouts
from titan_rl.records.steps.trace import write_trace

EVIL = "<script>document.title='forged'</script><img src=x onerror=\"document.title='forged'\">'\"><b>{{7*7}}\x1b[2J"


# the guard

PORT, SECRET = 4321, "secret"


def asked(kind: str = "http", path: str = "/", **headers: str) -> list[dict]:
    """What the guard, or the application behind it, sends."""
    sent: list[dict] = []

    async def app(scope, receive, send):
        assert scope["root_path"] == f"/{SECRET}", "addresses that the page makes begin so"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    told = {"host": f"127.0.0.1:{PORT}"} | headers
    scope = {
        "type": kind,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in told.items()],
    }
    asyncio.run(Guard(app, SECRET, PORT)(scope, None, send))
    return sent


def is_let_in(sent: list[dict]) -> bool:
    return sent[0].get("status") == 200


@pytest.mark.parametrize(
    "path, headers",
    [
        (f"/{SECRET}/", {}),
        (f"/{SECRET}/_nicegui/page.js", {}),
        (f"/{SECRET}/", {"origin": f"http://127.0.0.1:{PORT}"}),
        (f"/{SECRET}/", {"host": f"localhost:{PORT}"}),
    ],
)
def test_who_has_the_address_is_let_in(path, headers):
    for kind in ("http", "websocket"):
        assert is_let_in(asked(kind, path, **headers))


@pytest.mark.parametrize(
    "path, headers",
    [
        ("/", {}),
        ("//", {}),
        ("", {}),
        (f"/{SECRET}", {}),  # the page's own addresses are below it
        (f"/{SECRET[:-1]}/", {}),
        (f"//{SECRET}/", {}),
        ("/\udcff/", {}),
        (f"/{SECRET}/", {"host": f"evil.example:{PORT}"}),  # a name that leads here
        (f"/{SECRET}/", {"host": "127.0.0.1"}),
        (f"/{SECRET}/", {"origin": "http://evil.example"}),
        (f"/{SECRET}/", {"origin": f"http://127.0.0.1:{PORT + 1}"}),
    ],
)
def test_nobody_else_is(path, headers):
    assert asked("http", path, **headers)[0]["status"] == 403
    assert asked("websocket", path, **headers)[0]["type"] == "websocket.close"


def test_another_port_of_the_address_is_sent_nothing_that_opens_the_page():
    """A browser sends another user's port the cookies of this one, and a page of that port knows no other secret."""
    headers = dict(asked("http", f"/{SECRET}/")[0]["headers"])
    assert not {b"set-cookie", b"location"} & set(headers) and headers[b"referrer-policy"] == b"no-referrer"
    assert b"default-src 'self'" in headers[b"content-security-policy"]


@pytest.mark.slow
def test_the_page_as_it_is_served_needs_its_address_and_hands_out_no_cookie(made):
    with served(made) as address, httpx.Client() as client:
        root, _, secret = address.rstrip("/").rpartition("/")
        page = client.get(address)
        assert page.status_code == 200 and not client.cookies
        parts = set(re.findall(r'(?:src|href)="(/[^"]+)"', page.text))
        parts.add(f"/{secret}/_nicegui_ws/socket.io/?EIO=4&transport=polling")
        assert len(parts) > 3 and all(part.startswith(f"/{secret}/") for part in parts)
        for part in parts:
            assert client.get(f"{root}{part}").status_code == 200 and not client.cookies
            assert client.get(f"{root}{part.removeprefix('/' + secret)}").status_code == 403


@needs_root
@pytest.mark.slow
def test_another_user_of_the_host_is_not_let_in_even_with_the_address(made):
    with served(made) as address:
        place = urlsplit(address)
        opened = partial(ask, place.port, f"GET {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        assert opened().startswith(b"HTTP/1.1 200")
        assert as_another_user({"the page": opened}) == []


# what is shown


def rollout(text: str = "7") -> Rollout:
    provenance = np.array([0, 1, 1, 2], np.int8)
    return Rollout(
        *("train/0000001", 0, np.arange(4, dtype=np.int32), provenance),
        *(np.array([0, -1, -2, 0], np.float32), np.array([-1, 3, 3, -1], np.int32), [Turn(1, 3, "stop")], "ok"),
        reward=0.5,
        reward_parts={EVIL: 0.5},
        text=text,
    )


def trained() -> dict:
    return {"trainer_logprobs": [-1.5, -2.0], "advantages": [0.25, 0.25], "disagreement": 0.25, "advantage": 0.25}


@pytest.mark.parametrize("by", COLOURS)
def test_what_a_model_wrote_is_text(by):
    shown = Tokens(rollout(), ["<b>", EVIL, "é\n", "\x1b[2J"], trained()).html(by)
    assert "<script" not in shown and "<img" not in shown and "\x1b" not in shown
    assert "&lt;script&gt;" in shown


def test_a_token_tells_both_sides():
    tokens = Tokens(rollout(), ["a", "b", "c", "d"], trained())
    np.testing.assert_allclose(tokens.disagreement_T, [np.nan, 0.5, 0.0, np.nan])
    shown = tokens.html("provenance")
    assert "trainer logprob -1.5000" in shown and "logprob -1.0000" in shown and "advantage 0.25" in shown
    assert shown.count("not trained on") == 2
    assert dict(facts_of(tokens, "no_peers"))["trained on"] == "no: no_peers"
    assert np.isnan(Tokens(rollout(), list("abcd")).trainer_T).all()


def test_images_of_a_prompt_are_shown_with_each_of_its_rollouts(tmp_path):
    """As PNG made of recorded pixels; a large one as a small one, and few of many."""
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 3), dtype=np.uint8)
    image = PlacedImage(pixels, (1, 2), 0)
    (tmp_path / "rollouts").mkdir()
    write_rollouts(tmp_path / "rollouts", 1, [Group("p", [rollout_of("p", n, images=(image,)) for n in range(2)])])
    run = Watched(RunDir(tmp_path))
    found = [run.tokens(1, "p", sample)[1].rollout.images for sample in range(2)]
    assert [len(images) for images in found] == [1, 1] and len(run.images(1, "p", 1)) == 1
    assert not run.images(1, "q", 0) and not run.images(2, "p", 0) and images_html(()) == ""
    shown = images_html(found[1])
    [data] = re.findall('<img src="data:image/png;base64,([^"]*)" width="128" height="64" alt="16 x 8 pixels', shown)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), pixels)
    large = PlacedImage(np.zeros((600, 1200, 3), np.uint8), (1, 2), 0)
    shown = images_html([large] * 9)
    assert shown.count("<img") == 8 and 'width="512" height="256"' in shown and "1 more" in shown


def test_provenance_has_a_look_of_its_own_for_each():
    from titan_rl.diagnostics.web.html.style import CSS

    assert all(f".tok-{who.name.lower()} " in CSS for who in Provenance)


# the time line


def test_a_bubble_is_what_nothing_covers():
    spans = [ActorSpan("a", "generate", 0.0, 1.0), ActorSpan("a", "generate", 0.5, 1.0)]
    assert busy_share(spans, 0.0, 3.0) == pytest.approx(0.5)
    assert busy_share([ActorSpan("controller", "wait for rollouts", 0.0, 3.0)], 0.0, 3.0) == 0
    assert "<script" not in draw([ActorSpan(EVIL, EVIL, 0.0, 1.0)]) and draw([]) == ""


# the rollouts


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("made") / "run"
    watched_run.make(root, EVIL)
    return root


@pytest.fixture(scope="module")
def index(made) -> RolloutIndex:
    found = RolloutIndex(RunDir(made))
    assert found.refresh() and not found.refresh() and not found.damaged
    return found


def test_every_rollout_is_in_the_index(index):
    page = index.page(Selection(), 0, 10)
    assert page.count == index.num_rollouts == 3 * 128 and len(page.rows) == 10
    assert page.rows[0]["step"] == 3 and page.rows[0]["staleness"] in (0, 1, 2)


@pytest.mark.parametrize(
    "selection, holds",
    [
        (Selection(ranges={"reward": (1, None)}), lambda row: row["reward"] == 1),
        (Selection(ranges={"length": (20, 40)}), lambda row: 20 <= row["length"] <= 40),
        (Selection(status="truncated"), lambda row: row["status"] == row["why"] == "truncated"),
        (Selection(outcome="discarded"), lambda row: row["why"]),
        (Selection(outcome="trained"), lambda row: not row["why"]),
        (Selection(task="gcd"), lambda row: row["task"] == "gcd"),
        (Selection(text="CARRY"), lambda row: True),
        (Selection(ranges={"disagreement": (0.008, None)}), lambda row: row["disagreement"] >= 0.008),
    ],
)
def test_a_selection_finds_what_is_like_it(index, selection, holds):
    page = index.page(selection, 0, 1000)
    assert 0 < page.count == len(page.rows) < 3 * 128 and all(map(holds, page.rows))


def test_text_is_sought_as_it_is(index):
    assert index.page(Selection(text="<script>document"), 0, 5).count == 1
    assert index.page(Selection(text="' or 1=1 --"), 0, 5).count == 0
    assert index.page(Selection(text="%"), 0, 5).count == 0
    for wrong in (Selection(sort="1; drop table rollouts"), Selection(ranges={"x": (1, 2)})):
        with pytest.raises(KeyError):
            index.page(wrong, 0, 1)


def test_order(index):
    rows = index.page(Selection(sort="disagreement"), 0, 400).rows
    values = [row["disagreement"] for row in rows]
    assert values == sorted(values, reverse=True)


def test_answers_of_one_reward_are_ordered_by_how_few_others_have_it(index):
    rows = index.page(Selection(sort="reward"), 0, 400).rows
    ties = [row["advantage"] for row in rows if row["reward"] == 1]
    assert len(set(ties)) > 1 and ties == sorted(ties, reverse=True)
    least = index.page(Selection(sort="reward", descending=False), 0, 400).rows
    ties = [row["advantage"] for row in least if row["reward"] == 0]
    assert ties == sorted(ties)


def test_groups_are_whole_and_have_a_pass_rate(index):
    page = index.page(Selection(by_group=True, sort="pass_rate", descending=False), 0, 100)
    assert page.count == len(page.rows) == 48 and all(row["count"] == 8 for row in page.rows)
    rates = [row["pass_rate"] for row in page.rows]
    assert rates == sorted(rates) and rates == pytest.approx([row["reward"] for row in page.rows])
    # that of a filter is one that has such a rollout, and its numbers are the whole group's
    some = index.page(Selection(by_group=True, ranges={"reward": (1, None)}), 0, 100)
    assert all(row["count"] == 8 for row in some.rows) and any(row["pass_rate"] < 1 for row in some.rows)


def test_a_group_shows_its_answers_beside_each_other(index):
    row = index.page(Selection(by_group=True), 0, 1).rows[0]
    members = index.group(row["step"], row["prompt_id"])
    assert len(members) == 8 and members[0]["question"]
    rewards = [member["reward"] for member in members]
    assert rewards == sorted(rewards, reverse=True)
    assert summary(members).startswith(f"{sum(rewards):.0f} of ") and "mean reward" in summary(members)
    shown = card(members[0] | {"text": EVIL, "status": EVIL})
    assert "<script" not in shown and "<img" not in shown


def test_what_is_right_is_so_everywhere():
    assert correct(RIGHT) and not correct(RIGHT - 1e-9)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection("a & b", {"reward": (0.5, None), "step": (None, 7)}, "ok", "gcd", "trained", "reward", False),
        Selection(sort="pass_rate", by_group=True),
    ],
)
def test_an_address_tells_the_selection(selection):
    assert selection_of(selection.as_query()) == selection


def test_an_address_of_nonsense_is_the_first_view():
    nonsense = {"sort": "-1; drop table rollouts", "least_reward": "x", "groups": "2", "page": "-1"}
    assert selection_of(nonsense) == Selection()
    assert selection_of({"text": "a\ud800", "task": "\udfff"}) == Selection("a?", task="?")
    for text in ("9" * 5000, "9" * 10, "-1", "x", "", "²"):  # the first has more digits than Python reads
        assert whole_number({"page": text}, "page") is None
    assert whole_number({"page": "12"}, "page") == 12 and whole_number({}, "page") is None


# the evaluations

EARLY, LATE = Place("step-000000", "sums"), Place("step-000020", "sums")
NUM_QUESTIONS, NUM_SAMPLES = 40, 3


def evaluated(folder: Path, place: Place, right: Callable[[int, int], bool], text: str = "so", **more: Any) -> None:
    """Files of a suite. ``right``: whether an answer is, by its question and sample. ``text``: the first answer's."""

    def answer(n: int, sample: int) -> Answer:
        is_right = right(n, sample)
        said, status = text if (n, sample) == (0, 0) else f"so {n}", "ok" if n % 4 else "truncated"
        readings = {"flexible": True, EVIL: False}
        return Answer(sample, said, str(n) if is_right else None, is_right, float(is_right), status, n, readings)

    questions = [
        Question(
            f"eval/sums/{n:07d}", f"{EVIL if n == 1 else n} + 0?", str(n), [answer(n, s) for s in range(NUM_SAMPLES)]
        )
        for n in range(NUM_QUESTIONS)
    ]
    settings = {"suite": {"k": 2, EVIL: [EVIL]}, "task": "sums"}
    counts = {"unscored": {f"eval/{EVIL}": EVIL}, "settings": settings, "left_out": 7} | more
    write_result(folder / place.evaluation, SuiteResult(place.suite, 2, NUM_SAMPLES, True, questions, **counts))


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory) -> Evaluations:
    """Early, every third question is right; late every second one, and of question 1 the last sample alone."""
    folder = tmp_path_factory.mktemp("evaluated") / "evaluations"
    evaluated(folder, EARLY, lambda n, sample: n % 3 == 0)
    evaluated(folder, LATE, lambda n, sample: n % 2 == 0 or (n, sample) == (1, 2), EVIL)
    return Evaluations(folder)


def answers(evaluations: Evaluations, selection: AnswerSelection, beside: Place | None = EARLY) -> AnswersPage:
    return evaluations.page(LATE, beside, selection, 0, 1000)


def test_every_answer_is_shown_in_the_order_of_the_file(evaluations):
    page = evaluations.page(LATE, None, AnswerSelection(), 50, 50)
    assert page.count == page.num_answers == 120 and page.num_right == 61 and len(page.rows) == 50
    assert [(row["question_id"], row["sample"]) for row in page.rows[:2]] == [
        ("eval/sums/0000016", 2),
        ("eval/sums/0000017", 0),
    ]
    assert "correct_beside" not in page.rows[0]


@pytest.mark.parametrize(
    "selection, count, holds",
    [
        (AnswerSelection(correct="right"), 61, lambda row: row["correct"]),
        (AnswerSelection(correct="wrong"), 59, lambda row: not row["correct"]),
        (AnswerSelection(status="truncated"), 30, lambda row: row["status"] == "truncated"),
        (AnswerSelection(text="SO 17"), 3, lambda row: row["question_id"].endswith("17")),
        (AnswerSelection(text="<SCRIPT>document", correct="right"), 2, lambda row: row["correct"]),
        (AnswerSelection(became="right"), 40, lambda row: row["correct"] and not row["correct_beside"]),
        (AnswerSelection(became="wrong"), 21, lambda row: row["correct_beside"] and not row["correct"]),
        (AnswerSelection(text="' or 1=1 --"), 0, None),
        (AnswerSelection(text="%"), 0, None),
        (AnswerSelection(status="\0"), 0, None),
    ],
)
def test_answers_are_found_by_what_they_are(evaluations, selection, count, holds):
    page = answers(evaluations, selection)
    assert page.count == page.num_answers == len(page.rows) == count and all(map(holds, page.rows))
    assert page.num_right == sum(row["correct"] for row in page.rows)


def test_answers_are_sorted_by_any_column(evaluations):
    rows = answers(evaluations, AnswerSelection(sort="num_tokens", descending=True)).rows
    assert [row["num_tokens"] for row in rows] == sorted((row["num_tokens"] for row in rows), reverse=True)
    first = answers(evaluations, AnswerSelection()).rows
    nonsense = AnswerSelection(sort="1; drop table shown")
    assert answers(evaluations, nonsense).rows == first and answers(evaluations, nonsense, None).count == 120


def test_questions_are_whole_with_their_right_answers_at_both_steps(evaluations):
    page = answers(evaluations, AnswerSelection(by_question=True, sort="change", descending=True))
    assert page.count == len(page.rows) == 40 and page.num_answers == 120 and page.num_right == 61
    changes = [row["change"] for row in page.rows]
    assert changes == sorted(changes, reverse=True) and set(changes) == {3, 1, 0, -3}
    assert all(row["right"] - row["right_beside"] == row["change"] and row["count"] == 3 for row in page.rows)
    some = answers(evaluations, AnswerSelection(by_question=True, correct="right", became="right"))
    assert some.count == 14 and [row["right"] for row in some.rows if row["question_id"].endswith("01")] == [1]
    assert answers(evaluations, AnswerSelection(by_question=True, became="wrong")).count == 7


def test_what_became_right_did_so_from_the_earlier_step_to_the_later(evaluations):
    """Whichever of them is shown."""
    compared = evaluations.comparison(LATE, EARLY)
    assert compared == evaluations.comparison(EARLY, LATE)
    counts = compared.num_answers, compared.became_right, compared.became_wrong, compared.num_better, compared.num_worse
    assert counts == (120, 40, 21, 14, 7)
    difference = compared.difference
    assert difference.value == pytest.approx((40 - 21) / 120) and difference.low < difference.value < difference.high
    became = AnswerSelection(became="right")
    assert evaluations.page(EARLY, LATE, became, 0, 1).count == evaluations.page(LATE, EARLY, became, 0, 1).count == 40


def test_other_questions_under_the_same_names_are_not_compared(tmp_path, evaluations):
    """And a file that names an answer twice makes no rows."""
    shutil.copytree(evaluations.folder, folder := tmp_path / "evaluations")
    path = folder / EARLY.evaluation / "sums.parquet"
    rows = pq.read_table(path)
    texts = ["another" if n < 60 else text for n, text in enumerate(rows["question"].to_pylist())]
    rows = rows.set_column(rows.schema.get_field_index("question"), "question", pa.array(texts))
    pq.write_table(pa.concat_tables([rows] * 3), path)
    found = Evaluations(folder)
    assert found.comparison(LATE, EARLY).num_answers == 60
    assert found.page(LATE, EARLY, AnswerSelection(), 0, 1).count == 120
    pq.write_table(rows.slice(0, 60), path)  # it is read again
    assert found.comparison(LATE, EARLY).difference is None
    assert "No answer" in estimates.comparison(found.overview(*LATE, EARLY.evaluation))


def test_an_answer_is_whole_and_hostile_text_is_text(evaluations):
    overview = evaluations.overview(*LATE, EARLY.evaluation)
    row = evaluations.answer(LATE, "eval/sums/0000000", 0)
    assert row["answer"] == EVIL and dict(row["readings"]) == {"flexible": True, EVIL: False}
    assert evaluations.answer(LATE, "eval/sums/0000000", 3) is None is evaluations.answer(LATE, "x", 0)
    members = evaluations.question(LATE, "eval/sums/0000001")
    assert [member["sample"] for member in members] == [0, 1, 2] and EVIL in members[0]["question"]
    shown = [whole(LATE, row), whole(LATE, None), answer_card(row), said("a\n" + EVIL), said(None)]
    shown += [estimates.estimates(overview), estimates.facts(overview.record), estimates.settings(overview.record)]
    shown += [estimates.unscored(overview.record), estimates.comparison(overview), estimates.notices([EVIL])]
    for each in shown:
        assert "<script" not in each and "<img" not in each and "\x1b" not in each
    assert "7 rows" in shown[6] and "&lt;script&gt;" in shown[8] and "40 became right" in shown[9]
    cells = shown_row(answers(evaluations, AnswerSelection()).rows[0], "sums")
    assert (cells["question_id"], cells["correct"], cells["correct_beside"]) == ("0000000", "right", "right")
    assert all(str(cell).isprintable() for cell in cells.values())


def test_a_long_answer_is_cut_where_it_is_told():
    assert said("a" * 100_001).count("a" * 100_000) == 1 and "the first 100,000 of 100,001" in said("a" * 100_001)
    assert "the first" not in said("a" * 100_000)


def test_estimates_stand_beside_those_of_the_other_step(evaluations):
    shown = estimates.estimates(evaluations.overview(*LATE, EARLY.evaluation))
    assert "50.8%" in shown and "35.0%" in shown and "step 20" in shown and "step 0" in shown and " to " in shown
    alone = evaluations.overview(*LATE, "")
    assert "35.0%" not in estimates.estimates(alone) and alone.beside is None is alone.comparison
    assert [column["label"] for column in columns(alone, AnswerSelection())][:3] == ["question", "sample", "counts as"]


def test_a_file_that_cannot_be_read_is_one_notice(tmp_path, evaluations):
    shutil.copytree(evaluations.folder, folder := tmp_path / "evaluations")
    (folder / LATE.evaluation / "sums.json").write_text("[")
    found = Evaluations(folder).overview(*LATE, EARLY.evaluation)
    assert len(found.notices) == 1 and found.record is None and found.comparison and found.statuses
    (folder / EARLY.evaluation / "sums.parquet").write_bytes(b"PAR1")
    found = Evaluations(folder).overview(*LATE, EARLY.evaluation)
    assert len(found.notices) == 2 and found.beside is None and found.statuses == ["ok", "truncated"]
    (folder / LATE.evaluation / "sums.parquet").unlink()
    (folder / LATE.evaluation / "sums.parquet").symlink_to(evaluations.folder / LATE.evaluation / "sums.parquet")
    found = Evaluations(folder).overview(*LATE, EARLY.evaluation)
    assert len(found.notices) == 2 and found.statuses is None and found.suites == ["sums"]
    (folder / LATE.evaluation / "sums.json").unlink()
    found = Evaluations(folder).overview(*LATE, EARLY.evaluation)
    assert found.notices == (f"{LATE.evaluation} holds no suite yet",) and found.place is None
    assert Evaluations(tmp_path / "nowhere").overview("", "", "").names == []


def test_what_is_new_is_seen(tmp_path, evaluations):
    """Another evaluation, another suite, and a file in the place of one that could not be read."""
    shutil.copytree(evaluations.folder, folder := tmp_path / "evaluations")
    path = folder / EARLY.evaluation / "sums.parquet"
    path.rename(tmp_path / "kept")
    found = Evaluations(folder)

    def is_new(overview) -> bool:
        return found.signature(overview) != overview.signature

    overview = found.overview(*LATE, EARLY.evaluation)
    assert overview.beside is None and not is_new(overview)
    (tmp_path / "kept").rename(path)
    assert is_new(overview) and found.overview(*LATE, EARLY.evaluation).beside == EARLY
    for place in (Place("step-000040", "sums"), Place(LATE.evaluation, "more")):
        before = found.overview(*LATE, "")
        evaluated(folder, place, lambda n, sample: True)
        assert is_new(before) and not is_new(found.overview(*LATE, ""))


def test_what_is_not_there_gives_way_to_the_newest(evaluations):
    found = evaluations.overview("step-000007", "x", "../step-000000")
    assert (found.place, found.beside) == (LATE, None)
    assert found.notices == (f"step-000007 is not among the evaluations: this is {LATE.evaluation}",)
    assert evaluations.overview("", "", LATE.evaluation).beside is None


@pytest.mark.parametrize(
    "selection",
    [
        AnswerSelection(),
        AnswerSelection("a & b", "wrong", "ok", "right", "change", True, True),
        AnswerSelection(sort="num_tokens"),
    ],
)
def test_an_address_tells_the_selection_of_answers(selection):
    assert answer_selection_of(selection.as_query()) == selection


def test_an_address_of_nonsense_is_every_answer():
    nonsense = {"sort": "-1; drop table shown", "correct": "true", "became": "'", "questions": "2", "text": "\ud800"}
    assert answer_selection_of(nonsense) == AnswerSelection(text="?")


# the curves


def chart(steps: list[dict]) -> dict[str, dict]:
    """The options of each panel by its title."""
    curves = curves_of(steps)
    run = SimpleNamespace(name="run")
    return {panel.title: options(panel, [run], [curves]) for panel in panels_of(curves)}


def test_axes_are_readable():
    steps = [{"step": step, "reward": 0.5, "agreement_mean": 1 + 3e-6, "learning_rate": 1e-6} for step in (1, 2, 3)]
    charts = chart(steps)
    reward, apart = charts["reward of the samples"], charts["trainer-sampler disagreement: mean of exp|Δ logprob| - 1"]
    assert (reward["xAxis"]["min"], reward["xAxis"]["max"], reward["xAxis"]["minInterval"]) == (1, 3, 1)
    assert apart["yAxis"]["type"] == "log" and (apart["yAxis"]["min"], apart["yAxis"]["max"]) == (1e-6, 1e-5)
    assert reward["xAxis"]["axisLabel"]["hideOverlap"] and not reward["xAxis"]["axisTick"]["show"]
    one = chart(steps[:1])["reward of the samples"]["xAxis"]
    assert one["min"] < 1 < one["max"]


def test_alarms_that_are_looked_for_are_named(tmp_path):
    run = SimpleNamespace(run_dir=RunDir(tmp_path), records=list)
    assert all(name.replace("_", " ") in _alarms(run) for name in NAMES)


def test_actors_that_are_gone_have_no_empty_cells(made):
    run_dir = RunDir(made)
    shown = _health(actors_of(run_dir, plain_events(run_dir)))
    assert "gone" in shown and "></td>" not in shown


def test_links_are_not_followed_and_damage_is_named(tmp_path, made):
    run_dir = watched_run.make(tmp_path / "run")
    os.symlink(made / "rollouts" / "step-000001.parquet", run_dir.rollouts / "step-000007.parquet")
    (run_dir.rollouts / "step-000008.parquet").write_bytes(b"PAR1 no file at all PAR1")
    (run_dir.trained / "step-000002.parquet").write_bytes(b"nor this")
    index = RolloutIndex(run_dir)
    index.refresh()
    assert index.num_rollouts == 3 * 128
    assert set(index.damaged) >= {"trained/step-000002.parquet"} and len(index.damaged) <= 3
    with pytest.raises(duckdb.PermissionException, match="(?i)permission|disabled"):
        index._db.execute(f"select * from read_parquet('{made}/rollouts/step-000001.parquet')")


def test_what_the_directory_says(made):
    run_dir = RunDir(made)
    events = plain_events(run_dir)
    assert state_of(run_dir) == ("ended", "completed at step 3")
    assert dict(account_of(run_dir))["issued"] == 3 * 128
    [fault] = faults_of(events)
    assert fault.what == "generator 1 died" and fault.mended.startswith("replaced after")
    assert {actor.name: actor.deaths for actor in actors_of(run_dir, events)}["generator 1"] == 1


# the command


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    """Nor an evaluation: files of its names that are none, links to some, and what is only damaged."""
    for name, text in (("data.json", "{}"), ("more.json", "["), ("deep.json", "[" * 100_000), ("a.parquet", "PAR1")):
        (tmp_path / name).write_text(text)
    evaluated(tmp_path / "elsewhere", LATE, lambda n, sample: True)
    (tmp_path / "evaluation.json").symlink_to(tmp_path / "elsewhere" / LATE.evaluation / "sums.json")
    (tmp_path / "sums.json").symlink_to(tmp_path / "elsewhere" / LATE.evaluation / "sums.json")
    for folder in (tmp_path / "nowhere", tmp_path, tmp_path / "sums.json", tmp_path / "elsewhere"):
        assert main(["watch", str(folder)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "evaluation" in line


def test_a_folder_of_titan_rl_eval_is_shown_alone_or_beside_another(tmp_path):
    """While it is written, too, and by a link that is given; what is in the same folder is not shown with it."""
    for name in ("before", "after", "other"):
        evaluated(tmp_path, Place(name, "sums"), lambda n, sample, name=name: name == "after" or n % 2 == 0, EVIL)
    (tmp_path / "latest").symlink_to("after")
    [alone] = watched([tmp_path / "latest"])
    found = alone.evaluations.overview("before", "", "before")
    assert isinstance(alone, WatchedEvaluations) and alone.name == "after" and found.names == ["after"]
    assert found.record and found.beside is None and found.statuses == ["ok", "truncated"]
    evaluated(tmp_path / "elsewhere", Place("after", "sums"), lambda n, sample: True, EVIL)
    apart = watched([tmp_path / "elsewhere" / "after", tmp_path / "after"])
    assert [each.name for each in apart] == ["after (1)", "after (2)"]
    (tmp_path / "before" / "evaluation.json").write_text("{}")
    run = watched_run.make(tmp_path / "run").root
    shown, both = watched([tmp_path / "before", run, tmp_path / "after"])
    assert shown.name == "run" and both.name == tmp_path.name and both.evaluations.names() == ["after", "before"]
    found = both.evaluations.overview("before", "sums", "after")
    assert found.comparison and found.comparison.num_answers == NUM_QUESTIONS * NUM_SAMPLES
    shutil.rmtree(tmp_path / "after")
    (tmp_path / "after").symlink_to("other")
    assert both.evaluations.names() == ["before"] and alone.evaluations.overview("", "", "").names == []
    for name in ("sums.json", "sums.parquet", "evaluation.json"):
        (tmp_path / "before" / name).unlink()
        os.mkfifo(tmp_path / "before" / name)
    with pytest.raises(ConfigError, match="neither a run nor an evaluation"):
        watched([tmp_path / "before"])


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_a_folder_of_titan_rl_eval_in_a_browser(evaluations):
    """One view, whatever the address asks for; hostile answers are text."""
    with served(evaluations.folder / LATE.evaluation) as address, browser_page() as page:
        page.goto(f"{address}?view=curves")
        page.wait_for_selector("text=answers right")
        assert page.locator("nav button:visible").count() == 1 and not page.locator(".pill:visible").count()
        page.locator(".rollouts tbody tr").first.click()
        page.wait_for_selector(".sheet .said.tall")
        assert "<script>" in page.locator(".sheet .said.tall").inner_text() and "forged" not in page.title()
        assert not page.elsewhere and not page.errors


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_in_a_browser(made):
    """Every view is drawn, hostile answers are text, nothing is asked of anybody else, and Ctrl-C ends it."""
    with served(made) as address, browser_page() as page:
        for view, shown in SimpleNamespace(
            curves=".panels canvas", steps=".tl-row", mesh="table.plain", evaluations="text=No suite was evaluated yet"
        ).__dict__.items():
            page.goto(f"{address}?view={view}")
            page.wait_for_selector(shown)
        page.goto(f"{address}?view=steps")
        page.wait_for_selector("text=Step 3: who did what when")
        write_trace(made, 4, [("trainer rank 0", "optimizer", 1.8e9, 0.5)])  # the run goes on, and the page with it
        page.wait_for_selector("text=Step 4: who did what when")
        page.goto(f"{address}?view=rollouts")
        page.get_by_label("search answers and prompts").fill("<script>")
        page.wait_for_selector("text=1 rollouts")
        page.locator(".rollouts tbody tr").first.click()
        page.wait_for_selector(".tok span")
        assert "forged" not in page.title()
        assert not page.elsewhere and not page.errors


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_addresses_and_a_page_that_is_opened_early(tmp_path):
    """The panels come with the first step; the address tells what is shown; at 1280 no column is cut."""
    run_dir = watched_run.make(tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    later = metrics.read_text()
    metrics.write_text('{"step": 0, "held_out_accuracy": 0.1}\n')
    with served(run_dir.root) as address, browser_page(1280, 900) as page:
        page.goto(f"{address}?view=curves")
        page.wait_for_selector("text=held-out accuracy")
        assert page.get_by_text("reward of the samples").count() == 0
        metrics.write_text('{"step": 0, "held_out_accuracy": 0.1}\n' + later)
        page.wait_for_selector("text=reward of the samples")
        page.locator("#view-rollouts").click()
        page.wait_for_selector(".rollouts tbody tr")
        width = "e => [e.scrollWidth, e.clientWidth]"
        whole, seen = page.locator(".rollouts .q-table__middle").evaluate(width)
        assert whole <= seen
        page.get_by_text("groups", exact=True).click()
        page.get_by_label("least reward", exact=True).fill("1")
        page.wait_for_function("location.search.includes('least_reward=1') && location.search.includes('groups=1')")
        page.locator(".rollouts tbody tr").first.click()
        page.wait_for_selector(".answer")
        page.wait_for_function("location.search.includes('group=')")
        assert page.url.startswith(address)
        page.reload()
        page.wait_for_selector(".answer")
        assert not page.elsewhere and not page.errors


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_evaluations_in_a_browser(tmp_path, evaluations):
    """An evaluation that comes is shown; answers are compared, filtered and opened; the address tells it all."""
    run_dir = watched_run.make(tmp_path / "run")
    with served(run_dir.root) as address, browser_page(390, 844) as page:
        page.goto(f"{address}?view=evaluations&beside=step-000000&became=right")
        page.wait_for_selector("text=No suite was evaluated yet")
        shutil.copytree(evaluations.folder, tmp_path / "copied").rename(run_dir.evaluations)
        page.wait_for_selector("text=40 of 40 answers right")
        page.get_by_text("questions", exact=True).last.click()
        page.wait_for_selector("text=14 questions")
        page.locator(".rollouts tbody tr").first.click()
        page.wait_for_selector("text=step 20: 1 of 3 right")
        page.wait_for_function("location.search.includes('question=') && location.search.includes('became=right')")
        page.goto(f"{address}?view=evaluations&suite=sums&answer=eval/sums/0000000/0")
        page.wait_for_selector(".sheet .said.tall")
        assert "<script>" in page.locator(".sheet .said.tall").inner_text() and "forged" not in page.title()
        page.get_by_label("close").click()
        page.wait_for_function("!location.search.includes('answer=')")
        (run_dir.evaluations / LATE.evaluation / "sums.parquet").write_bytes(b"PAR1")
        page.wait_for_selector(".alarm >> text=sums.parquet cannot be read")
        assert page.locator("table.estimates").is_visible() and not page.locator(".rollouts").is_visible()
        whole, seen = page.locator("body").evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert whole <= seen
        assert not page.elsewhere and not page.errors
