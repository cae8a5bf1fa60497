"""Adapters of several clients on one model: each is what it would be in a process of its own, to the bit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from titan_rl.algorithms.offline.sft import SFT
from titan_rl.config.load import load_config
from titan_rl.data.types import Layout, Row
from titan_rl.mesh.members.adapter_endpoints import AdamSettings
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.service.rows import TrainingExample, pack_examples
from titan_rl.trainer.step.adapter_bank import AdapterBank
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
_ADAM = AdamSettings(3e-3, (0.9, 0.95), 1e-12, 0.0, 0.0)
_VOCABULARY = 90


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return path


@pytest.fixture
def make_bank(model_path):
    def make() -> AdapterBank:
        config = load_config(None, {"lora": {"rank": 4}})
        return AdapterBank(Learner(config, build_titan(config), model_path))

    return make


def _rows(seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    examples = []
    for length in (12, 7, 20):
        tokens, targets = random.integers(5, _VOCABULARY, (2, length))
        values = random.normal(size=(2, length)).astype(np.float32)
        examples.append(TrainingExample(tokens, targets, values[0], values[1] - 4, np.ones(length, np.float32)))
    return pack_examples(examples, Layout(1, 32)).rows[0]


def _trained(bank: AdapterBank, name: str, seeds: list[int], loss: str = "importance_sampling") -> list[float]:
    """Losses and norms of a client's passes, each of which is followed by a step."""
    values = []
    for seed in seeds:
        values.append(bank.forward_backward(name, _rows(seed), loss, {}, backward=True).loss)
        values.append(bank.step(name, _ADAM))
    return values


def test_clients_in_turn_are_those_alone(make_bank, tmp_path):
    alone = {}
    for name, seeds in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        bank = make_bank()
        bank.create(name, seed=ord(name))
        alone[name] = _trained(bank, name, seeds)
        bank.save(name, tmp_path / f"alone-{name}")
    bank, together = make_bank(), {"a": [], "b": []}
    for name in together:
        bank.create(name, seed=ord(name))
    for place in range(3):
        # a's gradients wait while b has a whole step
        a_loss = bank.forward_backward("a", _rows(1 + place), "importance_sampling", {}, backward=True).loss
        together["b"] += _trained(bank, "b", [4 + place])
        together["a"] += [a_loss, bank.step("a", _ADAM)]
    assert together == alone
    for name in together:
        bank.save(name, tmp_path / f"together-{name}")
        mine, wanted = load_file(tmp_path / f"together-{name}"), load_file(tmp_path / f"alone-{name}")
        assert mine.keys() == wanted.keys() and all(torch.equal(mine[key], wanted[key]) for key in wanted)


def test_gradients_of_several_passes_add_up(make_bank):
    together, apart = make_bank(), make_bank()
    norms = []
    for bank, batches in ((together, [[*_rows(1), *_rows(2)]]), (apart, [_rows(1), _rows(2)])):
        bank.create("a", seed=1)
        for rows in batches:
            bank.forward_backward("a", rows, "cross_entropy", {}, backward=True)
        norms.append(bank.step("a", _ADAM))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_examples_that_share_a_prompt_have_the_gradients_that_they_have_apart(make_bank):
    random, results = np.random.default_rng(3), []
    prompt, answers = random.integers(5, _VOCABULARY, 12), random.integers(5, _VOCABULARY, (3, 6))
    examples = []
    for place, answer in enumerate(answers):
        full = np.concatenate([prompt, answer])
        coefficients = np.where(np.arange(17) < 11, 0, place - 1.5).astype(np.float32)
        nothing = np.zeros(17, np.float32)
        examples.append(TrainingExample(full[:-1], full[1:], coefficients, nothing - 4, nothing + 1))
    for share in (True, False):
        bank, packed = make_bank(), pack_examples(examples, Layout(1, 64), share=share)
        bank.create("a", seed=1)
        passed = bank.forward_backward("a", packed.rows[0], "ppo", {}, backward=True)
        logprobs = np.concatenate(packed.logprobs({0: passed.logprobs}))
        results.append((len(packed.rows[0][0].tokens_T), passed.loss, bank.step("a", _ADAM), logprobs))
    (few, *shared), (many, *apart) = results
    assert (few, many) == (12 + 3 * 5, 3 * 17)
    assert shared[:2] == pytest.approx(apart[:2], rel=1e-5)
    np.testing.assert_allclose(shared[2], apart[2], atol=1e-5)


def test_a_forward_pass_alone_has_the_same_logprobs_and_leaves_no_gradient(make_bank):
    bank, rows = make_bank(), _rows(1)
    bank.create("a", seed=1)
    forward = bank.forward_backward("a", rows, "cross_entropy", {}, backward=False)
    assert bank.step("a", _ADAM) == 0.0
    both = bank.forward_backward("a", rows, "cross_entropy", {}, backward=True)
    assert forward.loss == pytest.approx(both.loss, rel=1e-6)
    for index, logprob_S in both.logprobs.items():
        np.testing.assert_allclose(forward.logprobs[index], logprob_S, atol=1e-5)
    assert bank.step("a", _ADAM) > 0


def test_a_saved_state_goes_on_as_if_it_had_never_been_saved(make_bank, tmp_path):
    bank = make_bank()
    bank.create("a", seed=1)
    _trained(bank, "a", [1, 2])
    bank.save("a", tmp_path / "state")
    wanted = _trained(bank, "a", [3, 4])
    resumed = make_bank()
    resumed.restore("back", tmp_path / "state")
    assert _trained(resumed, "back", [3, 4]) == wanted
    without = make_bank()
    without.restore("back", tmp_path / "state", with_optimizer=False)
    losses = _trained(without, "back", [3, 4])
    assert losses[0] == wanted[0] and losses[2] != wanted[2]


def test_weights_in_peft_s_format_are_the_client_s(make_bank, tmp_path):
    bank = make_bank()
    bank.create("a", seed=1)
    _trained(bank, "a", [1])
    bank.save_weights("a", tmp_path / "peft")
    bank.create("b", seed=2)
    before = bank.forward_backward("b", _rows(5), "cross_entropy", {}, backward=False).loss
    bank.load_weights("served", tmp_path / "peft")
    assert bank.forward_backward("b", _rows(5), "cross_entropy", {}, backward=False).loss == before
    served = bank.forward_backward("served", _rows(5), "cross_entropy", {}, backward=False).loss
    assert served == bank.forward_backward("a", _rows(5), "cross_entropy", {}, backward=False).loss != before


def test_a_loss_that_is_not_finite_moves_nothing(make_bank):
    bank, rows = make_bank(), _rows(1)
    bank.create("a", seed=1)
    wanted = bank.forward_backward("a", rows, "cross_entropy", {}, backward=False).loss
    spoilt = [type(row)(**{**vars(row), "advantage_S": np.full_like(row.advantage_S, math.inf)}) for row in rows]
    with pytest.raises(FloatingPointError, match="the loss is"):
        bank.forward_backward("a", spoilt, "cross_entropy", {}, backward=True)
    assert bank.step("a", _ADAM) == 0.0
    assert bank.forward_backward("a", rows, "cross_entropy", {}, backward=False).loss == wanted


def test_a_state_of_another_model_or_rank_is_refused(make_bank, tmp_path):
    bank = make_bank()
    bank.create("a", seed=1)
    bank.save("a", tmp_path / "state")
    other = load_config(None, {"lora": {"rank": 8}})
    make_tiny(tmp_path / "other", seed=2, hidden_size=64, num_layers=2)
    for model, config, words in (
        (tmp_path / "other", load_config(None, {"lora": {"rank": 4}}), "another base model"),
        (bank._learner.model_path, other, "lora.rank = 8"),
    ):
        with pytest.raises(ValueError, match=words):
            AdapterBank(Learner(config, build_titan(config), model)).restore("a", tmp_path / "state")


def test_losses_are_those_of_a_run_on_the_same_rows(make_bank, model_path, tmp_path):
    """Of a run with ``[lora]`` that begins with the same adapter, where each token has the weight 1."""
    bank, steps = make_bank(), range(6)
    bank.create("a", seed=1)
    bank.save_weights("a", tmp_path / "peft")
    tables = {
        "lora": {"rank": 4, "adapter": str(tmp_path / "peft")},
        "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
        "training": {"steps": len(steps), "max_norm": 1e-3},
    }
    config = load_config(None, tables)
    learner = Learner(config, build_titan(config), model_path)
    learner.algorithm = SFT()
    batches = [[_of_ones(row) for row in _rows(seed)] for seed in steps]
    wanted = [learner.train(rows, True).loss for rows in batches]
    adam = AdamSettings(3e-3, (0.9, 0.95), 1e-8, 0.1, 1e-3)
    losses = []
    for rows in batches:
        losses.append(bank.forward_backward("a", rows, "cross_entropy", {}, backward=True).loss)
        bank.step("a", adam)
    assert losses == pytest.approx(wanted, rel=1e-5)
    bank.create("untrained", seed=1)
    untrained = bank.forward_backward("untrained", batches[-1], "cross_entropy", {}, backward=False).loss
    assert losses[-1] != pytest.approx(untrained, rel=1e-3), "the steps are seen in what is compared"


def _of_ones(row: Row) -> Row:
    return replace(row, advantage_S=np.ones_like(row.advantage_S))
