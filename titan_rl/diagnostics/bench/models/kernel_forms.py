"""One form of a computation in a process of its own, for kernels.py: its time and its memory.

    python -m titan_rl.diagnostics.bench.models.kernel_forms head FORM
    python -m titan_rl.diagnostics.bench.models.kernel_forms step FORM MODEL_DIRECTORY CHECKPOINTING

``head`` is the vocabulary projection alone, forward and backward; ``step`` a whole trainer step of a model. Forms are
``kernel`` (what the trainer does), ``again`` (the same without an expected gradient, so that the backward computes the
logits again), ``naive`` and ``by_hand`` (all logits, by autograd and by hand). Peak memory is the operating system's
count of resident pages (VmHWM, reset before the computation), which includes the memory of every library. Freed memory
is returned to the system first, so that the computation cannot reuse it unseen.

Dimensions: S tokens, D hidden size, V words.
"""

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_rl.kernels.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from titan_rl.data.types import Row

TOKENS, WORDS, HIDDEN = 4096, 49_152, 576
_DOCUMENT = 256
_REPEATS = 3


def _status_mib(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def measure(run: Callable[[], None]) -> dict[str, float]:
    """Peak MiB, in total and beyond the MiB before; and medians of time over later runs, which reuse that memory.

    Seconds are wall-clock; processor seconds are of all threads, so other processes do not count.
    """
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_mib("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    run()
    peak, seconds, processor_seconds = _status_mib("VmHWM"), [], []
    for _ in range(_REPEATS):
        start, processor_start = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        processor_seconds.append(time.process_time() - processor_start)
    return {
        "mib": peak - before,
        "peak_mib": peak,
        "seconds": statistics.median(seconds),
        "processor_seconds": statistics.median(processor_seconds),
    }


def _naive(hidden_SD: Tensor, weight_VD: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """The usual code: logits, log-softmax, the target's value; the entropy for the log."""
    logprob_SV = torch.log_softmax(F.linear(hidden_SD, weight_VD), -1)
    with torch.no_grad():
        entropy_S = -(logprob_SV.exp() * logprob_SV).sum(-1)
    return logprob_SV.gather(1, target_S[:, None])[:, 0], entropy_S


class _Softmax(torch.autograd.Function):
    """Logits, probabilities and the gradient take turns in the same memory."""

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
        logits_SV -= logits_SV.amax(-1, keepdim=True)
        target_logit_S, exp_SV = logits_SV.gather(1, target_S[:, None])[:, 0], logits_SV.exp()
        total_S = exp_SV.sum(-1)
        expected_S = logits_SV.mul_(exp_SV).sum(-1)
        ctx.save_for_backward(exp_SV.div_(total_S[:, None]), target_S)
        entropy_S = total_S.log() - expected_S / total_S
        ctx.mark_non_differentiable(entropy_S)
        return target_logit_S - total_S.log(), entropy_S

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        grad_S, _ = grad_outputs
        grad_SV, target_S = ctx.saved_tensors
        grad_SV.mul_(-grad_S[:, None]).scatter_add_(1, target_S[:, None], grad_S[:, None])
        return grad_SV, None


def _by_hand(hidden_SD: Tensor, weight_VD: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """All logits, in as little memory and as few passes as torch allows; for one backward only."""
    return _Softmax.apply(F.linear(hidden_SD, weight_VD), target_S)


def _expecting(hidden_SD: Tensor, weight_VD: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """With the gradient of the log-probabilities' sum given, as the trainer's head is given that of its loss."""
    return linear_logprob(
        hidden_SD, weight_VD, target_S, expected_grad=lambda logprob_S, tokens: torch.ones_like(logprob_S)
    )


Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Log-probabilities and entropies [S] of hidden states [S, D], a weight [V, D] and targets [S]."""
HEADS: dict[str, Head] = {"naive": _naive, "by_hand": _by_hand, "kernel": _expecting, "again": linear_logprob}


def head(form: str) -> Callable[[], None]:
    torch.manual_seed(0)
    hidden_SD = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight_VD = torch.randn(WORDS, HIDDEN).mul_(0.1).requires_grad_()
    target_S = torch.randint(WORDS, (TOKENS,))

    def run() -> None:
        logprob_S, _ = HEADS[form](hidden_SD, weight_VD, target_S)
        torch.autograd.grad(logprob_S.sum(), (hidden_SD, weight_VD))

    return run


def step(form: str, path: str, checkpointing: str) -> Callable[[], None]:
    """On one row of whole documents, every token of which is trained; bfloat16, as configs/smollm2.toml trains."""
    import torch.distributed as dist

    from titan_rl.config.load import load_config
    from titan_rl.data.nonfinite import NonfiniteBatch
    from titan_rl.trainer.step.learner import Learner
    from titan_rl.trainer.titan_config import build_titan

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    training = {"seq_len": TOKENS, "mixed_precision_param": "bfloat16"}
    tables = {"model": {"path": path}, "task": {"style": "chat"}, "training": training}
    tables |= {"activation_checkpoint": {"mode": checkpointing}}
    config = load_config(None, tables | {"parallelism": {"fsdp_reshard_after_forward": "never"}})
    learner = Learner(config, build_titan(config), path)
    output_head = learner.model_parts[0].lm_head
    assert isinstance(output_head, torch.nn.Module)
    rows = _documents(len(_weight(output_head)))
    if form != "kernel":
        _put_logits_in_full(output_head, HEADS[form])

    def run() -> None:
        assert not isinstance(learner.train(rows, True), NonfiniteBatch)

    run()  # the first step creates the optimizer's state
    return run


def _documents(num_words: int) -> "list[Row]":
    import numpy as np

    from titan_rl.data.batches.packing import pack, token_weights
    from titan_rl.data.types import Provenance, Sample

    random = np.random.default_rng(0)
    provenance = np.array([Provenance.TEMPLATE] + [Provenance.MODEL] * _DOCUMENT, np.int8)
    samples = [
        Sample(random.integers(0, num_words, _DOCUMENT + 1), provenance, np.full(_DOCUMENT + 1, -9.0, np.float32), 1.0)
        for _ in range(TOKENS // _DOCUMENT)
    ]
    batch = pack(
        [[sample] for sample in samples],
        num_ranks=1,
        row_tokens=TOKENS,
        share_prefix=False,
        weigh=lambda samples: token_weights(samples, "token", _DOCUMENT),
    )
    [[row]] = batch.rows
    return [row]


def _put_logits_in_full(output_head: torch.nn.Module, statistics: Head) -> None:
    """In the module's forward, for which FSDP gathers the weight, as for the trainer's own."""

    def forward(hidden_SD: Tensor, target_S: Tensor, **_: Any) -> Tensor:
        return torch.stack(statistics(hidden_SD.float(), _weight(output_head).float(), target_S))

    output_head.forward = forward


def _weight(output_head: torch.nn.Module) -> Tensor:
    """Its weight [V, D] at this moment: FSDP has another one in its place during a forward."""
    weight = output_head.weight
    assert isinstance(weight, Tensor)
    return weight


def main(what: str, form: str, *arguments: str) -> None:
    print(json.dumps(measure({"head": head, "step": step}[what](form, *arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
