"""Answers of the Tinker API as protocol buffers.

Dimensions: T tokens of an example, of a prompt or of a sample.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from titan_rl.data.types import Completion
from titan_rl.service.wire.messages import FLOAT32, message

_STOP, _LENGTH = 0, 1
_EMPTY = -99999.0
"""Log-probability of a cell without a token."""


def pass_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Answer of a forward and backward pass. ``logprobs``: of each example, float32 [T]."""
    answer = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    batched = record.fields["logprobs"]
    batched.data = b"".join(array.astype("<f4").tobytes() for array in logprobs)
    batched.offsets = np.cumsum([0, *(4 * len(array) for array in logprobs)], dtype="<i8").tobytes()
    batched.dtype = FLOAT32
    return answer.SerializeToString()


def sample_answer(completions: Sequence[Completion]) -> bytes:
    """Answer of a request for samples."""
    answer = message("SampleResponse")()
    for completion in completions:
        answer.sequences.add(
            stop_reason=_LENGTH if completion.stop_reason == "length" else _STOP,
            tokens=completion.tokens.astype("<i4").tobytes(),
            logprobs=completion.logprobs.astype("<f4").tobytes(),
        )
    prompt = completions[0].prompt_logprobs
    if prompt is not None:
        answer.prompt_logprobs = prompt.logprobs[:, 0].astype("<f4").tobytes()
        if (width := prompt.logprobs.shape[1] - 1) > 0:
            top, likeliest = answer.topk_prompt_logprobs, prompt.logprobs[:, 1:]
            top.token_ids = prompt.tokens[:, 1:].astype("<i4").tobytes()
            top.logprobs = np.nan_to_num(likeliest, nan=_EMPTY).astype("<f4").tobytes()
            top.k, top.length = width, len(likeliest)
    return answer.SerializeToString()
