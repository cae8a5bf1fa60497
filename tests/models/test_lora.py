"""Adapters on one rank: what they change and what they leave alone, what others get of them, and what is refused."""

import asyncio
import json

import pytest
import torch
from batches import batch_of
from family_models import make as make_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import LoraConfig
from titan_rl.controller.initial_policy import keeps_policy
from titan_rl.controller.planning.memory_plan import Size
from titan_rl.controller.preflight.checks import check_model
from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan, split_name
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.spec import model_spec, read_hf_config
from titan_rl.models.weights.lora import linear_layers
from titan_rl.models.weights.peft_files import CONFIG, WEIGHTS
from titan_rl.models.weights.shards import is_adapter
from titan_rl.trainer.model.lora_checks import check_lora
from titan_rl.trainer.state.checkpoint_state import BackgroundSave
from titan_rl.trainer.state.plain_state import StateError, read_metadata
from titan_rl.trainer.state.snapshot import load_snapshot
from titan_rl.trainer.state.snapshot_kinds import make_snapshots
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8.0}
ALL_TARGETS = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def make(path, seed: int = 1, **settings):
    make_tiny(path, seed=seed, num_layers=2, **settings)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model") / "moe", architecture="qwen3_moe")


def learner_of(path, lora=LORA, **sections) -> Learner:
    settings = {"optimizer": {"lr": 1e-2}, "training": {"steps": 10}, "lora": lora or {}} | sections
    config = load_config(None, settings)
    return Learner(config, build_titan(config), path)


def train(learner: Learner, *seeds: int) -> list[float]:
    return [learner.train(batch_of(seed).rows[0], True).loss for seed in seeds]


def logprobs(learner: Learner) -> torch.Tensor:
    rows = learner.policy.fit(batch_of(7, row_tokens=1000).rows[0])
    return learner.policy.measure(rows)[0]


def merged(learner: Learner) -> dict[str, torch.Tensor]:
    return {shard.name: shard.merged().clone() for shard in learner.shards()}


@pytest.fixture(scope="module")
def trained(base) -> Learner:
    """After three steps; nobody may train it further."""
    learner = learner_of(base)
    train(learner, 0, 1, 2)
    return learner


def test_a_new_adapter_changes_nothing(base):
    assert torch.equal(logprobs(learner_of(base)), logprobs(learner_of(base, lora=None)))


def test_nothing_but_adapters_is_trained_and_the_base_stays_as_it_was(base, trained):
    [optimizer] = trained.optimizer.optimizers
    in_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(trained.model_parts[0].named_parameters())
    assert {name for name, p in named.items() if id(p) in in_optimizer} == set(filter(is_adapter, named))
    assert all(p.requires_grad == is_adapter(name) for name, p in named.items())
    assert trained.policy.digest() == learner_of(base, lora=None).policy.digest() == trained.digests()["base model"]


def test_all_projections_learn(base, trained):
    before = load_file(base / "model.safetensors")
    after = merged(trained)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.split(".")[-2] in ALL_TARGETS
    }


def test_without_its_adapters_the_model_is_its_base(base, trained):
    adapted, plain = logprobs(trained), logprobs(learner_of(base, lora=None))
    with trained.policy.adapters.disabled():
        off = logprobs(trained)
    assert torch.equal(off, plain)
    assert (adapted - plain).abs().max() > 0.1
    assert torch.equal(logprobs(trained), adapted)


NEEDS_REFERENCE = """
from titan_rl.algorithms.base import Algorithm, Needs

class Near(Algorithm):
    needs = Needs(reference=True)

    def advantages(self, rollouts):
        return [rollout.reward for rollout in rollouts]

    def loss(self, inputs):
        distance_S = (inputs.logprob_S - inputs.reference_logprob_S).square()
        return (distance_S * inputs.weight_S).sum(), {}
"""


def test_the_reference_is_the_policy_with_its_adapters_off(base, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "near_reference.py").write_text(NEEDS_REFERENCE)
    sections = {"algorithm": {"name": "near_reference:Near"}, "run": {"plugin_path": [str(tmp_path)]}}
    free, second = learner_of(base, **sections), learner_of(base, reference={"path": str(base)}, **sections)
    assert free.roles["reference"].model is free.policy and second.roles["reference"].model is not second.policy
    for seed in range(3):
        rows = batch_of(seed).rows[0]
        [[one, *_]], [[other, *_]] = free.prepare([rows]), second.prepare([rows])
        assert (one.role_columns["reference_logprob_S"] == other.role_columns["reference_logprob_S"]).all()
        for learner in (free, second):
            learner.train_step([rows], [True])
    assert free.digests()["reference"] == second.digests()["reference"]


def test_what_bf16_rounds_away_of_adapters_is_neither_computed_with_nor_merged(base):
    learner = learner_of(base, training={"mixed_precision_param": "bfloat16"})
    train(learner, 0, 1, 2)
    before, weights = logprobs(learner), merged(learner)
    adapters = learner.policy.adapters
    assert not any(torch.equal(shard.tensor, shard.tensor.bfloat16().float()) for shard in adapters.shards)
    for shard in adapters.shards:
        shard.tensor.copy_(shard.tensor.bfloat16())
    adapters.refresh()
    assert torch.equal(logprobs(learner), before)
    assert all(torch.equal(values, weights[name]) for name, values in merged(learner).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generators_get_merged_weights(base, dtype):
    learner, interner = learner_of(base), Interner()
    shards = learner.shards()
    needs = interner.units(
        (unit, Need(name, Box((0,) * len(s.shape), s.shape), dtype))
        for s in shards
        for unit, name in [split_name(s.name)]
    )
    plan = Plan([holdings(shards, interner)], [needs])
    writer = WeightWriter(0, shards, plan.slot(0), CPU)
    setup = ReaderSetup(plan.reads(0, 0), [writer.region.handle(over_rdma=False)], ["shared_memory"])
    reader = WeightReader(setup, CPU)
    for version in range(3):
        writer.stage(version)
        wanted = {name: values.to(getattr(torch, dtype)) for name, values in merged(learner).items()}
        asyncio.run(reader.fetch(version, 10.0))
        got = {name: values.clone() for name, _, _, values in reader.pieces()}
        assert {name: torch.equal(got[name], values) for name, values in wanted.items()} == dict.fromkeys(wanted, True)
        writer.wait()
        train(learner, version)


def test_a_state_comes_back_bit_for_bit_from_snapshot_and_checkpoint(base, tmp_path):
    learner = learner_of(base)
    train(learner, 0, 1)
    snapshots, saver = make_snapshots(0, learner, learner.config), BackgroundSave(learner)
    snapshots.take(2)
    saver.begin(tmp_path / "checkpoint")
    saver.wait()
    snapshots.before_update()
    assert snapshots.steps() == [2]
    going_on = train(learner, 2, 3)
    from_snapshot, from_checkpoint = learner_of(base), learner_of(base)
    load_snapshot(from_snapshot, snapshots.slot_of(2))
    from_checkpoint.load_checkpoint(tmp_path / "checkpoint")
    assert train(from_snapshot, 2, 3) == train(from_checkpoint, 2, 3) == going_on
    for other in (from_snapshot, from_checkpoint):
        assert all(torch.equal(values, merged(learner)[name]) for name, values in merged(other).items())


def test_a_checkpoint_holds_no_weight_that_is_not_trained_and_knows_its_base(trained, tmp_path):
    saver = BackgroundSave(trained)
    saver.begin(tmp_path / "checkpoint")
    saver.wait()
    names = read_metadata(tmp_path / "checkpoint").state_dict_metadata
    weights = [name for name in names if name.startswith("model.")]
    assert weights and all(map(is_adapter, weights))
    with pytest.raises(StateError, match="other base weights"):
        learner_of(make(tmp_path / "other", seed=2)).load_checkpoint(tmp_path / "checkpoint")


# files


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained.save_hf(folder / "model", folder / "adapter")
    return folder


@torch.no_grad()
def hf_logits(model) -> torch.Tensor:
    tokens = torch.arange(3, 83).view(2, 40)
    return model.eval()(tokens).logits


def test_the_merged_directory_computes_what_the_adapted_model_does(saved, trained):
    difference = logprobs(learner_of(saved / "model", lora=None)) - logprobs(trained)
    assert difference.abs().max() < 1e-5
    assert not list((saved / "model").glob("adapter*"))  # transformers would add it once more


def test_adapter_files_make_the_merged_weights(saved, base, trained):
    config = json.loads((saved / "adapter" / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert set(config["target_modules"]) == ALL_TARGETS and config["base_model_name_or_path"] == str(base)
    adapter, weights = load_file(saved / "adapter" / WEIGHTS), load_file(base / "model.safetensors")
    for name, values in merged(trained).items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in adapter:
            a, b = adapter.pop(f"{stem}.lora_A.weight"), adapter.pop(f"{stem}.lora_B.weight")
            torch.testing.assert_close(weights[name] + 2.0 * b @ a, values, rtol=1e-5, atol=1e-6)
    assert not adapter


def test_peft_loads_the_adapter(saved, base):
    peft = pytest.importorskip("peft")
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved / "adapter")
    wanted = hf_logits(AutoModelForCausalLM.from_pretrained(saved / "model"))
    assert (hf_logits(adapted) - wanted).abs().max() < 1e-5
    assert (hf_logits(AutoModelForCausalLM.from_pretrained(base)) - wanted).abs().max() > 0.1


def test_a_saved_adapter_is_begun_with(saved, base, trained):
    lora = LORA | {"adapter": str(saved / "adapter")}
    check_model(load_config(None, {"model": {"path": str(base)}, "lora": lora}))
    assert torch.equal(logprobs(learner_of(base, lora=lora)), logprobs(trained))


def test_the_reference_of_a_run_from_a_saved_adapter_is_what_the_run_began_as(saved, base, tmp_path, monkeypatch):
    """Not the model below that adapter, which it never was."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reference_of_saved.py").write_text(NEEDS_REFERENCE)
    algorithm = {"name": "reference_of_saved:Near"}
    sections = {"algorithm": algorithm, "run": {"plugin_path": [str(tmp_path)]}, "optimizer": {"lr": 1e-2}}
    lora = LORA | {"adapter": str(saved / "adapter")}
    config = load_config(None, sections | {"model": {"path": str(base)}, "lora": lora, "training": {"steps": 10}})
    assert keeps_policy(config, make_algorithm(config.algorithm, config.run.plugin_path))
    learner = Learner(config, build_titan(config), base, initial_policy=str(saved / "model"))
    [[row, *_]] = learner.prepare([batch_of(0).rows[0]])
    began, below = (learner_of(base, lora=each, **sections) for each in (lora, LORA))
    wanted, other = (each.policy.measure(each.policy.fit([row]))[0][0] for each in (began, below))
    torch.testing.assert_close(torch.tensor(row.role_columns["reference_logprob_S"]), wanted, atol=1e-5, rtol=1e-5)
    assert (wanted - other).abs().max() > 1e-3


# what is refused


def refusal(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(load_config(None, sections))
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 4, "targets": ["q_prj"]}, ["lora.targets", "'q_prj'", "did you mean 'q_proj'?"]),
        ({"rank": 4, "targets": ["embed_tokens"]}, ["lora.targets", "'embed_tokens'"]),
        ({"rank": 4, "targets": ["q_proj", "v_proj"]}, ["k_proj and v_proj together", "add 'k_proj'"]),
        ({"rank": -1}, ["lora.rank = -1"]),
        ({"rank": 4, "alpha": 0.0}, ["lora.alpha = 0.0"]),
        ({"rank": 4, "dropout": 0.1}, ["unknown key lora.dropout"]),
        ({"rank": 4, "adapter": "nowhere"}, ["lora.adapter = 'nowhere'", "cannot read adapter_config.json"]),
    ],
)
def test_what_cannot_be_adapted_is_told_in_one_line(lora, words):
    line = refusal(lora=lora)
    assert all(word in line for word in words), line


def test_adapters_are_sent_alone_between_hosts_and_where_it_is_asked_for():
    def sends(sync: str, hosts: dict | None = None, **sections) -> bool:
        tables = {"lora": LORA | {"sync": sync}, "hosts": hosts or {}} | sections
        return load_config(None, tables).sends_adapters

    hosts = {"launcher": "slurm", "count": 2}
    assert [sends(sync) for sync in ("auto", "adapter", "merged")] == [False, True, False]
    assert [sends(sync, hosts) for sync in ("auto", "adapter", "merged")] == [True, True, False]
    assert not sends("adapter", lora={"sync": "adapter"})


def test_adapters_of_rank_16_are_less_than_a_hundredth_of_a_model_of_8b():
    """Qwen3-8B's shapes; both are sent in bf16."""
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32)
    hf = Qwen3Config(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False)
    size = Size.of(hf, None, LoraConfig(rank=16, alpha=32.0))
    base = size.parameters - size.trained
    assert base == 8_190_735_360 and 0.005 < size.trained / base < 0.0055


def test_experts_are_refused_by_name_and_left_out_by_default(moe):
    line = refusal(model={"path": str(moe)}, lora={"rank": 4, "targets": ["gate_proj"]})
    assert "'gate_proj' outside of its experts" in line
    learner = learner_of(moe)
    train(learner, 0)
    before = load_file(moe / "model.safetensors")
    changed = {name.split(".")[-2] for name, values in merged(learner).items() if not torch.equal(before[name], values)}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_projections_to_latents_and_gates_are_left_out(tmp_path):
    make_family(tmp_path, "deepseek_v3")
    named = linear_layers(model_spec(tmp_path)).keys()
    assert named >= {"q_b_proj", "kv_b_proj", "o_proj", "gate_proj"}
    assert not named & {"q_a_proj", "kv_a_proj_with_mqa", "gate"}
    make_family(tmp_path / "next", "qwen3_next")
    named = linear_layers(model_spec(tmp_path / "next")).keys()
    assert "in_proj_qkvz" in named and not named & {"shared_expert_gate", "gate"}


def test_an_output_projection_that_tensor_parallel_ranks_cannot_adapt_is_refused(tmp_path):
    make_family(tmp_path, "gpt_oss")
    hf, parallelism = read_hf_config(tmp_path), {"tensor_parallel_degree": 2}
    config = load_config(None, {"lora": LORA, "parallelism": parallelism})
    with pytest.raises(ConfigError, match="'o_proj' cannot have an adapter"):
        check_lora(hf, config, build_titan(config), None)
    config = load_config(None, {"lora": LORA | {"targets": ["q_proj"]}, "parallelism": parallelism})
    check_lora(hf, config, build_titan(config), None)


def test_a_pipeline_stage_without_an_adapter_is_refused(tmp_path):
    path = make(tmp_path / "untied", tie_word_embeddings=False)
    stages = [["tok_embeddings", "layers.0", "layers.1"], ["norm", "lm_head"]]
    parallelism = {"pipeline_parallel_degree": 2, "module_fqns_per_model_part": stages}
    line = refusal(model={"path": str(path)}, parallelism=parallelism, lora=LORA)
    assert "stage 1" in line and "norm, lm_head" in line


def test_optimizer_groups_must_fit_adapters():
    group = {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3}}
    line = refusal(lora=LORA, optimizer={"param_groups": [group | {"pattern": "norm"}, group | {"pattern": ".*"}]})
    assert "'norm'" in line and "lora_a" in line
    assert "add a group" in refusal(lora=LORA, optimizer={"param_groups": [group | {"pattern": "lora_b"}]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 8}, ["r = 8", "set lora.rank"]),
        ({"lora_alpha": 16}, ["lora_alpha = 16", "set lora.alpha"]),
        ({"target_modules": ["q_proj"]}, ["target_modules = ['q_proj']", "set lora.targets"]),
        ({"target_modules": "all-linear"}, ["give a list"]),
        ({"use_dora": True}, ["use_dora = True"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"peft_type": "IA3"}, ["peft_type = 'IA3'"]),
    ],
)
def test_adapters_that_compute_something_else_are_refused(saved, base, tmp_path, changes, words):
    config = json.loads((saved / "adapter" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    (tmp_path / WEIGHTS).write_bytes((saved / "adapter" / WEIGHTS).read_bytes())
    line = refusal(model={"path": str(base)}, lora=LORA | {"adapter": str(tmp_path)})
    assert "lora.adapter" in line and all(word in line for word in words), line


def test_adapters_of_another_model_are_refused(saved, base, tmp_path):
    tensors = load_file(saved / "adapter" / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((saved / "adapter" / CONFIG).read_bytes())
    name = next(iter(tensors))
    for changed, words in (
        ({n: t for n, t in tensors.items() if n != name}, f"lacks {name}"),
        (tensors | {"base_model.model.model.layers.7.x": torch.zeros(1)}, "has base_model.model.model.layers.7.x"),
        (tensors | {name: torch.zeros(4, 3)}, "is (4, 3)"),
    ):
        save_file(changed, tmp_path / WEIGHTS)
        assert words in refusal(model={"path": str(base)}, lora=LORA | {"adapter": str(tmp_path)})
