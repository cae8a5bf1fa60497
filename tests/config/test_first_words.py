"""What a newcomer types: names that other systems have, JSON, numbers as text, and a configuration to look at."""

import re
from dataclasses import dataclass, fields
from typing import get_type_hints

import pytest
import tomli

from titan_rl.algorithms.registry import ALGORITHMS, make_algorithm
from titan_rl.cli import main
from titan_rl.config import other_names
from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.io.toml_text import toml_text
from titan_rl.config.load import ConfigError, build_section, load_config, nearest
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import OUR_SECTIONS, TITAN_SECTIONS, Config
from titan_rl.config.sections.text_lists import TITAN_TEXT_LISTS, holds_texts
from titan_rl.controller.preflight.checks import resolve
from titan_rl.trainer.titan_config import build_titan, titan_keys


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--algorithm.name=gpro", "did you mean 'grpo'? Else give pkg.module:name of your own"),
        ("--algorithm.name=DAPO", "algorithm.name = 'DAPO' is unknown: did you mean 'dapo'?"),
        ("--algorithm.name=losses.Mine", "algorithm.name = 'losses.Mine' is unknown: did you mean 'losses:Mine'?"),
        ("--algorithm.name=a/losses.py:Mine", "give losses:Mine, and --run.plugin_path a"),
        ("--training.steps", "training.steps = true: Input should be a valid integer (--training.steps without a"),
        ("--filter.no_signal=True", "filter.no_signal = 'True': write true, in small letters and without quotes"),
        ("--optimizer.betas=0.9,0.99", "give two numbers from 0 to below 1, as [0.9,0.99]"),
        ("--rollout.stop=x,y", 'rollout.stop = \'x,y\' is one text: give a list, ["x,y"] or ["x", "y"]'),
        ("--rollout.stop=[x, y]", 'rollout.stop = \'[x, y]\' is one text: give a list, ["[x, y]"] or ["x", "y"]'),
        ("--rollout.stop=[END]", 'rollout.stop = \'[END]\' is one text: give a list, ["[END]"] or ["END"]'),
        ("--eval.suites=gsm8k", "eval.suites = 'gsm8k' is one text: give a list"),
        ("--training.epochs=3", "unknown key training.epochs: here it is training.steps: a run counts steps"),
        ("--training.lr=1e-4", "unknown key training.lr: here it is optimizer.lr"),
        ("--optimizer.learning_rate=1e-4", "unknown key optimizer.learning_rate: did you mean 'lr'?"),
        ("--generator.batch_invariant=true", "unknown key generator.batch_invariant: here it is debug.batch_invariant"),
        ("--generator.helper_generators=1", "here it is placement.helper_generators"),
        ("--generator.temperature=0.5", "unknown key generator.temperature: here it is rollout.temperature"),
        ("--sampling.temperature=0.5", "unknown section [sampling]: here it is rollout.temperature"),
        ("--sampling.heat=0.5", "unknown section [sampling]: did you mean [rollout]?"),
        ("--actor_rollout_ref.rollout.n=4", "unknown section [actor_rollout_ref]: here it is rollout.group_size"),
        ("--actor_rollout_ref.rollout.enforce_eager=1", "there is none here: engines capture graphs"),
        ("--wandb.project=x", "unknown section [wandb]: did you mean [metrics]?"),
        (
            "--generator.enforce_eager",
            "unknown key generator.enforce_eager: there is none here: engines capture graphs",
        ),
        (
            "--profiling.enable_profiling",
            "unknown section [profiling]: there is none here: each step's trace is recorded",
        ),
        (
            "--algorithm.epsilon=0.2",
            "unknown key algorithm.epsilon: here it is algorithm.clip_low and algorithm.clip_high",
        ),
        ("--algorithm.kl_coef=0.1", "unknown key algorithm.kl_coef: did you mean 'kl_coefficient'?"),
        ("--generator.tensor_parallel_size=2", "did you mean 'tensor_parallel'?"),
        ("--run.dir=2026", "run.dir = 2026 is no text: put it in quotes, as in --run.dir '\"2026\"'"),
        ("--task.system_prompt", "task.system_prompt = true is no text: put it in quotes"),
    ],
)
def test_a_slip_is_told_with_what_was_meant(argument, said):
    with pytest.raises(ConfigError) as caught:
        config = load_config(None, parse_overrides([argument]))
        build_titan(config)
        make_algorithm(config.algorithm, [])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_hint_of_the_quotes_works():
    assert load_config(None, parse_overrides(["--run.dir", '"2026"'])).run.dir == "2026"


def test_one_text_is_a_list_where_a_list_of_texts_is_wanted():
    given = ["--run.plugin_path=a b", "--rollout.stop=\\n", "--lora.targets=o_proj", "--hosts.trainer=node1"]
    config = load_config(None, parse_overrides([*given, "--compile.components=loss"]))
    lists = config.run.plugin_path, config.rollout.stop, config.lora.targets, config.hosts.trainer
    assert lists == (["a b"], ["\\n"], ["o_proj"], ["node1"])
    assert build_titan(config).compile.components == ["loss"]


def test_no_list_of_texts_in_torchtitans_sections_is_forgotten():
    found = [
        (section, key)
        for section, (cls, defaults) in titan_keys().items()
        for key, kind in get_type_hints(cls).items()
        if key in defaults and holds_texts(kind)
    ]
    assert sorted(found) == sorted(TITAN_TEXT_LISTS)


def test_a_text_in_a_file_is_no_list(tmp_path):
    (tmp_path / "run.toml").write_text('[rollout]\nstop = "x"\n')
    with pytest.raises(ConfigError, match="is one text: give a list"):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--resum"], "cannot read '--resum': did you mean --resume?"),
        (["--seed", "3"], "cannot read '--seed': here it is --run.seed"),
        (["--learning_rate=1e-4"], "here it is --optimizer.lr"),
        (["--steps", "3"], "here it is --training.steps"),
        (["--group-size", "3"], "did you mean --rollout.group_size?"),
        (["--use_vllm"], "cannot read '--use_vllm': there is none here: vLLM samples all answers of every run"),
        (["--per_device_train_batch_size=4"], "there is none here: a step has rollout.prompts_per_step prompts"),
        (["--gradient_accumulation_steps", "2"], "there is none here: a step has rollout.prompts_per_step prompts"),
        (["training.steps=5"], "cannot read 'training.steps=5': did you mean --training.steps=5?"),
        (["algorithm.kl_coefficient=5"], "did you mean --algorithm.kl_coefficient=5?"),
        (["data.train_files=x"], "here it is task.options.file, or data.file. Settings are given with two dashes"),
        (["actor_rollout_ref.rollout.n=5"], "here it is rollout.group_size. Settings are given with two dashes"),
        (["other.toml"], "overrides look like --section.key value"),
        (["--zzz", "3"], "overrides look like --section.key value"),
    ],
)
def test_a_key_without_its_section_is_told_with_it(arguments, said, capsys):
    assert main(["train", "quickstart", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data.toml", "algorithm.toml", "sft.toml"])
def test_a_file_that_is_called_as_a_section_is_a_file(name, capsys):
    assert main(["train", name]) == 2
    assert "give the path of a TOML file" in capsys.readouterr().err


def test_an_override_without_dashes_is_told_where_a_file_is_expected(capsys):
    assert main(["train", "training.steps=5"]) == 2
    assert "did you mean --training.steps=5?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("num_generations = 8", "num_generations = 8 is in no section: here it is rollout.group_size"),
        ("learning_rate = 1e-4", "learning_rate = 0.0001 is in no section: here it is optimizer.lr"),
        ('model_name_or_path = "m"', "model_name_or_path = 'm' is in no section: here it is model.path"),
        ("use_vllm = true", "use_vllm = True is in no section: there is none here: vLLM samples"),
        ("group_siz = 8", "group_siz = 8 is in no section: did you mean rollout.group_size?"),
        ("zzz = 8", "unknown section [zzz]"),
    ],
)
def test_a_key_at_a_file_s_top_is_told_with_its_section(line, said, tmp_path):
    (tmp_path / "run.toml").write_text(line + "\n[training]\nsteps = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml")
    assert said in str(caught.value)


@dataclass(kw_only=True)
class Needy:
    url: str
    inner: dict[str, int]


def test_a_key_that_is_needed_is_named_with_the_mend():
    with pytest.raises(ConfigError, match="^task.judge.url is needed, and is not given: set it$"):
        build_section(Needy, {"inner": {}}, "task.judge")


def test_a_judge_without_an_address_is_one_line(capsys):
    assert main(["train", "quickstart", "--eval.grader", "judge"]) == 2
    assert "task.judge.url is needed, and is not given: set it" in capsys.readouterr().err


def test_what_else_may_be_given_is_a_sentence_of_its_own():
    assert nearest("gpro", ["grpo"], "a file") == "did you mean 'grpo'? Else give a file"
    assert nearest("x", ["grpo"], "a file") == "known: grpo; or give a file"


def test_letters_that_changed_places_come_before_other_ones():
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == "did you mean 'grpo'?"


def test_the_nearest_file_is_told_first():
    with pytest.raises(ConfigError, match="did you mean 'quickstart'. Else give the path of a TOML file, or a name"):
        load_config("quickstrt")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"file": "x.jsonl", "held_out_share": 0.1}', {"file": "x.jsonl", "held_out_share": 0.1}),
        ('{file = "x.jsonl"}', {"file": "x.jsonl"}),
        ('{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        ("{not either}", "{not either}"),
        ('["a", "b"]', ["a", "b"]),
    ],
)
def test_a_table_may_be_json(text, value):
    assert parse_overrides([f"--task.options={text}"]) == {"task": {"options": value}}


@pytest.mark.parametrize("file", ["quickstart", "dpo_tiny", "ppo_tiny", "llama_70b_64h100"])
def test_the_whole_configuration_can_be_printed_and_makes_the_same_run(file, tmp_path):
    before = resolve(load_config(file, {"run": {"dir": 'a"\\\n\x7fé'}}, with_models=False), on_cpu=True)
    (tmp_path / "same.toml").write_text(toml_text(before.as_dict()))
    after = resolve(load_config(tmp_path / "same.toml", with_models=False), on_cpu=True)
    assert after.as_dict() == before.as_dict()


def test_print_config_prints_a_toml_and_starts_nothing(capsys, tmp_path):
    assert main(["train", "quickstart", "--print-config", "--rollout.group_size=4", f"--run.dir={tmp_path / 'a'}"]) == 0
    tables = tomli.loads(capsys.readouterr().out)
    assert tables["rollout"]["group_size"] == 4 and tables["algorithm"]["clip_high"] == 0.2
    assert not (tmp_path / "a").exists()
    assert main(["train", "quickstart", "--print-config", "--lora.alpha=2.0"]) == 2


@pytest.mark.parametrize("path", ["nowhere", "organization/there-is-none"])
def test_a_configuration_is_printed_without_a_look_at_its_models(path, capsys):
    models = [f"--model.path={path}", f"--reference.path={path}", "--algorithm.kl_coefficient=0.1"]
    assert main(["train", "quickstart", "--print-config", *models]) == 0
    tables = tomli.loads(capsys.readouterr().out)
    assert tables["model"]["path"] == path and tables["reference"]["path"] == path


def test_each_name_of_another_system_leads_to_a_key_or_section_that_is_here():
    known = {
        f"{name}.{field.name}"
        for name, cls in get_type_hints(Config).items()
        if name != "titan"
        for field in fields(cls)
    }
    known |= {f"model.images.{field.name}" for field in fields(ImagesConfig)}
    known |= {f"{section}.{key}" for section, (_, keys) in titan_keys().items() for key in keys}
    known |= {f"algorithm.{field.name}" for made in ALGORITHMS.values() for field in fields(made.Settings)}
    for key, ours in other_names.KEYS.items():
        named = re.findall(r"[a-z_]+\.[a-z_.]+[a-z_]", ours)
        assert named and ours.startswith(named[0]), (key, ours)
        assert {name for name in named if not name.startswith("task.options.")} <= known, (key, named)
    sections = {*OUR_SECTIONS, *TITAN_SECTIONS}
    assert set(other_names.SECTIONS.values()) <= sections and not sections & other_names.SECTIONS.keys()
    assert not other_names.KEYS.keys() & other_names.NOT_HERE.keys()
    for name in other_names.NOT_HERE.keys() - {"top_k"}:
        assert not any(key.endswith(f".{name}") for key in known), name
