"""The gated delta rule over packed rows, against its recurrence token by token over each whole document."""

import pytest
import torch
import torch.nn.functional as F

from titan_rl.data.types import Segment
from titan_rl.models.layers.gated_delta_net import causal_convolution, gated_delta_rule, plan_recurrence

CPU = torch.device("cpu")
PROMPT, TURN = (0, 70), (70, 40)
ROW = [
    Segment(*PROMPT),
    Segment(*TURN, (PROMPT,)),
    Segment(110, 1, (PROMPT, TURN)),
    Segment(111, 130, (PROMPT, TURN)),
    Segment(241, 9, (PROMPT,)),
    Segment(250, 1),
    Segment(251, 33),
]
"""A prompt; a turn behind it, and two samples behind both; a third sample; two documents more."""
TOKENS, HEADS, KEYS, VALUES = 284, 3, 5, 7


def document(segment: Segment) -> torch.Tensor:
    return torch.cat([torch.arange(s, s + n) for s, n in (*segment.prefix, (segment.start, segment.length))])


def step_by_step(q, k, v, decay, beta) -> torch.Tensor:
    """arXiv 2412.06464, equation 10, with queries and keys of unit length."""
    q, k = F.normalize(q, dim=-1) * KEYS**-0.5, F.normalize(k, dim=-1)
    state, outputs = torch.zeros(HEADS, KEYS, VALUES, dtype=q.dtype), []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        predicted = torch.einsum("nkv,nk->nv", state, k[t])
        state = state + torch.einsum("nk,nv->nkv", k[t], beta[t][:, None] * (v[t] - predicted))
        outputs.append(torch.einsum("nkv,nk->nv", state, q[t]))
    return torch.stack(outputs)


def columns(dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(TOKENS, HEADS, *shape, generator=generator)  # noqa: E731
    made = [draw(KEYS), draw(KEYS), draw(VALUES), -F.softplus(draw()), draw().sigmoid()]
    return [x.to(dtype).requires_grad_() for x in made]


def expected(inputs: list[torch.Tensor]) -> torch.Tensor:
    out = torch.full((TOKENS, HEADS, VALUES), torch.nan, dtype=inputs[0].dtype)
    for segment in ROW:
        own = document(segment)
        out[own[-segment.length :]] = step_by_step(*(x[own] for x in inputs))[-segment.length :]
    return out


def test_each_document_is_as_if_it_were_alone():
    inputs, wanted = columns(), columns(torch.float64)
    out, reference = gated_delta_rule(*inputs, plan_recurrence(ROW, CPU)), expected(wanted)
    assert float((out - reference).detach().abs().max()) < 1e-5 * float(reference.detach().abs().max())
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    (reference * weights).sum().backward()
    for mine, theirs in zip(inputs, wanted, strict=True):
        assert float((mine.grad - theirs.grad).abs().max()) < 1e-4 * float(theirs.grad.abs().max())


def test_a_state_that_forgets_all_at_once_stays_a_number():
    inputs = columns()
    with torch.no_grad():
        inputs[3].fill_(-300.0)
    gated_delta_rule(*inputs, plan_recurrence(ROW, CPU)).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_reads_its_own_document_alone(width):
    generator = torch.Generator().manual_seed(2)
    x_TF, weight = (torch.randn(*shape, generator=generator) for shape in ((TOKENS, 5), (5, 1, width)))
    out_TF = causal_convolution(x_TF, weight, plan_recurrence(ROW, CPU))
    for segment in ROW:
        own = document(segment)
        padded = F.pad(x_TF[own].T, (width - 1, 0))
        alone = F.silu(F.conv1d(padded, weight, groups=5)).T[-segment.length :]
        assert torch.allclose(out_TF[own[-segment.length :]], alone, atol=1e-6)


def test_a_convolution_in_bf16_is_rounded_once():
    generator = torch.Generator().manual_seed(3)
    x_TF, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((TOKENS, 64), (64, 1, 4)))
    alone = Segment(0, TOKENS)
    out_TF = causal_convolution(x_TF, weight, plan_recurrence([alone], CPU))
    exact_TF = F.silu(F.conv1d(F.pad(x_TF.double().T, (3, 0)), weight.double(), groups=64)).T
    assert out_TF.dtype == torch.bfloat16
    assert float((out_TF == exact_TF.bfloat16()).double().mean()) > 0.999


def test_only_states_that_others_begin_with_are_kept():
    scans = plan_recurrence(ROW, CPU).scans
    assert sum(len(scan.kept_S) for scan in scans) == 2
    assert [scan.state_D.tolist() for scan in scans if scan.state_D is not None] == [[0, 0], [1], [1]]
