"""A user's mistake is one line that names the key and the mend; whatever is right comes through as it was written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from tree import CONFIGS

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.io.overrides import override_arguments, parse_overrides
from titan_rl.config.load import ConfigError, as_dict, load_config, load_resolved
from titan_rl.config.sections.schema import OUR_SECTIONS, Config
from titan_rl.controller.preflight.checks import check_model, resolve
from titan_rl.environments.registry import make_task
from titan_rl.models.builtin.tiny import make_tiny, tiny_config
from titan_rl.trainer.model.layout import check_layout
from titan_rl.trainer.titan_config import build_titan

COMMITTED = sorted(CONFIGS.rglob("*.toml"))


def load(*arguments: str, file: Path | str | None = None) -> Config:
    return load_config(file, parse_overrides(list(arguments)))


def mistake(*arguments: str, file: Path | str | None = None) -> str:
    """The one line of the ConfigError that the arguments earn."""
    with pytest.raises(ConfigError) as caught:
        config = load(*arguments, file=file)
        build_titan(config)
        make_algorithm(config.algorithm, config.run.plugin_path)
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("argument", "name", "nearest"),
    [
        ("--taks.name=gcd", "[taks]", "'task'"),
        ("--task.nmae=gcd", "task.nmae", "'name'"),
        ("--rollout.max_stalenes=1", "rollout.max_stalenes", "'max_staleness'"),
        ("--training.stesp=3", "training.stesp", "'steps'"),
        ("--optimizer.beta=3", "optimizer.beta", "'betas'"),
        ("--activation_checkpoint.mode=fulll", "activation_checkpoint.mode", "'full'"),
        ("--titan.training=1", "[titan]", "training"),
        ("--run.zzzzz=1", "run.zzzzz", "seed"),
    ],
)
def test_unknown_name_is_told_with_the_nearest(argument, name, nearest):
    line = mistake(argument)
    assert name in line and nearest in line


@pytest.mark.parametrize(
    "argument",
    [
        "--run.seed=one",
        "--run.seed='1'",
        "--run.seed=1.0",
        "--run.seed=true",
        "--task.name=5",
        "--task.options=3",
        "--rollout.share_prefix=1",
        "--rollout.temperature='hot'",
        "--training.steps=1.5",
        "--training.mixed_precision_param=float8",
        "--parallelism.data_parallel_shard_degree='2'",
        "--optimizer.lr=fast",
        "--activation_checkpoint.mode=[1]",
    ],
)
def test_wrong_type_names_the_key(argument):
    assert argument[2:].partition("=")[0] in mistake(argument)


@pytest.mark.parametrize(
    "argument",
    [
        "--run.seed=-1",
        "--rollout.group_size=1",
        "--rollout.temperature=0",
        "--rollout.temperature=nan",
        "--rollout.max_staleness=-1",
        "--algorithm.clip_low=1.0",
        "--algorithm.aggregation=mean",
        "--generator.gpu_memory_utilization=1.0",
        "--verifier.score_timeout=0",
        "--training.steps=0",
        "--optimizer.lr=-1",
        "--optimizer.betas=[0.9]",
        "--optimizer.betas=[0.9, 1.5]",
        "--parallelism.data_parallel_shard_degree=0",
    ],
)
def test_value_out_of_range_names_the_key(argument):
    assert argument[2:].partition("=")[0] in mistake(argument)


def test_limits_themselves_are_allowed():
    config = load("--rollout.group_size=2", "--run.seed=0", "--rollout.max_staleness=0", "--rollout.temperature=1")
    assert (config.rollout.group_size, config.run.seed, config.rollout.temperature) == (2, 0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "tables"),
    [
        (["--run.seed", "3"], {"run": {"seed": 3}}),
        (["--run.seed=3", "--run.dir", "runs/a"], {"run": {"seed": 3, "dir": "runs/a"}}),
        (["--optimizer.lr", "1e-3"], {"optimizer": {"lr": 1e-3}}),
        (["--optimizer.weight_decay", "-1"], {"optimizer": {"weight_decay": -1}}),
        (["--compile.enable"], {"compile": {"enable": True}}),
        (["--compile.enable", "--run.seed", "1"], {"compile": {"enable": True}, "run": {"seed": 1}}),
        (["--rollout.share_prefix", "false"], {"rollout": {"share_prefix": False}}),
        (["--task.options.max_value", "12"], {"task": {"options": {"max_value": 12}}}),
        (["--task.options={max_value=12}"], {"task": {"options": {"max_value": 12}}}),
        (["--run.dir=a=b"], {"run": {"dir": "a=b"}}),
        (["--run.dir="], {"run": {"dir": ""}}),
        (["--run.seed=1", "--run.seed=2"], {"run": {"seed": 2}}),
        (["--task.system_prompt", "3\nseed = 2"], {"task": {"system_prompt": "3\nseed = 2"}}),
        (["--run.seed=" + "9" * 5000], {"run": {"seed": "9" * 5000}}),
        (["--run.dir=" + "[" * 1000], {"run": {"dir": "[" * 1000}}),
        (["--rün.sëed=ü"], {"rün": {"sëed": "ü"}}),
    ],
)
def test_overrides(arguments, tables):
    assert parse_overrides(arguments) == tables


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["-run.seed", "1"],
        ["--seed", "1"],
        ["--seed=1.5"],
        ["--run.seed", "1", "2"],
        ["--run.seed=1", "--run.seed.deeper=2"],
        ["--=3"],
        ["--.=3"],
        ["--.seed=3"],
        ["--run.=3"],
        ["--run..seed=3"],
    ],
)
def test_bad_form_of_an_override(arguments):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (f"--training.{'a.' * 3000}b=1", "nests more than 30 deep"),
        (f"--task.options={'[' * 60}{']' * 60}", "nests more than 30 deep"),
        (
            '--task.options={"file": ["a\\u0000b"]}',
            "task.options.file.0 = 'a\\x00b' cannot be a setting: it has a null byte",
        ),
        ("--run.dir=\udcff", "cannot be a run directory: it is not UTF-8"),
    ],
)
def test_what_no_setting_can_be_is_one_line(argument, said):
    told = mistake(argument)
    assert said in told and "\n" not in told and len(told) < 300


def test_an_override_says_what_was_set():
    tables = {"run": {"dir": "a\x7fb"}, "task": {"options": {"list": [1, "\x7f"]}}}
    assert parse_overrides(override_arguments(tables)) == tables


def test_override_goes_over_the_file_and_keeps_the_rest(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(
        "[run]\nseed = 3\n[task]\nname = 'lcm'\noptions = {max_value = 9, shots = 1}\n[training]\nsteps = 7"
    )
    config = load("--task.options.max_value=20", "--training.seq_len=64", file=file)
    assert config.run.seed == 3 and config.task.name == "lcm"
    assert config.task.options == {"max_value": 20, "shots": 1}
    assert config.titan == {"training": {"steps": 7, "seq_len": 64}}


def test_missing_file(tmp_path):
    assert "none.toml" in mistake(file=tmp_path / "none.toml")
    assert str(tmp_path) in mistake(file=tmp_path)
    assert "too long" in mistake(file=tmp_path / ("a" * 5000))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    assert "pipe.toml: it is not a file" in mistake(file=tmp_path / "pipe.toml")


@pytest.mark.parametrize(
    "content",
    [
        b"[run",
        b"[run]\nseed =",
        b"seed = \xff",
        b"[run]\nseed = 1\nseed = 2",
        "[run]\nseed = 1".encode("utf-16"),
        b"\0" * 100,
        b"a = " + b"9" * 5000,
        b"a = " + b"[" * 1000,
    ],
    ids=lambda content: repr(content[:24]),
)
def test_file_that_is_not_toml(tmp_path, content):
    file = tmp_path / "a.toml"
    file.write_bytes(content)
    assert "a.toml is not TOML" in mistake(file=file)


@pytest.mark.parametrize("content", [b"", b" \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_starts_no_run_of_defaults(tmp_path, content):
    (tmp_path / "a.toml").write_bytes(content)
    assert "a.toml is empty" in mistake(file=tmp_path / "a.toml")


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert load(file=tmp_path / "a.toml").run.seed == 3


def test_a_file_of_that_path_is_taken_before_the_one_that_comes_along(tmp_path, monkeypatch):
    """A folder of that name, such as the one of its runs, is no such file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert load(file="quickstart").task.name == "count_bits"
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("[task]\nname = 'lcm'")
    assert load(file="quickstart").task.name == "lcm"


def test_data_beside_a_file_that_comes_along_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [quickstart] = [file for file in COMMITTED if file.stem == "quickstart"]
    assert load(file="quickstart").run.plugin_path == [str(quickstart.parent), str(tmp_path)]


def test_an_unknown_name_is_told_with_the_nearest_and_where_all_are_listed():
    line = mistake(file="quickstrat")
    assert "did you mean 'quickstart'" in line and "(`titan-rl train --help` lists them)" in line
    assert "grpo_tiny" not in line and "grpo_tiny" not in mistake(file="zzz")
    assert "did you mean" not in mistake(file="zzz")


def test_key_outside_a_section(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("run = 3")
    assert "[run]" in mistake(file=file)


def test_missing_model_is_told_before_anything_is_loaded(tmp_path):
    assert "config.json" in mistake(f"--model.path={tmp_path}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--algorithm.updates_per_batch=17"], ["algorithm.updates_per_batch", "rollout.prompts_per_step"]),
        (["--task.style=chat"], ["task.style", "model.path"]),
        (["--rollout.max_new_tokens=64", "--training.seq_len=64"], ["rollout.max_new_tokens", "training.seq_len"]),
        (["--training.local_batch_size=2"], ["training.local_batch_size"]),
        (["--training.global_batch_size=8"], ["global_batch_size"]),
    ],
)
def test_combinations_that_cannot_be(arguments, words):
    line = mistake(*arguments)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("context_parallel_degree=0", "at least 1"),
        ("spmd_backend=full_dtensor", "partial_dtensor"),
        ("pipeline_parallel_microbatch_size=2", "no effect"),
        ("pipeline_parallel_schedule=GPipe", "1F1B"),
        ("pipeline_parallel_layers_per_stage=0", "at least 1"),
        ("pipeline_parallel_first_stage_less_layers=-1", "at least 0"),
        ("data_parallel_shard_degree=-1", "at least 1"),
        ("data_parallel_replicate_degree=0", "at least 1"),
        ("tensor_parallel_degree=0", "at least 1"),
        ("expert_parallel_degree=2", "data_parallel_shard_degree"),
    ],
)
def test_layouts_that_are_not_trained_are_refused_with_the_reason(setting, word):
    line = mistake(f"--parallelism.{setting}")
    assert f"parallelism.{setting.partition('=')[0]}" in line and word in line


def parallelism(**settings):
    return build_titan(load(*(f"--parallelism.{name}={value}" for name, value in settings.items()))).parallelism


UNTIED = dict(tie_word_embeddings=False)
MOE = dict(architecture="qwen3_moe", tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ({}, dict(tensor_parallel_degree=3), ["tensor_parallel_degree = 3", "num_attention_heads = 4"]),
        ({}, dict(tensor_parallel_degree=4), ["tensor_parallel_degree = 4", "num_key_value_heads = 2"]),
        ({}, dict(tensor_parallel_degree=2), []),
        ({}, dict(pipeline_parallel_degree=2), ["pipeline_parallel_degree = 2", "tie_word_embeddings"]),
        (UNTIED, dict(pipeline_parallel_degree=4), []),
        (UNTIED, dict(pipeline_parallel_degree=5), ["pipeline_parallel_degree = 5", "5 stages of 4 layers"]),
        (
            UNTIED,
            dict(pipeline_parallel_degree=3, pipeline_parallel_schedule="Interleaved1F1B"),
            ["pipeline_parallel_degree = 3", "6 stages of 4 layers"],
        ),
        (
            UNTIED,
            dict(pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=2),
            ["pipeline_parallel_schedule = '1F1B'", "wants 2 stages", "there are 3"],
        ),
        (UNTIED, dict(pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=3), []),
        (
            UNTIED,
            dict(pipeline_parallel_degree=2, pipeline_parallel_first_stage_less_layers=9),
            ["pipeline_parallel_first_stage_less_layers = 9"],
        ),
        (
            UNTIED,
            dict(pipeline_parallel_degree=2, module_fqns_per_model_part=[["tok_embeddings", "layers.0"], ["lm_head"]]),
            ["module_fqns_per_model_part"],
        ),
        ({}, dict(expert_parallel_degree=2, data_parallel_shard_degree=2), ["expert_parallel_degree = 2", "dense"]),
        (
            MOE,
            dict(expert_parallel_degree=3, data_parallel_shard_degree=3),
            ["expert_parallel_degree = 3", "num_experts = 4"],
        ),
        (MOE, dict(tensor_parallel_degree=2), []),
        (MOE, dict(tensor_parallel_degree=2, enable_sequence_parallel="false"), []),
        (MOE, dict(tensor_parallel_degree=2, expert_parallel_degree=2), []),
        (
            MOE,
            dict(tensor_parallel_degree=2, expert_parallel_degree=2, enable_sequence_parallel="false"),
            ["enable_sequence_parallel"],
        ),
        (MOE, dict(data_parallel_shard_degree=5), ["5 ranks share each expert", "moe_intermediate_size = 64"]),
        (MOE, dict(data_parallel_shard_degree=8), []),
    ],
)
def test_model_and_layout_must_fit(model, settings, words):
    """No words: they do."""
    hf = tiny_config(**model)
    if not words:
        return check_layout(hf, parallelism(**settings))
    with pytest.raises(ConfigError) as caught:
        check_layout(hf, parallelism(**settings))
    [line] = str(caught.value).splitlines()
    assert all(word in line for word in ["parallelism", *words])


def test_each_rank_needs_words_of_the_vocabulary():
    hf = tiny_config()
    hf.num_attention_heads = hf.num_key_value_heads = 8
    check_layout(hf, parallelism(tensor_parallel_degree=8))
    hf.vocab_size = 9
    with pytest.raises(ConfigError, match="vocab_size = 9"):
        check_layout(hf, parallelism(tensor_parallel_degree=8))


def test_layout_of_a_model_is_checked_before_anything_starts(tmp_path):
    make_tiny(tmp_path, seed=1, hidden_size=64, num_layers=1)
    for path in ("tiny", tmp_path):
        with pytest.raises(ConfigError, match="num_attention_heads"):
            check_model(load(f"--model.path={path}", "--parallelism.tensor_parallel_degree=3"))


def test_ranks_of_one_group_take_the_same_rows():
    """Of 2 stages x 2 replicas x 3 shards x 2 tensor-parallel ranks."""
    titan = build_titan(
        load(
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=3",
            "--parallelism.tensor_parallel_degree=2",
            "--parallelism.pipeline_parallel_degree=2",
        )
    )
    assert (titan.world_size, titan.batch_degree, titan.row_multiple) == (24, 6, 2)
    assert [titan.batch_rank(rank) for rank in range(24)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 2


def test_titan_sections_keep_what_serves_reinforcement_learning_unless_written():
    titan = build_titan(load("--training.steps=7", "--parallelism.data_parallel_shard_degree=2"))
    assert (titan.training.steps, titan.training.local_batch_size, titan.world_size) == (7, 1, 2)
    assert titan.activation_checkpoint is None
    assert build_titan(load("--activation_checkpoint.mode=full")).activation_checkpoint is not None


def test_optimizer_short_form_is_one_adamw():
    [group] = build_titan(load("--optimizer.lr=1e-3", "--optimizer.betas=[0.8, 0.9]")).optimizer.param_groups
    assert group.optimizer_name == "AdamW" and group.pattern == ".*"
    assert group.optimizer_kwargs["lr"] == 1e-3 and list(group.optimizer_kwargs["betas"]) == [0.8, 0.9]


GROUP = '{pattern = ".*", optimizer_name = "AdamW", optimizer_kwargs = {lr = 0.1}%s}'


def test_optimizer_groups_exclude_the_short_form():
    groups = f"--optimizer.param_groups=[{GROUP % ''}]"
    assert build_titan(load(groups)).optimizer.param_groups[0].optimizer_kwargs == {"lr": 0.1}
    line = mistake(groups, "--optimizer.lr=1e-3")
    assert "optimizer.lr" in line and "param_groups" in line


def test_optimizer_groups_exclude_a_pipeline():
    groups = f"--optimizer.param_groups=[{GROUP % ''}, {GROUP % ''}]"
    assert "param_groups" in mistake(groups, "--parallelism.pipeline_parallel_degree=2")


def test_unknown_key_inside_an_optimizer_group():
    assert "lrr" in mistake(f"--optimizer.param_groups=[{GROUP % ', lrr = 1'}]")


def test_resolved_configuration_reads_back_as_itself():
    config = load("--run.seed=3", "--task.options.max_value=9", "--training.steps=7")
    values = as_dict(config)
    assert set(values) == set(OUR_SECTIONS) and values["task"]["options"] == {"max_value": 9}
    assert as_dict(load_config(None, values)) == values
    assert build_titan(config).as_dict()["training"]["steps"] == 7


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--activation_checkpoint.mode=full", "--parallelism.tensor_parallel_degree=2", "--optimizer.lr=1e-3"],
        ["--activation_checkpoint.mode=selective", "--lr_scheduler.decay_ratio=0.5"],
        ['--optimizer.param_groups=[{pattern = ".*", optimizer_name = "AdamW", optimizer_kwargs = {lr = 0.1}}]'],
    ],
)
def test_a_run_directorys_configuration_reads_back_as_itself(tmp_path, overrides):
    config = load("--training.steps=7", *overrides)
    titan, path = build_titan(config), tmp_path / "config.json"
    path.write_text(json.dumps(as_dict(config) | titan.as_dict(), default=str))
    again = load_resolved(path)
    assert as_dict(again) == as_dict(config) and build_titan(again) == titan


@pytest.mark.parametrize("text", ["{", '{"training": {"stps": 3}}', '{"run": 1}'])
def test_a_damaged_configuration_of_a_run_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        build_titan(load_resolved(tmp_path / "config.json"))


def test_a_date_is_a_name_of_a_directory():
    assert load("--run.dir=2025-01-01").run.dir == "2025-01-01"


@pytest.mark.parametrize(
    "setting",
    [
        "training.enable_cpu_offload=true",
        "training.dtype=bfloat16",
        "training.gc_freq=7",
        "comm.mode=fake_backend",
        "debug.seed=3",
    ],
)
def test_a_setting_without_effect_is_refused(setting):
    assert setting.partition("=")[0] in mistake(f"--{setting}")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_committed_file_is_right(file, tmp_path, monkeypatch):
    model = tomli.loads(file.read_text()).get("model", {}).get("path", "tiny")
    if model != "tiny":
        make_tiny(tmp_path / model, seed=1)
        (tmp_path / model / "chat_template.jinja").write_text("{{ messages }}")
        monkeypatch.chdir(tmp_path)
    config = load(file=file)
    build_titan(config)
    make_task(config.task, config.run.plugin_path)


def test_our_sections_need_no_torch():
    program = "import sys, titan_rl.config.load as c; c.load_config(None); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_former_section_is_refused_with_its_new_name_and_read_in_records(tmp_path):
    assert "[sft]" in mistake("--warmup.steps=3")
    (tmp_path / "config.json").write_text('{"warmup": {"steps": 3}, "algorithm": {"name": "grpo", "clip_low": 0.1}}')
    config = load_resolved(tmp_path / "config.json")
    assert config.sft.steps == 3 and config.algorithm.options == {"clip_low": 0.1}


def test_a_former_key_is_refused_with_its_new_name_and_read_in_records(tmp_path):
    line = mistake("--mesh.hosts=2")
    assert "mesh.hosts is called mesh.worker_loops now" in line
    (tmp_path / "config.json").write_text('{"mesh": {"hosts": 2, "step_timeout": 30.0}}')
    config = load_resolved(tmp_path / "config.json")
    assert config.mesh.worker_loops == 2 and config.mesh.step_timeout == 30.0


def test_an_algorithms_own_keys_are_written_as_they_were_read(tmp_path):
    config = load("--algorithm.clip_low=0.1", "--algorithm.aggregation=sequence")
    table = as_dict(config)["algorithm"]
    assert table["clip_low"] == 0.1 and table["aggregation"] == "sequence" and "options" not in table


def test_plugins_are_looked_for_beside_the_toml_first(tmp_path):
    toml = tmp_path / "a.toml"
    toml.write_text("# all defaults")
    assert load_config(toml).run.plugin_path == [str(tmp_path), str(Path.cwd())]
    assert load("--run.plugin_path=['/x']").run.plugin_path == ["/x"]


def test_the_resolved_configuration_holds_what_was_left_out():
    table = resolve(load("--algorithm.clip_low=0.1")).as_dict()
    assert table["algorithm"]["clip_low"] == 0.1 and table["algorithm"]["clip_high"] == 0.2
    assert table["training"]["max_norm"] == 1.0 and table["sft"]["steps"] == 0


def test_a_table_goes_over_the_file_s_by_its_keys_and_an_empty_one_empties_it(tmp_path):
    (tmp_path / "run.toml").write_text(
        "[task]\nname = 'gcd'\n[task.options]\nmax_value = 9\nshots = 2\n[sft]\nsteps = 3\n"
    )

    def options(**tables) -> dict:
        return load_config(tmp_path / "run.toml", tables).task.options

    assert options(task={"options": {"shots": 4}}) == {"max_value": 9, "shots": 4}
    assert options(task={"options": {}}) == {} and options(task={}) == options() != {}
    assert load_config(tmp_path / "run.toml", parse_overrides(["--task.options", "{}"])).task.options == {}
