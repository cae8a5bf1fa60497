"""What vLLM cannot compute here is refused in a line, before an engine starts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_models import add_prediction_layer, make
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.device_defaults import for_device
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config, GeneratorConfig
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.controller.planning import device_memory
from titan_rl.controller.planning.memory_plan import Size, draft_of
from titan_rl.controller.preflight.checks import check_model, resolve
from titan_rl.controller.preflight.engine_checks import (
    cache_bytes,
    check_batch_invariant,
    check_decoding,
    check_engine,
    check_export,
    check_generator_layout,
    check_suite_decoding,
    kernel_notices,
)
from titan_rl.controller.preflight.role_checks import check_draft_model, check_roles
from titan_rl.environments.rollout.decoding import PENALTIES
from titan_rl.generator.engine_arguments import _on_gpu, engine_arguments
from titan_rl.models.builtin.tiny import make_tiny, tiny_config
from titan_rl.models.spec import read_hf_config
from titan_rl.trainer.titan_config import build_titan

FITTING = dict(kv_lora_rank=512, qk_rope_head_dim=64)


def check(path, *, on_cpu: bool, **generator) -> None:
    config = for_device(load_config(None, {"generator": generator}), on_cpu=on_cpu)
    check_engine(config, read_hf_config(path), 200, on_cpu=on_cpu)


def test_vllms_own_batch_invariant_mode_is_refused_where_engines_cannot_compute_by_it(tmp_path, monkeypatch):
    make(tmp_path, "qwen2")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    check(tmp_path, on_cpu=False)
    assert "no form for a CPU; unset it, and set debug.batch_invariant = true" in refusal(tmp_path, on_cpu=True)
    ours = for_device(load_config(None, {"debug": {"batch_invariant": True}}), on_cpu=False)
    with pytest.raises(ConfigError, match="replace those of debug.batch_invariant = true; unset it"):
        check_engine(ours, read_hf_config(tmp_path), 200, on_cpu=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check(tmp_path, on_cpu=True)


def refusal(path, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        check(path, **settings)
    [line] = str(caught.value).splitlines()
    return line


def test_a_cpu_computes_linear_attention_in_bf16_and_some_sizes_alone(tmp_path):
    make(tmp_path, "qwen3_next")
    assert "(7, 9)" in refusal(tmp_path, on_cpu=True, dtype="bfloat16")
    make(tmp_path, "qwen3_next", linear_key_head_dim=64, linear_value_head_dim=64)
    line = refusal(tmp_path, on_cpu=True)
    assert "generator.dtype = 'float32'" in line and "set generator.dtype = 'bfloat16'" in line
    check(tmp_path, on_cpu=True, dtype="bfloat16")
    check(tmp_path, on_cpu=False, dtype="float32")


@pytest.mark.parametrize(("key", "size"), [("kv_lora_rank", 256), ("qk_rope_head_dim", 32)])
def test_a_cpu_has_a_kernel_for_latents_of_one_size(tmp_path, key, size):
    make(tmp_path, "deepseek_v3", **FITTING | {key: size})
    assert f"{key} = {size}" in refusal(tmp_path, on_cpu=True)
    check(tmp_path, on_cpu=False)
    make(tmp_path, "deepseek_v3", **FITTING)
    check(tmp_path, on_cpu=True)


def test_latents_are_cached_and_not_their_heads(tmp_path):
    """Of 512 + 64 numbers for each token and layer; 17 tokens take two blocks of 16."""
    make(tmp_path, "deepseek_v3", **FITTING)
    hf, generator = read_hf_config(tmp_path), load_config(None, {"generator": {"dtype": "float32"}}).generator
    wanted = 3 * (512 + 64) * 4 * 32
    assert cache_bytes(hf, 17, "float32", 1) == device_memory.kv_bytes([hf], generator, 17) == wanted


def test_states_are_cached_for_each_request_and_no_keys_of_their_layers(tmp_path):
    """Of 3 layers, 2 with 6 states of 64 x 64 in fp32 behind a convolution of 3; 17 tokens take two blocks of 16."""
    make(tmp_path, "qwen3_next", linear_key_head_dim=64, linear_value_head_dim=64)
    hf, generator = read_hf_config(tmp_path), load_config(None, {"generator": {"dtype": "bfloat16"}}).generator
    states = 2 * (6 * 64 * 64 * 4 + (2 * 2 * 64 + 6 * 64) * 2 * 2)
    keys_and_values = 2 * 3 * 12 * 2 * 32
    assert cache_bytes(hf, 17, "bfloat16", 1) == states + keys_and_values
    assert device_memory.kv_bytes([hf], generator, 17, requests=5) == 5 * (states + keys_and_values)
    check(tmp_path, on_cpu=True, dtype="bfloat16", kv_cache_gib=1e-3)
    assert "cannot hold one rollout" in refusal(tmp_path, on_cpu=True, dtype="bfloat16", kv_cache_gib=states / 2**31)


def test_an_engine_is_told_of_latents_and_of_states(tmp_path):
    """Also where config.json leaves the defaults out.

    By default vLLM takes a kernel that knows no fp32, where the CPU has AMX, and shares prefixes of states.
    """
    generator = load_config(None).generator
    for case, expected in (
        ("deepseek_v3", ("CPU_MLA", 16, None)),
        ("qwen3_next", (None, 32, False)),
        ("qwen2", (None, 32, None)),
    ):
        make(tmp_path / case, case)
        file = tmp_path / case / "config.json"
        model = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in model.items() if not k.startswith(("kv_lora_rank", "linear_"))}))
        arguments = engine_arguments(generator, tmp_path / case, 128)
        assert (arguments.attention_backend, arguments.block_size, arguments.enable_prefix_caching) == expected


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p = 0.9: drafts are not checked with it"),
        ({"rollout": {"presence_penalty": 1.0}}, "rollout.presence_penalty = 1.0: drafts"),
        ({"rollout": {"thinking_budget": 4}}, "rollout.thinking_budget = 4: drafts"),
        ({"eval": {"thinking_budget": 4}}, "eval.thinking_budget = 4: drafts"),
        ({"algorithm": {"routing": "replay"}}, "algorithm.routing = 'replay': experts are not recorded of drafts"),
        ({"generator": {"speculative": {"prompt_lookup_min": 5}}}, "prompt_lookup_min = 5 is more than"),
        ({"generator": {"speculative": {"method": "draft_model"}}}, "'draft_model' needs a model: give its"),
    ],
)
def test_what_drafts_cannot_be_checked_with_is_refused(tables, named):
    generator = tables.get("generator", {}).get("speculative", {})
    tables = tables | {"generator": {"speculative": {"method": "ngram"} | generator}}
    config = load_config(None, tables)
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_decoding(config, make_algorithm(config.algorithm, []), tiny_config())


def drafted_by(path) -> dict:
    return {"generator": {"speculative": {"method": "draft_model", "model": str(path)}}}


def test_a_draft_model_reads_the_policys_tokens(tmp_path):
    """Otherwise hardly a draft would be accepted, and nothing would say why."""
    model = make_tiny(tmp_path, seed=1, num_layers=1)
    check_model(load_config(None, drafted_by(tmp_path)), None)
    file = tmp_path / "tokenizer.json"
    before, tokenizer = file.read_text(), json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="is 'a', and 2 of its tokens are others there: the draft model must read"):
        check_model(load_config(None, drafted_by(tmp_path)), None)
    file.write_text(before)
    model.resize_token_embeddings(120)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="vocab_size = 120, the policy 99: the draft model must read"):
        check_model(load_config(None, drafted_by(tmp_path)), None)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("deepseek_v3", "the draft's latent attention (kv_lora_rank) has a KV cache of its own kind"),
        ("qwen3_next", "its states of linear attention cannot go back over a draft"),
        ("gpt2", "model type 'gpt2'"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(tmp_path, case, why):
    make_tiny(tmp_path, seed=1, num_layers=1)
    config = load_config(None, drafted_by(tmp_path))
    if case == "gpt2":
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    else:
        make(tmp_path, case)
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        check_draft_model(config, tiny_config(), None, on_cpu=False)
    assert str(caught.value).startswith(f"generator.speculative.model = '{tmp_path}'")


MTP = {"speculative": {"method": "mtp"}}
GROUP = {"pattern": "q_norm", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 1e-3}}


def with_own_drafts(path: Path, **speculative) -> tuple[Config, Algorithm]:
    settings = {"speculative": MTP["speculative"] | speculative}
    config = for_device(load_config(None, {"generator": settings}), on_cpu=False)
    return replace(config, model=replace(config.model, path=str(path))), make_algorithm(config.algorithm, [])


def test_a_policy_drafts_by_layers_that_it_has(tmp_path):
    config, algorithm = with_own_drafts(tmp_path)
    with pytest.raises(ConfigError, match="'mtp': engines draft by the own layers of glm4_moe alone"):
        check_decoding(config, algorithm, tiny_config())
    make(tmp_path, "glm4_moe")
    with pytest.raises(ConfigError, match=r"layers for multi-token prediction: it lacks \d+ tensors .* model.layers.3"):
        check_decoding(config, algorithm, read_hf_config(tmp_path))
    add_prediction_layer(tmp_path)
    hf = read_hf_config(tmp_path)
    check_decoding(config, algorithm, hf)
    tensors = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if ".layers.3." in name}
    del tensors["model.layers.3.mlp.gate.e_score_correction_bias"]  # which stays as it is
    planned, size = draft_of(SimpleNamespace(config=config, family=None))
    assert size.parameters == sum(each.numel() for each in tensors.values())
    assert (planned.num_hidden_layers, hf.num_hidden_layers) == (1, 3)
    for count in (0, -1, True, "1", 1.0, [1], None):
        hf.num_nextn_predict_layers = count
        with pytest.raises(ConfigError, match="num_nextn_predict_layers = .* is no number of layers"):
            check_decoding(config, algorithm, hf)
    hf.num_nextn_predict_layers = 2
    with pytest.raises(ConfigError, match="num_speculative_tokens = 3: the policy drafts by 2 layers in turn"):
        check_decoding(config, algorithm, hf)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"algorithm": {"name": "ppo"}}, "needs a model that learns, too (critic), and one model learns beside"),
        (
            {"lora": {"rank": 4, "sync": "adapter"}},
            "generators are sent adapters alone; set lora.sync = 'merged', or leave it out",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 2}},
            "= 2 cannot cut a layer for multi-token prediction that learns",
        ),
        ({"checkpoint": {"export_quantization": "fp8_per_channel"}}, "that layer is not written in FP8; leave one"),
        ({"model": {"num_nextn_predict_layers": 2}}, "the policy has 2 layers for multi-token prediction"),
        (
            {"drafter": {"optimizer": {"param_groups": [GROUP]}}},
            "no parameter is left for 'q_norm': their names are like layers.3.",
        ),
        ({}, ""),
    ],
)
def test_what_a_layer_that_learns_cannot_go_with_is_one_line(tmp_path, tables, said):
    make(tmp_path, "glm4_moe", **{"num_nextn_predict_layers": 1} | tables.get("model", {}))
    given = {key: table for key, table in tables.items() if key != "model"}
    drafter = {"train_mtp": True} | tables.get("drafter", {})
    config = load_config(None, given | {"generator": MTP, "drafter": drafter})
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    algorithm = make_algorithm(config.algorithm, [])
    if not said:
        check_roles(config, algorithm, None, SimpleNamespace())
        return
    with pytest.raises(ConfigError) as caught:
        check_roles(config, algorithm, None, SimpleNamespace())
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "mlp.experts.1.up_proj.weight",
            None,
            "it lacks 1 tensors .* first model.layers.3.mlp.experts.1.up_proj.weight",
        ),
        ("self_attn.q_proj.bias", None, "it lacks 1 tensors that config.json asks for"),
        ("eh_proj.weight", torch.zeros(60, 60), r"eh_proj.weight in .* is \(60, 60\), and config.json asks for"),
        ("foo.weight", torch.zeros(2), "holds 1 tensors that config.json does not ask for, first model.layers.3.foo"),
        ("shared_head.head.weight", torch.zeros(2, 60), "shared_head.head.weight in .* is .* config.json asks for"),
    ],
)
def test_own_layers_that_vllm_would_leave_unfilled_are_refused(tmp_path, name, change, said):
    make(tmp_path, "glm4_moe")
    add_prediction_layer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(key := f"model.layers.3.{name}", None)
    save_file(weights | ({} if change is None else {key: change}), tmp_path / "model.safetensors")
    config, algorithm = with_own_drafts(tmp_path)
    with pytest.raises(ConfigError, match=said):
        check_decoding(config, algorithm, read_hf_config(tmp_path))


def test_a_path_that_vllm_takes_for_other_drafts_is_refused(tmp_path):
    make_tiny(tmp_path / "Eagle3" / "draft", seed=1, num_layers=1)
    with pytest.raises(ConfigError, match="a path with 'eagle3' in it for one of another kind"):
        check_model(load_config(None, drafted_by(tmp_path / "Eagle3" / "draft")), None)


def test_engines_and_plan_count_a_draft_model(tmp_path):
    make_tiny(tmp_path / "draft", seed=1, num_layers=2)
    config = for_device(load_config(None, drafted_by(tmp_path / "draft")), on_cpu=False)
    policy, draft, generator = tiny_config(), tiny_config(num_layers=2), config.generator
    alone = device_memory.kv_bytes([policy], generator, 100)
    assert device_memory.kv_bytes([policy, draft], generator, 100) == 1.5 * alone, "two layers beside four"
    size = Size.of(draft, None)
    with_draft = device_memory.engine_rank(policy, Size.of(policy, None), generator, size)
    assert with_draft["draft model"] == 2 * size.parameters
    short = replace(generator, kv_cache_gib=1.2 * cache_bytes(policy, 200, "bfloat16", 1) / 2**30)
    check_engine(replace(config, generator=short), policy, 200, on_cpu=False)
    with pytest.raises(ConfigError, match="cannot hold one rollout"):
        check_engine(replace(config, generator=short), policy, 200, draft, on_cpu=False)


def test_a_draft_model_stays_what_it_is_while_an_engine_sleeps():
    """The channel fills the policy alone when it wakes."""
    drafting = load_config(None).generator
    drafting.speculative.method = "draft_model"
    for settings, sleeps, kept in ((drafting, True, ["draft.*"]), (drafting, False, []), (GeneratorConfig(), True, [])):
        assert _on_gpu(settings, 64, (), sleeps)["sleep_preserve_parameter_names"] == kept


def test_drafts_cannot_go_back_over_states():
    config = load_config(None, {"generator": {"speculative": {"method": "ngram"}}})
    hf = SimpleNamespace(vocab_size=99, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="linear attention"):
        check_decoding(config, make_algorithm(config.algorithm, []), hf)
    check_decoding(config, make_algorithm(config.algorithm, []), tiny_config())


def test_a_suite_that_drafts_cannot_be_checked_with_is_refused():
    config = load_config(None, {"generator": {"speculative": {"method": "ngram"}}})
    suite = SimpleNamespace(setting="eval.suites.gsm8k", config=SuiteConfig(name="gsm8k", top_p=0.5))
    with pytest.raises(ConfigError, match="eval.suites.gsm8k.top_p = 0.5: drafts"):
        check_suite_decoding(suite, config, tiny_config(), None)


def test_suites_of_a_run_on_data_are_checked_as_answers_of_others_are():
    tables = {"generator": {"speculative": {"method": "ngram"}}, "data": {"file": "rows.jsonl"}}
    suite = SimpleNamespace(setting="eval.suites.gsm8k", config=SuiteConfig(name="gsm8k"), prompts=[])
    check_suite_decoding(suite, load_config(None, tables), tiny_config(), None)
    with pytest.raises(ConfigError, match="eval.thinking_budget = 4: drafts"):
        check_suite_decoding(suite, load_config(None, tables | {"eval": {"thinking_budget": 4}}), tiny_config(), None)


FP8 = dict(quantization="fp8_per_block")


@pytest.mark.parametrize(
    ("case", "said"),
    [("glm4_moe", "mixture of experts"), ("gpt_oss", "mixture of experts"), ("deepseek_v3", "experts")],
)
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block"])
def test_layers_without_fp8_are_refused_by_name(tmp_path, case, said, scheme):
    make(tmp_path, case)
    line = refusal(tmp_path, on_cpu=False, quantization=scheme)
    assert f"generator.quantization = '{scheme}'" in line and said in line and "leave it out" in line


def test_ranks_cut_no_block(tmp_path):
    """On one rank blocks at the ends are smaller."""
    sizes = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    make(tmp_path, "glm4", **sizes, intermediate_size=384)
    for on_cpu in (True, False):
        check(tmp_path, on_cpu=on_cpu, **FP8)
        check(tmp_path, on_cpu=on_cpu, quantization="fp8_per_channel", tensor_parallel=2)
        line = refusal(tmp_path, on_cpu=on_cpu, tensor_parallel=2, **FP8)
        assert "intermediate_size = 384" in line and "take 'fp8_per_channel'" in line
    make(tmp_path, "glm4", **sizes, intermediate_size=512)
    check(tmp_path, on_cpu=True, tensor_parallel=2, **FP8)


def settled(**tables):
    config = load_config("quickstart", {"generator": FP8, **tables})
    return resolve(config, on_cpu=True)


def test_rollouts_are_weighed_by_default_with_fp8_and_a_run_says_so():
    def lines(checked):
        return kernel_notices(checked.config, on_cpu=True)

    checked = settled()
    assert checked.algorithm.settings.importance == "token" and checked.algorithm.settings.decoupled
    assert checked.as_dict()["algorithm"]["importance_bound"] == "truncate" and checked.algorithm.needs.proximal
    fp8, weighed = lines(checked)
    assert "'fp8_per_block'" in fp8 and "evaluation" in fp8 and "emulated" in fp8 and "saved are not quantized" in fp8
    assert "truncate at 2" in weighed
    for off in ({"importance": "none"}, {"decoupled": False}):
        checked = settled(algorithm=off)
        assert checked.algorithm.settings.importance == "none" and not checked.algorithm.settings.decoupled
        assert "not weighed" in lines(checked)[1]
    masked = settled(algorithm={"importance_bound": "mask", "importance_high": 4.0})
    assert "mask at 4" in lines(masked)[1]
    trainer = settled(generator={}, float8={"recipe_name": "rowwise"})
    assert trainer.algorithm.settings.importance == "token" and "trained with E4M3" in lines(trainer)[0]
    plain = settled(generator={})
    assert plain.algorithm.settings.importance == "none" and lines(plain) == []
    with pytest.raises(ConfigError, match="clip_high has no effect.*FP8 has that for its default"):
        settled(algorithm={"clip_high": 0.3})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(vocab_size=101), "= 3 must divide the model's vocab_size = 101, padded to 128"),
        (dict(vocab_size=192, intermediate_size=53), "= 3 must divide the model's intermediate_size = 53"),
    ],
)
def test_an_engines_ranks_must_have_equal_parts(sizes, said):
    hf = Qwen2Config(num_attention_heads=6, num_key_value_heads=3, hidden_size=192, **sizes)
    with pytest.raises(ConfigError, match=said):
        check_generator_layout(hf, 3, on_cpu=True)
    hf.vocab_size, hf.intermediate_size = 192, 54
    check_generator_layout(hf, 3, on_cpu=True)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"parallelism": {"tensor_parallel_degree": 2}, "generator": {"tensor_parallel": 6}},
            "tensor_parallel_degree = 2 and generator.tensor_parallel = 6: sums over ranks are taken by halves",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 3}, "generator": {"tensor_parallel": 2}},
            "make one a power of two times the other",
        ),
        ({"parallelism": {"context_parallel_degree": 2}}, "set parallelism.context_parallel_degree = 1"),
        ({"generator": {"dtype": "bfloat16"}}, "set generator.dtype = 'float32'"),
        ({"generator": {"speculative": {"method": "ngram"}}}, "set generator.speculative.method = 'none'"),
        ({"lora": {"rank": 4}}, "set lora.rank = 0"),
        ({"generator": {"quantization": "fp8_per_block"}}, "set generator.quantization = 'none'"),
        ({"float8": {"recipe_name": "rowwise"}}, "set float8.recipe_name = 'none'"),
        ({"compile": {"enable": True}}, "set compile.enable = False"),
        *(({"rollout": {key: 1.1}}, f"set rollout.{key} = ") for key in PENALTIES),
    ],
)
def test_what_would_not_have_equal_bits_is_refused(tmp_path, tables, said):
    make(tmp_path, "qwen2")
    settings = {"debug": {"batch_invariant": True}}
    for trainer, engine in ((3, 1), (1, 6), (4, 2), (1, 1)):
        degrees = {"parallelism": {"tensor_parallel_degree": trainer}, "generator": {"tensor_parallel": engine}}
        config = for_device(load_config(None, settings | degrees), on_cpu=True)
        check_batch_invariant(config, build_titan(config), read_hf_config(tmp_path), None)
    assert "the same bits" in kernel_notices(config, on_cpu=True)[0]
    wrong = for_device(load_config(None, settings | tables), on_cpu=True)
    with pytest.raises(ConfigError, match=said):
        check_batch_invariant(wrong, build_titan(wrong), read_hf_config(tmp_path), None)
    make(tmp_path, "gemma3_text")
    with pytest.raises(ConfigError, match="no batch-invariant form of SandwichBlock; leave it out"):
        check_batch_invariant(config, build_titan(config), read_hf_config(tmp_path), None)


def test_what_learns_a_teachers_words_is_not_weighed():
    """Its gradient is exact; nothing that was sampled is in it."""
    checked = settled(algorithm={"name": "distillation", "top_k": 8})
    assert (
        checked.algorithm.settings.importance == "none"
        and "not weighed" in kernel_notices(checked.config, on_cpu=True)[1]
    )
    assert settled(algorithm={"name": "distillation"}).algorithm.settings.importance == "token"


def test_an_algorithm_without_weights_stays_as_it_is(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    checked = settled(algorithm={"name": "own:Own"}, run={"plugin_path": [str(tmp_path)]})
    assert checked.config.algorithm.options == {} and "not weighed" in kernel_notices(checked.config, on_cpu=True)[1]


OWN = """
from dataclasses import dataclass
from titan_rl.algorithms.base import Algorithm
class Own(Algorithm):
    @dataclass(kw_only=True)
    class Settings:
        pass

    def advantages(self, rollouts):
        return [0.0 for _ in rollouts]

    def loss(self, inputs):
        return -(inputs.logprob_S * inputs.advantage_S * inputs.weight_S).sum(), {}
"""


def test_what_vllm_is_told(tmp_path):
    make(tmp_path, "qwen2")
    on_cpu = engine_arguments(GeneratorConfig(**FP8), tmp_path, 64)
    assert on_cpu.additional_config == {"titan_rl_quantization": "fp8_per_block"} and on_cpu.quantization is None
    assert _on_gpu(GeneratorConfig(**FP8), 64, (), False)["quantization"] == "fp8_per_block"
    assert _on_gpu(GeneratorConfig(), 64, (), False)["quantization"] is None


DENSE = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)


def export_refusal(path, scheme="fp8_per_channel", *, on_cpu=True, **tables) -> str:
    """What the export of a model is refused for; empty: it is not."""
    config = load_config(None, {"checkpoint": {"export_quantization": scheme} | tables.pop("checkpoint", {})} | tables)
    try:
        algorithm = make_algorithm(config.algorithm, [], on_data=bool(config.data.file))
        check_export(config, algorithm, read_hf_config(path), on_cpu=on_cpu)
    except ConfigError as error:
        [line] = str(error).splitlines()
        assert line.startswith(f"checkpoint.export_quantization = {scheme!r}")
        return line
    return ""


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("qwen2", {}, ""),
        ("mistral", {"hidden_size": 320, "head_dim": 64}, "hidden_size = 320 is no whole number of blocks of 128"),
        ("qwen2", {"hidden_size": 384, "num_attention_heads": 6}, "num_key_value_heads * head_dim = 192"),
        ("phi3", {"intermediate_size": 192}, "intermediate_size = 192 is no whole"),
    ],
)
def test_a_file_in_fp8_has_whole_blocks(tmp_path, case, changes, named):
    """Which vLLM wants of what it fuses, and of a token's features."""
    make(tmp_path, case, **DENSE | {"num_key_value_heads": 3 if "num_attention_heads" in changes else 2} | changes)
    line = export_refusal(tmp_path, "fp8_per_block")
    assert named in line and bool(line) == bool(named)
    assert not export_refusal(tmp_path) and not export_refusal(tmp_path, "fp8_per_tensor")


def test_what_no_engine_has_in_fp8_is_not_exported_so(tmp_path):
    make(tmp_path, "glm4_moe")
    assert "a mixture of experts (num_local_experts in config.json)" in export_refusal(tmp_path)
    make(tmp_path, "qwen2")
    assert "model.family = 'a:b'" in export_refusal(tmp_path, model={"family": "a:b"})
    values = {"algorithm": {"name": "reward_model"}, "data": {"file": "a.jsonl"}}
    assert "algorithm.name = 'reward_model' trains a model that no engine serves" in export_refusal(tmp_path, **values)


@pytest.mark.parametrize(
    ("export_dtype", "generator", "on_cpu", "named"),
    [
        ("auto", {}, True, ""),
        ("float32", {}, True, ""),
        ("bfloat16", {}, True, "generator.dtype = 'float32'"),
        ("bfloat16", {}, False, ""),
        ("float16", {}, False, "generator.dtype = 'bfloat16'"),
        ("bfloat16", {"dtype": "bfloat16"}, True, ""),
    ],
)
def test_what_is_not_quantized_is_as_engines_have_it(tmp_path, export_dtype, generator, on_cpu, named):
    make(tmp_path, "qwen2")
    line = export_refusal(tmp_path, on_cpu=on_cpu, checkpoint={"export_dtype": export_dtype}, generator=generator)
    assert named in line and bool(line) == bool(named)


@pytest.mark.parametrize(
    ("generator", "named"),
    [
        ({"quantization": "fp8_per_channel"}, ""),
        ({}, "rolled out and evaluated with other weights"),
        ({"quantization": "fp8_per_tensor"}, "rolled out and evaluated with other weights"),
        ({"quantization": "fp8_per_channel", "tensor_parallel": 2}, "the file has those of whole layers"),
    ],
)
def test_a_run_says_where_its_file_has_other_weights_than_its_engines(generator, named):
    tables = {"checkpoint": {"export_quantization": "fp8_per_channel"}, "generator": generator}
    lines = kernel_notices(load_config(None, tables), on_cpu=True)
    [*told] = (line for line in lines if line.startswith("checkpoint.export_quantization"))
    assert len(told) == bool(named) and named in "".join(told)
