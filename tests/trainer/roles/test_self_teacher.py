"""What the self-teacher says of a sample's tokens is what the policy says of them behind the reprompt."""

import numpy as np
import pytest
import torch
from batches import batch_of
from parity import learner_of

from titan_rl.data.batches.packing import pack
from titan_rl.data.types import Provenance, Sample
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.roles.frozen import FrozenRole
from titan_rl.trainer.roles.self_teacher import SelfTeacher, teacher_rows

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, seed=1, hidden_size=64, num_layers=2)
    return learner_of(path)


def alone(learner, reprompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """Log-probabilities of an answer behind a prompt, by itself."""
    provenance = np.repeat([Provenance.TEMPLATE, Provenance.MODEL], [len(reprompt), len(answer)]).astype(np.int8)
    tokens = np.concatenate([reprompt, answer]).astype(np.int32)
    sample = Sample(tokens, provenance, np.zeros(len(tokens), np.float32), 0.0)
    batch = pack([[sample]], num_ranks=1, row_tokens=200, share_prefix=False, weigh=lambda samples: [1.0])
    return learner.policy.measure(learner.policy.fit(batch.rows[0]))[0][0].numpy()


@pytest.mark.parametrize("num_words", [0, 3])
def test_columns_are_those_of_each_sample_by_itself(learner, num_words):
    rows = learner.policy.fit(batch_of(5, reprompts=True).rows[0])
    found, num_with = SelfTeacher(learner.policy, num_words).find(rows), 0
    for row, columns in zip(rows, found, strict=True):
        assert set(columns) == set(learner_columns(num_words))
        for number, (begin, end) in enumerate(zip(row.branch_offsets, row.branch_offsets[1:], strict=False)):
            own = slice(int(begin), int(end))
            reprompt = row.reprompts[number] if row.reprompts else None
            assert (columns["teacher_mask_S"][own] == (reprompt is not None)).all()
            if reprompt is None:
                assert not columns["teacher_logprob_S"][own].any()
                continue
            num_with += 1
            wanted_S = alone(learner, reprompt, row.target_S[own])
            np.testing.assert_allclose(columns["teacher_logprob_S"][own], wanted_S, atol=1e-5)
    assert num_with == 9


def learner_columns(num_words: int) -> list[str]:
    words = ["teacher_words_SK", "teacher_word_logprob_SK"] if num_words else []
    return ["teacher_logprob_S", "teacher_mask_S", *words]


def test_the_policy_as_it_was_at_first_is_another_model(learner, tmp_path):
    make_tiny(tmp_path, seed=2, hidden_size=64, num_layers=2)
    first = learner_of(tmp_path)
    rows = learner.policy.fit(batch_of(5, reprompts=True).rows[0])
    found = SelfTeacher(learner.policy, 0, FrozenRole("reference_logprob_S", first.policy)).find(rows)
    [(row, columns), *_] = zip(rows, found, strict=True)
    number = next(number for number, reprompt in enumerate(row.reprompts) if reprompt is not None)
    own = slice(*map(int, row.branch_offsets[number : number + 2]))
    wanted_S = alone(first, row.reprompts[number], row.target_S[own])
    np.testing.assert_allclose(columns["teacher_logprob_S"][own], wanted_S, atol=1e-5)
    assert np.abs(wanted_S - alone(learner, row.reprompts[number], row.target_S[own])).max() > 1e-3


def test_samples_of_a_group_with_one_reprompt_read_it_once(learner):
    [row] = batch_of(5, row_tokens=400).rows[0]
    shared = np.arange(3, 33, dtype=np.int32)
    row.reprompts.extend([shared] * len(row.owners))
    [told] = teacher_rows([row], 1000)
    answers = sum(count - 1 for _, _, count in row.owners)  # the last token of each is a target alone
    assert len(told.tokens_T) == 3 * len(shared) + answers  # of three groups


def test_without_any_reprompt_each_rank_has_one_pass_all_the_same(learner):
    rows = learner.policy.fit(batch_of(5).rows[0])
    for columns in SelfTeacher(learner.policy, 0).find(rows):
        assert not any(values.any() for values in columns.values())
    assert torch.is_grad_enabled()
