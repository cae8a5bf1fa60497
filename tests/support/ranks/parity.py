"""A learner's logits against transformers', on whole documents and on packed rows."""

import numpy as np
import torch

from titan_rl.config.load import load_config
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.types import Provenance, Row, Sample, Segment
from titan_rl.models.layers.attention import plan_attention
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

TOLERANCE = 1e-4
"""Of the largest difference, as a part of the largest logit."""


def learner_of(path, **tables) -> Learner:
    config = load_config(None, tables)
    return Learner(config, build_titan(config), path)


@torch.no_grad()
def reference_logits(reference, tokens: np.ndarray) -> torch.Tensor:
    return reference(torch.from_numpy(tokens).long()[None]).logits[0]


@torch.no_grad()
def row_logits(learner: Learner, row: Row, **statistics) -> torch.Tensor:
    """Logits at the row's source positions, or what the head says of them (``statistics``: its arguments)."""
    return learner.model_parts[0](
        torch.from_numpy(row.tokens_T)[None],
        positions=torch.from_numpy(row.positions_T)[None],
        attention_masks=plan_attention(row.segments, len(row.tokens_T), torch.device("cpu")),
        logit_index_S=torch.from_numpy(row.source_S),
        **statistics,
    )


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())


def assert_documents_agree(learner: Learner, reference, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    for length in lengths:
        tokens = rng.integers(0, reference.config.vocab_size, length)
        places = np.arange(length)
        nothing = np.zeros(0, np.float32)
        row = Row(tokens, places, [Segment(0, length)], places, places, nothing, nothing, nothing)
        assert distance(row_logits(learner, row), reference_logits(reference, tokens)) < TOLERANCE


def assert_packed_rows_agree(learner: Learner, reference, share_prefix: bool) -> None:
    """Several prompts of different lengths to a row; ``advantage`` serves as the name of a sample."""
    rng, samples = np.random.default_rng(1), []
    groups = []
    for prompt_length in (1, 5, 17):
        prompt = rng.integers(0, reference.config.vocab_size, prompt_length)
        groups.append([])
        for length in (1, 2, 9, 16):
            tokens = np.concatenate([prompt, rng.integers(0, reference.config.vocab_size, length)])
            provenance = np.array([Provenance.TEMPLATE] * prompt_length + [Provenance.MODEL] * length, np.int8)
            samples.append(Sample(tokens, provenance, np.zeros(len(tokens), np.float32), float(len(samples))))
            groups[-1].append(samples[-1])
    weigh = lambda part: token_weights(part, "token", 16)  # noqa: E731
    batch = pack(groups, num_ranks=1, row_tokens=70, share_prefix=share_prefix, weigh=weigh)
    assert 1 < len(batch.rows[0]) < len(groups) * 2
    seen = set()
    for row in batch.rows[0]:
        logits = row_logits(learner, row)
        for name in set(row.advantage_S.tolist()):
            sample = samples[int(name)]
            first = int(sample.provenance.argmax())
            wanted = reference_logits(reference, sample.tokens)[first - 1 : -1]
            assert distance(logits[torch.from_numpy(row.advantage_S == name)], wanted) < TOLERANCE
            seen.add(int(name))
    assert seen == set(range(len(samples)))
