"""One run through the whole house, with real actors, and what it must leave behind."""

import json
import math
import statistics
from pathlib import Path

import pytest
import running

from titan_rl.data.types import Provenance
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import read_metrics
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = pytest.mark.slow
STEPS = running.STEPS
SAMPLES = 32
"""Of a step."""


@pytest.fixture(scope="module")
def run(finished_run) -> Path:
    return finished_run


@pytest.fixture(scope="module")
def records(run) -> list[dict]:
    return [record for record in read_metrics(run) if "reward" in record]


def test_every_step_is_measured(records):
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for record in records for value in record.values())


def test_what_is_trained_is_what_was_sampled(records):
    assert all(record["agreement_mean"] <= 1.0001 for record in records)


def test_the_share_of_prompts_that_came_from_the_cache_is_a_metric(records):
    assert all(0 <= record["prompt_tokens_cached"] <= 1 for record in records)


def test_on_policy_means_no_lag(records):
    assert all(record["staleness_max"] == 0 for record in records)


def test_each_step_trains_on_the_weights_of_the_step_before(run):
    for step in range(1, STEPS + 1):
        for group in read_rollouts(run / "rollouts", step):
            for rollout in group.rollouts:
                assert set(rollout.versions[rollout.provenance == Provenance.MODEL]) == {step - 1}


def test_summary_tells_the_run(run, records):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["why_ended"] == "completed"
    assert summary["steps_done"] == summary["steps_asked"] == STEPS
    assert summary["reward_by_step"] == [record["reward"] for record in records]
    assert summary["truncated_mean"] == statistics.fmean(record["truncated"] for record in records)
    assert summary["steps_without_signal"] == sum(record["groups_with_signal"] == 0 for record in records)
    assert summary["held_out_before"]["count"] == summary["held_out_after"]["count"] == 16
    assert summary["agreement_mean_max"] == max(record["agreement_mean"] for record in records)


def test_every_sample_is_accounted_for(run):
    account = Ledger(run / "ledger.db").account()
    assert account == {"issued": SAMPLES * STEPS, "trained": SAMPLES * STEPS, "pending": 0}


def test_trained_model_loads_in_transformers_and_differs_from_the_base(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained, base = (AutoModelForCausalLM.from_pretrained(run / name) for name in ("model", "base_model"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(run / "model").decode([3]) == "0"


def test_run_directory_is_whole(run):
    for name in (
        "config.json",
        "log.txt",
        "curves.png",
        "tensorboard",
        "checkpoints/step-000002",
        "checkpoints/step-000006",
    ):
        assert (run / name).exists(), name


def test_two_ranks_train_as_one_does(run):
    """On rollouts of another policy, so that losses are not rounding alone."""
    one = running.replay(run, 1, 5, **running.FINISHED)
    two = running.replay(run, 1, 5, **running.FINISHED | {"parallelism__data_parallel_shard_degree": 2})
    for a, b in zip(one, two, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-5, abs=1e-9)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)


def test_a_second_run_in_the_same_directory_is_refused(run):
    assert running.train(run, training__steps=STEPS) == 2
    assert "--resume" in running.output(run)
