"""Teachers of a mixture's tasks: each rollout's tokens are measured by the teacher of its own task, and no other."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from batches import batch_of
from transformers import AutoModelForCausalLM

from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.config.errors import NamedFault
from titan_rl.config.load import ConfigError, flat, load_config
from titan_rl.config.mixture import teachers_of
from titan_rl.controller.planning.memory_plan import memory_needs
from titan_rl.controller.preflight.checks import check
from titan_rl.controller.preflight.resume import changes, first_change, limits_of
from titan_rl.controller.preflight.role_checks import teacher_notice
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Row, Turn
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.metrics import mean_metrics
from titan_rl.records.steps.rollouts import RolloutsError, read_rollouts, write_rollouts
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

TASK = {"name": "mixture", "options": {"divisors": {"name": "gcd"}, "sums": {"name": "chain_sum"}}}
FORMS = {"sampled": {}, "words": {"top_k": 3}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "one", "other"), start=1):
        make_tiny(root / name, seed=seed, num_layers=2)
    return root


def config_of(models, form: str = "sampled", **teacher):
    tables = {"task": TASK, "teacher": teacher, "algorithm": {"name": "distillation", **FORMS[form]}}
    return load_config(None, tables | {"model": {"path": str(models / "policy")}})


def both(models, form: str = "sampled"):
    return config_of(models, form, by_task={"divisors": str(models / "one"), "sums": str(models / "other")})


def learner_of(config) -> Learner:
    return Learner(config, build_titan(config), config.model.path)


def token_tasks(row: Row) -> np.ndarray:
    """Of each trained token, by its owner's name: group 0 and 2 are divisors, 1 is sums (``batch_of``)."""
    return np.repeat([int(prompt_id[-1]) % 2 for prompt_id, _, _ in row.owners], np.diff(row.branch_offsets))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [dict(row_tokens=1000), dict(branches=True)], ids=["one row", "split rows"])
def test_each_token_has_its_own_teachers_columns_and_no_others(models, form, shape):
    """To the last bit what a run with that teacher alone has of the same rows, if rows hold both tasks, too."""
    mixed = batch_of(3, tasks=True, apart=False, **shape).rows[0]
    assert any(len(set(token_tasks(row))) == 2 for row in mixed)
    assert any(row.split for row in mixed) == ("branches" in shape)
    rows = {name: learner_of(config_of(models, form, path=str(models / name))) for name in ("one", "other")}
    alone = {name: learner.prepare([mixed])[0] for name, learner in rows.items()}
    [together] = learner_of(both(models, form)).prepare([mixed])
    names = ["teacher_logprob_S"] + ["teacher_words_SK", "teacher_word_logprob_SK"] * (form == "words")
    for row, one, other in zip(together, alone["one"], alone["other"], strict=True):
        is_sum_S = token_tasks(row) == 1
        for name in names:
            columns, theirs = row.role_columns[name], (one.role_columns[name], other.role_columns[name])
            assert (columns[~is_sum_S] == theirs[0][~is_sum_S]).all() and (
                columns[is_sum_S] == theirs[1][is_sum_S]
            ).all()
            assert not np.array_equal(*theirs)
        assert (row.advantage_S == np.where(is_sum_S, other.advantage_S, one.advantage_S)).all()


@pytest.mark.usefixtures("process_group")
def test_columns_are_transformers_log_probabilities_of_each_rollout(models):
    rows = learner_of(both(models)).prepare([batch_of(3, tasks=True, apart=False, row_tokens=1000).rows[0]])[0]
    teachers = [AutoModelForCausalLM.from_pretrained(models / name).eval() for name in ("one", "other")]
    for row in rows:
        ends = row.branch_offsets
        for number, (prompt_id, _, _) in enumerate(row.owners):
            own = slice(int(ends[number]), int(ends[number + 1]))
            places = _context(row, int(row.source_S[own][-1]))
            tokens = torch.tensor(row.tokens_T[places])[None]
            with torch.no_grad():
                logprob_TV = teachers[int(prompt_id[-1]) % 2](tokens).logits[0].log_softmax(-1)
            wanted = [
                logprob_TV[places.index(source), target]
                for source, target in zip(row.source_S[own], row.target_S[own], strict=True)
            ]
            np.testing.assert_allclose(row.role_columns["teacher_logprob_S"][own], wanted, atol=1e-5)


def _context(row: Row, place: int) -> list[int]:
    """Places of all tokens that the one at ``place`` sees, itself the last."""
    segment = next(s for s in row.segments if s.start <= place < s.start + s.length)
    before = [p for start, length in segment.prefix for p in range(start, start + length)]
    return [*before, *range(segment.start, place + 1)]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("form", FORMS)
def test_metrics_of_a_task_are_means_over_its_own_tokens(models, form):
    """Without an update of the policy, by hand for the sampled word; a task that has no tokens has no metric."""
    learner = learner_of(both(models, form))
    rows = batch_of(3, tasks=True, row_tokens=1000).rows[0]
    [update] = learner.train_step([rows], [True])
    tasks = np.concatenate([token_tasks(row) for row in rows])
    metrics, shares = update.loss_metrics, [np.mean(tasks == task) for task in (0, 1)]
    of_tasks = [metrics["teacher_kl/divisors"], metrics["teacher_kl/sums"]]
    assert np.dot(shares, of_tasks) == pytest.approx(metrics["teacher_kl"], rel=1e-6)
    assert of_tasks[0] != pytest.approx(of_tasks[1], rel=1e-3)
    [lone] = learner.train_step([[row for row in rows if set(token_tasks(row)) == {0}]], [True])
    assert "teacher_kl/sums" not in lone.loss_metrics
    assert mean_metrics([update, lone]).loss_metrics["teacher_kl/sums"] == of_tasks[1]
    assert not any(name.startswith("count") for name in metrics)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rows_of_one_number_have_one_teacher_on_all_ranks(num_ranks):
    batch = batch_of(3, tasks=True, row_tokens=40, num_ranks=num_ranks)
    for ranks in zip(*batch.rows, strict=True):
        assert len({task for row in ranks for task in token_tasks(row).tolist()}) == 1


@pytest.mark.usefixtures("process_group")
def test_a_directory_that_is_named_twice_is_one_model(models, tmp_path):
    (tmp_path / "link").symlink_to(models / "one")
    by_task = {"divisors": str(models / "one"), "sums": str(tmp_path / "link")}
    config = config_of(models, by_task=by_task)
    assert teachers_of(config).paths == (str(models / "one"),)
    assert list(learner_of(config).roles) == ["teacher"] and teacher_notice(config, check(config).algorithm) == []
    weights = [memory_needs(check(each))[0].bytes_by_reason["weights"] for each in (config, both(models))]
    assert weights[1] == pytest.approx(weights[0] * 3 / 2)
    assert set(learner_of(both(models)).digests()) == {"teacher of divisors", "teacher of sums"}


REFUSED = [
    ({}, "needs a teacher: give its Hugging Face directory as teacher.path, or one of each task"),
    ({"by_task": {"divisors": "one"}}, "task.options.sums has no teacher: give one as teacher.by_task.sums, or"),
    ({"by_task": {"divisors": "one", "sum": "one"}}, r"'sum' is no task of the mixture \(divisors, sums\): rename it"),
    ({"by_task": {"divisors": "one", "sums": "nowhere"}}, "teacher.by_task.sums = '.*nowhere': there is no such dir"),
    ({"by_task": {"divisors": "one", "sums": "longer"}}, "teacher.by_task.sums = .* has vocab_size = 120, the policy"),
    ({"by_task": {"divisors": "one", "sums": "other"}, "path": "one"}, "teacher.path = .* has no effect: each task"),
]


@pytest.mark.parametrize(("teacher", "why"), REFUSED)
def test_teachers_that_are_not_those_of_the_tasks_are_refused(models, teacher, why):
    if "longer" in json.dumps(teacher):
        model = make_tiny(models / "longer", seed=1, hidden_size=64, num_layers=1)
        model.resize_token_embeddings(120)
        model.save_pretrained(models / "longer")
    settings = {"path": str(models / teacher["path"])} if "path" in teacher else {}
    settings |= {"by_task": {task: str(models / name) for task, name in teacher.get("by_task", {}).items()}}
    with pytest.raises(ConfigError, match=why):
        check(config_of(models, **settings))


def test_teachers_by_task_are_of_mixtures(models):
    tables = {"teacher": {"by_task": {"bits": str(models / "one")}}, "algorithm": {"name": "distillation"}}
    with pytest.raises(ConfigError, match="task.name = 'gcd' is one task: give teacher.path instead"):
        check(load_config(None, tables))
    with pytest.raises(ConfigError, match=r"\[teacher\] has no effect: .* needs no teacher"):
        check(load_config(None, tables | {"algorithm": {"name": "grpo"}, "task": TASK}))


def test_another_teacher_of_a_task_is_a_change_of_what_is_trained(models):
    before = flat(check(both(models)).as_dict())
    by_task = {"divisors": str(models / "one")}
    after = flat(check(config_of(models, by_task=by_task, path=str(models / "other"))).as_dict())
    assert "teacher.by_task.sums" in changes(before, after)
    assert first_change(before, after) in ("teacher.path", "teacher.by_task.sums")
    [line] = teacher_notice(both(models), check(both(models)).algorithm)
    assert line == f"teachers: of divisors: {models / 'one'}; of sums: {models / 'other'}"


def group_of(number: int, task: str) -> Group:
    rollouts = [
        Rollout(
            prompt_id=f"train/{number}",
            sample=sample,
            tokens=np.array([5, 6, 7 + sample], np.int32),
            provenance=np.array([Provenance.TEMPLATE, Provenance.MODEL, Provenance.MODEL], np.int8),
            logprobs=np.array([0, -1, -1], np.float32),
            versions=np.array([-1, 0, 0], np.int32),
            turns=[Turn(1, 3, "stop")],
            status="ok",
        )
        for sample in range(2)
    ]
    return Group(f"train/{number}", rollouts, task=task)


def test_recorded_rollouts_come_back_to_their_teachers(models, tmp_path):
    checked, layout = check(both(models)), Layout(num_ranks=1, row_tokens=64)
    groups = [group_of(0, "sums"), group_of(1, "divisors"), group_of(2, "sums")]
    write_rollouts(tmp_path, 1, groups)
    read = read_rollouts(tmp_path, 1, limits_of(checked))
    for trained in (groups, read):
        [batch] = step_batches(trained, checked.algorithm, checked.config, layout)
        rows = [(sorted({name for name, _ in row.samples}), set(row.role_columns["task_S"])) for row in batch.rows[0]]
        assert rows == [(["train/1"], {0}), (["train/0", "train/2"], {1})]
    write_rollouts(tmp_path, 1, [*groups[:2], replace(groups[2], task="products")])
    with pytest.raises(RolloutsError, match="train/2 is of task 'products', which has no teacher"):
        read_rollouts(tmp_path, 1, limits_of(checked))
    with pytest.raises(NamedFault, match="train/2 is of 'products', which the mixture has not"):
        step_batches([*groups[:2], replace(groups[2], task="products")], checked.algorithm, checked.config, layout)
    lone = check(config_of(models, path=str(models / "one")))
    assert limits_of(lone).tasks == frozenset()
    [batch] = step_batches([replace(groups[2], task="")], lone.algorithm, lone.config, layout)
    assert "task_S" not in batch.rows[0][0].role_columns and asdict(layout)["num_ranks"] == 1
