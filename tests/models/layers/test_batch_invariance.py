"""Batch-invariant layers: a token's log-probability has the same bits however rows are packed; gradients stay."""

import numpy as np
import pytest
import torch
from batches import batch_of
from family_models import make
from parity import learner_of, row_logits

from titan_rl.models.batch_invariance import depth_product, linear, sum_by_halves, why_not_invariant
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.spec import model_config, read_hf_config
from titan_rl.trainer.step.learner import Learner

pytestmark = pytest.mark.usefixtures("process_group")


def by_sample(learner: Learner, **packing) -> dict[tuple[float, ...], np.ndarray]:
    """Log-probabilities of each sample of a batch, by its advantage and what it sampled."""
    found = {}
    for row in batch_of(3, **packing).rows[0]:
        head = {"target_S": torch.from_numpy(row.target_S), "temperature": 0.7, "mask": row.mask}
        logprob_S = row_logits(learner, row, **head)[0].numpy()
        for name in set(row.advantage_S.tolist()):
            chosen = row.advantage_S == name
            found[name, *row.target_S[chosen].tolist()] = logprob_S[chosen]
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "masked"),
    [("qwen2", "float32", False), ("qwen2", "bfloat16", True), ("qwen3", "bfloat16", False)],
)
def test_a_token_is_as_likely_in_every_row(tmp_path, family, dtype, masked):
    """With biases and heads of 10; with norms of queries and keys."""
    if family == "qwen2":
        make(tmp_path, family)
    else:
        make_tiny(tmp_path, seed=0, architecture=family)
    training = {"mixed_precision_param": dtype}
    invariant = learner_of(tmp_path, training=training, debug={"batch_invariant": True})
    packed = by_sample(invariant, masked=masked, row_tokens=256)
    alone = by_sample(invariant, masked=masked, row_tokens=24, share_prefix=False)
    assert packed.keys() == alone.keys() and len(packed) == 12
    assert all(np.array_equal(packed[name], alone[name]) for name in packed)
    exact, plain = (by_sample(learner_of(tmp_path, training=each), masked=masked) for each in ({}, training))
    errors = [np.concatenate([each[name] - exact[name] for name in exact]) for each in (packed, plain)]
    invariant_error, plain_error = (float(np.abs(error).mean()) for error in errors)
    assert invariant_error < max(1e-5, 1.5 * plain_error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_parts", "degrees"), [(4, (1, 2, 4)), (6, (1, 3, 6)), (3, (1, 3))])
def test_a_product_is_the_same_on_any_number_of_ranks(num_parts, degrees, dtype):
    """Over parts of 300 inputs, and over parts of 101 outputs, which no number of ranks divides."""
    torch.manual_seed(0)
    x_MI, weight_OI = torch.randn(70, 300).to(dtype), torch.randn(101, 300).to(dtype)
    by_depth, by_columns = [], []
    for ranks in degrees:
        shares = zip(x_MI.chunk(ranks, 1), weight_OI.chunk(ranks, 1), strict=True)
        by_depth.append(sum_by_halves([depth_product(x, weight, num_parts // ranks) for x, weight in shares]))
        width, share = -(-101 // num_parts), -(-101 // ranks)
        columns = [linear(x_MI, part, None, width, share * rank) for rank, part in enumerate(weight_OI.split(share))]
        by_columns.append(torch.cat(columns, 1))
    exact = x_MI.double() @ weight_OI.double().T
    for products, step in ((by_depth, 2**-16), (by_columns, 2**-16 if dtype == torch.float32 else 2**-8)):
        torch.testing.assert_close(products[0].double(), exact, rtol=step, atol=1e-3)
        assert all(torch.equal(each, products[0]) for each in products)
    assert by_depth[0].dtype == torch.float32 and by_columns[0].dtype == dtype


def test_gradients_are_those_of_plain_layers(tmp_path):
    make(tmp_path, "qwen2")
    gradients = []
    for invariant in (False, True):
        learner = learner_of(tmp_path, debug={"batch_invariant": invariant})
        learner.forward_backward(batch_of(0).rows[0])
        gradients.append({name: each.grad.clone() for name, each in learner.model_parts[0].named_parameters()})
    plain, found = gradients
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-4, atol=1e-5 * float(plain[name].abs().max()))


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("qwen2", ""),
        ("mistral", ""),
        ("mistral window", "sliding windows"),
        ("phi3", "StackedFeedForward, StackedQKVLinear"),
        ("gemma3_text", "SandwichBlock"),
        ("glm4_moe", "ExpertBlock"),
    ],
)
def test_what_has_no_such_layers_is_said(tmp_path, case, why):
    make(tmp_path, case)
    assert why_not_invariant(model_config(read_hf_config(tmp_path))) == why
