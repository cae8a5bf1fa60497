"""What other people's servers and our own scoring processes answer: an outcome, or the failure of a name."""

import math

import pytest
from fuzzing import ANY_TEXT, VALUES, as_json, fuzz, spoilt
from hypothesis import strategies as st

from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.interfaces.server_address import Address
from titan_rl.environments.scoring.scoring_process import read_score
from titan_rl.environments.servers.http_session import read_object
from titan_rl.environments.servers.mapping import as_text, read_observation
from titan_rl.environments.servers.openenv_session import Refused, Session

STEP = {"type": "observation", "data": {"observation": {"board": ["x"], "n": 1}, "reward": 0.5, "done": False}}
ERROR = {"type": "error", "data": {"code": "NO", "message": "no", "errors": [{"loc": ["a", 1], "msg": "what"}]}}
SESSION = Session(Address("ws://127.0.0.1:1", "", "task.options"), 1.0, 1.0)
BOARD = read_observation("board", [])


def is_told(error: Exception) -> None:
    assert str(error).isprintable() and len(str(error)) < 2000


@fuzz(text=st.sampled_from([STEP, ERROR]).flatmap(spoilt).map(as_json) | VALUES.map(as_json) | ANY_TEXT)
def test_a_step_of_openenv_is_an_outcome_or_a_failure(text):
    try:
        outcome = SESSION._outcome("step", text)
        assert outcome.reward is None or math.isfinite(outcome.reward)
        as_text(outcome.observation).encode()
        BOARD(outcome.observation).encode()
    except (EnvironmentFailed, Refused) as error:
        is_told(error)


SCORE = {"status": "ok", "parts": {"right": 1.0, "short": 0}, "message": "", "turn_rewards": [1, 0.5]}


@fuzz(text=st.just(SCORE).flatmap(spoilt).map(as_json) | ANY_TEXT)
def test_whatever_a_scorer_says_is_a_finite_score_or_its_failure(text):
    score = read_score(text)
    assert math.isfinite(score.reward) and all(map(math.isfinite, [*score.parts.values(), *score.turn_rewards]))
    assert score.status != "infra_error" or not score.parts or text


@fuzz(text=VALUES.map(as_json) | ANY_TEXT)
def test_an_answer_is_an_object_or_a_failure(text):
    try:
        assert isinstance(read_object("a server", text), dict)
    except EnvironmentFailed as error:
        is_told(error)


@pytest.mark.parametrize("text", ['{"a": ' + "[" * 100_000, "9" * 5000])
def test_depth_and_length_are_no_answer(text):
    with pytest.raises(EnvironmentFailed):
        read_object("a server", text)
