"""One form of a computation in a process of its own, for bench/kernels.py: what it takes in time and in memory.

    python -m titan_rl.bench.kernel_forms head FORM
    python -m titan_rl.bench.kernel_forms step FORM MODEL_DIRECTORY CHECKPOINTING

``head`` is the vocabulary projection alone, forward and backward; ``step`` a whole trainer step of a model. Peak
memory is the kernel's count of resident pages (VmHWM, set back before the computation): it sees all that was touched,
by whatever library. Memory that was freed before is given back first, so that nothing hides in it.

Dimensions: S tokens, D hidden size, V words.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.token_statistics import token_statistics

TOKENS, WORDS, HIDDEN = 4096, 49_152, 576
_DOCUMENT = 256
_REPEATS = 2


def _status_mib(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def measure(run: Callable[[], None]) -> dict[str, float | list[float]]:
    """MiB before and at most, and the seconds of later runs, whose memory is there already."""
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_mib("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    run()
    peak, seconds = _status_mib("VmHWM"), []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return {"before_mib": before, "peak_mib": peak, "seconds": seconds}


def _plain(hidden_SD, weight_VD, target_S):
    """What anyone writes: logits, log-softmax, the target's; the entropy for the log."""
    logprob_SV = torch.log_softmax(F.linear(hidden_SD, weight_VD), -1)
    with torch.no_grad():
        entropy_S = -(logprob_SV.exp() * logprob_SV).sum(-1)
    return logprob_SV.gather(1, target_S[:, None])[:, 0], entropy_S


def _in_full(hidden_SD, weight_VD, target_S):
    """Logits in full with the learner's own softmax, which keeps one buffer for its backward."""
    statistics = token_statistics(F.linear(hidden_SD, weight_VD), target_S, 1.0)
    return statistics.logprob_S, statistics.entropy_S


HEADS = {"plain": _plain, "in_full": _in_full, "kernel": linear_logprob}


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
    import numpy as np
    import torch.distributed as dist

    from titan_rl.config import AlgorithmConfig, load_config
    from titan_rl.learner import Learner, loss_and_sums
    from titan_rl.model.attention import plan_attention
    from titan_rl.packing import pack, token_weights
    from titan_rl.titan_config import build_titan
    from titan_rl.token_statistics import TokenStatistics
    from titan_rl.types import Provenance, Sample

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = {"seq_len": TOKENS, "mixed_precision_param": "bfloat16"}
    tables = {"model": {"path": path}, "task": {"style": "chat"}, "training": training}
    tables |= {"activation_checkpoint": {"mode": checkpointing}}
    config = load_config(None, tables | {"parallelism": {"fsdp_reshard_after_forward": "never"}})
    learner = Learner(config, build_titan(config), path)
    random, words = np.random.default_rng(0), learner.spec.model.vocab_size
    provenance = np.array([Provenance.TEMPLATE] + [Provenance.MODEL] * _DOCUMENT, np.int8)
    samples = [
        Sample(random.integers(0, words, _DOCUMENT + 1), provenance, np.full(_DOCUMENT + 1, -9.0, np.float32), 1.0)
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
    names = ("tokens_T", "positions_T", "source_S", "target_S", "logprob_S", "advantage_S", "weight_S")
    columns = {name: torch.from_numpy(getattr(row, name)) for name in names}
    model, settings = learner.model_parts[0], AlgorithmConfig()
    output_head = model.lm_head

    def logits(hidden_SD):
        return F.linear(hidden_SD.float(), output_head.weight.float())

    def statistics(hidden_SD):
        logprob_S, entropy_S = linear_logprob(hidden_SD, output_head.weight, columns["target_S"])
        return torch.stack((logprob_S, entropy_S.detach()))

    # inside the module's forward, where FSDP has the weight gathered
    output_head.forward = statistics if form == "kernel" else logits

    def run() -> None:
        output = model(
            columns["tokens_T"][None],
            positions=columns["positions_T"][None],
            attention_masks=plan_attention(row.segments, len(row.tokens_T), output_head.weight.device),
            logit_index_S=columns["source_S"],
        )
        found = TokenStatistics(*output) if form == "kernel" else token_statistics(output, columns["target_S"], 1.0)
        loss, _ = loss_and_sums(found, columns, settings)
        del output, found
        loss.backward()
        learner.optimizer_step(has_signal=True)

    run()  # the optimizer's state is made in the first step
    return run


def main(what: str, form: str, *arguments: str) -> None:
    print(json.dumps(measure({"head": head, "step": step}[what](form, *arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
