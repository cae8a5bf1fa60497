"""A run directory as a long run would have left it, without the run: what ``bench watch`` looks at."""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import MetricsLog
from titan_rl.records.run_directory.events import EventLog
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import SCHEMA as ROLLOUTS
from titan_rl.records.steps.step_names import step_name
from titan_rl.records.steps.trace import write_trace
from titan_rl.records.steps.trained import SCHEMA as TRAINED

PROMPTS, SAMPLES = 16, 8
_WORDS = ["the", "sum", "of", "these", "is", "so", "we", "add", "carry one", "check", "7", "12", "31", "=", "answer"]


def make_run(root: Path, num_rollouts: int, seed: int = 0) -> RunDir:
    """Run directory with so many rollouts, PROMPTS x SAMPLES a step, and metrics, trace and ledger of each step."""
    run_dir, rng = RunDir(root), np.random.default_rng(seed)
    for folder in (run_dir.rollouts, run_dir.trained, run_dir.logs):
        folder.mkdir(parents=True)
    run_dir.config.write_text(json.dumps({"model": {"path": "tiny"}, "task": {"name": "made"}}))
    ledger, metrics, events = Ledger(run_dir.ledger), MetricsLog(root), EventLog(root)
    steps, start = -(-num_rollouts // (PROMPTS * SAMPLES)), time.time() - 3600
    for step in range(1, steps + 1):
        statuses = _write_step(run_dir, step, steps, rng)
        names = [_prompt(step, number) for number in range(PROMPTS)]
        ledger.issue(names, SAMPLES)
        whys = np.array([None if status == "ok" else status for status in statuses.tolist()], object)
        ledger.settle(dict(zip(names, whys.reshape(PROMPTS, SAMPLES).tolist(), strict=True)), step)
        metrics.write(_record(step, steps, rng))
        write_trace(root, step, _spans(start + 2.0 * step, rng))
    for name, pid in (("trainer rank 0", 11), ("generator 0", 12), ("generator 1", 13), ("verifier 0", 14)):
        events.write("started", name=name, pid=pid)
    events.write("died", name="generator 1", pid=13, why="was killed by signal SIGKILL")
    events.write("generator_serves", number=1)
    message = "the reward went from 0.412 to 0.655, the grader from 0.400 to 0.402"
    events.write("alarm", name="reward_gap", step=steps // 2, says=message)
    for log in (ledger, metrics, events):
        log.close()
    run_dir.summary.write_text(json.dumps({"why_ended": "completed", "steps_done": steps}))
    return run_dir


def _prompt(step: int, number: int) -> str:
    return f"train/{(step - 1) * PROMPTS + number:07d}"


def _write_step(run_dir: RunDir, step: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    """The statuses of its samples."""
    count, prompt = PROMPTS * SAMPLES, 12
    lengths = rng.integers(8, 100, count)
    offsets = np.concatenate([[0], np.cumsum(lengths + prompt)])
    of_model = np.concatenate([np.repeat([False, True], (prompt, length)) for length in lengths])
    logprobs = np.where(of_model, -rng.exponential(0.7, len(of_model)), 0).astype(np.float32)
    statuses = rng.choice(["ok", "truncated", "timeout", "infra_error"], count, p=[0.93, 0.05, 0.015, 0.005])
    rewards = (rng.random(count) < 0.2 + 0.6 * step / steps).astype(float)
    texts = [" ".join(rng.choice(_WORDS, 14)) for _ in range(count)]
    names = [_prompt(step, number) for number in range(PROMPTS) for _ in range(SAMPLES)]
    samples = np.tile(np.arange(SAMPLES), PROMPTS)
    stale = rng.integers(0, 3, count)

    def lists(values: np.ndarray, kind: pa.DataType, ends: np.ndarray = offsets) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, kind))

    versions = np.where(of_model, step - 1 - np.repeat(stale, lengths + prompt), -1)
    columns = {
        "prompt_id": names,
        "sample": samples,
        "tokens": lists(rng.integers(1, 20, len(of_model)), pa.int32()),
        "provenance": lists(of_model.astype(np.int8), pa.int8()),
        "logprobs": lists(logprobs, pa.float32()),
        "versions": lists(versions, pa.int32()),
        "turn_start": [[prompt]] * count,
        "turn_stop": [[prompt + int(length)] for length in lengths],
        "stop_reason": [["stop"]] * count,
        "calls": [[[]]] * count,
        "status": statuses,
        "reward": rewards,
        "reward_parts": [[("task", reward), ("format", 1.0)] for reward in rewards],
        "text": texts,
        "question": [f"What is {number * 7} + {number * 5}?" for number in range(count)],
        "expected": [str(number * 12) for number in range(count)],
        "task": rng.choice(["sums", "gcd"], count),
    }
    nothing = {name: [None] * count for name in ROLLOUTS.names if name not in columns}
    pq.write_table(pa.table(columns | nothing, ROLLOUTS), run_dir.rollouts / f"{step_name(step)}.parquet")
    trainer = (logprobs[of_model] + rng.normal(0, 0.01, lengths.sum())).astype(np.float32)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    advantages = rewards - rewards.mean()
    trained_columns = {
        "prompt_id": names,
        "sample": samples,
        "trainer_logprobs": lists(trainer, pa.float32(), ends),
        "advantages": lists(np.repeat(advantages, lengths), pa.float32(), ends),
        "update": np.zeros(count, np.int32),
        "disagreement": np.add.reduceat(np.abs(trainer - logprobs[of_model]), ends[:-1]) / lengths,
        "advantage": advantages,
    }
    pq.write_table(pa.table(trained_columns, TRAINED), run_dir.trained / f"{step_name(step)}.parquet")
    return statuses


def _record(step: int, steps: int, rng: np.random.Generator) -> dict[str, float]:
    done = step / steps
    seconds = {"generate": 0.8, "forward_backward": 0.5, "weight_sync": 0.04, "step": 1.5}
    return {
        "step": step,
        "reward": 0.2 + 0.6 * done + rng.normal(0, 0.03),
        "reward_part/task": 0.2 + 0.6 * done + rng.normal(0, 0.03),
        "reward_part/format": 1.0,
        "accuracy": 0.2 + 0.6 * done + rng.normal(0, 0.03),
        "loss": rng.normal(0, 0.01),
        "grad_norm": 1.0 + rng.exponential(0.3),
        "learning_rate": 1e-6 * min(1.0, step / 10),
        "clip_fraction": abs(rng.normal(0.01, 0.003)),
        "response_length": 40 + 20 * done + rng.normal(0, 1),
        "truncated": abs(rng.normal(0.05, 0.01)),
        "staleness_max": float(rng.integers(0, 3)),
        "staleness_mean": rng.random(),
        "tokens_per_second_generate": rng.normal(9000, 300),
        "tokens_per_second_step": rng.normal(4000, 200),
        "num_trained_tokens": float(rng.integers(6000, 8000)),
        "my_metric": rng.normal(3, 1),
        "entropy": 1.8 - 1.2 * done + rng.normal(0, 0.03),
        "agreement_mean": 1 + abs(rng.normal(2e-5, 5e-6)),
        "groups_with_signal": 0.9 - 0.3 * done**2 + rng.normal(0, 0.03),
        "alarm_reward_gap": float(steps // 2 <= step < steps // 2 + 20),
        **({"held_out_accuracy": 0.2 + 0.55 * done} if step % 25 == 1 else {}),
        **{f"seconds_{name}": value * rng.uniform(0.9, 1.2) for name, value in seconds.items()},
    }


def _spans(begin: float, rng: np.random.Generator) -> list[tuple[str, str, float, float]]:
    spans = [("controller", "wait for rollouts", begin, 0.9), ("controller", "train", begin + 0.9, 0.55)]
    spans.append(("controller", "publish", begin + 1.45, 0.05))
    for replica in range(2):
        busy = rng.uniform(0.6, 0.85)
        spans.append((f"generator {replica}", "generate", begin + 0.02, busy))
        spans.append((f"generator {replica}", "fetch", begin + 1.5, 0.02))
        spans.append((f"generator {replica}", "take the weights", begin + 1.52, 0.05))
    for rank in range(2):
        spans.append((f"trainer rank {rank}", "forward and backward", begin + 0.93, rng.uniform(0.4, 0.46)))
        spans.append((f"trainer rank {rank}", "optimizer", begin + 1.4, 0.04))
        spans.append((f"trainer rank {rank}", "publish", begin + 1.45, 0.05))
    for _ in range(PROMPTS):
        took = rng.uniform(0.3, 0.8)
        spans.append(("verifier 0", "episode", begin + 0.02, took))
        spans.append(("verifier 0", "scoring", begin + 0.02 + took, rng.uniform(0.01, 0.05)))
    return spans
