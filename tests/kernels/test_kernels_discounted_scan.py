"""discounted_scan against loops over tokens, token after token."""

import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels.discounted_scan import advantages_and_returns, discounted_returns, last_tokens

LENGTHS = [(1,), (1, 1, 1), (16, 16), (3, 0, 40, 1, 17), (100,)]
"""Tokens of each segment; the interpreter's blocks hold 16."""
DISCOUNTS = [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0), (0.0, 0.5)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def token_after_token(rewards, values, lengths, discount, trace):
    """Returns, advantages and values plus advantages, by loops over Python's numbers."""
    results, stop = [[], [], []], len(rewards)
    for length in reversed(lengths):
        total, advantage, value = 0.0, 0.0, 0.0
        for token in range(stop - 1, stop - length - 1, -1):
            total = rewards[token] + discount * total
            advantage = rewards[token] + discount * value - values[token] + discount * trace * advantage
            value = values[token]
            for result, number in zip(results, (total, advantage, advantage + value), strict=True):
                result.append(number)
        stop -= length
    return [torch.tensor(result[::-1], dtype=torch.float64) for result in results]


def compare(implementation: str, lengths, discount: float, trace: float) -> None:
    torch.manual_seed(sum(lengths))
    num_tokens = sum(lengths)
    rewards_T, values_T = torch.randn(num_tokens), torch.randn(num_tokens)
    last_T = last_tokens(torch.tensor([0, *lengths]).cumsum(0), num_tokens)
    expected = token_after_token(rewards_T.tolist(), values_T.tolist(), lengths, discount, trace)
    found = [
        discounted_returns(rewards_T, last_T, discount, implementation=implementation),
        *advantages_and_returns(rewards_T, values_T, last_T, discount, trace, implementation=implementation),
    ]
    bound = 2**-20 * float(rewards_T.abs().sum() + 2 * values_T.abs().sum())
    for mine, exactly in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - exactly).abs().max() <= bound


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("discount", "trace"), DISCOUNTS)
def test_reference(lengths, discount, trace):
    compare("reference", lengths, discount, trace)


def compare_beside_what_is_not_finite(implementation: str, number: float) -> None:
    """The segment that holds it has it, up to there; those before and behind it do not."""
    lengths = (20, 30, 5)
    torch.manual_seed(3)
    rewards_T, values_T = torch.randn(55), torch.randn(55)
    last_T = last_tokens(torch.tensor([0, *lengths]).cumsum(0), 55)

    def scans():
        how = dict(implementation=implementation)
        returns_T = discounted_returns(rewards_T, last_T, 0.9, **how)
        return [returns_T, *advantages_and_returns(rewards_T, values_T, last_T, 0.9, 0.95, **how)]

    wanted = scans()
    rewards_T[40] = number
    for found_T, wanted_T in zip(scans(), wanted, strict=True):
        assert not found_T[20:41].isfinite().any()
        others = [*range(20), *range(41, 55)]
        assert torch.equal(found_T[others], wanted_T[others])


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_reference_beside_what_is_not_finite(number):
    compare_beside_what_is_not_finite("reference", number)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def check_triton_beside_what_is_not_finite(number):
    compare_beside_what_is_not_finite("triton", number)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("discount", "trace"), DISCOUNTS)
def check_triton(lengths, discount, trace):
    compare("triton", lengths, discount, trace)


def test_tokens_behind_the_last_end_are_a_segment():
    ones_T = torch.ones(4)
    returns_T = discounted_returns(ones_T, torch.tensor([False, True, False, False]), 1.0)
    assert returns_T.tolist() == [2.0, 1.0, 2.0, 1.0]


def check_negative_sums_travel_between_blocks():
    """The bits of a negative number fill the sign of the published word."""
    returns_T = discounted_returns(-torch.ones(40), torch.zeros(40, dtype=torch.bool), 1.0, implementation="triton")
    assert returns_T.tolist() == [-float(40 - token) for token in range(40)]


@pytest.mark.parametrize("implementation", ["reference"])
def test_no_tokens(implementation):
    no_tokens(implementation)


def check_no_tokens():
    no_tokens("triton")


def no_tokens(implementation: str) -> None:
    empty_T, last_T = torch.zeros(0), last_tokens(torch.tensor([0, 0]), 0)
    assert len(discounted_returns(empty_T, last_T, 1.0, implementation=implementation)) == 0
    assert len(advantages_and_returns(empty_T, empty_T, last_T, 1.0, 1.0, implementation=implementation)[0]) == 0


def test_triton_in_its_interpreter():
    run_interpreted(__file__)
