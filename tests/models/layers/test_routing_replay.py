"""Experts that routers are given: they take them, weigh them themselves, and count what they would have changed."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import batch_of
from family_models import make
from parity import learner_of

from titan_rl.config.load import ConfigError
from titan_rl.models.layers.moe import RoutedPlan, Router
from titan_rl.models.spec import read_hf_config
from titan_rl.trainer.model.layout import check_replay, experts_of
from titan_rl.trainer.roles.frozen import PolicyWithoutAdapters

pytestmark = pytest.mark.usefixtures("process_group")

FAMILIES = ("qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe 2", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def learner(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make(path, request.param)
    check_replay(read_hf_config(path))
    learner = learner_of(path)
    learner.policy.replays_routing = True
    return learner


def routers_of(learner) -> dict[int, Router]:
    """By their layers, of the model that computes."""
    model = learner.policy.unsharded.model if learner.policy.unsharded else learner.model_parts[0]
    return {int(name): layer.moe.router for name, layer in model.layers.items() if layer.moe_enabled}


def chosen_by(learner, row) -> np.ndarray:
    """What the routers choose for a row by themselves: [T, L, K]."""
    shape, found = experts_of(read_hf_config(learner.model_path)), {}
    hooks = [
        router.register_forward_hook(lambda module, inputs, output, layer=layer: found.update({layer: output[1][0]}))
        for layer, router in routers_of(learner).items()
    ]
    learner.policy.measure([row])
    for hook in hooks:
        hook.remove()
    chosen_TLK = np.zeros((len(row.tokens_T), shape.num_layers, shape.per_token), np.uint8)
    for layer, chosen_TK in found.items():
        chosen_TLK[:, layer] = chosen_TK.numpy()
    return chosen_TLK


def test_what_is_given_is_taken_and_what_is_not_recorded_is_the_routers_own(learner):
    [row] = learner.policy.fit(batch_of(0, row_tokens=400).rows[0])
    own = learner.policy.measure([row])[0]
    chosen_TLK = chosen_by(learner, row)

    def measured(experts_TLK: np.ndarray) -> tuple[torch.Tensor, float]:
        [statistics] = learner.policy.measure([replace(row, routed_experts=experts_TLK)])
        return statistics, learner.policy.take_routing_changed()

    again, changed = measured(chosen_TLK[..., ::-1].copy())  # in another order
    assert torch.allclose(again, own, atol=1e-5) and changed == 0
    unrecorded, changed = measured(np.full_like(chosen_TLK, 255))
    assert torch.equal(unrecorded, own) and changed == 0
    others = np.roll(chosen_TLK, 1, axis=0)
    moved, changed = measured(others)
    assert float((moved - own).abs().max()) > 0.01 and 0.1 < changed < 1
    taken_TLK = chosen_by(learner, replace(row, routed_experts=others))
    assert np.array_equal(np.sort(taken_TLK), np.sort(others))
    reference = object.__new__(PolicyWithoutAdapters)
    reference.model, reference._adapters = learner.policy, SimpleNamespace(disabled=nullcontext)
    assert torch.equal(reference.measure([replace(row, routed_experts=others)])[0], own), "it chooses for itself"
    learner.policy.replays_routing = False
    ignored, changed = measured(others)
    learner.policy.replays_routing = True
    assert torch.equal(ignored, own) and changed is None


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [False, True])
def test_given_experts_are_weighed_by_the_routers_own_scores(tmp_path, score, normalized):
    torch.manual_seed(0)
    x_BLD, bias_E = torch.randn(1, 6, 40), torch.randn(12) if score == "sigmoid" else None
    make(tmp_path, "qwen3_next")
    layers = learner_of(tmp_path).spec.model.layers
    router = Router(
        replace(layers[0].moe.router, num_experts=12, top_k=2, score_func=score, route_norm=normalized, route_scale=1.7)
    )
    router.gate.weight = torch.nn.Parameter(torch.randn(12, 40))
    given_LK = torch.tensor([[3, 5], [5, 3], [0, 11], [255, 255], [1, 2], [7, 6]])
    _, own_BLK, _ = router(x_BLD, bias_E)
    router.given = RoutedPlan(None, given_LK, counts := torch.zeros(2, dtype=torch.int64))
    weight_BLK, chosen_BLK, _ = router(x_BLD, bias_E)
    wanted_LK = torch.where(given_LK < 12, given_LK, own_BLK[0])
    assert torch.equal(chosen_BLK[0], wanted_LK)
    logits_LE = x_BLD[0] @ router.gate.weight.T
    scores_LE = logits_LE.softmax(-1) if score == "softmax" else logits_LE.sigmoid()  # without the bias
    scores_LK = scores_LE.gather(1, wanted_LK)
    wanted = 1.7 * (scores_LK / scores_LK.sum(-1, keepdim=True) if normalized else scores_LK)
    assert torch.allclose(weight_BLK[0], wanted, atol=1e-6)
    pairs = zip(own_BLK[0].tolist(), given_LK.tolist(), strict=True)
    num_other = sum(len(set(given) - set(own) - {255}) for own, given in pairs)
    assert counts.tolist() == [num_other, 10] and num_other  # two are not recorded
    weight_BLK[0, :, 0].sum().backward()
    gate_grad = router.gate.weight.grad
    assert gate_grad is not None and float(gate_grad.abs().max()) > 0


def test_a_model_without_experts_is_refused(tmp_path):
    make(tmp_path, "qwen2")
    with pytest.raises(ConfigError, match="'replay': the model has no experts; leave it out"):
        check_replay(read_hf_config(tmp_path))
