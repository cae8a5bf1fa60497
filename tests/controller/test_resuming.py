"""What a resumed run may change, what it refuses by name, and which run --resume takes."""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import made_run
import numpy as np
import pytest
from row_tasks import write
from running import overrides

from titan_rl import train
from titan_rl.config.load import ConfigError, load_config, read_resolved
from titan_rl.controller.initial_policy import keep_policy
from titan_rl.controller.preflight import recorded_config
from titan_rl.controller.preflight import resume as resuming
from titan_rl.controller.preflight.checks import resolve, with_dataset
from titan_rl.controller.preflight.resumed_settings import is_complete, learning_rates, resumed_settings
from titan_rl.controller.recovery.recorded_rollouts import Recovery
from titan_rl.controller.session import Session
from titan_rl.data.text.thinking import thinking_tags
from titan_rl.data.types import StepMetrics
from titan_rl.diagnostics.replay import replay
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import MetricsLog
from titan_rl.records.run_directory import rundir
from titan_rl.records.run_directory.rundir import RunDir, claim, new_run_dir, passed_over, run_dir_to_resume
from titan_rl.records.run_directory.sources import check_sources, find_sources, write_sources
from titan_rl.records.run_directory.summary import Progress, write_summary
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

LAST = made_run.STEPS


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """By the step of their checkpoint; 0: none, so that all steps must be trained again."""
    folder = tmp_path_factory.mktemp("originals")
    return {step: made_run.made_run(folder / f"run{step}", checkpoint=step).root for step in range(LAST + 1)}


@pytest.fixture
def run(originals, tmp_path):
    def copy(checkpoint=LAST) -> RunDir:
        shutil.copytree(originals[checkpoint], tmp_path / "run")
        return RunDir(tmp_path / "run")

    return copy


def check(run_dir: RunDir, **settings) -> int:
    return resuming.check_resumable(run_dir, resolve(made_run.config_of(run_dir.root, **settings)))


@pytest.mark.parametrize("checkpoint", [0, 1, LAST])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(training__steps=50),
        dict(checkpoint__every=3, eval__every=2, metrics__tensorboard=False, recovery__snapshot_every=0),
        dict(generator__replicas=2, verifier__procs=2, mesh__step_timeout=60, rollout__max_staleness=1),
        dict(task__sandbox__url="http://127.0.0.1:9"),
        dict(rollout__prompts_per_step=8, rollout__group_size=2, parallelism__data_parallel_shard_degree=2),
    ],
)
def test_what_may_change_at_any_time(run, checkpoint, settings):
    assert check(run(checkpoint), **settings) == (LAST if "parallelism__data_parallel_shard_degree" in settings else 0)


def test_what_generators_are_sent_may_change_and_the_adapters_may_not(run):
    run_dir, before = run(), {"lora.rank": 4, "lora.sync": "auto"}
    resuming._check_kept(run_dir, before, before | {"lora.sync": "adapter"})
    assert resuming.first_change(before, before | {"lora.sync": "adapter"}) == ""
    with pytest.raises(ConfigError, match="lora.rank = 8 is not what .* was begun with, 4"):
        resuming._check_kept(run_dir, before, before | {"lora.rank": 8})


KEPT = {
    "run.seed": (dict(run__seed=2), "run.seed = 2 ", ", 1:"),
    "a task": (dict(task__name="lcm"), 'task.name = "lcm"', '"gcd"'),
    "an option": (dict(task__options__max_value=70), "task.options.max_value = 70", "60"),
    "a new option": (dict(task__options__min_value=2), "task.options.min_value = 2", "not set"),
}


@pytest.mark.parametrize("checkpoint", [0, LAST])
@pytest.mark.parametrize("name", KEPT)
def test_what_never_changes_is_refused_by_name(run, checkpoint, name):
    settings, asked, recorded = KEPT[name]
    with pytest.raises(ConfigError) as refused:
        check(run(checkpoint), **settings)
    assert asked in str(refused.value) and recorded in str(refused.value) and "\n" not in str(refused.value)


WHILE_REDOING = {
    "seq_len": (dict(training__seq_len=128), "training.seq_len = 128", "512"),
    "lr": (dict(optimizer__lr=5e-4), "optimizer.param_groups.0.optimizer_kwargs.lr = 0.0005", "0.001"),
    "loss": (dict(algorithm__clip_high=0.5), "algorithm.clip_high = 0.5", "0.2"),
    "updates": (dict(algorithm__updates_per_batch=2), "algorithm.updates_per_batch = 2", "1"),
    "temperature": (dict(rollout__temperature=0.5), "rollout.temperature = 0.5", "1.0"),
}


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize("name", WHILE_REDOING)
def test_training_does_not_change_while_recorded_steps_must_be_trained_again(run, checkpoint, name):
    settings, asked, recorded = WHILE_REDOING[name]
    with pytest.raises(ConfigError) as refused:
        check(run(checkpoint), **settings)
    said = str(refused.value)
    assert asked in said and recorded in said and f"steps {checkpoint + 1} to {LAST}" in said and "\n" not in said


@pytest.mark.parametrize("schedule", ["lr_scheduler", "critic.lr_scheduler", "implicit_reward.lr_scheduler"])
def test_neither_does_the_number_of_steps_that_a_learning_rate_decays_over(run, schedule):
    """A schedule that is constant, or has a length of its own, does not depend on it."""
    run_dir, before = run(1), {"training.steps": 60, f"{schedule}.decay_ratio": 0.5, f"{schedule}.total_steps": None}
    after = {"training.steps": 35}
    with pytest.raises(ConfigError, match="training.steps = 35 is not what steps 2 to 2 of .* with, 60, .*Ctrl-C"):
        resuming._check_redone(run_dir, before, before | after, 2, 2, with_sft=False)
    for settings in ({f"{schedule}.decay_ratio": 0.0}, {f"{schedule}.total_steps": 60}):
        independent = before | settings
        resuming._check_redone(run_dir, independent, independent | after, 2, 2, with_sft=False)
        assert resuming.first_change(independent, independent | after) == ""


def test_nor_does_the_number_of_drafted_tokens_that_a_head_learns(run):
    run_dir, key = run(0), "generator.speculative.num_speculative_tokens"
    before = {key: 3, "drafter.path": "head", "generator.speculative.method": "eagle3"}
    for learned in ({}, {"drafter.path": "", "drafter.train_mtp": True, "generator.speculative.method": "mtp"}):
        with pytest.raises(ConfigError, match=f"{key} = 2 is not what steps 1 to 2 of .* with, 3"):
            resuming._check_redone(run_dir, before | learned, before | learned | {key: 2}, 1, 2, with_sft=False)
    for free in ({"drafter.path": ""}, {"generator.speculative.method": "draft_model"}):
        resuming._check_redone(run_dir, before | free, before | free | {key: 2}, 1, 2, with_sft=False)


@pytest.mark.parametrize("role", ["critic", "drafter"])
def test_another_directory_of_a_model_whose_weights_a_checkpoint_has_is_refused(run, monkeypatch, tmp_path, role):
    """It would never be read. The same directory may have moved."""
    run_dir, before, holds = run(LAST), {f"{role}.path": str(tmp_path)}, {role}
    checked = resolve(made_run.config_of(run_dir.root))
    monkeypatch.setattr(resuming, "learned_roles", lambda config, needs: [role])
    monkeypatch.setattr(resuming, "holds_role", lambda checkpoint, name: name in holds)
    with pytest.raises(ConfigError, match=f'{role}.path = "b" is not what .* has the weights of the {role}'):
        resuming._check_learned(run_dir, checked, before, {f"{role}.path": "b"})
    resuming._check_learned(run_dir, checked, before, before)
    resuming._check_learned(run_dir, checked, {f"{role}.path": "gone"}, {f"{role}.path": "b"})
    learned = before | {"drafter.train_mtp": True}
    if role == "drafter":
        with pytest.raises(ConfigError, match="drafter.train_mtp = false: .* model/ would have that of tiny again"):
            resuming._check_learned(run_dir, checked, learned, before)
        resuming._check_learned(run_dir, checked, learned, learned)
    holds.clear()
    resuming._check_learned(run_dir, checked, before, {f"{role}.path": "b"})
    resuming._check_learned(run_dir, checked, learned, before)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_neither_does_a_role_that_they_were_compared_with(run, role):
    run_dir, before = run(0), {f"{role}.path": "a", f"{role}.placement": "own"}
    with pytest.raises(ConfigError, match=f'{role}.path = "b" is not what steps 1 to 2 of .* with, "a"'):
        resuming._check_redone(run_dir, before, before | {f"{role}.path": "b"}, 1, 2, with_sft=False)
    resuming._check_redone(run_dir, before, before | {f"{role}.placement": "with_trainer"}, 1, 2, with_sft=False)


def test_rows_that_became_too_short_are_named_by_their_setting(run):
    """And not as rollouts that cannot be read, whose steps would be sampled again."""
    run_dir = run(1)
    groups = read_rollouts(run_dir.rollouts, 2)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        for name in ("tokens", "provenance", "logprobs", "versions"):
            setattr(rollout, name, np.repeat(getattr(rollout, name), 3))
    write_rollouts(run_dir.rollouts, 2, groups)
    with pytest.raises(ConfigError, match="training.seq_len = 8 .*512"):
        check(run_dir, training__seq_len=8)


def test_a_checkpoint_before_the_first_step_is_one(run):
    """What a run with recovery.nonfinite = "rollback" begins with."""
    run_dir = run(0)
    made_run.save(run_dir, 0)
    assert check(run_dir, sft__steps=20) == LAST
    (run_dir.rollouts / "step-000001.parquet").unlink()
    assert check(run_dir) == 0


@pytest.mark.parametrize("name", WHILE_REDOING)
def test_training_may_change_at_a_checkpoint_of_the_last_step(run, name):
    assert check(run(), **WHILE_REDOING[name][0]) == LAST


def test_sft_matters_only_without_a_checkpoint(run, tmp_path):
    with pytest.raises(ConfigError, match="sft.steps = 20"):
        check(run(0), sft__steps=20)
    shutil.rmtree(tmp_path / "run")
    assert check(run(1), sft__steps=20) == LAST


KL = dict(algorithm__kl_coefficient=0.1)


def test_the_reference_stays_what_it_was_when_the_run_began(tmp_path):
    """It is the policy as it was before the first step: after SFT, where there was some, and else the base model."""
    before, after = (
        made_run.made_run(tmp_path / name, **KL, sft__steps=n) for name, n in (("before", 0), ("after", 5))
    )
    after.kept_policy.mkdir()
    make_tiny(after.kept_policy, seed=1)
    for run_dir, asked in ((before, 5), (after, 0)):
        line = (
            f"sft.steps = {asked} is not what {run_dir.root} was begun with, {5 - asked}: the reference is the policy"
        )
        with pytest.raises(ConfigError, match=line):
            check(run_dir, **KL, sft__steps=asked)
        check(run_dir, **KL, sft__steps=5 - asked)
        check(run_dir, algorithm__kl_coefficient=0.0, sft__steps=asked)
    shutil.rmtree(after.kept_policy)
    with pytest.raises(ConfigError, match="kept_policy, the reference of this run, is gone"):
        check(after, **KL, sft__steps=5)


def test_a_reference_that_is_wanted_later_is_not_said_to_be_gone(tmp_path):
    run_dir = made_run.made_run(tmp_path / "run", sft__steps=5)
    with pytest.raises(ConfigError, match="has not kept, since its algorithm needed none: set reference.path"):
        check(run_dir, **KL, sft__steps=5)


def test_the_reference_is_the_policy_after_the_supervised_steps_that_were_done_last(tmp_path):
    """A run that ends between them and its first checkpoint may be resumed with others."""
    checked = resolve(made_run.config_of(tmp_path / "run", **KL, sft__steps=5))
    run_dir, loaded = RunDir(tmp_path / "run"), []

    class Trainer:
        policy = ""

        async def call(self, request):
            *role, folder = request.arguments
            if request.endpoint == "save_hf":
                Path(folder).mkdir(parents=True)
                (Path(folder) / "config.json").write_text(self.policy)
            else:
                loaded.append((*role, (Path(folder) / "config.json").read_text()))

    class Roles:
        async def load_role(self, role, folder):
            pass

    meshes = SimpleNamespace(trainer=Trainer(), roles=Roles())
    for meshes.trainer.policy in ("after 5 steps", "after 20 steps"):
        asyncio.run(keep_policy(checked.config, checked.algorithm, run_dir, meshes))
    assert loaded == [("reference", "after 5 steps"), ("reference", "after 20 steps")]


# of a run on data

ON_DATA = dict(algorithm__name="sft", sft__steps=0, eval__prompts=4)
MADE = {"data.file": "task", "data.too_long": "error"}
WEIGHTED = '[{ path = "a.jsonl", weight = 2.0 }, "b.jsonl"]'


@pytest.fixture
def on_data(tmp_path, monkeypatch):
    """A run on two weighted files, whose rows have their texts under two names each."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(tmp_path, [{"prompt": f"{n},1=", "completion": "1", "second": "2"} for n in range(9)], f"{name}.jsonl")
    return made_run.made_run(tmp_path / "data_run", **ON_DATA, data__file=WEIGHTED)


def check_data(run_dir: RunDir, **settings) -> int:
    config = made_run.config_of(run_dir.root, **ON_DATA | {"data__file": WEIGHTED} | settings)
    return resuming.check_resumable(run_dir, with_dataset(resolve(config)))


def test_a_run_on_weighted_files_goes_on_and_is_replayed_as_one_on_data(on_data):
    assert check_data(on_data) == 0
    assert replay.plan_replay(on_data.root, 1, LAST).checked.dataset is not None
    with pytest.raises(
        ConfigError, match=r'data.file = "task" is not what .* \[{"path": "a.jsonl", "weight": 2.0}, "b'
    ):
        resuming._check_drawn(on_data, resuming.read_settings(on_data.config), MADE)


@pytest.mark.parametrize("columns", ['{ completion = "second" }', '{ prompt = "prompt", completion = "second" }'])
def test_other_columns_are_other_rows(on_data, columns):
    with pytest.raises(ConfigError, match=r"data.columns.\w+ = .* is not what .* was begun with, not set"):
        check_data(on_data, data__columns=columns)


def test_a_layout_that_a_role_did_not_name_before_is_one_that_a_replay_must_know():
    later = {"reference.parallelism.data_parallel_shard_degree": 2}
    assert resuming.first_change({}, later) == next(iter(later))


# what is said of settings that are other ones now


def told(run_dir: RunDir, **settings) -> list[str]:
    return resumed_settings(run_dir, resolve(made_run.config_of(run_dir.root, **settings)))


DECAY = dict(lr_scheduler__decay_ratio=1.0, optimizer__lr=1e-3, training__steps=LAST)


@pytest.fixture
def decaying(tmp_path):
    return made_run.made_run(tmp_path / "decaying", checkpoint=LAST, **DECAY)


def test_a_resume_with_the_same_settings_says_no_more_than_that_all_steps_are_done(run, decaying):
    assert told(run(1), training__steps=LAST + 1)[1:] == []
    assert told(decaying, **DECAY) == [
        "all 2 steps are done: the evaluation and the export follow; raise training.steps to train on"
    ]


def test_settings_that_are_other_ones_are_said(run):
    line, _ = told(run(), rollout__prompts_per_step=8, algorithm__clip_high=0.5, task__options__max_value=60)
    assert line.startswith(f"other settings from step {LAST + 1} on: ")
    assert "rollout.prompts_per_step = 8 (was 4)" in line and "algorithm.clip_high = 0.5 (was 0.2)" in line
    assert "run.dir" not in line and "max_value" not in line


def test_a_learning_rate_that_jumps_is_said_with_the_key_that_keeps_it(decaying):
    """The second of 2 steps is at a half, the third of 20 at nine tenths."""
    settings, jump = told(decaying, **DECAY | dict(training__steps=20))
    assert settings == f"other settings from step {LAST + 1} on: training.steps = 20 (was 2)"
    assert jump == (
        "learning rate: 0.0005 at step 2, 0.0009 at step 3, since its schedule is that of 20 steps now, no more of "
        "2; lr_scheduler.total_steps = 2 keeps that one, and its last rate behind it"
    )


def test_a_schedule_that_is_told_to_go_on_does(decaying):
    asked = DECAY | dict(training__steps=20, lr_scheduler__total_steps=LAST)
    [settings] = told(decaying, **asked)
    assert "lr_scheduler.total_steps = 2 (was null)" in settings and "learning rate" not in settings
    titan = resolve(made_run.config_of(decaying.root, **asked)).titan
    last, following = learning_rates(titan, 1, LAST)
    assert following == last and learning_rates(titan, 1, 19) == (last, last)


def test_a_rate_that_was_changed_is_said(run):
    settings, jump = told(run(), optimizer__lr=5e-4, training__steps=9)
    assert "optimizer.param_groups.0.optimizer_kwargs.lr = 0.0005 (was 0.001)" in settings
    assert jump == "learning rate: 0.001 at step 2, 0.0005 at step 3, by the settings that are other ones now"


def test_a_draft_model_that_there_was_none_of_is_said(run, tmp_path):
    make_tiny(tmp_path / "draft", seed=1, num_layers=1)
    drafts = dict(generator__speculative__method="draft_model", drafter__path=str(tmp_path / "draft"))
    assert told(run(), training__steps=9, **drafts)[1:] == [
        f"drafter: none learned up to step {LAST}; it begins as {tmp_path / 'draft'}"
    ]


def test_a_constant_rate_does_not_depend_on_the_number_of_steps(run):
    [line] = told(run(), training__steps=50)
    assert line == "other settings from step 3 on: training.steps = 50 (was 2)"


def test_a_critics_schedule_changes_with_the_number_of_steps():
    before = {"lr_scheduler.decay_ratio": 0.0, "critic.lr_scheduler.decay_ratio": 0.5, "training.steps": 10}
    assert resuming.first_change(before, before | {"training.steps": 20}) == "training.steps"
    constant = before | {"critic.lr_scheduler.decay_ratio": 0.0}
    assert resuming.first_change(constant, constant | {"training.steps": 20}) == ""


# the configuration that steps were trained under


def resumed(run_dir: RunDir, **settings) -> None:
    """A resume that gets as far as the lock, with the settings that it asked for."""
    checked = resolve(made_run.config_of(run_dir.root, **settings))
    run_dir.open(checked.as_dict(), resuming.check_resumable(run_dir, checked))
    run_dir.close()


def test_steps_keep_the_configuration_that_they_were_trained_under(run):
    run_dir = run()
    resumed(run_dir, training__steps=9)
    assert not run_dir.earlier.exists(), "nothing changed that bears on what a step is"
    resumed(run_dir, optimizer__lr=5e-4)
    resumed(run_dir, optimizer__lr=2e-4)  # no step was trained under the one before
    settings = [resuming.read_settings(run_dir.config_of(step)) for step in (1, LAST, LAST + 1)]
    rates = [each["optimizer.param_groups.0.optimizer_kwargs.lr"] for each in settings]
    assert rates == [1e-3, 1e-3, 2e-4]
    assert recorded_config.one_configuration(run_dir, 1, LAST) == run_dir.earlier / "step-000002.json"
    assert recorded_config.one_configuration(run_dir, LAST + 1, LAST + 2) == run_dir.config
    with pytest.raises(ConfigError, match="lr was 0.001, then 0.0002; replay its parts, with --to 2 or --from 3"):
        recorded_config.one_configuration(run_dir, 1, LAST + 1)


def test_a_schedule_that_decays_depends_on_the_number_of_steps(run):
    decays = dict(lr_scheduler__decay_ratio=0.5)
    run_dir = run()
    resumed(run_dir, **decays)
    assert check(run_dir, **decays) == 0
    assert check(run_dir, **decays, training__steps=9) == LAST


def test_a_replay_takes_the_earlier_configuration(run):
    run_dir = run()
    resumed(run_dir, optimizer__lr=5e-4)
    plan = replay.plan_replay(run_dir.root, 1, LAST)
    assert plan.checked.titan.optimizer.param_groups[0].optimizer_kwargs["lr"] == 1e-3


# what is missing or damaged


def test_a_run_without_its_ledger_is_refused(run):
    run_dir = run()
    run_dir.ledger.unlink()
    with pytest.raises(ConfigError, match="ledger"):
        check(run_dir)
    assert not run_dir.ledger.exists(), "looking makes none"


def test_a_ledger_behind_the_checkpoint_is_refused(run):
    """Of another run, or a copy from before."""
    run_dir = run()
    run_dir.ledger.unlink()
    ledger = Ledger(run_dir.ledger)
    ledger.issue(["train/0000000"], 4)
    ledger.settle({"train/0000000": [None] * 4}, 1)
    ledger.close()
    with pytest.raises(ConfigError, match="ends at step 1, before its checkpoint of step 2"):
        check(run_dir)


def test_steps_after_a_damaged_rollout_file_are_named_where_they_cannot_be_had(run, tmp_path):
    run_dir = run(0)
    (run_dir.rollouts / "step-000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="no checkpoint .* and .*step-000002.parquet cannot be read"):
        check(run_dir)
    shutil.rmtree(tmp_path / "run")
    run_dir = run(1)
    (run_dir.rollouts / "step-000002.parquet").write_bytes(b"PAR1")
    assert check(run_dir) == 0, "from the checkpoint on they are sampled again"


class FakeTrainer:
    """Trains what it is given, and remembers the steps."""

    def __init__(self):
        self.steps = []

    async def train(self, batches, step):
        self.steps.append(step)
        return [StepMetrics(loss=0.25, grad_norm=1.5) for _ in batches]


@pytest.mark.parametrize(
    ("damaged", "top_k", "trained_again"), [(None, 0, [1, 2]), (2, 0, [1]), (1, 0, []), (None, 4, [])]
)
def test_steps_that_can_be_had_again_are_and_the_rest_is_named(run, damaged, top_k, trained_again):
    """``top_k``: set while the run goes on, after which no rollout without a sampling mask is its own."""
    run_dir, said = run(0), []
    if damaged:
        (run_dir.rollouts / f"step-{damaged:06d}.parquet").write_bytes(b"PAR1")
    checked = resolve(made_run.config_of(run_dir.root))
    metrics, ledger, trainer = MetricsLog(run_dir.root), Ledger(run_dir.ledger), FakeTrainer()
    recovery = Recovery(
        *(checked.config, checked.algorithm, checked.titan.layout, run_dir, CheckpointFolder(run_dir.checkpoints, 1)),
        *(PromptStream(checked.task, 1), ledger, metrics, Progress(LAST)),
        limits=resuming.limits_of(checked),
        log=said.append,
        record_event=lambda kind, **fields: None,
    )
    checked.config.rollout = replace(checked.config.rollout, top_k=top_k)
    asyncio.run(recovery.train_recorded(trainer))
    pending = recovery.rewind(recovery.progress.step)
    assert trainer.steps == trained_again and recovery.progress.step == len(trained_again)
    assert len(pending) == (LAST - len(trained_again)) * made_run.GROUPS
    if damaged:
        [line] = said
        assert f"step-{damaged:06d}.parquet cannot be read" in line and f"from step {damaged} on" in line
    assert not top_k or "no sampling mask, and rollout.top_p, top_k or min_p was set" in said[0]
    ledger.close()
    metrics.close()


def test_settings_may_change_if_what_must_be_trained_again_cannot_be_read(run):
    run_dir = run(1)
    (run_dir.rollouts / "step-000002.parquet").unlink()
    assert check(run_dir, optimizer__lr=5e-4) == 1, "step 2 will be another"


def test_foreign_names_are_passed_over(run):
    run_dir = run()
    for name in ("step-000004.bak", "step-x", "step-0000000009", "step-3", "notes"):
        (run_dir.checkpoints / name).mkdir()
    for name in ("step-000002.bak.parquet", "step-x.parquet", "step-9.parquet"):
        (run_dir.rollouts / name).touch()
    (run_dir.root / "mine").symlink_to("/")
    folder = CheckpointFolder(run_dir.checkpoints, 1)
    assert folder.steps() == [LAST] and check(run_dir) == 0
    made_run.save(run_dir, 3)
    folder.drop_after(2)
    assert folder.steps() == [LAST] and (run_dir.checkpoints / "step-000004.bak").is_dir()
    replay.plan_replay(run_dir.root, 1, LAST)


def test_an_interrupted_save_removes_nothing_foreign(tmp_path):
    folder = CheckpointFolder(tmp_path, 1)
    (tmp_path / "writing-notes").mkdir()
    (tmp_path / "writing-000001-5").mkdir()
    folder.begin(2)
    assert (tmp_path / "writing-notes").is_dir() and not (tmp_path / "writing-000001-5").exists()


# models and data files


def test_a_model_may_move_but_not_change(tmp_path):
    make_tiny(tmp_path / "model", seed=1)
    make_tiny(tmp_path / "other", seed=2)
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()

    def sources(name):
        return find_sources(made_run.config_of(run_dir.root, model__path=str(tmp_path / name)))

    write_sources(run_dir, sources("model"))
    check_sources(run_dir, sources("moved"))
    with pytest.raises(ConfigError, match=r"model.path is not what .* \(changed: model.safetensors\)"):
        check_sources(run_dir, sources("other"))
    (tmp_path / "moved" / "chat_template.jinja").write_text("{{ messages[0].content }};")
    with pytest.raises(ConfigError, match=r"model.path \(text\) is not what .* \(changed: chat_template.jinja\)"):
        check_sources(run_dir, sources("moved"))


def test_a_model_in_place_of_tiny_is_refused(run, tmp_path):
    make_tiny(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match='model.path = .* is not what .* "tiny"'):
        check(run(), model__path=str(tmp_path / "model"))


def test_a_data_file_may_move_but_not_change(tmp_path):
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()

    def sources(name):
        config = made_run.config_of(run_dir.root, task__name="jsonl")
        config.task.options = {"file": str(tmp_path / f"{name}.jsonl")}
        return find_sources(config)

    write_sources(run_dir, sources("a"))
    check_sources(run_dir, sources("b"))
    with pytest.raises(ConfigError, match="task.options.file is not what"):
        check_sources(run_dir, sources("c"))


# which run


def begun(root) -> None:
    root.mkdir(parents=True)
    (root / "config.json").write_text("{}")
    (root / "rollouts").mkdir()
    (root / "rollouts" / "step-000001.parquet").touch()


def test_the_newest_run_that_came_to_a_step_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = made_run.config_of("")
    config.run.dir = ""
    with pytest.raises(ConfigError, match="nothing to resume"):
        run_dir_to_resume(config, "my.toml")
    runs = tmp_path / "runs"
    failed = runs / "my-20260103-000000"
    (failed / "rollouts").mkdir(parents=True)
    (failed / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="of 1 starts none came to its first step"):
        run_dir_to_resume(config, "my.toml")
    begun(runs / "my-20260101-000000")
    begun(runs / "my-20260102-000000")
    begun(runs / "my-other-20260104-000000")  # a run of my-other.toml
    (runs / "my-20260105-000000").touch()
    found = run_dir_to_resume(config, "my.toml")
    assert found.root.name == "my-20260102-000000"
    assert "newer starts came to no step (1, the last one runs/my-20260103-000000)" in passed_over(found)
    assert run_dir_to_resume(config, "my-other.toml").root.name == "my-other-20260104-000000"


def test_runs_that_begin_in_one_second_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir.time, "strftime", lambda form: "20260106-000000")
    config = made_run.config_of("")
    config.run.dir = ""
    of_both = [new_run_dir(config, "my.toml") for _ in range(2)]
    claimed = [claim(each) for each in of_both]
    assert [each.root.name for each in claimed] == ["my-20260106-000000", "my-20260106-000000-2"]
    for each in claimed:
        each.open({})
        (each.rollouts / "step-000001.parquet").touch()
    assert run_dir_to_resume(config, "my.toml").root.name == "my-20260106-000000-2"
    for each in claimed:
        each.close()


def test_a_run_that_never_started_can_be_begun_where_it_is_named(tmp_path):
    """Killed before its first step: there is nothing to go on from, and nothing to lose."""
    root = tmp_path / "run"
    config = made_run.config_of(root)
    run_dir = RunDir(root)
    run_dir.open(resolve(config).as_dict())
    run_dir.close()
    assert run_dir_to_resume(config, None).root == root and check(run_dir) == 0
    run_dir.ledger.touch()
    assert check(run_dir) == 0


def test_a_run_that_is_under_way_is_not_looked_into(run):
    run_dir = run()
    run_dir.open({})
    try:
        with pytest.raises(ConfigError, match="in use by another process"):
            check(RunDir(run_dir.root))
    finally:
        run_dir.close()


def test_a_session_refuses_before_it_changes_anything(run, capsys):
    run_dir = run()
    before = run_dir.config.read_text()
    arguments = overrides(training__steps=5, task__options__max_value=99)
    assert train.main(["--run.dir", str(run_dir.root), "--resume", *arguments]) == 2
    line = capsys.readouterr().err.strip()
    assert "task.options.max_value = 99" in line and "\n" not in line
    assert run_dir.config.read_text() == before


def test_a_complete_run_is_left_alone_and_one_that_is_not_goes_on(run, capsys):
    """Without its export, with a fault at its end, begun again since, or under other settings it is not complete."""
    run_dir = run()
    arguments = ["--run.dir", str(run_dir.root), "--resume", *overrides(training__steps=LAST)]

    def is_left_alone() -> bool:
        return is_complete(run_dir, resolve(made_run.config_of(run_dir.root)))

    assert not is_left_alone()
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    write_summary(run_dir, Progress(LAST, step=LAST), "OSError: no room", {})
    assert not is_left_alone()
    write_summary(run_dir, Progress(LAST, step=LAST), "completed", {})
    before = {path: path.stat().st_mtime_ns for path in run_dir.root.rglob("*")}
    assert is_left_alone() and train.main(arguments) == 0
    assert capsys.readouterr().out == f"all 2 steps of {run_dir.root} are done: raise training.steps to train on\n"
    assert {path: path.stat().st_mtime_ns for path in run_dir.root.rglob("*")} == before
    assert not is_complete(run_dir, resolve(made_run.config_of(run_dir.root, eval__prompts=9)))
    assert not is_complete(run_dir, resolve(made_run.config_of(run_dir.root, training__steps=LAST + 1)))
    os.utime(run_dir.config)  # begun again, and killed
    assert not is_left_alone()


def test_a_session_records_what_it_was_begun_with(tmp_path):
    config = made_run.config_of(tmp_path / "run")
    session = Session.open(config)
    session.ledger.close()
    session._exits.close()
    session.run_dir.close()
    assert json.loads(session.run_dir.sources.read_text()) == {}
    with pytest.raises(ConfigError, match="holds a run already: continue it with --resume"):
        new_run_dir(config, None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"notes.txt": "hi"}, "holds no config.json"),
        ({"notes.txt": "hi", "config.json": "{}"}, "holds no tables"),
        ({"config.json": '{"architectures": ["LlamaForCausalLM"], "vocab_size": 3}'}, "something else than tables"),
        ({"config.json": "[]"}, "something else than tables"),
    ],
)
def test_a_folder_of_something_else_is_no_run(tmp_path, content, why):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    config = load_config(None, {"run": {"dir": str(tmp_path)}})
    with pytest.raises(ConfigError, match="is not empty, and holds no run: give another --run.dir"):
        new_run_dir(config, None)
    with pytest.raises(ConfigError, match=why):
        read_resolved(run_dir_to_resume(config, None).config)


def test_limits_are_the_models_and_the_rows(tmp_path):
    limits = resuming.limits_of(resolve(made_run.config_of(tmp_path)))
    assert limits.length == 512 and 10 < limits.vocabulary < 1000


@pytest.mark.parametrize("budget", [4, 0])
def test_recorded_marks_of_forced_tokens_are_held_against_the_models_tags(monkeypatch, budget):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    monkeypatch.setattr(resuming, "tokenizer_of", lambda config: tokenizer)
    checked = resolve(load_config("grpo_tiny", {"rollout": {"thinking_budget": budget}}))
    assert resuming.limits_of(checked).tags == (thinking_tags(tokenizer) if budget else None)
