"""What vLLM cannot compute here is refused in a line, before an engine starts."""

import json
import re
from types import SimpleNamespace

import pytest
from family_models import make

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.device_defaults import for_device
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.controller.planning import device_memory
from titan_rl.controller.preflight import engine_checks
from titan_rl.controller.preflight.engine_checks import (
    cache_bytes,
    check_decoding,
    check_engine,
    check_suite_decoding,
)
from titan_rl.generator.engine_arguments import engine_arguments
from titan_rl.models.builtin.tiny import tiny_config
from titan_rl.models.spec import read_hf_config

FITTING = dict(kv_lora_rank=512, qk_rope_head_dim=64)


def check(path, *, on_cpu: bool, **generator) -> None:
    config = for_device(load_config(None, {"generator": generator}), on_cpu=on_cpu)
    check_engine(config, read_hf_config(path), 200, on_cpu=on_cpu)


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


def test_qwen3_5_needs_torchvision_in_vllm(tmp_path, monkeypatch):
    make(tmp_path, "qwen3_5_text")
    monkeypatch.setattr(engine_checks, "find_spec", lambda name: None)
    line = refusal(tmp_path, on_cpu=False)
    assert "'qwen3_5_text' needs torchvision" in line and "install" in line
    monkeypatch.setattr(engine_checks, "find_spec", lambda name: object())
    check(tmp_path, on_cpu=False)


def test_latents_are_cached_and_not_their_heads(tmp_path):
    """Of 512 + 64 numbers for each token and layer; 17 tokens take two blocks of 16."""
    make(tmp_path, "deepseek_v3", **FITTING)
    hf, generator = read_hf_config(tmp_path), load_config(None, {"generator": {"dtype": "float32"}}).generator
    wanted = 3 * (512 + 64) * 4 * 32
    assert cache_bytes(hf, 17, "float32", 1) == device_memory.kv_bytes(hf, generator, 17) == wanted


def test_states_are_cached_for_each_request_and_no_keys_of_their_layers(tmp_path):
    """Of 3 layers, 2 with 6 states of 64 x 64 in fp32 behind a convolution of 3; 17 tokens take two blocks of 16."""
    make(tmp_path, "qwen3_next", linear_key_head_dim=64, linear_value_head_dim=64)
    hf, generator = read_hf_config(tmp_path), load_config(None, {"generator": {"dtype": "bfloat16"}}).generator
    states = 2 * (6 * 64 * 64 * 4 + (2 * 2 * 64 + 6 * 64) * 2 * 2)
    keys_and_values = 2 * 3 * 12 * 2 * 32
    assert cache_bytes(hf, 17, "bfloat16", 1) == states + keys_and_values
    assert device_memory.kv_bytes(hf, generator, 17, requests=5) == 5 * (states + keys_and_values)
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
    ],
)
def test_what_drafts_cannot_be_checked_with_is_refused(tables, named):
    generator = tables.get("generator", {}).get("speculative", {})
    tables = tables | {"generator": {"speculative": {"method": "ngram"} | generator}}
    config = load_config(None, tables)
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_decoding(config, make_algorithm(config.algorithm, []), tiny_config())


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
