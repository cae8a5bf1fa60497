"""Healthy runs, of which the doctor says nothing, and what once made it cry wolf. The whole runs are ``confirms``."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import healthy_runs
import pytest

from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import Checked, check, resolve
from titan_rl.data.types import Group
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor import command, runner
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest
from titan_rl.diagnostics.doctor.catalogue import CHECKS
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped
from titan_rl.diagnostics.doctor.checks import arithmetic, layouts, rewards
from titan_rl.diagnostics.doctor.context import CheckContext
from titan_rl.diagnostics.doctor.findings import Finding
from titan_rl.diagnostics.doctor.probes import bandit
from titan_rl.diagnostics.doctor.runner import run_checks, run_doctor
from titan_rl.mesh.meshes import ALL_PARTS
from titan_rl.mesh.processes.deadlines import DeadlineError
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorFault
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.step.learner import Gradients, Learner

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = tuple(healthy_runs.healthy_runs(Path(), Path(), Path()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    healthy_runs.write_files(folder)
    return folder


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.line() for finding in findings if finding.status == "wrong"]


@pytest.mark.slow
@pytest.mark.confirms
@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_raises_no_alarm(folder, smollm2, tmp_path, name):
    base, tables = healthy_runs.healthy_runs(folder, smollm2, EXAMPLES)[name]
    findings = asyncio.run(run_doctor(check(load_config(base, tables)), tmp_path, lambda finding: None))
    assert not wrong(findings)
    assert sum(finding.status == "passed" for finding in findings) >= (3 if name == "dpo" else 14)


# rewards of people's own


def reward_findings(tables: dict) -> dict[str, Finding]:
    checks = [each for each in CHECKS if each.name.startswith("reward-")]
    context = CheckContext(resolve(load_config(None, tables)), Path())
    return {each.check.name: each for each in asyncio.run(run_checks(context, checks, lambda finding: None))}


@pytest.mark.parametrize(("file", "reward"), [("gsm8k.jsonl", "last_number"), ("bare.jsonl", "last_number")])
def test_a_reward_that_reads_the_last_number_is_healthy(folder, file, reward):
    """A list of guesses is right by its last one, which nobody knows beforehand: it pays one in three."""
    found = reward_findings(healthy_runs.rows_task(folder, file, reward))
    assert not wrong(list(found.values()))
    assert {finding.status for finding in found.values()} == {"passed"}


def test_a_form_that_rows_do_not_show_is_tried(folder):
    found = reward_findings(healthy_runs.rows_task(folder, "bare.jsonl", "tags"))
    assert {finding.status for finding in found.values()} == {"passed"}, [each.line() for each in found.values()]
    assert "right answers earn 1.1" in found["reward-signal"].message


def test_a_form_that_nobody_knows_is_said_and_is_no_fault(folder):
    found = reward_findings(healthy_runs.rows_task(folder, "bare.jsonl", "form_of_its_own"))
    assert {finding.status for finding in found.values()} == {"not looked at"}
    assert "every answer that was tried earns 0" in found["reward-signal"].message


@pytest.mark.parametrize(
    ("task", "may"),
    [
        ({"name": "gcd"}, True),
        ({"name": "gcd", "scoring": "exact"}, False),
        ({"name": "calculator"}, False),
        ({"name": "jsonl", "reward": "healthy_rewards:tags", "options": {"file": "bare.jsonl"}}, False),
        ({"name": "gcd", "reward": "healthy_rewards:tags"}, False),
        ({"name": "mixture", "options": {"gcd": {}, "lcm": {}}}, False),
    ],
)
def test_a_mend_names_only_settings_that_the_run_takes(folder, task, may):
    tables = {"run": {"plugin_path": [str(folder)]}, "task": task}
    assert rewards._may_be_exact(CheckContext(resolve(load_config(None, tables)), Path())) == may


# a batch and a schedule of each check's own


class LocalActors(ActorsUnderTest):
    """With a trainer's rank in this process, and nobody else."""

    def __init__(self, checked: Checked, path: Path) -> None:
        super().__init__(checked, path)
        self.learner = Learner(checked.config, checked.titan, path)
        self.step = self.version = 0
        self.trainer = self
        self.made: Gradients | None = None
        self.signal = False

    async def ask_trainer(self, function):
        return [function(self.learner)]

    async def forward_backward(self, batch):
        self.made, self.signal = self.learner.gradients(batch.rows[0]), batch.has_signal
        return self.made.metrics

    async def optim_step(self, step):
        return self.learner.apply_gradients(self.made, self.signal)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


def local(model: Path, **tables) -> LocalActors:
    return LocalActors(resolve(load_config("grpo_tiny", tables)), model)


async def batch_of(actors: LocalActors) -> bandit.Bandit:
    prompt = bandit.np.array([5, 6, 7], bandit.np.int32)
    groups = [
        Group(f"doctor/bandit{n}", bandit._rollouts(f"doctor/bandit{n}", prompt, words, right))
        for n, (words, right) in enumerate([([10, 11, 12, 13], 0), ([20, 21, 22, 23], 2)])
    ]
    made = actors.batch(groups)
    return bandit.Bandit(bandit._with_ratio_of_one(made, await actors.read(made)), prompt)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"steps": 1}, "lr_scheduler": {"decay_ratio": 0.0}},
        {"training": {"steps": 2}, "lr_scheduler": {"decay_ratio": 1.0}},
        {"training": {"max_norm": 0.01}},
        {"optimizer": {"lr": 0.0}},
    ],
    ids=str,
)
def test_updates_are_of_the_doctors_size_and_are_taken_back(model, tables):
    """Whatever the schedule allows, and to what norm gradients are clipped."""

    async def look():
        actors = local(model, **tables)
        before = await actors.ask_trainer(probes.learned_digests)
        told = []
        for _ in range(3):
            one = await batch_of(actors)
            async with actors.rolled_back():
                read = await one.move(actors)
                gains = bandit.gains(read.tokens, (await actors.read(one.batch)).tokens)
                assert await actors.ask_trainer(probes.learned_digests) != before
            assert await actors.ask_trainer(probes.learned_digests) == before
            told.append({name: gain_N.tolist() for name, gain_N in gains.items()})
        return told

    first, *others = asyncio.run(look())
    assert all(other == first for other in others)
    for (_, gain_N), right in zip(sorted(first.items()), bandit.RIGHT, strict=True):
        assert max(gain_N) == gain_N[right] and 0.05 < gain_N[right] < 1.0


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "base", ["grpo_tiny", "gspo_tiny", "cispo_tiny", "ppo_tiny", "dapo_tiny", "sapo_tiny", "dppo_tiny"]
)
def test_a_token_of_weight_0_makes_nothing_nan(model, base):
    actors = LocalActors(resolve(load_config(base)), model)
    assert "finite" in asyncio.run(layouts.unweighed(CheckContext(actors.checked, model, actors)))


@pytest.mark.usefixtures("process_group")
def test_nan_times_0_is_named(model, monkeypatch):
    actors = local(model)
    loss = actors.learner.algorithm.loss

    def leaky(inputs):
        value, counted = loss(inputs)
        return value + 0.0 * (inputs.logprob_S * inputs.weight_S).sum(), counted

    monkeypatch.setattr(actors.learner.algorithm, "loss", leaky)
    with pytest.raises(CheckFailed, match="weight 0 makes the loss NaN"):
        asyncio.run(layouts.unweighed(CheckContext(actors.checked, model, actors)))


# numbers of made-up rollouts


def context_of(base: str | None = "quickstart", **tables) -> CheckContext:
    return CheckContext(resolve(load_config(base, tables)), Path())


AGENTS = {"run": {"plugin_path": [str(EXAMPLES)]}, "task": {"name": "nim:SelfPlay", "options": {"heap": 9}}}
GROUPED = ("grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo", "maxrl", "turn_grpo", "sapo", "dppo", "gigpo")


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", GROUPED)
def test_made_rollouts_of_a_healthy_algorithm_are_healthy(name, aggregation):
    context = context_of(algorithm={"name": name, "aggregation": aggregation}, **AGENTS)
    assert "two" in asyncio.run(arithmetic.branches(context))
    assert "1, 0, 0" in asyncio.run(arithmetic.magnitude(context))


@pytest.mark.parametrize("base", ["ppo_tiny", "reinforce_pp_tiny", "prime_tiny", "gdpo_tiny"])
def test_rewards_that_roles_make_advantages_of_are_no_alarm(base):
    assert asyncio.run(arithmetic.branches(context_of(base)))
    assert asyncio.run(arithmetic.magnitude(context_of(base)))
    with pytest.raises(CheckSkipped):
        asyncio.run(arithmetic.magnitude(context_of("distillation_tiny")))


def test_weights_of_a_rewards_parts_are_no_alarm():
    """The doctor's own rewards have none of these parts."""
    context = context_of(algorithm={"name": "gdpo", "reward_weights": {"exact": 1.0}})
    assert asyncio.run(arithmetic.branches(context)) and asyncio.run(arithmetic.magnitude(context))


def changed_rows(change, monkeypatch) -> None:
    """Plants a bug into what packing gives: ``change(weight_S, advantage_S, offsets, owners)``, in place."""
    made = arithmetic.step_batches

    def planted(*given):
        batches = made(*given)
        for row in (row for batch in batches for rows in batch.rows for row in rows):
            change(row.weight_S, row.advantage_S, row.branch_offsets, row.owners)
        return batches

    monkeypatch.setattr(arithmetic, "step_batches", planted)


def named(check: str, context: CheckContext) -> str:
    [one] = [each for each in CHECKS if each.name == check]
    [finding] = asyncio.run(run_checks(context, [one], lambda finding: None))
    assert finding.status == "wrong", finding.line()
    return finding.line()


def test_a_reward_that_reaches_the_last_branch_alone_is_named(monkeypatch):
    def last_alone(weight_S, advantage_S, offsets, owners):
        samples = [sample for _, sample, _ in owners]
        for place, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if samples[place] in samples[place + 1 :]:
                advantage_S[begin:end] = 0.0

    changed_rows(last_alone, monkeypatch)
    assert "does not reach all its sequences" in named("branches", context_of(**AGENTS))


def test_a_weight_by_the_number_of_branches_is_named(monkeypatch):
    def by_branches(weight_S, advantage_S, offsets, owners):
        samples = [sample for _, sample, _ in owners]
        for place, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            weight_S[begin:end] *= samples.count(samples[place])

    changed_rows(by_branches, monkeypatch)
    assert "weight depends on the number of sequences" in named("branches", context_of(**AGENTS))


def planted_advantages(context: CheckContext, formula) -> CheckContext:
    algorithm = context.checked.algorithm
    algorithm.advantages = lambda rollouts: formula(bandit.np.array([r.reward for r in rollouts]))
    return CheckContext(replace(context.checked, algorithm=algorithm), context.folder)


def test_a_division_by_no_deviation_is_named():
    import numpy as np

    def without_epsilon(rewards_G):
        with np.errstate(all="ignore"):
            return (rewards_G - rewards_G.mean()) / rewards_G.std()

    line = named("magnitude", planted_advantages(context_of(), without_epsilon))
    assert "equal but for rounding teach something" in line


def test_a_division_by_a_mean_of_almost_nothing_is_named(monkeypatch):
    async def signed(context):
        return True

    monkeypatch.setattr(arithmetic, "_pays_less_than_nothing", signed)
    over_mean = planted_advantages(context_of(), lambda rewards_G: rewards_G / (rewards_G.mean() + 1e-6) - 1)
    assert "make advantages explode" in named("magnitude", over_mean)


# actors that end while a check looks


def ended(name: str, why: str, why_hung: str = "") -> ActorFault:
    """What the mesh raises when a rank of the trainer is gone."""
    process = SimpleNamespace(name=name, kind=name.split()[0], why=why)
    process.how_it_ended = f"{why} ({why_hung})" if why_hung else why
    died = ActorDied([process], "the run went on")
    fault = ActorFault(f"{died}: recovery is off, so this ends the run")
    fault.__cause__ = died
    return fault


def look(error: Exception, needs: str) -> list[Finding]:
    """Findings of the catalogue's checks from ``cache`` on, of which the first has this error and the others pass."""

    async def fails(context: CheckContext) -> str:
        raise error

    async def passes(context: CheckContext) -> str:
        return "well"

    names = [check.name for check in CHECKS]
    checks = [replace(check, run=passes) for check in CHECKS[names.index("cache") :]]
    checks[0] = replace(checks[0], run=fails)
    checks += [replace(checks[-1], name="of another part", needs=frozenset({needs}))]
    context = CheckContext(None, Path(), SimpleNamespace(parts=ALL_PARTS))
    return asyncio.run(run_checks(context, checks, lambda finding: None))


def test_an_actor_that_hung_is_no_finding_of_the_check():
    findings = look(ended("trainer rank 0", "hung", "no answer in 1800 s"), "generators")
    assert [each.status for each in findings] == ["not finished", "not looked at", "not looked at", "passed"]
    first, second = findings[0].line(), findings[1].line()
    assert "trainer rank 0 hung (no answer in 1800 s)" in first and "run the doctor again" in first
    assert "prefix cache" not in first and findings[0].as_json()["mend"] == ""
    assert second == "-        reference: trainer rank 0 ended in the check cache"


def test_checks_without_the_actor_that_died_go_on():
    findings = look(ended("generator 1", "died"), "trainer")
    assert [each.status for each in findings] == ["not finished", "not looked at", "passed", "passed"]


def test_an_end_of_nobody_known_is_of_all_that_the_check_needs():
    assert [each.status for each in look(ActorFault("all"), "trainer")][1:] == ["not looked at"] * 3


def test_an_actor_that_was_too_slow_is_no_finding_either():
    findings = look(DeadlineError("fetching took longer than 3 s"), "trainer")
    assert [each.status for each in findings] == ["not finished", "passed", "passed", "passed"]


@pytest.mark.parametrize("status", ["wrong", "not finished", "not looked at"])
def test_the_exit_code_says_what_is_not_known(monkeypatch, capsys, status):
    async def found(checked, folder, on_finding):
        return [Finding(CHECKS[0], status, "it", "x")]

    monkeypatch.setattr(command, "run_doctor", found)
    assert command.doctor("quickstart", {}, as_json=True) == (0 if status == "not looked at" else 1)
    assert json.loads(capsys.readouterr().out)["healthy"] == (status == "not looked at")


def test_actors_that_do_not_start_are_told_without_a_mend_of_a_check(monkeypatch, tmp_path):
    class Unstarted:
        def __init__(self, *arguments):
            raise RuntimeError("no room")

    monkeypatch.setattr(runner, "ActorsUnderTest", Unstarted)
    [weights] = [check for check in CHECKS if check.name == "weights"]
    [finding] = asyncio.run(run_doctor(None, tmp_path, lambda finding: None, [weights]))
    assert finding.line().endswith("no room. Mend what it says: the run would not start either")
