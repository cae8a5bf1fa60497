"""vLLM's sampler of drafts on a CPU: exact in distribution, whatever is drafted and however wrong it is."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from titan_rl.compat.vllm import speculation
from titan_rl.compat.vllm.speculation import (
    DraftRecorder,
    expand_batch_to_tokens,
    replace_functions,
    sample_draft_tokens,
)

SAMPLES, WORDS, BONUS = 100_000, 12, 9
TEMPERATURES = (0.5, 1.5)
SURELY = 1 - 1e-6


@pytest.fixture
def on_cpu(monkeypatch):
    """As in an engine on a CPU: vLLM's kernels in C++, and drafts as the recorder has them checked."""
    current_platform.import_kernels()
    for name in ("rejection_random_sample", "expand"):
        owner, kernel = getattr(rejection_sampler, f"_{name}"), getattr(cpu_triton_utils, f"_{name}_kernel_impl")
        monkeypatch.setattr(owner, "kernel", KernelOverride(owner.kernel, kernel))
        owner.__dict__.pop("_kernel_arg_names", None)
    replaced = (
        (rejection_sampler, "expand_batch_to_tokens"),
        (rejection_sampler, "sample_recovered_tokens"),
        (RejectionSampler, "forward"),
        (llm_base_proposer, "compute_probs_and_sample_next_token"),
        (llm_base_proposer.SpecDecodeBaseProposer, "_maybe_share_lm_head"),
        (speculation.gpu_eagle, "_should_share"),
    )
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    replace_functions(on_cpu=True)
    return torch.manual_seed(7)


def settings_of(temperatures: tuple[float, ...], generators: dict[int, torch.Generator]) -> SimpleNamespace:
    """Of as many requests as there are temperatures."""
    is_greedy = [temperature == 0 for temperature in temperatures]
    return SimpleNamespace(
        all_greedy=all(is_greedy),
        all_random=not any(is_greedy),
        temperature=torch.tensor(temperatures),
        generators=generators,
        top_k=None,
        top_p=None,
    )


EACH = settings_of(TEMPERATURES * (SAMPLES // 2), {})
"""Every other request has the other temperature."""


def checked(logits: torch.Tensor, drafted: torch.Tensor, draft_probs: torch.Tensor | None = None) -> torch.Tensor:
    """Answers [SAMPLES, 3] whose first two tokens were drafted [SAMPLES, 2], with such probabilities."""
    counted = torch.arange(2, 2 * SAMPLES + 1, 2, dtype=torch.int32)
    constrained = rejection_sampler.apply_sampling_constraints(logits.repeat(SAMPLES, 1), counted, EACH)
    bonus = torch.full((SAMPLES, 1), BONUS, dtype=torch.int32)
    numbers, tokens = [2] * SAMPLES, drafted.flatten().int()
    return rejection_sampler.rejection_sample(tokens, numbers, 2, counted, draft_probs, constrained, bonus, EACH)


def unlikeliness(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square of counted tokens, as the share of samples that would be nearer to these probabilities."""
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens.long(), minlength=WORDS)
    chi_square = ((counts - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammainc(torch.tensor((WORDS - 1) / 2).double(), chi_square / 2))


@pytest.mark.parametrize("drafts", ["likeliest", "least likely"])
def test_drafted_answers_have_the_models_distribution(on_cpu, drafts):
    """Fails with vLLM's own function, which checks each draft at whatever temperature was in memory."""
    logits = torch.randn(2, WORDS, generator=torch.Generator().manual_seed(0))
    first, second = (logits.argmax(-1) if drafts == "likeliest" else logits.argmin(-1)).tolist()
    answers = checked(logits, torch.tensor([[first, second]]).repeat(SAMPLES, 1))
    for place, temperature in enumerate(TEMPERATURES):
        own = answers[place::2]
        probabilities = (logits / temperature).softmax(-1)
        went_on = own[own[:, 0] == first]
        assert unlikeliness(own[:, 0], probabilities[0]) < SURELY
        assert unlikeliness(went_on[:, 1], probabilities[1]) < SURELY
        assert (went_on[:, 2] == BONUS).equal(went_on[:, 1] == second), "a token more where both were accepted"
        assert (own[own[:, 0] != first][:, 1:] == -1).all(), "and none behind one that was not"


@pytest.mark.parametrize("broken", [None, float("nan"), float("inf")])
def test_answers_that_another_model_drafted_have_the_models_distribution(on_cpu, broken):
    """``broken``: a value of the drafts' logits, after which any token is as likely; answers must not depend on it."""
    logits, others = torch.randn(2, 2, WORDS, generator=torch.Generator().manual_seed(0))
    if broken is not None:
        others[:] = 0
        others[:, 3] = broken
    drafts = [llm_base_proposer.compute_probs_and_sample_next_token(row.repeat(SAMPLES, 1), EACH) for row in others]
    tokens, probs = (torch.stack(each, 1) for each in zip(*drafts, strict=True))
    answers = checked(logits, tokens, probs.flatten(0, 1))
    for place, temperature in enumerate(TEMPERATURES):
        own, drafted = answers[place::2], tokens[place::2]
        probabilities = (logits / temperature).softmax(-1)
        of_draft = (others.nan_to_num(0, 0) / temperature).softmax(-1)
        assert unlikeliness(drafted[:, 0], of_draft[0]) < SURELY
        assert unlikeliness(own[:, 0], probabilities[0]) < SURELY
        accepted = own[:, 1] >= 0
        assert unlikeliness(own[accepted, 1], probabilities[1]) < SURELY
        share = float(torch.minimum(probabilities[0], of_draft[0]).sum())
        assert float(accepted.double().mean()) == pytest.approx(share, abs=0.02), "as often as the models agree"


def test_drafts_depend_on_a_requests_seed_alone():
    """Neither on this process's randomness nor on who else is in the batch; greedy requests get the likeliest."""
    logits = torch.randn(3, WORDS, generator=torch.Generator().manual_seed(0))

    def drafted(rows: list[int], temperatures: tuple[float, ...]) -> list[int]:
        generators = {
            place: torch.Generator().manual_seed(row) for place, row in enumerate(rows) if temperatures[place]
        }
        chosen = [sample_draft_tokens(logits[rows], settings_of(temperatures, generators))[0] for _ in range(20)]
        return torch.stack(chosen, 1).tolist()

    first, greedy, last = drafted([0, 1, 2], (1.0, 0.0, 1.0))
    assert drafted([2, 0], (1.0, 1.0)) == [last, first]
    assert len(set(first)) > 2 and set(greedy) == {int(logits[1].argmax())}
    assert drafted([1], (0.0,)) == [greedy]


def test_a_request_without_drafts_has_no_values():
    values, counted = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(values, counted, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert expand_batch_to_tokens(values, torch.tensor([1, 2, 3]), 3, 0, 1).tolist() == [0.5, 1.0, 2.0]


def metadata_of(numbers: list[int]) -> SpecDecodeMetadata:
    """Of requests with so many drafts each, whose tokens are zeros."""
    return SpecDecodeMetadata.make_dummy([[0] * number for number in numbers], torch.device("cpu"))


def test_a_step_without_drafts_is_sampled_as_without_speculation(on_cpu, monkeypatch):
    """Else logits would be copied and their log-probabilities computed twice, for which a step takes a third longer."""
    calls = []
    monkeypatch.setattr(speculation, "_check_drafts", lambda *_: "checked")

    class Recorded(Sampler):
        def forward(self, logits, sampling_metadata, predict_bonus_token=False, logprobs_mode_override=None):
            calls.append((len(logits), predict_bonus_token))
            return "sampled"

    checker = RejectionSampler(Recorded("raw_logprobs"))
    assert checker(metadata_of([0, 0, 0]), None, torch.zeros(3, WORDS), None) == "sampled"
    assert calls == [(3, False)]
    assert checker(metadata_of([0, 2, 0]), None, torch.zeros(5, WORDS), None) == "checked"


def step(scheduled: dict[str, int], drafts: dict[str, list[int]], limit: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts, num_spec_tokens_to_schedule=limit
    )


def test_what_became_of_drafts_is_counted():
    """The drafts of a step were made at the end of the one before, by what was set then. An answer ends at a 0."""

    def update(step, output):
        ended = [tokens[: tokens.index(0) + 1] if 0 in tokens else tokens for tokens in output.sampled_token_ids]
        named = zip(output.req_ids, ended, strict=True)
        outputs = [SimpleNamespace(request_id=name, new_token_ids=tokens) for name, tokens in named]
        return {0: SimpleNamespace(outputs=outputs)}

    scheduler = SimpleNamespace(dynamic_sd_lookup=[0, 3, 3, 3, 3], update_from_output=update)
    recorder = DraftRecorder(scheduler)
    prompts = step({"a": 5, "b": 1}, {}, 3)
    given = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[1], [2]])
    assert [each.request_id for each in scheduler.update_from_output(prompts, given)[0].outputs] == ["a", "b"]
    decode = step({"a": 4, "b": 1}, {"a": [7, 8, 9]}, 0)
    scheduler.update_from_output(decode, SimpleNamespace(req_ids=["b", "a"], sampled_token_ids=[[4], [7, 8, 1]]))
    read, decoded = recorder.take()
    assert (read.batch, read.limit, read.num_drafted, read.num_tokens, read.is_decode) == (2, 0, 0, 2, False)
    assert (decoded.limit, decoded.num_drafted, decoded.num_accepted, decoded.num_tokens) == (3, 3, 2, 4)
    assert decoded.is_decode and recorder.take() == []
    ends = SimpleNamespace(req_ids=["a", "b"], sampled_token_ids=[[7, 0, 9, 5], [4]])
    scheduler.update_from_output(step({"a": 4, "b": 1}, {"a": [7, 0, 9]}, 0), ends)
    [ended] = recorder.take()
    assert (ended.num_drafted, ended.num_accepted, ended.num_tokens) == (3, 2, 3), "nothing behind its end"
    recorder.limit(range(2, 8), 0)
    assert scheduler.dynamic_sd_lookup == [0, 3, 0, 0, 0]
