"""What a loader does to stand-ins is told as boxes, or refused."""

import pytest
import torch

from titan_rl.mesh.channel.plan import Box, PlanError


@pytest.fixture(scope="module")
def recording():
    from titan_rl.generator.weights import vllm_recording

    return vllm_recording


def whole() -> torch.Tensor:
    return torch.empty(8, 6, device="meta")


@pytest.mark.parametrize(
    "view, box, places",
    [
        (lambda t: t, Box((0, 0), (8, 6)), [0, 1]),
        (lambda t: t.narrow(0, 2, 3), Box((2, 0), (3, 6)), [0, 1]),
        (lambda t: t[2:5, 1:4], Box((2, 1), (3, 3)), [0, 1]),
        (lambda t: t.t()[1:4], Box((0, 1), (8, 3)), [1, 0]),
        (lambda t: t[3], Box((3, 0), (1, 6)), [None, 0]),
        (lambda t: t[:, 4], Box((0, 4), (8, 1)), [0, None]),
        (lambda t: t[3:4, 2:5], Box((3, 2), (1, 3)), [None, 1]),
    ],
)
def test_views_are_boxes(recording, view, box, places):
    assert recording.box_of_view("w", whole(), view(whole())) == (box, places)


@pytest.mark.parametrize("view", [lambda t: t.flatten()[3:9], lambda t: t[::2], lambda t: t.as_strided((8,), (7,))])
def test_what_is_no_box_is_refused(recording, view):
    with pytest.raises(PlanError, match="not a box"):
        recording.box_of_view("w", whole(), view(whole()))


class Model(torch.nn.Module):
    """Loads q and k into one fused parameter, and v as it is told to."""

    def __init__(self, load_v):
        super().__init__()
        self.fused = torch.nn.Module()
        self.fused.weight = torch.nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16, device="meta"))
        self.load_v = load_v

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "v":
                self.load_v(self.fused.weight.data, tensor)
            else:
                self.fused.weight.data.narrow(0, 2 * (name == "k"), 2).copy_(tensor[4:6])


def test_fused_and_cut_parameters_are_followed(recording):
    model = Model(lambda into, tensor: None)
    recorded = recording.record_on_meta(model, [("q", (8, 6)), ("k", (8, 6)), ("v", (8, 6))])
    assert [(r.name, r.box, r.dtype) for r in recorded] == [
        ("q", Box((4, 0), (2, 6)), "bfloat16"),
        ("k", Box((4, 0), (2, 6)), "bfloat16"),
    ]
    assert [(r.target.module, r.target.parameter, r.target.offset) for r in recorded] == [
        ("fused", "weight", 0),
        ("fused", "weight", 12),
    ]


def test_a_parameter_in_memory_is_left_as_it_is(recording):
    """vLLM keeps biases where they are, while it puts other parameters aside."""
    model = Model(lambda into, tensor: None)
    model.fused.weight = torch.nn.Parameter(torch.ones(4, 6))
    recorded = recording.record_on_meta(model, [("q", (8, 6)), ("k", (8, 6))])
    assert [r.target.offset for r in recorded] == [0, 12] and bool((model.fused.weight == 1).all())


def test_a_copy_laid_out_anew_is_followed(recording):
    model = Model(lambda into, tensor: into.copy_(tensor.t().contiguous()[:4]))
    [recorded] = recording.record_on_meta(model, [("v", (6, 8))])
    assert recorded.box == Box((0, 0), (6, 4)) and recorded.target.stride == (1, 6)


def test_what_a_rank_zeroes_is_not_asked_for(recording):
    """GPT-OSS's output biases, which one tensor-parallel rank adds."""
    assert recording.record_on_meta(Model(lambda into, tensor: into.copy_(tensor.zero_()[:4])), [("v", (8, 6))]) == []


@pytest.mark.parametrize(
    "load_v, word",
    [
        (lambda into, tensor: into.copy_(tensor[:4] * 2), "computes"),
        (lambda into, tensor: into.copy_(tensor[:4].zero_()), "changes"),
        (lambda into, tensor: into.copy_(tensor.mul_(2)[:4]), "changes"),
        (lambda into, tensor: into.copy_(tensor[0]), "broadcasts"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused(recording, load_v, word):
    with pytest.raises(PlanError, match=word):
        recording.record_on_meta(Model(load_v), [("v", (8, 6))])
