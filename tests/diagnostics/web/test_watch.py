"""The page that looks inside runs: who is let in, what is shown of hostile text, what a selection asks."""

import asyncio
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import duckdb
import httpx
import numpy as np
import pytest
import watched_run
from another_user import as_another_user, ask, needs_root

from titan_rl.cli import main
from titan_rl.data.types import Provenance, Rollout, Turn, correct
from titan_rl.diagnostics.bench.page.browser import browser_page, why_no_browser
from titan_rl.diagnostics.bench.page.watch import served
from titan_rl.diagnostics.web.data.facts import account_of, actors_of, faults_of, plain_events, state_of
from titan_rl.diagnostics.web.data.index import RolloutIndex
from titan_rl.diagnostics.web.data.selection import RIGHT, Selection, selection_of, whole_number
from titan_rl.diagnostics.web.guard import Guard
from titan_rl.diagnostics.web.html.timeline import busy_share, draw
from titan_rl.diagnostics.web.html.tokens import COLOURS, Tokens, facts_of
from titan_rl.diagnostics.web.views.group import card, summary
from titan_rl.diagnostics.web.views.mesh import _health
from titan_rl.diagnostics.web.views.overview import _alarms, options
from titan_rl.mesh.telemetry.step_record import ActorSpan
from titan_rl.records.alarms.alarms import NAMES
from titan_rl.records.plot import curves_of, panels_of
from titan_rl.records.run_directory.rundir import RunDir
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
    for arguments in ([str(tmp_path / "nowhere")], [str(tmp_path)]):
        assert main(["watch", *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_in_a_browser(made):
    """Every view is drawn, hostile answers are text, nothing is asked of anybody else, and Ctrl-C ends it."""
    with served(made) as address, browser_page() as page:
        for view, shown in SimpleNamespace(
            curves=".panels canvas", steps=".tl-row", mesh="table.plain"
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
