"""Roles beside the policy: what they find does not depend on layouts or processes, and the frozen ones stay frozen."""

import json

import pytest
import running
import torch
from faults import strike, wait_for_event
from layout_ranks import Layout, parallelism, run_layouts
from role_ranks import steps_with_roles, with_algorithms
from tree import SUPPORT

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events

ALGORITHM = {
    "algorithm.name": "role_algorithms:AsksForAll",
    "run.plugin_path": json.dumps([str(SUPPORT / "ranks")]),
}
LAYOUTS = {
    1: {name: Layout(name) for name in ("llama", "qwen3")} | {"llama own": Layout("llama", start_from="own")},
    2: {
        "dp2": Layout("llama", parallelism(dp=2)),
        "dp2 own": Layout("llama", parallelism(dp=2), start_from="own"),
        "tp2": Layout("llama", parallelism(tp=2)),
        "tp2 own": Layout("llama", parallelism(tp=2), start_from="own"),
        "pp2": Layout("qwen3", parallelism(pp=2)),
        "pp2 own": Layout("qwen3", parallelism(pp=2), start_from="own"),
        "pp2 interleaved": Layout("qwen3", parallelism(pp=2, schedule="Interleaved1F1B")),
    },
}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    for architecture, is_tied in {"llama": True, "qwen3": False}.items():
        for seed, name in enumerate((architecture, f"{architecture}_reference"), start=1):
            settings = dict(architecture=architecture, tie_word_embeddings=is_tied, hidden_size=64, num_layers=4)
            make_tiny(models / name, seed=seed, **settings)
    for world_size, layouts in LAYOUTS.items():
        run_layouts(world_size, models, out, with_algorithms(layouts), steps_with_roles)
    return {path.stem: torch.load(path, weights_only=False) for path in out.glob("*.pt")}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in with_algorithms(layouts)])
def test_no_layout_and_no_placement_changes_a_step(studies, name):
    laid_out, _, algorithm = name.rpartition(", ")
    layout = next(layouts[laid_out] for layouts in LAYOUTS.values() if laid_out in layouts)
    found, wanted = studies[name], studies[f"{layout.model}, {algorithm}"]
    for rank in found["metrics"]:
        for update, other in zip(rank, wanted["metrics"][0], strict=True):
            assert update["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-6)
            assert update["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
            # a mean of differences of log-probabilities may cancel to a thousandth of them
            assert update["loss_metrics"] == pytest.approx(other["loss_metrics"], rel=1e-5, abs=1e-7)
    for weight, tensor in wanted["trained"].items():
        assert (found["trained"][weight] - tensor).norm() <= 1e-5 * tensor.norm(), weight
    assert all(before == after for before, after in found["digests"])


def test_a_role_that_is_described_for_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\[reference\] has no effect: .*needs no reference"):
        check(load_config(None, {"reference": {"placement": "own"}}))


def test_a_layout_of_its_own_needs_processes_of_its_own():
    tables = {"reference": {"parallelism": {"data_parallel_shard_degree": 2}}}
    tables |= {"algorithm": {"name": "role_algorithms:AsksForAll"}}
    tables |= {"run": {"plugin_path": json.loads(ALGORITHM["run.plugin_path"])}}
    with pytest.raises(ConfigError, match="set placement = 'own'"):
        check(load_config(None, tables))


def test_a_reference_with_other_tokens_is_refused(tmp_path):
    path = tmp_path / "other"
    model = make_tiny(path, seed=1, hidden_size=64, num_layers=1)
    model.resize_token_embeddings(120)
    model.save_pretrained(path)
    tables = {"reference": {"path": str(path)}, "algorithm": {"name": "role_algorithms:AsksForAll"}}
    tables |= {"run": {"plugin_path": json.loads(ALGORITHM["run.plugin_path"])}}
    with pytest.raises(ConfigError, match="must read the policy's tokens"):
        check(load_config(None, tables))


def test_a_teacher_with_as_many_other_tokens_is_refused(tmp_path):
    """Whose log-probabilities would be of other words, and nothing would say so."""
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=1)
    tables = {"algorithm": {"name": "distillation"}, "teacher": {"path": str(tmp_path)}}
    check(load_config(None, tables))
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="is 'a', and 2 of its tokens are others there: the teacher must read"):
        check(load_config(None, tables))


def settings(**more):
    return {name.replace(".", "__"): value for name, value in ALGORITHM.items()} | {"training__steps": 4} | more


def losses(root) -> list[float]:
    return [record["loss"] for record in read_metrics(root) if "loss" in record]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared") / "run"
    assert running.train(root, **settings(checkpoint__every=2)) == 0, running.output(root)[-3000:]
    return root


@pytest.mark.slow
def test_the_reference_is_the_policy_after_its_supervised_steps(shared):
    record = next(record for record in read_metrics(shared) if record.get("step") == 1)
    assert record["distance"] == pytest.approx(0, abs=1e-9), "in the first step they are the same"
    assert any(record.get("distance", 0) > 1e-6 for record in read_metrics(shared)), "and then the policy leaves it"
    kinds = [event["kind"] for event in read_events(shared)]
    assert kinds.count("frozen_weights") == kinds.count("frozen_weights_unchanged") == 1


@pytest.mark.slow
def test_a_replay_has_the_same_reference(shared):
    from titan_rl.cli import main

    assert main(["replay", str(shared), "--from", "1", "--to", "4", *_plugins()]) == 0
    assert main(["replay", str(shared), "--from", "3", "--to", "4", *_plugins()]) == 0


def _plugins() -> list[str]:
    return ["--run.plugin_path", ALGORITHM["run.plugin_path"]]


@pytest.mark.slow
def test_a_reference_in_processes_of_its_own_may_be_killed(shared, tmp_path):
    root = tmp_path / "run"
    process = running.start(root, **settings(reference__placement="own"))
    wait_for_event(root, "started", name="reference rank 0")
    running.wait_for_step(root, 2)
    strike(root, "reference rank 0")
    assert process.wait(180) == 0, running.output(root)[-3000:]
    assert losses(root) == losses(shared)
    assert [e["name"] for e in read_events(root) if e["kind"] == "started"].count("reference rank 0") == 2
