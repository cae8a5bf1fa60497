"""PPO through the real actors: killed trainer ranks come back with policy and critic, and replays are bit-equal."""

import json
import os
import signal

import pytest
import running
from faults import strike
from transformers import AutoModelForSequenceClassification

from titan_rl import cli
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events

pytestmark = [pytest.mark.slow, pytest.mark.confirms, pytest.mark.timeout(900)]
STEPS = 12
PPO = dict(
    algorithm__name="ppo",
    critic__warmup_steps=2,
    critic__updates=2,
    critic__optimizer__lr=1e-3,
    training__steps=STEPS,
    training__seq_len=256,
    parallelism__data_parallel_shard_degree=2,
    checkpoint__every=4,
    checkpoint__keep_latest_k=3,
    sft__steps=60,
)


def replay(root, first: int, capsys) -> dict:
    capsys.readouterr()
    assert cli.main(["replay", str(root), "--from", str(first), "--to", str(STEPS), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


OWN = {"critic__placement": "own", "parallelism__data_parallel_shard_degree": 1}
CASES = {
    "with_trainer": ({}, "trainer rank 1", "trainer rank 0"),
    "own": (OWN, "critic rank 0", "trainer rank 0"),
}


@pytest.mark.parametrize("placement", CASES)
def test_ranks_are_killed_and_every_weight_of_both_comes_out_the_same(tmp_path, capsys, placement):
    """Ranks die one after the other, in the warm-up and after it; then the controller, and the run is resumed."""
    root, (changed, first, second) = tmp_path / "run", CASES[placement]
    settings = PPO | changed
    process = running.start(root, **settings)
    for step, name in ((1, first), (5, second)):
        running.wait_for_step(root, step)
        strike(root, name)
    running.wait_for_step(root, 7)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert running.train(root, "--resume", timeout=300, **settings) == 0, running.output(root)[-3000:]
    events = read_events(root)
    assert [e["kind"] for e in events].count("trainer_repaired") == 2
    assert all(e["same"] for e in events if e["kind"] == "redone")
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["critic_grad_norm"] > 0 for record in records)
    state = replay(root, 1, capsys)["state"]
    assert state["num_different"] == 0 and state["num_tensors"] > 200, "weights and moments of two models"
    critic, notes = AutoModelForSequenceClassification.from_pretrained(root / "critic", output_loading_info=True)
    assert not notes["missing_keys"] and critic.score.weight.any()
