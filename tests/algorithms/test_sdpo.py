"""SDPO against formulas written out by hand, and what a self-teacher reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.policy_gradient.teachers.distillation import Distillation
from titan_rl.algorithms.policy_gradient.teachers.sdpo import SDPO
from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.interactive.change_settings import _check_roles
from titan_rl.controller.preflight.checks import check, resolve
from titan_rl.environments.rollout.reprompts import reprompted

SAMPLED = torch.tensor([-1.0, -2.0, -0.5, -3.0])
TEACHER = torch.tensor([-0.5, -2.5, 0.0, 0.0])
MASK = torch.tensor([1.0, 1.0, 0.0, 0.0])
"""The second sample, of two tokens as the first, has no teacher."""


def inputs(**more) -> LossInputs:
    columns = dict(
        logprob_S=SAMPLED.clone(),
        sampling_logprob_S=SAMPLED,
        advantage_S=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        weight_S=torch.full((4,), 0.25),
        entropy_S=torch.ones(4),
        offsets_N=torch.tensor([0, 2, 4]),
        teacher_logprob_S=TEACHER,
        teacher_mask_S=MASK,
    )
    return LossInputs(**columns | more)


@pytest.mark.parametrize(("weight", "wanted"), [(1.0, [0.5, -0.5, 0, 0]), (0.25, [0.875, 0.625, -0.75, -0.75])])
def test_advantages_are_the_teachers_and_grpos(weight, wanted):
    algorithm = SDPO(SDPO.Settings(distillation_weight=weight))
    torch.testing.assert_close(algorithm.refine(inputs()).advantage_S, torch.tensor(wanted, dtype=torch.float32))


def test_a_penalty_in_the_reward_is_whole_whatever_the_teacher_weighs():
    reference = dict(reference_logprob_S=SAMPLED - 0.5)
    penalized = {"kl_in": "reward", "kl_coefficient": 0.4, "kl_estimator": "k1"}
    for weight in (1.0, 0.25):
        plain = SDPO(SDPO.Settings(distillation_weight=weight)).refine(inputs())
        found = SDPO(SDPO.Settings(distillation_weight=weight, **penalized)).refine(inputs(**reference))
        taken_S = plain.advantage_S - found.advantage_S  # of each token and those behind it
        torch.testing.assert_close(taken_S, torch.tensor([0.4, 0.2, 0.4, 0.2]))


def test_the_divergence_is_of_what_has_a_teacher():
    _, metrics = SDPO().loss(inputs())
    assert float(metrics["teacher_kl"]) == pytest.approx((-1.0 + 0.5) + (-2.0 + 2.5))
    assert int(metrics["teacher_fraction"]) == 2


def test_by_words_it_is_distillation_where_there_is_a_teacher():
    torch.manual_seed(0)
    student_SK, teacher_SK = (torch.randn(4, 3).log_softmax(1) - shift for shift in (0.5, 0.1))
    words = dict(word_logprob_SK=student_SK.requires_grad_(), teacher_word_logprob_SK=teacher_SK)
    loss, metrics = SDPO(SDPO.Settings(top_k=3)).loss(inputs(**words))
    loss.backward()
    assert float(student_SK.grad[2:].abs().max()) == 0 < float(student_SK.grad[:2].abs().max())
    columns = vars(inputs(**words)) | {"offsets_N": None}
    first = {name: values[:2].detach() for name, values in columns.items() if values is not None}
    wanted, wanted_metrics = Distillation(Distillation.Settings(top_k=3)).loss(LossInputs(**first))
    assert float(loss) == pytest.approx(float(wanted))
    assert float(metrics["teacher_kl"]) == pytest.approx(float(wanted_metrics["teacher_kl"]))


def test_what_prompt_and_solution_hold_is_text():
    assert reprompted("<{prompt}|{solution}|{x}>", "a {solution}", r"\1 {prompt}") == r"<a {solution}|\1 {prompt}|{x}>"


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"algorithm": {"reprompt_template": "{prompt}"}}, "reprompt_template has no {solution}: add it"),
        ({"algorithm": {"top_k": 500}}, "algorithm.top_k: 500 tokens exceed the vocabulary of"),
        ({"algorithm": {"distillation_weight": 0.5, "top_k": 2}}, "distillation_weight has no effect with top_k > 0"),
        ({"task": {"name": "calculator"}}, "is for tasks of one answer, and task.name = 'calculator' replies"),
        (
            {"algorithm": {"self_teacher": "initial"}, "reference": {"placement": "own"}},
            "reference.placement = 'own': .* beside the policy; leave it out",
        ),
        ({"rollout": {"repetition_penalty": 1.1}}, "rollout.repetition_penalty = 1.1: .*leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused(tables, said):
    config = {**tables, "algorithm": {"name": "sdpo", **tables.get("algorithm", {})}}
    with pytest.raises(ConfigError, match=said):
        check(load_config(None, config))


@pytest.mark.parametrize(("begun", "template"), [("grpo", {}), ("sdpo", {"reprompt_template": "{solution}, {prompt}"})])
def test_a_run_cannot_begin_with_it_while_it_goes_on(begun, template):
    checked = resolve(load_config(None, {"algorithm": {"name": begun}}))
    config = load_config(None, {"algorithm": {"name": "sdpo", **template}})
    with pytest.raises(ConfigError, match="algorithm: .*self.teacher.* give it with resume=True"):
        _check_roles(checked, config, "algorithm")


def test_by_words_every_key_of_all_forms_counts():
    SDPO.Settings(top_k=2, reprompt_template="{prompt} {solution}")
    assert replace(SDPO.Settings(), top_k=2).distillation_weight == 1 and np.isfinite(SDPO.Settings().clip_low)
