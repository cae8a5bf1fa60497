"""A reward model in place of the task's score: its numbers, its failures, and what is told beside it."""

import asyncio
import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.data.types import Completion, Group, Prompt, Sampling
from titan_rl.environments.interfaces.environment import OneAnswer
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rollout.group import run_group
from titan_rl.environments.scoring.reward_model import RewardModelScorer, load_reward_model, reward_of
from titan_rl.models.builtin.tiny import tiny_config
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.records.metrics import sampling_metrics
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


def make_reward_model(out, **changed) -> LlamaForSequenceClassification:
    settings = tiny_config(hidden_size=32, num_layers=1).to_dict() | {"num_labels": 1} | changed
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LlamaForSequenceClassification(LlamaConfig(**settings)).eval()
    model.save_pretrained(out)
    TOKENIZER.save_pretrained(out)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward model")
    make_reward_model(folder)
    return folder


ROLLOUTS = [np.array(tokens, np.int32) for tokens in ([5, 6, 7, 8, END], [5, 6, 9], [5, END], [END])]


def scored(path, rollouts, timeout=30.0, ends=()):
    async def ask():
        scorer = RewardModelScorer(str(path), timeout, 120.0, ends)
        try:
            return (await scorer.score_tokens(rollouts))[0]
        finally:
            await scorer.stop()

    return asyncio.run(ask())


def expected(model, tokens: list[int]) -> float:
    """The head over the last hidden state, as the paper has it, without transformers' own pooling."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1]
        return float(hidden @ model.score.weight[0])


def test_its_reward_is_the_heads_value_at_the_last_token(path):
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    whole = [expected(model, tokens.tolist()) for tokens in ROLLOUTS]
    assert len({round(reward, 6) for reward in whole}) == 4
    found = scored(path, ROLLOUTS)
    assert [score.reward for score in found] == pytest.approx(whole, abs=1e-6)
    assert all(score.status == "ok" and set(score.parts) == {"reward_model"} for score in found)
    without_end = [expected(model, tokens) for tokens in ([5, 6, 7, 8], [5, 6, 9], [5], [END])]
    assert [score.reward for score in scored(path, ROLLOUTS, ends=[END, 77])] == pytest.approx(without_end, abs=1e-6)


def test_the_same_rollout_has_the_same_reward_whatever_is_beside_it(path):
    alone = [scored(path, [tokens])[0].reward for tokens in ROLLOUTS[:2]]
    assert [score.reward for score in scored(path, ROLLOUTS[1::-1])] == alone[::-1]


def test_rollouts_that_are_alike_are_read_once(path, monkeypatch):
    asked = []

    async def score_lines(self, lines):
        asked.extend(lines)
        return [Score("ok", {"reward_model": float(len(line))}) for line in lines], 0.0

    monkeypatch.setattr(RewardModelScorer, "score_lines", score_lines)
    first, other, again = ROLLOUTS[0], ROLLOUTS[1], ROLLOUTS[0].copy()
    scores = scored(path, [first, other, again])
    assert len(asked) == 2 and scores[0] is scores[2] and scores[0] is not scores[1]


def test_what_it_trips_over_is_no_reward(path):
    bad, good = scored(path, [np.array([100_000], np.int32), ROLLOUTS[1]])
    assert bad.status == "infra_error" and bad.message.startswith("the reward model: IndexError")
    assert good.status == "ok"


def test_a_number_that_is_not_finite_is_no_reward(path, tmp_path):
    model = load_reward_model(str(path))
    with torch.no_grad():
        model.score.weight.fill_(torch.inf)
    assert not np.isfinite(reward_of(model, [5, 6]))
    model.save_pretrained(tmp_path)
    [score] = scored(tmp_path, ROLLOUTS[:1])
    assert score.status == "infra_error" and "gave" in score.message


def test_one_that_takes_too_long_is_a_timeout_and_no_reward(path):
    [late] = scored(path, ROLLOUTS[:1], timeout=1e-4)
    assert (late.status, late.parts) == ("timeout", {}) and "0.0001 s" in late.message


class Asks(Task):
    """Every answer is right, or so the task says."""

    tools = ()

    def messages(self, prompt):
        return prompt.text

    def environment(self, prompt):
        return OneAnswer()


def group_of(task_score: Score, judged: Score) -> Group:
    async def ask(request):
        tokens = np.array([7, END], np.int32)
        return [Completion(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")] * len(request.seeds)

    async def score(prompt, rollouts):
        return [task_score] * len(rollouts), 0.0

    async def judge(rollouts):
        assert [tokens.tolist() for tokens in rollouts] == [[*TOKENIZER.encode("ab"), 7, END]] * 2
        return [judged] * len(rollouts), 0.0

    prompt, sampling = Prompt("train/0000001", "ab", "", {}), Sampling(2, 4, 1.0, 16)
    parts = dict(ask=ask, score=score, sampling=sampling, seed=1, step_timeout=60, judge=judge)
    return asyncio.run(run_group(prompt, task=Asks(), tokenizer=TOKENIZER, **parts))


def test_it_is_the_reward_and_the_tasks_score_tells_what_is_right(tmp_path):
    group = group_of(Score("ok", {"exact": 1.0}), Score("ok", {"reward_model": -3.5}))
    for rollout in group.rollouts:
        assert (rollout.reward, rollout.reward_parts) == (-3.5, {"reward_model": -3.5})
        assert rollout.task_reward == rollout.true_reward == 1.0
    metrics = sampling_metrics([group], 0)
    assert (metrics["reward"], metrics["task_reward"], metrics["accuracy"]) == (-3.5, 1.0, 1.0)
    write_rollouts(tmp_path, 1, [group])
    assert [r.task_reward for [*found] in [read_rollouts(tmp_path, 1)[0].rollouts] for r in found] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("task_score", "judged", "failure"),
    [
        (Score("ok", {"exact": 1.0}), Score("timeout", {}, "too long"), "too long"),
        (Score("ok", {"exact": 1.0}), Score("infra_error", {}, "broken"), "broken"),
        (Score("infra_error", {}, "no task"), Score("ok", {"reward_model": 2.0}), "no task"),
    ],
)
def test_a_failure_of_either_is_told_and_never_trained_on(task_score, judged, failure):
    rollouts = group_of(task_score, judged).rollouts
    assert rollouts
    for rollout in rollouts:
        assert rollout.status in ("timeout", "infra_error") and rollout.failure == failure
        assert not rollout.reward_parts


def test_without_one_nothing_is_told_beside_the_reward(tmp_path):
    group = group_of(Score("ok", {"exact": 1.0}), Score("ok", {"reward_model": 0.0}))
    for rollout in group.rollouts:
        rollout.task_reward = None
    assert "task_reward" not in sampling_metrics([group], 0)


def test_one_with_several_labels_or_other_tokens_is_refused(path, tmp_path):
    tables = {"reward_model": {"path": str(path)}}
    check(load_config(None, tables))
    make_reward_model(tmp_path / "labels", num_labels=2)
    with pytest.raises(ConfigError, match="it has 2 labels, and a reward model has one"):
        load_config(None, {"reward_model": {"path": str(tmp_path / "labels")}})
    make_reward_model(tmp_path / "words", vocab_size=300)
    with pytest.raises(ConfigError, match="must read the policy's tokens"):
        check(load_config(None, {"reward_model": {"path": str(tmp_path / "words")}}))
    with pytest.raises(ConfigError, match="gives rewards of both signs, and algorithm.name = 'maxrl' divides by"):
        check(load_config(None, tables | {"algorithm": {"name": "maxrl"}}))
    with pytest.raises(
        ConfigError, match="reward_model.reads_end = true has no effect: there is none without reward_model.path"
    ):
        check(load_config(None, {"reward_model": {"reads_end": True}}))
    with pytest.raises(ConfigError, match="reward_model.path = 'nowhere'"):
        load_config(None, {"reward_model": {"path": "nowhere"}})
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
