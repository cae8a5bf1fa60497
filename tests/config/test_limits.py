"""Every key that is handed to vLLM or TorchTitan has their limits: at a limit it is taken, beyond it refused in a line,
before any process starts."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mistakes import assert_one_line

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.kinds import LEAST_TEMPERATURE, MOST_TEMPERATURE
from titan_rl.config.sections.suites import SuiteConfig
from titan_rl.controller.preflight import engine_checks
from titan_rl.controller.preflight.checks import check, check_model, read_config, resolve
from titan_rl.controller.preflight.engine_checks import (
    cache_bytes,
    check_decoding,
    check_suite_decoding,
    kernel_notices,
)
from titan_rl.data.types import Prompt
from titan_rl.environments.rollout.decoding import ThinkingBudget
from titan_rl.environments.rollout.prompt_checks import ThinkingCheck
from titan_rl.models.builtin.tiny import tiny_config
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.layers.rope import num_positions
from titan_rl.trainer.model.optimizer import build_optimizer
from titan_rl.trainer.titan_config import build_titan, learned_titan, titan_keys


def checked(*arguments: str) -> None:
    """As before a run, as far as it is about numbers. Errors: ConfigError."""
    of_images = arguments[0].startswith("--model.images.")
    config = load_config(None, parse_overrides([*arguments, *(["--model.path=tiny-vision"] if of_images else [])]))
    titan = build_titan(config)
    make_algorithm(config.algorithm, [])
    for role in ("critic", "implicit_reward", "drafter"):
        learned_titan(config, titan, role)
    if of_images or arguments[0].startswith(("--generator.", "--optimizer.param_groups")):  # a model is built for these
        check_model(config)


def groups(pattern: str = ".*", name: str = "AdamW", **arguments) -> str:
    told = ", ".join(f"{key} = {value}" for key, value in arguments.items())
    return f"[{{ pattern = '{pattern}', optimizer_name = '{name}', optimizer_kwargs = {{ {told} }} }}]"


KV = cache_bytes(tiny_config(), num_positions(tiny_config()), "float32", 1) / 2**30
LIMITS = [
    # key, at its limits, beyond them
    ("rollout.temperature", [0.01, 2, 2.0], [0.0, 0.009, 2.001, 2.5, 100, -1, "inf", "nan"]),
    ("placement.helper_generators", [0, 1, 8], [-1]),
    ("rollout.top_p", [1e-9, 1], [0, 1.001, "nan"]),
    ("rollout.top_k", [0, 1, 98], [-1]),
    ("rollout.min_p", [0, 1], [-0.1, 1.1, "nan"]),
    ("rollout.repetition_penalty", [0.01, 1, 100], [0, -1, 101, "inf", "nan"]),
    ("rollout.presence_penalty", [-2, 2], [-2.01, 2.01, "nan"]),
    ("rollout.frequency_penalty", [-2, 2], [-2.01, 2.01, "nan"]),
    ("rollout.thinking_budget", [0, 15], [-1]),
    ("eval.thinking_budget", [0, 15], [-1]),
    ("rollout.stop", ["[]", "['x']"], ["['']", "[1]"]),
    ("rollout.max_new_tokens", [1, 2047], [0, 2048]),
    ("generator.max_num_seqs", [1, 4096], [0, 4097, 10**9]),
    ("generator.speculative.num_speculative_tokens", [1, 16], [0, 17]),
    ("generator.speculative.prompt_lookup_min", [1, 64], [0, 65]),
    ("generator.speculative.prompt_lookup_max", [1, 64], [0, 65]),
    ("generator.kv_cache_gib", [0, KV, 0.5], [-1, KV * 0.99, "inf", "nan", 1e7]),
    ("generator.gpu_memory_utilization", [0.01, 0.99], [0, 1, "nan"]),
    ("generator.dtype", ["float32", "bfloat16"], ["float16", "int8"]),
    ("generator.quantization", ["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"], ["fp8", "int8"]),
    ("checkpoint.export_quantization", ["none", "fp8_per_tensor", "fp8_per_channel"], ["fp8", "int8"]),
    ("generator.tensor_parallel", [1, 2, 4], [0, 3]),
    # tokens of 8 x 8 pixels, of which 494 leave room for an answer, and images of 256 to 16384 pixels by the model
    ("model.images.max_pixels", [0, 256, 494 * 64 + 63], [-1, 63, 255, 495 * 64, 10**9]),
    ("model.images.min_pixels", [0, 1, 16384], [-1, 16385]),
    ("training.seq_len", [17], [0, 16, -1]),
    ("training.steps", [1], [0, -1]),
    ("training.max_norm", [1e-9, 1e9], [0, -1, "inf", "nan"]),
    ("training.mixed_precision_param", ["float32", "bfloat16"], ["float16"]),
    ("optimizer.lr", [0, 1], [-1e-9, "inf", "nan"]),
    ("optimizer.eps", [0, 1], [-1e-9, "inf", "nan"]),
    ("optimizer.weight_decay", [0, 1], [-1e-9, "inf", "nan"]),
    ("optimizer.betas", ["[0, 0]", "[0.999, 0.9]"], ["[1.0, 0.9]", "[-0.1, 0.9]", "[0.9, nan]", "[0.9]"]),
    ("optimizer.implementation", ["fused", "foreach", "for-loop"], ["compiled", "fused_opt_states_bf16"]),
    (
        "optimizer.param_groups",
        [groups(), groups(lr=0), groups(name="Adam", lr=1e-3, betas=[0.9, 0.99])],
        [
            groups(lr=-1),
            groups(lr="inf"),
            groups(betas=[0.9, 1.0]),
            groups(learning_rate=1),
            groups(name="SGD"),
            groups(name="DistMuon"),
            groups(pattern="("),
            groups(amsgrad="true"),
        ],
    ),
    ("optimizer.optimizer_factory_kwargs_by_name", ["{}"], ["{ SGD = {} }", "{ AdamW = { lrr = 1 } }"]),
    (
        "optimizer.optimizer_factory_kwargs_by_name",
        ["{ AdamW = { maximize = false } }"],
        ["{ Adam = {} }", "{ AdamW = { lr = 0.1 } }", "{ AdamW = { fused = false } }"],
    ),
    ("lr_scheduler.warmup_steps", [0, 100], [-1]),
    ("lr_scheduler.total_steps", [1, 10**6], [0, -1]),
    ("lr_scheduler.decay_ratio", [0, 1], [-0.01, 1.01, "inf", "nan"]),
    ("lr_scheduler.min_lr_factor", [0, 1], [-0.01, 1.01, "inf", "nan"]),
    ("lr_scheduler.decay_type", ["linear", "sqrt", "cosine"], ["step"]),
    ("critic.lr_scheduler.total_steps", [1], [0]),
    ("critic.lr_scheduler.decay_ratio", [1], [1.01]),
    ("critic.optimizer.lr", [0], [-1]),
    ("implicit_reward.lr_scheduler.min_lr_factor", [1], [-1]),
    ("implicit_reward.optimizer.betas", ["[0, 0]"], ["[0, 1]"]),
    ("sft.lr", [1e-9, 1], [0, -1, "inf", "nan"]),
    ("comm.init_timeout_seconds", [1, 10**6], [0, -1, 10**6 + 1]),
    ("compile.components", ["[]", '["model"]'], ['["modle"]']),
    ("algorithm.kl_coefficient", [0, 1], [-1, "inf", "nan"]),
    *((f"parallelism.{kind}_degree", [1], [0, -1]) for kind in ("data_parallel_shard", "tensor_parallel")),
    *((f"parallelism.{kind}_degree", [1], [0, -1]) for kind in ("data_parallel_replicate", "pipeline_parallel")),
    ("parallelism.context_parallel_degree", [1, 2], [0, -1]),
    ("parallelism.expert_parallel_degree", [1], [0, 2]),
    ("parallelism.fsdp_reshard_after_forward", ["always", "never"], ["sometimes"]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, taken, _ in LIMITS for value in taken])
def test_a_value_at_a_limit_is_taken(key, value):
    checked(f"--{key}={value}")


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, _, refused in LIMITS for value in refused])
def test_a_value_beyond_a_limit_is_refused_in_a_line(key, value):
    with pytest.raises(ConfigError) as caught:
        checked(f"--{key}={value}")
    [line] = str(caught.value).splitlines()
    assert key in line


def test_keys_with_a_mode_have_limits_too():
    checked("--activation_checkpoint.mode=full", "--activation_checkpoint.determinism_check=none")
    with pytest.raises(ConfigError, match=r"activation_checkpoint.determinism_check = 'strict'"):
        checked("--activation_checkpoint.mode=full", "--activation_checkpoint.determinism_check=strict")
    compiled = load_config(None, parse_overrides(["--compile.enable", "--compile.backend=inducter"]))
    with pytest.raises(ConfigError, match="compile.backend = 'inducter': did you mean 'inductor'"):
        build_titan(compiled)


def test_every_number_of_torchtitans_keys_is_in_the_table():
    """So that a key which a new release brings is given its limits."""
    numbers = {
        f"{section}.{key}"
        for section, (_, keys) in titan_keys().items()
        for key, default in keys.items()
        if isinstance(default, int | float) and not isinstance(default, bool)
    }
    stages = {f"parallelism.pipeline_parallel_{name}_stage_less_layers" for name in ("first", "last")}  # test_config.py
    assert numbers <= {key for key, *_ in LIMITS} | stages


def test_a_group_without_a_parameter_is_refused():
    apart = '{ pattern = "%s", optimizer_name = "AdamW" }'
    checked(f"--optimizer.param_groups=[{apart % 'norm'}, {apart % '.*'}]")
    with pytest.raises(ConfigError, match="no parameter is left for 'nrom'"):
        checked(f"--optimizer.param_groups=[{apart % 'nrom'}, {apart % '.*'}]")
    with pytest.raises(ConfigError, match="no pattern for"):
        checked(f"--optimizer.param_groups=[{apart % 'attention'}]")
    with pytest.raises(ConfigError, match="has no pattern for"):
        checked(f"--optimizer.param_groups=[{apart % 'norm'}, {apart % 'attention'}]")


PPO, PRIME = {"algorithm": {"name": "ppo"}}, {"algorithm": {"name": "prime"}}
NEEDING = {"": {}, "critic.": PPO, "implicit_reward.": PRIME}
"""By the role whose optimizer and schedule they are, the policy's first."""


def of_role(role: str, **tables) -> dict:
    """A run with this role, and its tables."""
    section = role.removesuffix(".")
    return NEEDING[role] | ({section: tables} if section else tables)


@pytest.mark.parametrize("role", ["critic.", "implicit_reward."])
def test_groups_of_parameters_are_those_of_the_role_that_has_them(role):
    """A critic's head is one of its parameters."""
    names = ("norm", ".*") if role == "implicit_reward." else ("norm", "lm_head", ".*")
    patterns = {"taken": names, "no parameter is left for 'nrom'": ("nrom", ".*"), "no pattern for": ("norm",)}
    for said, wanted in patterns.items():
        tables = of_role(role, optimizer={"param_groups": [{"pattern": p, "optimizer_name": "AdamW"} for p in wanted]})
        if said == "taken":
            check(load_config(None, tables))
        else:
            assert_one_line(tables, [f"{role}optimizer.param_groups", said])


def test_a_role_in_processes_of_its_own_has_the_layout_that_its_groups_are_for():
    groups = [{"pattern": pattern, "optimizer_name": "AdamW"} for pattern in ("norm", ".*")]
    own = {"placement": "own", "optimizer": {"param_groups": groups}}
    two = {"pipeline_parallel_degree": 2}
    assert_one_line(PPO | {"critic": own | {"parallelism": two}}, ["critic.optimizer.param_groups", "every stage"])
    config = load_config(None, PPO | {"critic": own, "parallelism": two})
    assert learned_titan(config, build_titan(config), "critic").parallelism.pipeline_parallel_degree == 1
    critic = {"placement": "own", "parallelism": two}
    config = load_config(None, PPO | {"critic": critic, "optimizer": {"param_groups": groups}})
    assert learned_titan(config, build_titan(config), "critic").parallelism.pipeline_parallel_degree == 2
    assert_one_line(
        PPO | {"critic": own | {"parallelism": {"tensor_parallel_degree": 0}}}, ["critic.parallelism.tensor"]
    )


@pytest.mark.parametrize("role", NEEDING)
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"warmup_steps": 10}, []),
        ({"warmup_steps": 11}, ["warmup_steps = 11", "the run's updates, which are 10", "raise training.steps"]),
        ({"warmup_steps": 3, "decay_ratio": 0.7}, []),
        (
            {"warmup_steps": 4, "decay_ratio": 0.7},
            ["warmup_steps = 4", "decay_ratio = 0.7 another 7", "lower one of them"],
        ),
        ({"warmup_steps": 11, "total_steps": 11}, []),
        (
            {"warmup_steps": 6, "total_steps": 5},
            ["warmup_steps = 6", "total_steps, which are 5", "raise", "total_steps"],
        ),
    ],
)
def test_a_schedule_that_torchtitan_would_shorten_is_refused(role, schedule, words):
    tables = of_role(role, lr_scheduler=schedule)
    tables |= {"algorithm": tables.get("algorithm", {}) | {"updates_per_batch": 2}, "training": {"steps": 5}}
    if words:
        assert_one_line(tables, [f"{role}lr_scheduler", *words])
    else:
        check(load_config(None, tables))


@pytest.mark.parametrize(
    ("temperature", "sampled"),
    [(LEAST_TEMPERATURE, LEAST_TEMPERATURE), (MOST_TEMPERATURE, MOST_TEMPERATURE), (1.0, 1.0), (0.0, 0.0)],
)
def test_the_limits_of_temperatures_are_vllms(temperature, sampled):
    import vllm

    assert vllm.SamplingParams(temperature=temperature, max_tokens=1).temperature == sampled
    for beyond in (MOST_TEMPERATURE * 1.001, -0.1):
        with pytest.raises(vllm.exceptions.VLLMValidationError):
            vllm.SamplingParams(temperature=beyond)
    assert vllm.SamplingParams(temperature=LEAST_TEMPERATURE / 2).temperature != LEAST_TEMPERATURE / 2


@pytest.mark.parametrize(
    ("kind", "ratio", "warmup"), list(product(("linear", "sqrt", "cosine"), (0.0, 0.7, 1.0), (0, 4)))
)
def test_after_its_last_step_a_schedule_stays_where_it_is(kind, ratio, warmup):
    """TorchTitan's own would go below 0, rise again, or fail, where a run goes on beyond ``total_steps``."""
    settings = [f"--lr_scheduler.decay_type={kind}", f"--lr_scheduler.decay_ratio={ratio}", "--optimizer.lr=0.5"]
    settings += [f"--lr_scheduler.warmup_steps={warmup}", "--lr_scheduler.total_steps=10", "--training.steps=30"]
    titan = build_titan(load_config(None, parse_overrides(settings)))
    own = titan.lr_scheduler.build(optimizers=_optimizer(titan), training_steps=30)
    _, schedule = build_optimizer(titan, [torch.nn.Linear(2, 2)], 30)
    rates = {which: _rates(each, 10) for which, each in (("own", own), ("held", schedule))}
    assert rates["held"] == rates["own"]
    after = _rates(schedule, 40)
    assert after == [rates["held"][-1]] * 40 and after[0] > 0


def _optimizer(titan):
    return titan.optimizer.build(model_parts=[torch.nn.Linear(2, 2)])


def _rates(schedule, count: int) -> list[float]:
    """Of the next updates."""
    found = []
    for _ in range(count):
        found.append(schedule.schedulers[0].get_last_lr()[0])
        for optimizer in (each.optimizer for each in schedule.schedulers):
            optimizer.step()
        schedule.step()
    return found


def test_a_sliding_window_needs_no_more_than_its_full_layers():
    hf = SimpleNamespace(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    everywhere = cache_bytes(hf, 100, "bfloat16", 1)
    assert everywhere == 2 * 4 * 2 * 16 * 2 * 112
    assert cache_bytes(hf, 100, "float32", 2) == everywhere
    hf.layer_types = ["sliding_attention", "full_attention"] * 2
    assert cache_bytes(hf, 100, "bfloat16", 1) == everywhere // 2


@pytest.mark.parametrize(
    ("base", "tables", "said"),
    [
        ("grpo_tiny", {"rollout": {"top_k": 99}}, "rollout.top_k = 99: the model has 99 tokens"),
        ("distillation_tiny", {"rollout": {"min_p": 0.05}, "algorithm": {"top_k": 4}}, "rollout.min_p = 0.05: "),
        ("distillation_tiny", {"rollout": {"presence_penalty": 1}, "algorithm": {"top_k": 4}}, "or changes their log"),
        ("grpo_tiny", {"rollout": {"thinking_budget": 16, "max_new_tokens": 16}}, "thinking_budget = 16 has no effect"),
        (
            "grpo_tiny",
            {"rollout": {"max_new_tokens": 16}, "eval": {"thinking_budget": 16}},
            "eval.thinking_budget = 16 has",
        ),
        (
            "grpo_tiny",
            {"rollout": {"frequency_penalty": 0.5}, "model": {"kernel": "triton"}},
            "rollout.frequency_penalty = 0.5: model.kernel = 'triton' has no penalties",
        ),
    ],
)
def test_a_distribution_that_the_trainer_would_not_have_is_refused(base, tables, said):
    with pytest.raises(ConfigError, match=said):
        checked = resolve(load_config(base, tables))
        check_decoding(checked.config, checked.algorithm, read_config(checked))


TAGS = ["<think>", "</think>"]


def check_thinking(tags: list[str], texts: list[str], budget: int) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(tags)
    thinking = ThinkingCheck(ThinkingBudget("rollout.thinking_budget", budget), tokenizer)
    for number, text in enumerate(texts):
        prompt = Prompt(f"train/{number}", text, "", {})
        thinking.add(prompt, np.array(tokenizer.encode(text, add_special_tokens=False)))
    thinking.check_effect()


@pytest.mark.parametrize(
    ("tags", "texts", "said"),
    [
        ([], ["a"], "the model's tokenizer has no token for <think> and for </think>"),
        (["<think>"], ["a"], "has no token for <think>"),
        (TAGS, ["a=<think>\n\n</think>\n\n", "b=<think></think>"], "has no effect: the chat template closes thinking"),
        (TAGS, ["a=<think>\n\n</think>\n\n", "b="], ""),
        (TAGS, ["think in <think> </think>, then answer: 2+2="], ""),  # which opens no section, nor forbids one
        (TAGS, ["<think>a</think>b", "<think>c</think>d"], ""),  # earlier answers' thoughts
        (TAGS, ["a=<think>\n"], ""),
        (TAGS, [], ""),
    ],
)
def test_a_budget_for_thinking_needs_a_model_that_thinks(tags, texts, said):
    check_thinking(tags, texts, 0)
    if not said:
        return check_thinking(tags, texts, 8)
    with pytest.raises(ConfigError, match=f"^rollout.thinking_budget = 8.*{said}"):
        check_thinking(tags, texts, 8)


def test_a_prompt_that_uses_up_its_budget_is_named():
    texts = ["a=", "begin with <think>, then 2+2="]
    check_thinking(TAGS, texts, 12)
    with pytest.raises(ConfigError, match="^prompt train/1: the prompt opens .* 11 tokens before its end") as it:
        check_thinking(TAGS, texts, 11)
    assert "\n" not in str(it.value)


def suite_of(**settings) -> SimpleNamespace:
    """Whose answers have 512 tokens."""
    config = SuiteConfig(name="gsm8k", **settings)
    return SimpleNamespace(config=config, setting="eval.suites.gsm8k", prompts=(), max_new_tokens=lambda default: 512)


@pytest.mark.parametrize(
    ("run", "of_eval", "own", "said"),
    [
        (64, None, 512, ""),  # more than the run's
        (64, None, 0, ""),
        (0, 64, 512, ""),
        (0, 1024, None, ""),  # some suite's answers may be longer
        (0, None, 512, "eval.suites.gsm8k.thinking_budget = 512 has no effect: an answer has at most 512 tokens"),
        (64, 0, 512, "eval.suites.gsm8k.thinking_budget = 512 has no effect"),
        (0, None, 511, ""),
    ],
)
def test_a_budget_that_changes_another_has_an_effect(run, of_eval, own, said):
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(TAGS)
    config = load_config(None, {"rollout": {"thinking_budget": run, "max_new_tokens": 512}})
    config = replace(config, eval=replace(config.eval, thinking_budget=of_eval))
    if not said:
        return check_suite_decoding(suite_of(thinking_budget=own), config, tiny_config(), tokenizer)
    with pytest.raises(ConfigError, match=said):
        check_suite_decoding(suite_of(thinking_budget=own), config, tiny_config(), tokenizer)


def test_a_suites_prompts_are_encoded_for_a_budget_alone(monkeypatch):
    monkeypatch.setattr(engine_checks, "encode_checked", lambda *_: pytest.fail("encoded"))
    suite = suite_of()
    suite.prompts = (Prompt("a", "b", "", {}),)
    check_suite_decoding(suite, load_config(None, {}), tiny_config(), character_tokenizer())


def test_a_slower_kernel_is_announced_where_there_is_a_faster_one():
    config = load_config("grpo_tiny", {"rollout": {"repetition_penalty": 1.1}})
    [line] = kernel_notices(config, on_cpu=False)
    assert line.startswith("rollout.repetition_penalty = 1.1: ") and not kernel_notices(config, on_cpu=True)
    assert not kernel_notices(load_config("grpo_tiny", {}), on_cpu=False)
