"""An algorithm by its name, ours or a user's: what it is given reaches it, and every mistake in it is one line."""

import itertools
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from titan_rl.algorithms import dry_run as probe
from titan_rl.algorithms.base import Algorithm, LossInputs, Needs
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.algorithms.policy_gradient.base import PolicyGradient
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.registry import ALGORITHMS, check_algorithm, make_algorithm
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import AlgorithmConfig
from titan_rl.data.types import Group, Rollout, StepMetrics
from titan_rl.records.metrics import sampling_metrics, trained_metrics

HEAD = """
import numpy as np, torch
from dataclasses import dataclass
from titan_rl.algorithms.base import Algorithm, LossInputs, Needs
"""
RIGHT = """
class Mine(Algorithm):
    @dataclass(kw_only=True)
    class Settings:
        scale: float = 2.0

    is_token_sum = True

    def advantages(self, rollouts):
        return [np.full(r.num_model_tokens, self.settings.scale * r.reward + r.reward_parts["form"]) for r in rollouts]

    def loss(self, inputs):
        kept = inputs.weight_S > 0
        loss = -(inputs.logprob_S * inputs.advantage_S * inputs.weight_S).sum()
        return loss, {"surprise": -(inputs.logprob_S * kept).sum()}
"""
_numbers = itertools.count()


@pytest.fixture
def make(tmp_path, monkeypatch):
    """An algorithm from a user's file, made and tried."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(text: str, **options) -> Algorithm:
        module = f"users_algorithm_{next(_numbers)}"
        (tmp_path / f"{module}.py").write_text(HEAD + text)
        config = load_config(None, {"algorithm": {"name": f"{module}:Mine", **options}})
        algorithm = make_algorithm(config.algorithm, [str(tmp_path)])
        check_algorithm(algorithm, f"algorithm.name = {config.algorithm.name!r}")
        return algorithm

    return make


def mistake(function, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **keywords)
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_ours_are_made_by_name_and_work(name):
    algorithm = make_algorithm(AlgorithmConfig(name=name), [], on_data=ALGORITHMS[name].trains_on != "rollouts")
    assert type(algorithm) is ALGORITHMS[name] and algorithm.settings == algorithm.Settings()
    check_algorithm(algorithm, name)


def test_sft_works():
    check_algorithm(SFT(), "SFT")


def test_keys_of_an_algorithm_reach_it():
    config = load_config(None, {"algorithm": {"normalize_std": False, "clip_high": 0.5, "aggregation": "sequence"}})
    assert make_algorithm(config.algorithm, []).settings == GRPO.Settings(normalize_std=False, clip_high=0.5)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_that_says_so_leaves_advantages_alone(name):
    """Its rows are not sent through ``refine``, so that it must have nothing to do there."""
    algorithm, zero_S = ALGORITHMS[name](), torch.zeros(2)
    if not algorithm.refines:
        columns = zero_S, zero_S, torch.tensor([0.5, -2.0]), zero_S + 1, zero_S, torch.tensor([0, 2])
        assert algorithm.refine(LossInputs(*columns)).advantage_S.tolist() == [0.5, -2.0]


def test_a_penalty_in_the_reward_refines_advantages():
    assert GRPO(GRPO.Settings(kl_in="reward", kl_coefficient=0.1)).refines and not GRPO().refines


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"clip_lo": 0.1}, "unknown key algorithm.clip_lo: did you mean 'clip_low'?"),
        ({"agregation": "token"}, "unknown key algorithm.agregation: did you mean 'aggregation'?"),
        ({"clip_low": 1.0}, "algorithm.clip_low = 1.0"),
        ({"clip_low": 0.0}, "algorithm.clip_low = 0.0"),
        ({"clip_high": "0.2"}, "algorithm.clip_high = '0.2'"),
        ({"normalize_std": 1}, "algorithm.normalize_std = 1"),
        ({"name": "grop"}, "algorithm.name = 'grop' is unknown: did you mean 'grpo'?"),
        ({"name": "supervised"}, "is no reinforcement-learning algorithm: take grpo, and set [sft] steps"),
        ({"name": "sft"}, "is no reinforcement-learning algorithm: take grpo, and set [sft] steps"),
        (
            {"name": "titan_rl.algorithms.offline.sft:SFT"},
            "is no reinforcement-learning algorithm: take grpo, and set [sft]",
        ),
        ({"name": "no_such_module_at_all:Mine"}, "there is no module 'no_such_module_at_all'"),
        ({"name": "titan_rl.algorithms.policy_gradient.grpo:GRPOO"}, "did you mean 'GRPO'?"),
        (
            {"name": "titan_rl.algorithms.policy_gradient.grpo:rewards_of"},
            "must name a subclass of titan_rl.algorithms.base.Algorithm",
        ),
        ({"name": "titan_rl.algorithms.base:LossInputs"}, "must name a subclass"),
        ({"name": "titan_rl.algorithms.base:Algorithm"}, "has no advantages and no loss: write the method"),
    ],
)
def test_wrong_names_and_keys(keys, said):
    config = load_config(None, {"algorithm": keys})
    assert said in mistake(make_algorithm, config.algorithm, [])


def test_a_users_algorithm(make):
    algorithm = make(RIGHT, scale=3)
    assert algorithm.settings.scale == 3.0
    assert "did you mean 'scale'?" in mistake(make, RIGHT, scael=3)
    assert "algorithm.scale = 'much'" in mistake(make, RIGHT, scale="much")


def test_a_supervised_algorithm_that_is_told_what_answers_earned_is_another(make):
    """SFT's own advantages count every answer alike, right or wrong."""
    text = "from titan_rl.algorithms.offline.sft import SFT\nclass Mine(SFT):\n"
    assert "is no reinforcement-learning algorithm" in mistake(make, text + "    pass\n")
    assert isinstance(make(text + METHODS["advantages"]), SFT)


def test_an_algorithm_may_tell_its_needs_by_its_settings(make):
    text = (
        RIGHT
        + """
    def __init__(self, settings):
        super().__init__(settings)
        self.needs = Needs(rewards="token" if settings.scale < 0 else "sample")
"""
    )
    assert make(text).needs == Needs()
    assert "needs a reward for each token, which this release cannot serve yet" in mistake(make, text, scale=-1.0)


METHODS = {
    "advantages": "    def advantages(self, rollouts): return [r.reward for r in rollouts]\n",
    "loss": "    def loss(self, inputs): return (inputs.logprob_S * inputs.weight_S).sum(), {}\n",
}


def mine(extra: str = "", **methods: str) -> str:
    """A class with these methods' bodies, and plain ones for the rest."""
    plain = {name: text for name, text in METHODS.items() if name not in methods}
    arguments = {"advantages": "rollouts"} | dict.fromkeys(("loss", "refine", "group_terms"), "inputs")
    written = [f"    def {name}(self, {arguments[name]}): {body}\n" for name, body in methods.items()]
    return f"class Mine(Algorithm):\n    {extra or 'pass'}\n" + "".join([*plain.values(), *written])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine(Algorithm):\n" + METHODS["advantages"], "has no loss: write the method"),
        (mine("def __init__(self): pass"), "must take (settings), but it takes ()"),
        (
            mine("def __init__(self, settings): raise KeyError('x')"),
            "making it failed: KeyError: 'x' (users_algo",
        ),
        (mine() + "    def loss(self): pass\n", "loss must take (inputs), but it takes ()"),
        (mine() + "    def advantages(self, a, b): pass\n", "advantages must take (rollouts), but it takes (a, b)"),
        (mine("advantages = 3") + "    advantages = 3\n", "advantages is of type int: name a function (rollouts)"),
        (mine("Settings = dict"), "its Settings must be a dataclass"),
        (mine("Settings = 3"), "its Settings must be a dataclass"),
        (mine() + "    @dataclass\n    class Settings:\n        name: str = ''\n", "Settings.name is a key that every"),
        (mine() + "    @dataclass\n    class Settings:\n        x: np.ufunc = None\n", "its Settings cannot be made"),
        (
            mine() + "    @dataclass\n    class Settings:\n        x: int\n",
            "algorithm.x is needed, and is not given: set it",
        ),
        (mine("needs = {'critic': True}"), "its needs must be a titan_rl.algorithms.base.Needs"),
        (mine("needs = Needs(teacher_words=4)"), "its needs name teacher_words and no teacher: set teacher = True"),
        (mine("needs = Needs(implicit_reward=True)"), "its needs name implicit_reward and no reference"),
        (
            mine("needs = Needs(implicit_reward=True, reference=True, critic=True)"),
            "trains one model beside the policy",
        ),
        (mine(group_terms="return None"), "has group_terms, which nobody asks for without refine"),
        (mine("needs = Needs(rewards='token')"), "needs a reward for each token, which this release cannot serve yet"),
    ],
)
def test_wrong_classes(make, text, said):
    assert said in mistake(make, text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rollouts[0].rewrad", "AttributeError: 'Rollout' object has no attribute 'rewrad' (users_algorithm_"),
        ("return [1.0]", "one for each of 4 rollouts is wanted, not 1 of them"),
        ("return None", "not NoneType"),
        ("return ['a'] * 4", "must be a number or an array of 1 (the tokens that the model wrote), not str"),
        ("return [[1.0]] * 4", "not list"),
        ("return [torch.tensor(1.0)] * 4", "not Tensor"),
        ("return [np.ones(3)] * 4", "not an array (3,) of float64"),
        ("return [np.zeros(r.num_model_tokens, str) for r in rollouts]", "of <U1"),
        ("return [float('nan')] * 4", "advantages of four samples with unequal rewards must be finite, and are [nan"),
        (
            "x = np.array([r.reward for r in rollouts]); return (x - x.mean()) / x.std()",
            "advantages of four samples with equal rewards must be finite",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_advantages(make, body, said):
    assert said in mistake(make, mine(advantages=body))


SUM = "(inputs.logprob_S * inputs.weight_S).sum()"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return undefined", "loss: NameError: name 'undefined' is not defined (users_algorithm_"),
        ("return inputs.logprob_S - inputs.reference_logprob_S, {}", "TypeError"),
        (f"return {SUM}", "loss must return (loss, metrics), not Tensor"),
        (
            "return inputs.logprob_S, {}",
            "loss must be a scalar tensor, not Tensor of shape (8,): sum over",
        ),
        ("return 1.0, {}", "loss must be a scalar tensor, not float"),
        ("return inputs.weight_S.sum(), {}", "loss has no gradient for logprob_S"),
        (f"return {SUM}.detach(), {{}}", "loss has no gradient for logprob_S"),
        ("return torch.zeros((), requires_grad=True) * 2, {}", "loss has no gradient for logprob_S"),
        (f"return {SUM} / 0, {{}}", "loss must be finite"),
        (f"return {SUM} / inputs.weight_S.sum(), {{}}", "loss must be finite"),  # of a row of nothing but weight 0
        ("return (inputs.logprob_S.log1p() * inputs.weight_S).sum(), {}", "loss must be finite, and is nan"),
        (
            "return (inputs.logprob_S - inputs.logprob_S.detach()).abs().sqrt().sum(), {}",
            "gradient of loss must be",
        ),
        ("return inputs.logprob_S.sum(), {}", "loss of a token of weight 0 must be 0"),
        (f"return {SUM}, 3", "the second value of loss must be a dict of sums, not int"),
        (f"return {SUM}, {{3: inputs.weight_S.sum()}}", "a metric by the name 3"),
        (f"return {SUM}, {{'mean': 3.0}}", "the metric 'mean' of loss must be a scalar tensor, not float"),
        (f"return {SUM}, {{'ratio': inputs.logprob_S}}", "not Tensor of shape (8,)"),
        (f"return {SUM}, {{'ratio': inputs.logprob_S.exp().mean()}}", "the metric 'ratio' counts tokens of weight 0"),
        (
            f"return {SUM}, {{f'n{{len(inputs.weight_S)}}': {SUM}}}",
            "the same metrics for all tokens, not once ['n8']",
        ),
        *(
            (f"return {SUM}, {{{name!r}: {SUM}}}", f"a metric {name!r}, a name that every step has: rename yours")
            for name in ("loss", "entropy", "count", "grad_norm", "reward", "step", "seconds_mine")
        ),
    ],
)
def test_wrong_losses(make, body, said):
    assert said in mistake(make, mine(loss=body))


@pytest.mark.parametrize(
    "body",
    [
        f"return {SUM} ** 2, {{}}",
        "return (inputs.logprob_S * inputs.entropy_S * inputs.weight_S).sum(), {}",
        "return (inputs.logprob_S * inputs.logprob_S.mean() * inputs.weight_S).sum(), {}",
    ],
)
def test_a_claim_to_be_a_token_sum_is_tried(make, body):
    make(mine(loss=body))
    assert "is_token_sum is true, but the gradient of two halves" in mistake(
        make, mine("is_token_sum = True", loss=body)
    )


REFINED = "return Refined(inputs.advantage_S)"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return inputs.advantage_S", "refine must return a Refined, not Tensor"),
        (
            "return Refined(inputs.advantage_S.sum())",
            "refine's advantage_S must be a tensor with a number for each of 8",
        ),
        ("return Refined(inputs.advantage_S, 3.0)", "refine's return_S must be a tensor"),
        ("return Refined(inputs.advantage_S / 0)", "refine's advantage_S must be finite, and is [inf, -inf"),
        ("return Refined(inputs.reference_logprob_S + 1)", "refine: TypeError"),
        ("return Refined(inputs.advantage_S / inputs.weight_S.sum())", "refine's advantage_S must be finite"),
    ],
)
def test_wrong_refinements(make, body, said):
    refine = "    def refine(self, inputs): "
    head = HEAD_OF_REFINED + mine()
    make(head + refine + REFINED + "\n")
    assert said in mistake(make, head + refine + body + "\n")
    assert "refine must take (inputs), but it takes ()" in mistake(make, head + "    def refine(self): pass\n")


HEAD_OF_REFINED = "from titan_rl.algorithms.base import Refined\n"


def test_what_is_needed_is_given(make):
    """Also samples; a loss by what it was not promised is a mistake."""
    body = (
        "return (inputs.logprob_S * (inputs.reference_logprob_S - inputs.proximal_logprob_S + inputs.teacher_logprob_S)"
        " * inputs.weight_S * (len(inputs.offsets_N) > 1)).sum(), {}"
    )
    make(mine("needs = Needs(reference=True, proximal=True, teacher=True)", loss=body))
    assert "loss: TypeError" in mistake(make, mine("needs = Needs(reference=True, proximal=True)", loss=body))


def test_gradients_of_entropies(make):
    body = f"return {SUM} - (inputs.entropy_S * inputs.weight_S).sum(), {{}}"
    make(mine("needs = Needs(entropy_gradient=True)", loss=body))
    said = mistake(make, mine("needs = Needs(entropy_gradient=True); is_token_sum = True", loss=body))
    assert "is_token_sum is true, but the loss needs the gradient of entropies" in said


def test_what_gives_values_learns_by_values(make):
    body = "return ((inputs.value_S - inputs.advantage_S).square() * inputs.weight_S).sum(), {}"
    make(mine("head = 'value'", loss=body))
    said = mistake(make, mine("head = 'value'", loss=f"return {SUM}, {{}}"))
    assert "loss has no gradient for value_S: compute it from inputs.value_S" in said


_ALONE = [
    name for name, cls in sorted(ALGORITHMS.items()) if issubclass(cls, PolicyGradient) and cls().needs == Needs()
]


@pytest.mark.parametrize(
    ("options", "needs", "is_token_sum"),
    [
        ({}, Needs(), True),
        ({"kl_coefficient": 0.1}, Needs(reference=True), True),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, Needs(reference=True), True),
        ({"entropy_coefficient": 0.1}, Needs(entropy_gradient=True), False),
        ({"decoupled": True, "importance": "token"}, Needs(proximal=True), True),
        ({"decoupled": True, "importance": "sequence"}, Needs(proximal=True), False),
        ({"reject": "worst_token", "reject_low": 0.1}, Needs(), False),
    ],
)
@pytest.mark.parametrize("name", _ALONE)
def test_settings_say_what_is_needed(name, options, needs, is_token_sum):
    algorithm = make_algorithm(AlgorithmConfig(name=name, options=options), [])
    check_algorithm(algorithm, name)
    assert algorithm.needs == needs
    assert algorithm.is_token_sum == (is_token_sum and name != "gspo")
    assert algorithm.is_still_without_advantage == (not needs.reference and not needs.entropy_gradient)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kl_in": "reward"}, "set kl_coefficient"),
        ({"kl_in": "reward", "kl_coefficient": 0.1, "kl_estimator": "k3_unbiased"}, "rewards have none of: take k1"),
        ({"importance": "token"}, "set decoupled = true"),
        ({"importance": "token", "decoupled": True, "importance_low": 0.5}, "importance_bound = 'mask'"),
        (
            {"importance": "token", "decoupled": True, "importance_low": 3, "importance_bound": "mask"},
            "importance_low is above importance_high",
        ),
        ({"reject": "sequence"}, "set reject_low, reject_high or both"),
        ({"reject": "sequence", "reject_low": 2, "reject_high": 1}, "reject_low is above reject_high"),
        ({"reject_low": 0.1}, "reject_low has no effect: it is of what reject names: set reject"),
        ({"reject_only_negative": True}, "reject_only_negative has no effect: it is of what reject names: set reject"),
        ({"importance_high": 3.0, "decoupled": True}, "importance_high has no effect: it is of what importance names"),
        (
            {"decoupled": True, "clip_high": 0.3},
            "algorithm.clip_high has no effect: with decoupled = true and",
        ),
        ({"name": "gspo", "decoupled": True, "dual_clip": 3.0}, "dual_clip has no effect: with decoupled = true"),
        (
            {"importance_bound": "mask"},
            "importance_bound has no effect: it is of what importance names",
        ),
        ({"kl_estimator": "k2"}, "kl_estimator has no effect: kl_coefficient = 0 weighs no divergence: set that"),
        (
            {"kl_clip": 10.0},
            "kl_clip has no effect: kl_coefficient = 0 weighs no divergence",
        ),
        ({"kl_clip": 0.0, "kl_coefficient": 0.1}, "algorithm.kl_clip = 0.0"),
        ({"kl_estimator": "k1", "kl_coefficient": 0.1}, "gradient that is 0 on average: take 'k2', 'k3' or"),
        ({"name": "distillation", "top_k": 4, "kl_clip": 1.0, "kl_coefficient": 0.1}, "has no effect with top_k > 0"),
        ({"name": "maxrl", "overlong_buffer": 3}, "whose rewards must not be negative: leave it out, or take dapo"),
        ({"name": "distillation", "overlong_buffer": 3}, "which learns nothing from rewards: leave it out"),
        ({"name": "sdpo", "overlong_buffer": 3}, "which learns nothing from rewards: leave it out"),
        ({"overlong_penalty": 2.0}, "algorithm.overlong_penalty has no effect without algorithm.overlong_buffer"),
        ({"dual_clip": 1.0}, "algorithm.dual_clip = 1.0"),
        ({"name": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip = 3.0"),
        ({"name": "sapo", "clip_high": 0.3}, "clip_high has no effect: sapo clips no ratio: set tau_positive and"),
        ({"name": "sapo", "dual_clip": 3.0}, "dual_clip has no effect: sapo clips no ratio"),
        ({"name": "sapo", "tau_negative": 0.0}, "algorithm.tau_negative = 0.0"),
        ({"name": "sapo", "decoupled": True, "tau_negative": 2.0}, "tau_negative has no effect: with decoupled = true"),
        ({"name": "dppo", "clip_low": 0.3}, "clip_low has no effect: dppo clips no ratio: set threshold"),
        ({"name": "dppo", "threshold": 1.0}, "threshold = 1.0 masks nothing: total variation is at most 1: lower it"),
        ({"name": "dppo", "divergence": "js"}, "algorithm.divergence = 'js'"),
        ({"name": "dppo", "decoupled": True, "dual_clip": 3.0}, "dual_clip has no effect: with decoupled = true"),
        ({"name": "gdpo", "reward_weights": {"a": 0.0}}, "each of reward_weights is 0, and so would be every"),
        ({"name": "gdpo", "reward_weights": {"a": "1"}}, "algorithm.reward_weights.a = '1'"),
        ({"name": "gigpo", "omega": -1.0}, "algorithm.omega = -1.0"),
        ({"name": "gigpo", "omega": 0.0, "discount": 0.5}, "discount has no effect: omega = 0 weighs no return of"),
        ({"name": "reinforce_pp", "discount": 0.0}, "algorithm.discount = 0.0"),
        ({"name": "rloo", "normalize_std": True}, "unknown key algorithm.normalize_std"),
        ({"importance": "tokens"}, "algorithm.importance = 'tokens'"),
        ({"kl_coefficient": -0.1}, "algorithm.kl_coefficient = -0.1"),
    ],
)
def test_settings_that_do_not_go_together(keys, said):
    assert said in mistake(make_algorithm, load_config(None, {"algorithm": keys}).algorithm, [])


AS_IT_IS = "from titan_rl.algorithms.base import Refined; return Refined(inputs.advantage_S"


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ("return inputs.weight_S", "group_terms must return a tensor with a line of numbers for each of 4 samples"),
        ("return 1.0", "group_terms must return a tensor with a line of numbers for each of 4 samples"),
        ("return torch.full((len(inputs.offsets_N) - 1, 1), torch.nan)", "group_terms must be finite"),
        ("return inputs.nothing", "group_terms: AttributeError"),
    ],
)
def test_wrong_numbers_of_a_group(make, terms, said):
    assert said in mistake(make, mine(refine=f"{AS_IT_IS})", group_terms=terms))


def test_refine_finds_what_was_summed_up_over_a_group(make):
    terms = "return torch.ones(len(inputs.offsets_N) - 1, 2)"
    make(mine(refine=f"{AS_IT_IS} / inputs.group_sums_NM[0, 1].float())", group_terms=terms))
    assert "'NoneType'" in mistake(make, mine(refine=f"{AS_IT_IS} / inputs.group_sums_NM[0, 1])"))


def test_names_that_a_record_has_are_taken():
    rollout = Rollout("a", 0, *(np.array([0, 1]) for _ in range(4)), [], "ok")
    names = {f.name for f in fields(StepMetrics)} | set(trained_metrics(StepMetrics()))
    names |= set(sampling_metrics([Group("a", [rollout, rollout])], 0))
    assert all(name in probe._TAKEN or name.startswith(probe._TAKEN_BEGINNINGS) for name in names)


def test_columns_that_nobody_provides_are_none():
    inputs = LossInputs(*[torch.zeros(2)] * 5)
    assert [f.name for f in fields(inputs) if getattr(inputs, f.name) is None] == [
        "offsets_N",
        "branch_offsets",
        "reference_logprob_S",
        "proximal_logprob_S",
        "value_S",
        "teacher_logprob_S",
        "word_logprob_SK",
        "teacher_word_logprob_SK",
        "teacher_mask_S",
        "task_S",
        "process_reward_S",
        "group_sums_NM",
    ]
