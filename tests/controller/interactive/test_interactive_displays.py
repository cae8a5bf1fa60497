"""What a notebook's cell shows: coloured tokens, curves and times. What a model wrote stays text."""

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from made_rollouts import rollout_of
from made_run import made_run

import titan_rl
from titan_rl.config.load import ConfigError
from titan_rl.controller.interactive.live import LiveSession
from titan_rl.controller.interactive.plots import time_bar
from titan_rl.controller.interactive.run_view import RunView
from titan_rl.controller.interactive.tables import Table
from titan_rl.controller.interactive.token_view import TokenView, of_tokens, shade
from titan_rl.controller.loop.shutdown import StopRequest
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.run_directory.rundir import RunDir

PIECES = ["ask", " it\n", "<script>alert(1)</script>", '"\x1b[2J']


def view(**changes) -> str:
    return TokenView(rollout_of("train/0000001", 0), PIECES, **changes)._repr_html_()


def spans(html: str) -> list[tuple[str, str, str]]:
    """Colour, title and text of each token."""
    return re.findall(r'<span style="background: (#\w+)" title="([^"]*)">(.*?)</span>', html)


def test_tokens_are_text_whatever_they_say():
    html = view()
    assert "<script>" not in html and "\x1b" not in html and html.count("<br>") == 2
    assert [text for _, _, text in spans(html)] == [
        "ask",
        r" it\n",
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "&quot;\\x1b[2J",
    ]


def test_a_run_shows_its_directory_step_and_state(tmp_path):
    run_dir = RunDir(tmp_path)
    assert repr(RunView(run_dir)) == f"<run {tmp_path}: step 0, ended>"
    run_dir.phase.write_text("3 sampling")
    assert repr(RunView(run_dir)) == f"<run {tmp_path}: step 3, ended>"
    session = SimpleNamespace(run_dir=run_dir, progress=SimpleNamespace(step=3, steps_asked=9))
    live = LiveSession(session)
    assert repr(live) == f"<run {tmp_path}: step 3 of 9, not started>"
    live._end("it was closed")
    assert repr(live) == f"<run {tmp_path}: step 3 of 9, ended: it was closed>"


class FakeSession:
    """A run whose step ends as it is told to."""

    def __init__(self, run_dir: RunDir):
        self.run_dir, self.display = run_dir, SimpleNamespace(follow=lambda: None)
        self.progress, self.has_started = SimpleNamespace(step=3, steps_asked=9), True
        self.may_end, self.stop_request = asyncio.Event(), StopRequest()

    async def step(self) -> None:
        self.run_dir.phase.write_text(f"{self.progress.step} publishing")
        await self.may_end.wait()
        self.progress.step += 1

    def rest(self) -> None:
        self.run_dir.phase.write_text(f"{self.progress.step} idle")


def test_a_session_of_which_nothing_is_asked_is_idle(tmp_path):
    async def drive() -> None:
        session = FakeSession(RunDir(tmp_path))
        live = LiveSession(session)
        live._ticking = asyncio.create_task(asyncio.sleep(60))
        at = f"<run {tmp_path}: step"
        assert repr(live) == f"{at} 3 of 9, idle>"
        stepping = asyncio.create_task(live._in_turn(session.step))
        await asyncio.sleep(0.01)
        assert repr(live) == f"{at} 3 of 9, publishing>"
        session.may_end.set()
        await stepping
        assert repr(live) == f"{at} 4 of 9, idle>" and session.run_dir.phase.read_text() == "4 idle"
        session.may_end.clear()
        running = live.run()
        assert repr(live) == f"{at} 4 of 9, in the background, goes on>"
        await asyncio.sleep(0.01)
        assert repr(live) == f"{at} 4 of 9, in the background, publishing>"
        pausing = asyncio.create_task(live.pause())
        await asyncio.sleep(0.01)
        session.may_end.set()
        await pausing
        assert repr(live) == f"{at} 5 of 9, idle>" and session.run_dir.phase.read_text() == "5 idle"
        running.cancel()
        live._ticking.cancel()

    asyncio.run(drive())


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("111=", r"prompts = '111=' is one text: give a list, \['111='\]"),
        ([{"role": "user", "content": "hi"}], "prompts is one conversation: give a list of them"),
        ({"role": "user", "content": "hi"}, "prompts is one conversation: give a list of them"),
    ],
)
def test_one_prompt_in_place_of_a_list_is_refused(tmp_path, prompts, said):
    live = LiveSession(FakeSession(RunDir(tmp_path)))
    with pytest.raises(TypeError, match=said) as caught:
        asyncio.run(live.generate(prompts))
    assert "\n" not in str(caught.value)


def test_without_html_it_is_a_line():
    text = repr(TokenView(rollout_of("train/0000001", 0), PIECES))
    assert text.startswith(r"ask it\n<script>") and "\x1b" not in text


def test_each_token_tells_what_is_known_of_it():
    titles = [title for _, title, _ in spans(view(values_T=np.array([np.nan, np.nan, 0.5, -1.0]), by="advantage"))]
    assert titles[0] == "token 0: 0, template"
    assert titles[2] == "token 2: 2, model, logprob -1.0667, version 7, advantage 0.5"


def test_colours_say_what_is_asked_for():
    template, model = (spans(view())[place][0] for place in (0, 2))
    assert template != model and "template" in view() and "tool" in view()
    assert "version 7" in view(by="version") and spans(view(by="version"))[0][0] == "#ffffff"
    advantages = spans(view(values_T=np.array([np.nan, np.nan, 1.0, -1.0]), by="advantage"))
    assert [colour for colour, _, _ in advantages][2:] == [shade(1.0), shade(-1.0)]
    assert shade(0.0) == "#ffffff" and shade(np.nan) == "#dddddd" and shade(9.0) == shade(1.0) != shade(-1.0)


def test_a_run_shows_its_samples_and_its_curves(tmp_path):
    run_dir = made_run(tmp_path / "run")
    seen = titan_rl.connect(tmp_path / "run")
    with pytest.raises(ConfigError, match="base_model.*no such directory"):
        seen.tokens("train/0000000", step=1)
    make_tiny(run_dir.base_model, seed=1, hidden_size=32, num_layers=1)
    name = seen.rollouts(1)["prompt_id"].iloc[0]
    assert len(spans(seen.tokens(name, 2, step=1)._repr_html_())) == 4
    with pytest.raises(ConfigError, match="no sample 9 of"):
        seen.tokens(name, 9, step=1)
    assert seen.curves._repr_png_().startswith(b"\x89PNG")


def test_a_step_is_shared_out_among_what_took_its_time():
    seconds = {"seconds_step": [1.0, 3.0], "seconds_generate": [0.5, 1.5], "seconds_optimizer": [0.0, 1.0]}
    bar = time_bar(pd.DataFrame(seconds))
    assert bar.seconds == {"seconds_generate": 1.0, "seconds_optimizer": 0.5, "seconds_step": 2.0}
    html = bar._repr_html_()
    assert html.count("<span") == 3
    assert all(told in html for told in ("2.00 s a step", "generate 1.00 s", "waiting 0.50 s"))
    assert re.findall(r"width: ([\d.]+)%", html) == ["49.0", "24.5", "24.5"]


def test_what_a_table_has_not_is_shown_in_one_way():
    columns = {"version": pd.array([7, None], "Int64"), "seconds": [0.125, np.nan], "host": [None, "a"], "MiB": [3, 4]}
    table = Table(columns | {"actor": ["trainer", "verifier"]}).set_index("actor").assign(more=[np.nan, 1e-9])
    text, html = repr(table), table._repr_html_()
    assert not re.search("<NA>|&lt;NA|NaN|None", text + html)
    assert text.splitlines()[-1].split() == ["verifier", "-", "-", "a", "4", "1e-09"]
    assert html.count("<td>-</td>") == 4 and isinstance(table, Table) and table.seconds.isna().sum() == 1
    assert "Empty" in repr(Table()) and repr(Table({"a": [1.5]})) == repr(pd.DataFrame({"a": [1.5]}))


def test_a_run_without_steps_has_no_picture(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    seen = titan_rl.connect(tmp_path)
    assert seen.curves is None and seen.time is None


def test_without_values_of_its_own_a_token_has_its_samples_advantage():
    rollout = rollout_of("train/0000001", 0, advantage=-0.5)
    shown = spans(TokenView(rollout, PIECES, by="advantage")._repr_html_())
    assert [colour for colour, _, _ in shown][1:] == ["#ffffff", shade(-0.5), shade(-0.5)]
    assert shown[2][1].endswith("version 7, advantage -0.5") and "advantage" not in shown[1][1]


def test_values_may_be_of_the_models_tokens_alone():
    rollout = rollout_of("train/0000001", 0)  # two of the template, two of the model
    assert of_tokens(rollout, np.array([0.5, -1.0])).tolist()[2:] == [0.5, -1.0]
    assert np.isnan(of_tokens(rollout, np.array([0.5, -1.0]))[:2]).all()
    assert of_tokens(rollout, np.arange(4)).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="3 values for 4 tokens, 2 of them the model's"):
        of_tokens(rollout, np.zeros(3))
