"""Settings that change while a run goes on: what may, what it does from the next step on, and that it is on record."""

import asyncio
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import running

import titan_rl
from titan_rl import cli
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.plugins import forget, reference_to, resolve
from titan_rl.controller.preflight.checks import recheck_updates
from titan_rl.controller.preflight.checks import resolve as resolve_config
from titan_rl.controller.preflight.live_settings import Effect, effects_of
from titan_rl.controller.preflight.setting_changes import Change, read_changes, record_changes, with_changes
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.run_directory.rundir import RunDir

# what may change


@pytest.mark.parametrize(
    ("key", "effects"),
    [
        ("optimizer.lr", {Effect.UPDATES}),
        ("optimizer.betas", {Effect.UPDATES}),
        ("optimizer.param_groups", {Effect.TRAINER}),
        ("algorithm.clip_high", {Effect.UPDATES}),
        ("rollout.temperature", {Effect.TRAINER, Effect.SAMPLING}),
        ("rollout.max_staleness", {Effect.SAMPLING}),
        ("task.reward", {Effect.SAMPLING, Effect.REWARD}),
        ("eval.every", set()),
    ],
)
def test_a_setting_is_taken_up_by_those_whom_it_concerns(key, effects):
    assert effects_of(key, on_data=False) == effects


@pytest.mark.parametrize(
    ("key", "on_data", "said"),
    [
        ("model.path", False, "model.path cannot change while a run goes on; what can: optimizer, lr_scheduler"),
        ("optimizerx.lr", False, r"unknown section \[optimizerx\]: did you mean 'optimizer'"),
        ("rollout.top_q", False, "unknown key rollout.top_q: "),
        ("rollout.temprature", False, "unknown key rollout.temprature: did you mean 'temperature'"),
        ("checkpoint.stroe", False, "unknown key checkpoint.stroe: did you mean 'store'"),
        ("training.stepss", False, "unknown key training.stepss: did you mean 'steps'"),
        ("parallelism.tensor_parallel", False, "unknown key parallelism.tensor_parallel: did you mean"),
        ("compile.enabel", False, "unknown key compile.enabel: did you mean 'enable'"),
        ("comm.x", False, "unknown key comm.x: known: "),
        ("model.chat_template.fiel", False, "unknown key model.chat_template.fiel: did you mean 'file'"),
        ("reference.parallelism.tensor_parallel", False, "unknown key reference.parallelism.tensor_parallel: did you"),
        ("training.dtype", False, "training.dtype cannot change"),
        ("task.options.anything", False, "task.options.anything cannot change"),
        ("checkpoint.store", False, "checkpoint.store cannot change"),
        ("algorithm.updates_per_batch", False, "counts updates"),
        ("rollout.group_size", False, "the ledger counts"),
        ("generator.replicas", False, r"session.scale\(count\)"),
        ("training.steps", False, "resume=True"),
        ("rollout.temperature", True, "what can: optimizer, lr_scheduler, training.max_norm, algorithm, "),
    ],
)
def test_what_must_stay_is_one_line(key, on_data, said):
    with pytest.raises(ConfigError, match=said) as caught:
        effects_of(key, on_data=on_data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "besides", "changed", "said"),
    [
        ("distillation", {"rollout": {"top_p": 0.9}}, {"top_k": 8}, r"rollout.top_p = 0.9: .* 8 likeliest words"),
        ("distillation", {}, {"top_k": 4000}, "algorithm.top_k: 4000 tokens exceed the vocabulary"),
        ("grpo", {"reward_model": {"path": "model"}}, {"name": "maxrl"}, "reward_model.path = 'model' gives rewards"),
    ],
    ids=["decoding", "roles", "reward model"],
)
def test_a_change_is_refused_for_what_a_start_would_be(tmp_path, name, besides, changed, said):
    make_tiny(tmp_path / "teacher", seed=1)
    tables = {"algorithm": {"name": name}, "teacher": {"path": str(tmp_path / "teacher")}} | besides
    checked = resolve_config(load_config(None, tables, with_models=False))
    again = load_config(None, tables | {"algorithm": {"name": name} | changed}, with_models=False)
    with pytest.raises(ConfigError, match=said):
        recheck_updates(checked, again, [f"algorithm.{key}" for key in changed])


# rewards


def test_a_reward_is_named_by_where_it_can_be_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    file = tmp_path / "rewards_of_a_test.py"
    file.write_text("def one(prompt, completion, row): return 1.0\n")
    folders, name = [str(tmp_path)], "rewards_of_a_test:one"
    assert reference_to("task.reward", resolve("task.reward", name, folders)) == name
    file.write_text("def other(prompt, completion, row):\n    return 0.0\n")
    with pytest.raises(ConfigError, match="there is no 'other'"):
        resolve("task.reward", "rewards_of_a_test:other", folders)
    forget(name, folders)
    assert resolve("task.reward", "rewards_of_a_test:other", folders)(None, None, None) == 0.0


def test_nothing_is_forgotten_that_is_not_in_the_users_folders(tmp_path):
    forget("titan_rl.config.load:load_config", [str(tmp_path)])
    from titan_rl.config.load import load_config as again

    assert again is load_config


def test_a_function_without_a_module_is_one_line():
    with pytest.raises(ConfigError, match="%%writefile rewards.py") as caught:
        reference_to("task.reward", lambda prompt, completion, row: 1.0)
    assert "\n" not in str(caught.value)


# when the run is resumed


def changed(root: Path, *changes: Change) -> RunDir:
    run_dir = RunDir(root)
    for each in changes:
        record_changes(run_dir, [each])
    return run_dir


def test_a_resumed_run_goes_on_as_it_was_set(tmp_path):
    toml = load_config(None, {"optimizer": {"lr": 1e-3}})
    first, last = (Change("optimizer.lr", before, after, step, "me") for before, after, step in [
        (1e-3, 2e-3, 3), (2e-3, 5e-4, 7)])  # fmt: skip
    unset = Change("training.max_norm", None, 5.0, 7, "me")
    run_dir = changed(tmp_path, first, last, unset)
    config, held = with_changes(toml, run_dir)
    assert config.titan == {"optimizer": {"lr": 5e-4}, "training": {"max_norm": 5.0}} and held == [last, unset]
    asked_otherwise = load_config(None, {"optimizer": {"lr": 9e-4}, "training": {"max_norm": 1.0}})
    assert with_changes(asked_otherwise, run_dir) == (asked_otherwise, []), "who asks for something else gets it"


def test_a_record_can_set_nothing_else_and_names_no_code(tmp_path):
    config = load_config(None)
    named = changed(
        *(tmp_path, Change("task.reward", "", "rewards:one", 1, "me")),
        Change("algorithm.name", "grpo", "forged:Algorithm", 1, "me"),
    )
    assert with_changes(config, named) == (config, [])
    forged = changed(tmp_path, Change("model.path", "tiny", "/elsewhere", 1, "me"))
    with pytest.raises(ConfigError, match="model.path cannot change"):
        with_changes(config, forged)


@pytest.mark.parametrize("text", ["{", "[1]", '[{"key": "optimizer.lr"}]', "[" * 100_000])
def test_a_damaged_record_is_one_line(tmp_path, text):
    run_dir = RunDir(tmp_path)
    run_dir.changes.write_text(text)
    with pytest.raises(ConfigError, match="changes.json is damaged") as caught:
        read_changes(run_dir)
    assert "\n" not in str(caught.value)


# a run in hand

REWARDS = "def half(prompt, completion, row):\n    return {'half': 0.5 * len(completion)}\n"


SETTINGS = dict(sft__steps=60, training__steps=8, eval__prompts=4, checkpoint__keep_latest_k=4)
SETTINGS |= dict(algorithm__kl_coefficient=0.1, reference__placement="own")
"""The reference takes up changes, too: a replay, which begins with them, would find another KL."""


async def drive(root: Path) -> None:
    run = {"dir": str(root), "plugin_path": [str(root.parent)]}
    async with await titan_rl.launch(None, run=run, **parse_overrides(running.overrides(**SETTINGS))) as session:
        await session.step(2)
        await _refused(session)
        assert session.session.progress.step == 2 and not (root / "changes.json").exists()
        repair = session.session.controller.trainer
        with pytest.MonkeyPatch.context() as patch:  # a learning rate is no reason to load ranks anew
            patch.delattr(type(repair), "begin_anew")
            await session.set("optimizer.lr", 5e-4)
        assert (await session.step()).loc[3, "learning_rate"] == 5e-4
        sampling = {"temperature": 0.7, "top_k": 8, "max_staleness": 1, "prompts_per_step": 2}
        sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
        await session.set({f"rollout.{key}": value for key, value in sampling.items()})
        os.kill(session.actors.loc["trainer rank 0", "pid"], signal.SIGKILL)
        assert set((await session.step()).loc[4:, "learning_rate"]) == {5e-4}
        assert len(session.rollouts(4)) == 2 * 4 and len(session.rollouts(3)) == 4 * 4
        await session.step()  # one more is under way, whose samples are scored again
        await session.swap_reward("rewards:half")
        await session.step()
        assert "reward/half" in session.rollouts(6) and "reward/half" not in session.rollouts(5)
        kinds = session.events.query("kind == 'changed'")
        assert kinds["step"].tolist() == [2, *[3] * len(sampling), 5] and kinds["key"].iloc[0] == "optimizer.lr"
        kept = session.metrics["sampled_from_mean"]
        assert kept.loc[:3].isna().all() and kept.loc[4:].between(1, 8).all(), "from step 4 on there are sampling masks"
        agreement = session.metrics["agreement_mean"].loc[[3, 4, 6]]  # step 5 had one that was sampled before
        assert np.allclose(agreement, 1.0, atol=1e-4) and session.metrics["grad_norm"].gt(0).any(), "both sides know"


async def _refused(session) -> None:
    """With nothing changed, and the run goes on."""
    for overrides, said in [
        ({"model.path": "x"}, "cannot change"),
        ({"optimizer.lr": "fast"}, "optimizer.lr"),
        ({"optimizer.lrs": 1e-3}, "unknown key optimizer.lrs"),
        ({"rollout.temperature": -1.0}, "rollout.temperature = -1.0"),
        ({"algorithm.name": "ppo"}, "needs a critic"),
        ({"task.reward": "nowhere:one"}, "there is no module 'nowhere'"),
        ({"lr": 1}, "'lr' is no setting"),
    ]:
        with pytest.raises(ConfigError, match=said):
            await session.set(overrides)
    await session.set("optimizer.lr", 1e-3)  # as it is


@pytest.mark.slow
def test_a_change_is_a_boundary_that_is_on_record(tmp_path, capsys):
    """Each part is trained again, bit for bit, under what it was trained under; and a resumed run goes on with it."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    root = tmp_path / "run"
    asyncio.run(drive(root))
    assert sorted(path.name for path in (root / "earlier").iterdir()) == [
        "step-000002.json", "step-000003.json", "step-000005.json"]  # fmt: skip
    capsys.readouterr()
    for first, last in [(3, 3), (4, 5)]:
        span = ["--from", str(first), "--to", str(last)]
        assert cli.main(["replay", str(root), *span, "--run.plugin_path", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"]["num_different"] == 0
    given = ["--task.reward", "rewards:half", "--run.plugin_path", json.dumps([str(tmp_path)])]
    assert running.train(root, "--resume", *given, **SETTINGS) == 0, running.output(root)
    said = running.output(root)
    assert "optimizer.lr = 0.0005, as" in said and "rollout.temperature = 0.7, as" in said
    assert "rollout.top_k = 8, as" in said and titan_rl.connect(root).metrics.loc[7:, "sampled_from_mean"].le(8).all()
    assert set(titan_rl.connect(root).metrics.loc[7:, "learning_rate"]) == {5e-4}


async def drive_on_data(root: Path) -> None:
    settings = {"training.steps": 4, "run.dir": str(root), "eval.every": 0, "data.made_rows": 60}
    async with await titan_rl.launch("dpo_tiny", settings) as session:
        await session.step(2)
        with pytest.raises(ConfigError, match="rollout.temperature cannot change"):
            await session.set("rollout.temperature", 0.5)
        await session.set({"optimizer.lr": 5e-4, "algorithm.beta": 0.2})
        assert (await session.step())["learning_rate"].tolist() == [5e-4]


@pytest.mark.slow
@pytest.mark.confirms
def test_a_run_on_data_changes_too(tmp_path, capsys):
    asyncio.run(drive_on_data(tmp_path / "run"))
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "run"), "--from", "3", "--to", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["state"]["num_different"] == 0
