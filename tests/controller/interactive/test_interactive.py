"""A run with the loop in hand, and one that is looked at: launched, stepped, interrupted, struck, left behind clean."""

import asyncio
import json
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import running
from made_run import GROUPS, SAMPLES, STEPS, made_run

import titan_rl
from titan_rl import cli
from titan_rl.config.io.overrides import overriding, parse_overrides
from titan_rl.config.load import ConfigError
from titan_rl.controller.interactive.custom_step import CustomStep, OrderError
from titan_rl.controller.interactive.live import RunEnded
from titan_rl.controller.interactive.trainer import RankError
from titan_rl.controller.session import Session
from titan_rl.records.metrics import _has_signal

# what is asked for


def test_settings_are_given_by_name_and_by_section():
    wanted = {"training": {"steps": 3, "seq_len": 64}, "critic": {"optimizer": {"lr": 1e-3}}}
    assert overriding({"training.steps": 3, "critic.optimizer.lr": 1e-3}, {"training": {"seq_len": 64}}) == wanted


@pytest.mark.parametrize(
    ("dotted", "sections", "said"),
    [
        ({"steps": 3}, {}, "'steps' is no setting: give section.key"),
        ({"training.": 3}, {}, "'training.' is no setting"),
        ({"training.steps": 3}, {"training": {"steps": 3}}, "training.steps is given twice"),
        ({}, {"training": 3}, "training = 3: a section is a dict"),
        ({"run.seed.x": 3}, {"run": {"seed": 1}}, "seed = 1: a section is a dict"),
    ],
)
def test_a_setting_that_is_none_is_one_line(dotted, sections, said):
    with pytest.raises(ConfigError) as caught:
        overriding(dotted, sections)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_setting_without_its_section_is_told_with_it():
    with pytest.raises(ConfigError, match="^'learning_rate' is no setting: here it is optimizer.lr$"):
        titan_rl.launch("quickstart", {"learning_rate": 1e-4})


def test_a_mistake_starts_nothing_and_makes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="training.step: did you mean 'steps'"):
        titan_rl.launch("quickstart", {"training.step": 3}, run={"dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


def test_a_run_tells_of_its_file_as_it_was_asked_for(tmp_path, capsys):
    """Not by the place where this machine has it."""
    asyncio.run(titan_rl.launch("quickstart", run={"dir": str(tmp_path / "run")}).close())
    assert "next: titan-rl train quickstart --resume" in capsys.readouterr().out


def test_a_run_that_has_not_started_says_so():
    session = object.__new__(Session)
    session._meshes = session._controller = None
    assert not session.has_meshes
    for name in ("meshes", "controller"):
        with pytest.raises(RuntimeError, match="has not started: await the session"):
            getattr(session, name)


def test_a_batch_before_the_groups_that_it_is_of_is_out_of_order():
    own = object.__new__(CustomStep)
    own._collected = None
    with pytest.raises(OrderError, match="sample comes first"):
        own.batch([])


@pytest.mark.parametrize(
    ("advantages", "rewards", "has_signal"),
    [
        ([None, None], [1.0, 1.0], False),
        ([None, None], [0.0, 1.0], True),
        ([0.5, -0.5], [1.0, 1.0], True),
        ([0.0, np.zeros(3)], [0.0, 1.0], False),
    ],
)
def test_a_groups_signal_is_that_of_the_advantages_that_it_was_given(advantages, rewards, has_signal):
    given = zip(advantages, rewards, strict=True)
    rollouts = [SimpleNamespace(advantage=each, reward=reward, is_scored=True) for each, reward in given]
    assert _has_signal(rollouts) == has_signal


@pytest.mark.parametrize(
    ("advantages", "said"),
    [
        ([float("nan"), 1.0], "the advantage of p sample 0 is nan: give finite numbers"),
        (["high", 1.0], "the advantage of p sample 0 is 'high': give a number"),
        ([None, 1.0], "sample 0 of p has no advantage, and 1 has"),
        ([], "to leave one out, give its rollouts an advantage of 0"),
    ],
)
def test_a_mistake_in_the_advantages_of_a_loop_of_ones_own_is_told_as_it_is_made(advantages, said):
    rollouts = [SimpleNamespace(sample=number, advantage=value) for number, value in enumerate(advantages)]
    own = object.__new__(CustomStep)
    own._collected = SimpleNamespace(groups=[SimpleNamespace(prompt_id="p", rollouts=rollouts)])
    with pytest.raises(ValueError, match=re.escape(said)):
        own.batch(own._collected.groups if advantages else [])


def test_the_package_has_no_other_doors():
    assert {"launch", "connect", "ConfigError"} <= set(dir(titan_rl))
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = titan_rl.lunch


# a run that another process drives, or drove


def test_a_run_is_looked_at_by_its_records(tmp_path):
    made_run(tmp_path / "run")
    view = titan_rl.connect(tmp_path / "run")
    assert not view.is_active and view.actors.empty and view.summary == {}
    assert view.metrics.index.tolist() == [*range(1, STEPS + 1)] and view.metrics["loss"].eq(0.25).all()
    found = view.rollouts()
    assert len(found) == GROUPS * SAMPLES and found["reward/score"].sum() == found["reward"].sum() == len(found) / 2
    assert found.loc[0, "answer"] == "12" and found.loc[0, "tokens"].tolist() == [5, 6, 7, 8]
    with pytest.raises(ConfigError, match=f"step 99 is not recorded, 1 to {STEPS} are"):
        view.rollouts(99)
    with pytest.raises(ConfigError, match="no run is under way"):
        view.scale(2)


def test_a_run_that_has_just_begun_is_empty(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    view = titan_rl.connect(tmp_path)
    assert view.metrics.empty and view.events.empty and view.phase == ""
    with pytest.raises(ConfigError, match="none is yet"):
        view.rollouts()


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="holds no config.json"):
        titan_rl.connect(tmp_path)


# a run in hand


def seconds_of(look) -> float:
    start = time.perf_counter()
    look()
    return time.perf_counter() - start


async def drive(root) -> set[int]:
    tables = parse_overrides(running.overrides(training__steps=12))
    async with await titan_rl.launch(None, run={"dir": str(root)}, **tables) as session:
        pids = set(session.actors["pid"])
        other = titan_rl.connect(root)
        await _step_by_step(session, other)
        await _interrupted(session)
        await _struck(session)
        await _in_the_background(session)
        pids |= set(session.actors["pid"])
    assert session.actors.empty and not other.is_active
    with pytest.raises(RunEnded, match="it was closed"):
        await session.step()
    return pids


async def _step_by_step(session, other) -> None:
    first = await session.step(2)
    assert first.index.tolist() == [1, 2] and first["loss"].notna().all()
    assert session.actors.loc["trainer rank 0", "version"] == session.actors.loc["generator 0", "version"] == 2
    assert other.is_active and set(other.actors.index) == set(session.actors.index)
    assert set(session.actors["state"]) <= {"works", "waits"} and (session.actors["MiB"] > 10).all()
    assert set(session.actors["host"]) == {"controller"}
    assert (session.actors["seconds"].drop("scorer 0") > 0).all(), "that it worked in the last step"
    assert len(session.rollouts()) == len(other.rollouts(2)) and session.rollouts()["prompt"].str.len().gt(0).all()
    answers = await session.generate(["count 1", "count 2"], temperature=0.0, max_new_tokens=3)
    assert answers == await session.generate(["count 1", "count 2"], temperature=0.0, max_new_tokens=3)
    assert (await session.evaluate()).count == 16
    norms = await session.trainer.call(lambda learner: sum(float(w.norm()) for _, w in learner.weights()))
    assert list(norms) == ["trainer rank 0"] and norms["trainer rank 0"] > 0
    with pytest.raises(RankError, match="trainer rank 0: ZeroDivisionError"):
        await session.trainer.call(lambda learner: 1 / 0)
    with pytest.raises(RankError, match="trainer rank 0: TypeError: cannot pickle"):
        await session.trainer.call(lambda learner: (each for each in ()))
    with pytest.raises(ValueError, match="prompt 1 and 3 new tokens are more than"):
        await session.generate(["short", "long " * 1000], max_new_tokens=3)
    for beyond in ({"temperature": 2.5}, {"temperature": 0.001}, {"temperature": -1.0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="give a temperature from 0.01 to 2.0, or 0"):
            await session.generate(["short"], **beyond)


async def _interrupted(session) -> None:
    """The call stops; the step goes on, and the next call comes after it."""
    step = asyncio.create_task(session.step(3))
    while "idle" in repr(session):
        await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert session.session.progress.step == 2
    assert (await session.step()).index.tolist() == [4]
    assert session.session.progress.step == 4


async def _struck(session) -> None:
    os.kill(session.actors.loc["generator 0", "pid"], signal.SIGKILL)
    assert (await session.step()).index.tolist() == [5]
    os.kill(session.actors.loc["trainer rank 0", "pid"], signal.SIGKILL)
    assert (await session.step()).index.tolist() == [6]
    kinds = session.events["kind"].tolist()
    assert "trainer_repaired" in kinds and "generator_serves" in kinds


async def _in_the_background(session) -> None:
    running_on = session.run()
    while session.session.progress.step == 6:
        await asyncio.sleep(0.001)
    with pytest.raises(RunEnded, match=r"await session.pause\(\)"):
        await session.step()
    looks = [lambda: session.actors, lambda: session.metrics, lambda: session.rollouts(6)]
    assert all(seconds_of(look) < 0.5 for look in looks)
    await session.pause()
    paused_at = session.session.progress.step
    assert not session.is_running and 7 <= paused_at < 12
    await session.step()
    path = await session.save()
    assert f"step-{paused_at + 1:06d}" in os.listdir(path)
    await session.resume()
    assert await running_on is None and session.session.progress.step == 12


@pytest.mark.slow
def test_a_run_in_hand(tmp_path):
    pids = asyncio.run(drive(tmp_path / "run"))
    assert pids and running.gone(pids)
    summary = titan_rl.connect(tmp_path / "run").summary
    assert summary["why_ended"] == "completed" and summary["steps_done"] == 12


# a loop of one's own


def grpo_of_ones_own(groups) -> None:
    for group in groups:
        reward_G = np.array([rollout.reward for rollout in group.rollouts])
        centred_G = reward_G - reward_G.mean()
        scale = reward_G.std(ddof=1) + 1e-6 if centred_G.any() else 1.0
        for rollout, advantage in zip(group.rollouts, centred_G / scale, strict=True):
            rollout.advantage = float(advantage)


async def own_loop(root, settings, steps: int) -> None:
    async with await titan_rl.launch(None, run={"dir": str(root)}, **settings) as session:
        with pytest.raises(OrderError, match="sample"):
            await session.publish()
        for step in range(1, steps + 1):
            groups = await session.sample()
            grpo_of_ones_own(groups)
            told = await session.trainer.forward_backward(session.batch(groups))
            with pytest.raises(OrderError, match="a step of your own is at hand"):
                await session.step()
            if step == 2:  # the gradients go with it, and are made again
                os.kill(session.actors.loc["trainer rank 0", "pid"], signal.SIGKILL)
            made = await session.trainer.optim_step()
            assert (made.loss, made.grad_norm) == (told.loss, told.grad_norm)
            with pytest.raises(OrderError, match="publish comes next"):
                await session.trainer.forward_backward(session.batch(groups))
            assert (await session.publish()).index.tolist() == [step]
        assert "trainer_repaired" in session.events["kind"].tolist()


@pytest.mark.slow
def test_a_loop_of_ones_own_is_the_runs_own_bit_for_bit(finished_run, tmp_path, capsys):
    """Against a run that ``titan-rl train`` made; and its last step is trained again from what it recorded."""
    asyncio.run(own_loop(tmp_path / "own", parse_overrides(running.overrides(**running.FINISHED)), 3))
    both = (titan_rl.connect(root).metrics[["loss", "grad_norm"]].loc[:3] for root in (finished_run, tmp_path / "own"))
    one, other = both
    assert titan_rl.connect(tmp_path / "own").summary["seconds_training"] > 0
    assert one.equals(other) and one["grad_norm"].gt(0).any()
    assert titan_rl.connect(tmp_path / "own").rollouts(3)["advantage"].notna().all()
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "own"), "--from", "3", "--to", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"]["num_different"] == 0
