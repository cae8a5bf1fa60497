"""Every key of a TOML, in every kind of run: one that the run never reads is refused by its name, all others pass."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from chat_models import TEMPLATE
from tree import CONFIGS

from titan_rl.cli import main
from titan_rl.config.load import SWITCHES as SECTION_SWITCHES
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import OUR_SECTIONS, Config, ModelConfig, TaskConfig
from titan_rl.controller.preflight.checks import Checked, check_together, resolve
from titan_rl.controller.preflight.data_checks import _check_chat, template_notice, weight_notices
from titan_rl.controller.preflight.ineffective_settings import check_read, learning_rate_notices
from titan_rl.environments.registry import make_task
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.trainer.titan_config import build_titan

KINDS: dict[str, dict[str, Any]] = {
    "rollouts": {},
    "ppo": {"algorithm": {"name": "ppo"}},
    "ppo, roles apart": {
        "algorithm": {"name": "ppo", "kl_coefficient": 0.1},
        "critic": {"placement": "own"},
        "reference": {"placement": "own"},
    },
    "prime": {"algorithm": {"name": "prime"}},
    "distillation": {"algorithm": {"name": "distillation"}},
    "a tool, ahead": {"task": {"name": "calculator"}, "rollout": {"max_staleness": 1}},
    "images": {"model": {"path": "tiny-vision"}, "task": {"name": "shapes"}},
    "lora": {"lora": {"rank": 4}, "algorithm": {"kl_coefficient": 0.1}},
    "lora on data": {"algorithm": {"name": "sft"}, "data": {"file": "task"}, "lora": {"rank": 4}},
    "hosts": {"hosts": {"launcher": "attach", "addresses": ["tls://a:1"]}},
    "colocated, drafted by a model": {
        "placement": {"mode": "colocated"},
        "generator": {"speculative": {"method": "draft_model", "model": "there"}},
    },
    "a drafter": {
        "generator": {"speculative": {"method": "draft_model"}},
        "drafter": {"path": "there"},
    },
    "all switches": {
        "sft": {"steps": 1},
        "filter": {"no_signal": True},
        "curriculum": {"least_chance": 0.5},
        "algorithm": {"overlong_buffer": 2},
        "metrics": {"wandb": True},
        "mesh": {"worker_loops": 1},
        "task": {"reward": "judge", "judge": {"url": "http://a/v1", "model": "b"}},
        "reward_model": {"path": "there"},
        "compile": {"enable": True},
        "lr_scheduler": {"decay_ratio": 0.5},
        "parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2},
        "generator": {"speculative": {"method": "ngram"}},
    },
    "sft": {"algorithm": {"name": "sft"}, "data": {"file": "task"}},
    "sft on a file": {"algorithm": {"name": "sft"}, "data": {"file": "a.jsonl", "held_out_file": "b.jsonl"}},
    "dpo": {"algorithm": {"name": "dpo"}, "data": {"file": "task"}},
    "dpo on a file": {"algorithm": {"name": "dpo"}, "data": {"file": "a.jsonl"}, "sft": {"steps": 2}},
    "kto": {"algorithm": {"name": "kto"}, "data": {"file": "a.jsonl"}},
    "orpo": {"algorithm": {"name": "orpo"}, "data": {"file": "a.jsonl"}},
    "reward_model": {"algorithm": {"name": "reward_model"}, "data": {"file": "a.jsonl"}},
    "sft by shares": {"algorithm": {"name": "sft", "aggregation": "constant"}, "data": {"file": "a.jsonl"}},
    "suites as chats": {"eval": {"suites": [{"name": "gsm8k", "style": "chat"}]}},
    "sft with suites": {
        "algorithm": {"name": "sft"},
        "data": {"file": "a.jsonl"},
        "eval": {"suites": [{"name": "gsm8k"}]},
    },
    "suites of tasks": {"eval": {"suites": [{"name": "x", "task": {"name": "calculator"}}]}},
    "sft with suites of tasks": {
        "algorithm": {"name": "sft"},
        "data": {"file": "a.jsonl"},
        "eval": {"suites": [{"name": "x", "task": {"name": "calculator"}}]},
    },
}
OF_ROLLOUTS = {
    *("rollout", "filter", "curriculum", "generator", "verifier", "reward_model", "eval.grader"),
    "eval.thinking_budget",
    *("task.reward", "task.rewards", "task.judge", "task.sandbox", "task.scoring", "task.keep_special"),
    "task.rewards_by_source",
    *("algorithm.updates_per_batch", "algorithm.routing", "algorithm.train_truncated", "algorithm.overlong_buffer"),
    *("algorithm.overlong_penalty", "recovery.warm_spares", "placement.mode", "placement.generator"),
    "placement.helper_generators",
    "debug.batch_invariant",
}
"""What a run on data never reads."""
KEPT = {"generator.gpu_memory_utilization"}
"""But this, of the same sections: the trainer's GPU has a limit, too."""
STEADY = {"rollout.max_turns", "generator.update", "generator.kv"}
"""Of tasks of one answer, and of runs that sample nothing while weights are updated."""
SWITCHED = {
    *(f"lora.{key}" for key in ("alpha", "targets", "adapter", "sync")),
    *("model.images.min_pixels", "model.images.max_pixels"),
    *("sft.examples_per_step", "sft.lr", "filter.max_refills"),
    *("curriculum.memory", "algorithm.overlong_penalty", "metrics.project", "mesh.launcher", "task.judge"),
    *("reward_model.reads_end", "compile.components", "compile.backend"),
    *(f"generator.speculative.{key}" for key in ("model", "num_speculative_tokens", "adaptive")),
    *(f"generator.speculative.prompt_lookup_{key}" for key in ("min", "max")),
    *("lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"),
    *("parallelism.enable_sequence_parallel", "parallelism.pipeline_parallel_schedule"),
    *(f"parallelism.pipeline_parallel_{key}" for key in ("layers_per_stage", "first_stage_less_layers")),
    *("parallelism.pipeline_parallel_last_stage_less_layers", "parallelism.module_fqns_per_model_part"),
}
"""What is read only where something else is on."""
MAY_BE_OWN = {"reference", "teacher", "critic", "implicit_reward"}
ROLES = {*MAY_BE_OWN, "drafter"}
APART = {f"placement.{role}" for role in MAY_BE_OWN}
HOSTS = {"hosts.generator", "hosts.verifier"}
OF_TASK = {"task"}
MADE = {"data.made_rows"}
CHATS = {f"model.chat_template.{key}" for key in ("text", "options", "date")}
"""Of prompts of style chat, which rows of data may be, too."""
UNREAD: dict[str, set[str]] = {
    "rollouts": {*CHATS, *STEADY, "data", "hosts", *ROLES, *APART, *SWITCHED},
    "ppo": {*CHATS, *STEADY, "data", "hosts", *(ROLES - {"critic"}), *APART, *SWITCHED},
    "ppo, roles apart": {
        *(*CHATS, *STEADY),
        *("data", "hosts", "teacher", "implicit_reward", "drafter", "placement.teacher", "placement.implicit_reward"),
        *SWITCHED,
    },
    "prime": {*CHATS, *STEADY, "data", "hosts", "teacher", "critic", "drafter", *APART, *SWITCHED},
    "distillation": {*CHATS, *STEADY, "data", "hosts", *(ROLES - {"teacher"}), *APART, *SWITCHED},
    "a tool, ahead": {*CHATS, "data", "hosts", *ROLES, *APART, *SWITCHED},
    "images": {
        *(*CHATS, *STEADY, "data", "hosts", *ROLES, *APART),
        *(key for key in SWITCHED if not key.startswith("model.images.")),
    },
    "lora": {
        *(*CHATS, *STEADY),
        *("data", "hosts", "reference.path", *(ROLES - {"reference"}), *APART),
        *(key for key in SWITCHED if not key.startswith("lora.")),
    },
    "lora on data": {
        *("hosts", *ROLES, *APART, *OF_ROLLOUTS),
        *("data.held_out_file", "data.held_out_share", "data.format", "data.columns"),
        *(SWITCHED - {"lora.alpha", "lora.targets", "lora.adapter"}),
    },
    "hosts": {*CHATS, *STEADY, "data", *ROLES, *APART, *SWITCHED},
    "colocated, drafted by a model": {
        *(*CHATS, *STEADY, "data", "hosts", *ROLES, *APART),
        *(key for key in SWITCHED if not key.startswith("generator.speculative.") or "lookup" in key),
    },
    "a drafter": {
        *(*CHATS, *STEADY, "data", "hosts", *(ROLES - {"drafter"}), *APART, "drafter.train_mtp"),
        *(key for key in SWITCHED if not key.startswith("generator.speculative.") or "lookup" in key),
    },
    "all switches": {
        *(*CHATS, *STEADY, "data", "hosts", *ROLES, *APART, "lora.alpha", "lora.targets", "lora.adapter", "lora.sync"),
        *("generator.speculative.model", "model.images.min_pixels", "model.images.max_pixels"),
    },
    "sft": {
        *("hosts", *ROLES, *APART, *SWITCHED, *OF_ROLLOUTS),
        *("data.held_out_file", "data.held_out_share", "data.format", "data.columns"),
    },
    "sft on a file": {
        *("hosts", *ROLES, *APART, *SWITCHED, *OF_ROLLOUTS, *OF_TASK, *MADE),
        "data.held_out_share",
    },
    "dpo": {
        *("hosts", *(ROLES - {"reference"}), *APART, *SWITCHED, *OF_ROLLOUTS, "algorithm.aggregation"),
        *("data.held_out_file", "data.held_out_share", "data.format", "data.columns"),
    },
    "dpo on a file": {
        *("hosts", *(ROLES - {"reference"}), *APART, *OF_ROLLOUTS, *OF_TASK, *MADE, "algorithm.aggregation"),
        *(key for key in SWITCHED if not key.startswith("sft.")),
    },
    "kto": {
        *("hosts", *(ROLES - {"reference"}), *APART, *SWITCHED, *OF_ROLLOUTS, *OF_TASK, *MADE),
        "algorithm.aggregation",
    },
    "orpo": {"hosts", *ROLES, *APART, *SWITCHED, *OF_ROLLOUTS, *OF_TASK, *MADE, "algorithm.aggregation"},
    "reward_model": {"hosts", *ROLES, *APART, *SWITCHED, *OF_ROLLOUTS, *OF_TASK, *MADE, "algorithm.aggregation"},
    "sft by shares": {"hosts", *ROLES, *APART, *SWITCHED, *OF_ROLLOUTS, *OF_TASK, *MADE},
    "suites as chats": {*STEADY, "data", "hosts", *ROLES, *APART, *SWITCHED},
    "sft with suites": {
        *("hosts", *ROLES, *APART, *SWITCHED, *OF_TASK, *MADE, "generator.update", "generator.kv"),
        *(OF_ROLLOUTS - {"generator", "verifier", "placement.generator"}),
    },
    "suites of tasks": {
        *(*CHATS, "data", "hosts", "generator.update", "generator.kv", *ROLES, *APART, *SWITCHED),
    },
    "sft with suites of tasks": {
        *("hosts", *ROLES, *APART, *SWITCHED, *OF_TASK, *MADE, "generator.update", "generator.kv"),
        *(OF_ROLLOUTS - {"generator", "verifier", "placement.generator"}),
    },
}
"""Sections and keys, by kind of run."""
OF_SUITES = {
    "rollout.stop",
    "rollout.thinking_budget",
    "eval.thinking_budget",
    "rollout.max_retries",
    "task.sandbox",
    "task.keep_special",
    "debug.batch_invariant",
}
"""What suites of a run on data read."""
READ = {
    "sft by shares": {"rollout.max_new_tokens"},
    "sft with suites": OF_SUITES,
    "sft with suites of tasks": {*OF_SUITES, "rollout.max_new_tokens", "rollout.max_turns"},
    "colocated, drafted by a model": {"drafter.path"},
    **{kind: {"rollout.share_prefix"} for kind in ("dpo", "dpo on a file", "orpo", "reward_model")},
}
"""Keys of unread sections that this kind reads all the same."""
OF_KIND = {"data.file", "algorithm.name", "hosts.launcher"}
"""Keys that would make the run one of another kind."""
SWITCHES = {"sft.steps", "lora.rank", "curriculum.least_chance", "compile.enable", "task.reward", "task.rewards"}
SWITCHES |= {"task.rewards_by_source", "generator.speculative.method"}
PLACES = {f"{role}.placement" for role in MAY_BE_OWN}


def is_unread(kind: str, key: str) -> bool:
    section = key.partition(".")[0]
    if key in KEPT or key in READ.get(kind, ()):
        return False
    return key in UNREAD[kind] or section in UNREAD[kind]


def other(value: Any) -> Any:
    """Of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    return ["x"] if isinstance(value, list | tuple) else {"x": 1} if isinstance(value, dict) else "x"


def changes(section: str, table: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a table, and of tables in it, and the table with another value there."""
    for each in fields(table):
        key, value = f"{section}.{each.name}", getattr(table, each.name)
        if key == "model.chat_template.file":  # its text is in its place once a file is read
            continue
        inner = changes(key, value) if is_dataclass(value) else [(key, other(value))]
        yield from ((name, replace(table, **{each.name: changed})) for name, changed in inner)


def keys(checked: Checked) -> Iterator[tuple[str, Checked]]:
    """Every key, and the run with another value there."""
    config, titan = checked.config, checked.titan
    for section in OUR_SECTIONS:
        table = getattr(config, section)
        for key, changed in changes(section, table):
            if key not in ("algorithm.options", *OF_KIND):
                yield key, replace(checked, config=replace(config, **{section: changed}))
    for section in ("training", "parallelism", "lr_scheduler", "compile", "comm", "debug"):
        table = getattr(titan, section)
        assert is_dataclass(table)
        for each in fields(table):
            changed = replace(table, **{each.name: getattr(table, each.name)})
            object.__setattr__(changed, each.name, other(getattr(table, each.name)))
            yield f"{section}.{each.name}", replace(checked, titan=replace(titan, **{section: changed}))


def resolved(kind: str) -> Checked:
    return resolve(load_config(None, KINDS[kind], with_models=False), on_cpu=True)


def refusal(checked: Checked) -> str:
    try:
        check_read(checked.config, checked.algorithm, checked.titan, checked.task)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_a_run_never_reads_is_refused_by_its_name(kind):
    checked = resolved(kind)
    assert not refusal(checked), "the run as it is"
    for key, changed in keys(checked):
        line = refusal(changed)
        if is_unread(kind, key):
            assert line.startswith(f"{key} = ") and "has no effect: " in line and "\n" not in line, (key, line)
            assert "leave it out" in line or "set " in line, f"{line}: what is the mend?"
        elif not (key in SWITCHES or key in PLACES or key.startswith(("filter.", "metrics.", "parallelism."))):
            assert not line, (key, line)


@pytest.mark.parametrize("section", SECTION_SWITCHES)
def test_every_key_of_a_section_with_a_switch_has_a_rule(section):
    """A key that is added to one is read only where the section is on."""
    switch, _ = SECTION_SWITCHES[section]
    names = {f"{section}.{key.name}" for key in fields(getattr(Config(), section))} - {f"{section}.{switch}"}
    without = {key for key, changed in keys(resolved("rollouts")) if key in names and not refusal(changed)}
    assert names and not without


def test_all_keys_are_tried():
    tried = {key for key, _ in keys(resolved("rollouts"))}
    assert {key.partition(".")[0] for key in tried} >= set(OUR_SECTIONS) and len(tried) > 150


@pytest.fixture
def nothing_starts(monkeypatch):
    """A run that is not refused would begin here."""
    monkeypatch.setattr("titan_rl.mesh.forking.forking.is_alone", lambda: False)  # so no servers are begun
    monkeypatch.setattr("titan_rl.train.drive", lambda work: pytest.fail("the run was taken"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["quickstart", "--data.chat=true"], "data.chat = true: [data] has no effect"),
        (["dpo_tiny", "--filter.no_signal"], "filter.no_signal = true: [filter] has no effect"),
        (["dpo_tiny", "--rollout.temperature=1.5"], "rollout.temperature = 1.5: [rollout] has no effect"),
        (["quickstart", "--lora.alpha=3.0"], "lora.alpha = 3.0 has no effect: lora.rank = 0"),
        (["quickstart", "--hosts.options.partitions=x"], 'hosts.options = {"partitions": "x"}: [hosts] has no effect'),
        (["quickstart", "--critic.updates=2"], "critic.updates = 2: [critic] has no effect"),
        (["quickstart", "--rollout.max_turns=3"], "rollout.max_turns = 3 has no effect: nothing in the task replies"),
        (
            ["quickstart", "--generator.kv=recompute"],
            "generator.kv = 'recompute' has no effect: rollout.max_staleness = 0",
        ),
        (
            ["quickstart", "--generator.speculative.adaptive=false"],
            "generator.speculative.adaptive = false has no effect: generator.speculative.method = 'none'",
        ),
        (
            ["sft_tiny", "--rollout.share_prefix=false"],
            "rollout.share_prefix = false has no effect: each row is trained",
        ),
        (
            ["ppo_tiny", "--critic.lr_scheduler.min_lr_factor=0.1"],
            "min_lr_factor = 0.1 has no effect: critic.lr_scheduler",
        ),
        (["quickstart", "--task.rewards.task=0"], "task.rewards: each weight is 0"),
        (
            ["quickstart", "--filter.no_signal", "--filter.min_pass_rate=1"],
            "filter.min_pass_rate = 1 leaves the groups",
        ),
        (["quickstart", "--activation_checkpoint.preserve_rng_state=false"], "has no effect with mode = 'none'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_command_that_sets_it_is_told_in_one_line(capsys, tmp_path, nothing_starts, command, arguments, named):
    run = [f"--run.dir={tmp_path / 'run'}"]
    assert main([command, *arguments, *run]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line and not (tmp_path / "run").exists()


def test_a_file_that_says_it_is_refused_as_a_command_is(tmp_path, capsys, nothing_starts):
    file = tmp_path / "a.toml"
    file.write_text("[algorithm]\nname = 'sft'\n[data]\nfile = 'task'\n[verifier]\nprocs = 2\n")
    assert main(["train", str(file), f"--run.dir={tmp_path / 'run'}"]) == 2
    assert "verifier.procs = 2: [verifier] has no effect: a run on data.file" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.toml")), ids=lambda file: file.stem)
def test_no_shipped_file_sets_what_its_run_never_reads(file):
    checked = resolve(load_config(file, with_models=False), on_cpu=True)
    check_read(checked.config, checked.algorithm, checked.titan, checked.task)


@pytest.mark.parametrize(
    ("file", "switch"),
    [
        ("quickstart", {"sft": {"steps": 0}}),
        ("lora_tiny", {"lora": {"rank": 0}}),
        ("dpo_tiny", {"data": {"file": "pairs.jsonl"}}),
    ],
)
def test_a_switch_turned_off_on_the_command_line_takes_its_section_with_it(file, switch):
    checked = resolve(load_config(file, switch), on_cpu=True)
    check_read(checked.config, checked.algorithm, checked.titan, checked.task)


def test_what_the_command_line_says_itself_beside_a_switch_is_refused():
    checked = resolve(load_config("quickstart", {"sft": {"steps": 0, "lr": 0.1}}), on_cpu=True)
    assert "sft.lr = 0.1 has no effect: sft.steps = 0 leaves SFT out" in refusal(checked)


def test_a_task_has_one_answer_unless_something_in_it_replies():
    for name, options, has_one in (
        ("gcd", {}, True),
        ("calculator", {}, False),
        ("treasure", {}, False),
        ("reverse_text", {}, True),
        ("wordle", {}, False),
        ("alphabet_sort", {}, False),
        ("mixture", {"gcd": {}, "lcm": {"rewards": {"task": 2}}}, True),
        ("mixture", {"gcd": {}, "calculator": {}}, False),
    ):
        task = resolve(load_config(None, {"task": {"name": name, "options": options}}), on_cpu=True).task
        assert task.has_one_answer == has_one, (name, options)


@pytest.mark.parametrize("name", ["turn_grpo", "gigpo", "reinforce_pp"])
def test_a_discount_of_turns_is_refused_where_an_episode_has_one(name):
    """``reinforce_pp`` discounts tokens."""
    algorithm = {"algorithm": {"name": name, "discount": 0.5}}
    line = refusal(resolve(load_config(None, algorithm), on_cpu=True))
    one_answer = "algorithm.discount = 0.5 has no effect: nothing in the task replies to an answer, so an episode has"
    assert line.startswith(one_answer) if name != "reinforce_pp" else not line
    assert not refusal(resolve(load_config(None, algorithm | {"task": {"name": "calculator"}}), on_cpu=True))
    assert not refusal(resolve(load_config(None, {"algorithm": {"name": name}}), on_cpu=True))


def test_filters_together_leave_nothing_only_where_all_right_answers_earn_the_same():
    filters = {"filter": {"no_signal": True, "min_pass_rate": 1}}
    with pytest.raises(ConfigError, match="lower the one, or leave the other out"):
        together(filters)
    for other in ({"task": {"reward": "a:b"}}, {"task": {"name": "a:b"}}, {"filter": {"no_signal": True}}):
        together(filters | other)


def together(tables: dict[str, Any]) -> None:
    config = load_config(None, tables)
    check_together(config, build_titan(config))


def test_a_setting_that_does_nothing_any_more_keeps_no_other_from_changing():
    """``generator.kv`` cannot change while a run goes on, ``rollout.max_staleness`` can."""
    checked = resolve(load_config(None, {"generator": {"kv": "recompute"}}), on_cpu=True)
    parts = checked.config, checked.algorithm, checked.titan, checked.task
    check_read(*parts, ["rollout.max_staleness"])
    for asked in (None, ["generator.kv"]):
        with pytest.raises(ConfigError, match="generator.kv = 'recompute' has no effect"):
            check_read(*parts, asked)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({}, []),
        ({"optimizer": {"lr": 0.0}}, ["optimizer.lr = 0: the model stays as it is"]),
        (
            {
                "optimizer": {
                    "param_groups": [{"pattern": "w1", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 2.0}}]
                }
            },
            ["optimizer.lr of 'w1' = 2: Adam moves each weight"],
        ),
        ({"optimizer": {"lr": 5.0}}, ["optimizer.lr = 5: Adam moves each weight by about that much a step"]),
        ({"algorithm": {"name": "ppo"}, "critic": {"optimizer": {"lr": 0}}}, ["critic.optimizer.lr = 0: the critic"]),
        ({"critic": {"optimizer": {"lr": 0}}}, []),
    ],
)
def test_a_learning_rate_of_nothing_is_said_and_taken(tables, said):
    checked = resolve(load_config(None, tables), on_cpu=True)
    lines = learning_rate_notices(checked.config, checked.algorithm, checked.titan)
    assert len(lines) == len(said) and all(line.startswith(words) for line, words in zip(lines, said, strict=True))


@pytest.mark.parametrize(
    ("rewards", "said"),
    [({"task": 0.5}, "0.5"), ({"task": 0.5, "math": 0.3}, "0.8"), ({"task": 0.9, "math": 0.1}, ""), ({}, "")],
)
def test_weights_that_no_right_answer_can_reach_are_told(rewards, said):
    lines = weight_notices(Config(task=TaskConfig(rewards=rewards)))
    assert [line.startswith(f"task.rewards: weights add up to {said}, and") for line in lines] == [True] * bool(said)


def test_a_chat_model_that_is_asked_without_its_template_is_told(tmp_path):
    def lines(path: Path, **task: Any) -> list[str]:
        config = Config(task=TaskConfig(**{"name": "gcd"} | task), model=ModelConfig(path=str(path)))
        return template_notice(config, make_task(config.task, []))

    for name in ("base", "chat"):
        tokenizer = character_tokenizer()
        tokenizer.chat_template = TEMPLATE if name == "chat" else None
        tokenizer.save_pretrained(tmp_path / name)
    [line] = lines(tmp_path / "chat")
    assert line.startswith("task.style = 'compact': the model has a chat template and is asked without it")
    mixed = {"sums": {"name": "gcd", "style": "chat"}, "lcm": {}}
    assert lines(tmp_path / "chat", name="mixture", options=mixed) == [line]
    assert not lines(tmp_path / "chat", style="chat") and not lines(tmp_path / "base") and not lines(Path("tiny"))


def test_settings_of_chats_that_no_row_of_data_reads_are_refused():
    """A template writes rows of messages anyway, and rows of text where ``data.chat`` has it."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = {"algorithm": {"name": "sft"}, "data": {"file": "a.jsonl"}}
    chats, dated = (
        data | {"data": {"file": "a.jsonl", "chat": True}},
        data | {"model": {"chat_template": {"date": "2027-01-01"}}},
    )
    with pytest.raises(ConfigError, match="data.chat = true has no effect: each row has messages"):
        _check_chat(load_config(None, chats), True, [said, said])
    with pytest.raises(ConfigError, match="model.chat_template.date = '2027-01-01' has no effect: rows of text"):
        _check_chat(load_config(None, dated), False, ["a"])
    for tables, is_chat, answers in ((chats, True, ["a", said]), (dated, True, [said]), (data, False, ["a"])):
        _check_chat(load_config(None, tables), is_chat, answers)
