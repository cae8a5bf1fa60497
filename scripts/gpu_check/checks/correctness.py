"""Log-probabilities against transformers', and gradients of every dtype and kernel against fp32 by the reference."""

from typing import Any

import torch

from gpu_check.bench import relative_error
from gpu_check.checks.deterministic import gradient
from gpu_check.fixtures import Fixtures
from gpu_check.sizes import CHECKED
from titan_rl.data.types import Row


def check(fixtures: Fixtures) -> dict[str, Any]:
    rows, exact, figures = fixtures.rows("135m", CHECKED), None, {}
    expected = _by_transformers(fixtures, rows)
    for dtype in ("float32", "bfloat16"):
        for kernel in ("reference",) if fixtures.rehearse else ("reference", "triton"):
            trainer = fixtures.trainer("135m", fixtures.config(dtype, kernel))
            flat = gradient(trainer, rows)
            exact = flat if exact is None else exact
            logprobs = trainer.learner.logprobs()
            logprob = torch.cat([torch.from_numpy(logprobs[index]) for index in range(len(rows))])
            agreement = float((logprob - expected).abs().exp().mean())
            for name, value in (("agreement", agreement), ("gradient_error", relative_error(flat, exact))):
                name = f"{'fp32' if dtype == 'float32' else 'bf16'}_{name}"
                figures[f"{name}_{kernel}"], figures[name] = value, max(figures.get(name, 0.0), value)
            fixtures.clear()
    return figures


@torch.no_grad()
def _by_transformers(fixtures: Fixtures, rows: list[Row]) -> torch.Tensor:
    """Of the trained tokens of all rows in order, in fp32, a sample at a time: nothing is packed or shared."""
    from transformers import AutoModelForCausalLM

    path = fixtures.model("135m")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = model.to(fixtures.device).eval()  # pyright: ignore[reportArgumentType] - transformers' wrapper loses `self`
    by_segment = []
    for row in rows:
        for segment in row.segments:
            places = [place for start, length in segment.prefix for place in range(start, start + length)]
            places += range(segment.start, segment.start + segment.length)
            tokens = torch.from_numpy(row.tokens_T[places]).to(fixtures.device)
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            by_segment.append({place: logprobs[index] for index, place in enumerate(places)})
    del model
    return torch.cat([_trained(row, of_row) for row, of_row in zip(rows, _by_row(rows, by_segment), strict=True)])


def _by_row(rows: list[Row], by_segment: list[dict]) -> list[list[dict]]:
    segments = iter(by_segment)
    return [[next(segments) for _ in row.segments] for row in rows]


def _trained(row: Row, segments: list[dict]) -> torch.Tensor:
    """Each place is in the segment that it belongs to; what a prefix says is the same in all that share it."""
    at = {place: logprobs for one in segments for place, logprobs in one.items()}
    pairs = zip(row.source_S.tolist(), row.target_S.tolist(), strict=True)
    return torch.stack([at[source][target] for source, target in pairs]).float().cpu()
