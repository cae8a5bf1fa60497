"""Log-probabilities against transformers', and gradients of every dtype and kernel against fp32 by the reference."""

from typing import Any

import torch

from gpu_check.bench import relative_error
from gpu_check.checks.deterministic import gradient
from gpu_check.fixtures import House
from gpu_check.sizes import CHECKED
from titan_rl.data.types import Row


def check(house: House) -> dict[str, Any]:
    rows, exact, found = house.rows("135m", CHECKED), None, {}
    wanted = _by_transformers(house, rows)
    for dtype in ("float32", "bfloat16"):
        for kernel in ("reference",) if house.rehearse else ("reference", "triton"):
            trainer = house.trainer("135m", house.config(dtype, kernel))
            flat = gradient(trainer, rows)
            exact = flat if exact is None else exact
            logprobs = trainer.learner.logprobs()
            logprob = torch.cat([torch.from_numpy(logprobs[index]) for index in range(len(rows))])
            agreement = float((logprob - wanted).abs().exp().mean())
            for name, value in (("agreement", agreement), ("gradient_error", relative_error(flat, exact))):
                name = f"{'fp32' if dtype == 'float32' else 'bf16'}_{name}"
                found[f"{name}_{kernel}"], found[name] = value, max(found.get(name, 0.0), value)
            house.clear()
    return found


@torch.no_grad()
def _by_transformers(house: House, rows: list[Row]) -> torch.Tensor:
    """Of the trained tokens of all rows in order, in fp32, a sample at a time: nothing is packed or shared."""
    from transformers import AutoModelForCausalLM

    path = house.model("135m")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = model.to(house.device).eval()  # pyright: ignore[reportArgumentType] - transformers' wrapper loses `self`
    found = []
    for row in rows:
        for segment in row.segments:
            places = [place for start, length in segment.prefix for place in range(start, start + length)]
            places += range(segment.start, segment.start + segment.length)
            tokens = torch.from_numpy(row.tokens_T[places]).to(house.device)
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            found.append({place: logprobs[index] for index, place in enumerate(places)})
    del model
    return torch.cat([_trained(row, found_of) for row, found_of in zip(rows, _by_row(rows, found), strict=True)])


def _by_row(rows: list[Row], found: list[dict]) -> list[list[dict]]:
    segments = iter(found)
    return [[next(segments) for _ in row.segments] for row in rows]


def _trained(row: Row, found: list[dict]) -> torch.Tensor:
    """Each place is in the segment that it belongs to; what a prefix says is the same in all that share it."""
    at = {place: logprobs for one in found for place, logprobs in one.items()}
    pairs = zip(row.source_S.tolist(), row.target_S.tolist(), strict=True)
    return torch.stack([at[source][target] for source, target in pairs]).float().cpu()
