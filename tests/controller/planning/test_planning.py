"""``titan-rl plan``: without a GPU, without weights, with nothing started."""

import json
from pathlib import Path

import pytest

from titan_rl.cli import main
from titan_rl.models.builtin.eagle3 import make_eagle3

QWEN3 = dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=151936,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    attention_bias=False,
    use_sliding_window=False,
    num_key_value_heads=8,
)
MODELS = {
    "Qwen/Qwen3-1.7B": QWEN3
    | dict(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-8B": QWEN3
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-30B-A3B": QWEN3
    | dict(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
}
"""The sizes of Qwen's own config.json files."""
PARAMETERS = {
    "Qwen/Qwen3-1.7B": 1.72e9,
    "Qwen/Qwen3-8B": 8.19e9,
    "Qwen/Qwen3-30B-A3B": 30.5e9,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6e9,
}
"""As their model cards say."""
SHIPPED = {
    "qwen3_1.7b_h200": ("Qwen/Qwen3-1.7B", 1, ["--gpus=1", "--gpu-memory-gib=140"]),
    "qwen3_8b_8h100": ("Qwen/Qwen3-8B", 4, ["--gpus=8"]),
    "qwen3_30b_a3b_16h100": ("Qwen/Qwen3-30B-A3B", 12, ["--gpus=8", "--hosts=2"]),
    "llama_70b_64h100": ("meta-llama/Llama-3.3-70B-Instruct", 40, ["--gpus=8", "--hosts=8"]),
}
"""Of each shipped TOML for GPUs: its model, the ranks that share it, and the machine that it is for."""


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """A folder with their config.json files, in which the shipped TOMLs find them."""
    for name, values in MODELS.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_toml_fits_the_machine_that_it_is_for(name, models, capsys):
    model, shards, machine = SHIPPED[name]
    table = json.loads(told(capsys, name, *machine, "--json"))
    for device in table["devices"]:
        assert device["bytes"] <= table["usable_share"] * table["device_bytes"]
    trainer = table["devices"][0]["processes"][0]
    assert trainer["name"] == "trainer rank 0"
    assert trainer["bytes"]["weights"] * shards / 4 == pytest.approx(PARAMETERS[model], rel=0.02)
    assert table["kv_cache_bytes"] > 2 << 30
    assert len(table["devices"]) == table["hosts"] * table["devices_per_host"]


def test_gpus_and_their_memory_can_be_given(models, capsys):
    assert "needs 4 GPUs, and 2 of 2 GPUs are left" in refused(capsys, "qwen3_8b_8h100", "--gpus=2")
    line = refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--gpu-memory-gib=24")
    assert "GPU 0 of host 0 would have to hold" in line and "Take one of: more ranks in [parallelism]" in line
    assert "numbers above 0" in refused(capsys, "qwen3_8b_8h100", "--gpus=0")
    assert "give --gpus N" in refused(capsys, "quickstart", "--hosts=2")


def test_overrides_count(models, capsys):
    lines = told(capsys, "qwen3_8b_8h100", "--gpus=8", "--placement.generator=[0, 1, 2, 3]", "--generator.replicas=2")
    assert "GPU 0 to 1: " in lines and "generator 0 to generator 1" in lines
    assert "must divide" in refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--generator.tensor_parallel=3")


def test_gpus_that_nobody_uses_are_told(models, capsys):
    lines = told(capsys, "qwen3_1.7b_h200", "--gpus=8", "--gpu-memory-gib=140")
    assert "  6 of 8 GPUs idle: raise generator.replicas, or degrees of [parallelism], to use them" in lines
    assert "idle" not in told(capsys, "qwen3_8b_8h100", "--gpus=8")
    table = json.loads(told(capsys, "qwen3_1.7b_h200", "--gpus=8", "--gpu-memory-gib=140", "--json"))
    assert table["idle_devices"] == 6 and len(table["devices"]) == 2


def test_prompts_are_looked_at_where_they_are_here(tmp_path, capsys, models):
    file = tmp_path / "questions.jsonl"
    rows = [{"question": "1" * (10 + 10 * n), "answer": n} for n in range(11)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    toml = tmp_path / "my.toml"
    toml.write_text(f"[task]\nname = 'jsonl'\noptions = {{ file = '{file}' }}\n[rollout]\nmax_new_tokens = 3\n")
    run = (str(toml),)
    plan = json.loads(told(capsys, *run, "--json"))["data"]
    assert 10 <= plan["mean_tokens"] <= plan["longest_tokens"] <= 110
    assert "tokens on average" in told(capsys, *run)
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    options = json.dumps({"file": str(file), "held_out_file": str(held_out)})
    assert "; 2 training rows are left out: held-out rows ask the same" in told(capsys, *run, "--task.options", options)
    assert "are cut" not in told(capsys, *run)
    file.write_text("".join(json.dumps(row | {"answer": "1" * 50}) + "\n" for row in rows))
    assert "tokens (50 in the median, 50 at most), and are cut: set rollout" in told(capsys, *run)
    rows[3]["question"] = "1" * 402
    rows[4]["question"] = "2" * 402
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(capsys, *run)
    assert "leaves 253 tokens for prompts, but they have up to 402 (questions.jsonl line 4; 1 of 8 is too long)" in said
    file.unlink()
    assert f"prompts: not looked at, as task.options.file = '{file}' is not here" in told(capsys, *run)
    beside = tmp_path / "questions.csv"
    beside.write_text("question,answer\n1,2\n")
    assert "the name must end in .jsonl" in refused(capsys, *run, f"--task.options.file={beside}")
    whole = told(capsys, "qwen3_8b_8h100", "--gpus=8")
    assert "not looked at, as the model's tokenizer is not here: 512 tokens are assumed (--prompt-tokens)" in whole
    assert "are assumed" not in told(capsys, "qwen3_8b_8h100", "--gpus=8", "--prompt-tokens=100")


def test_a_draft_head_s_memory_is_told(tmp_path, capsys):
    tmp_path.joinpath("head").mkdir()
    make_eagle3(tmp_path / "head", "tiny", seed=1)
    head = ("--generator.speculative.method=eagle3", f"--drafter.path={tmp_path / 'head'}")
    number = json.loads(told(capsys, "quickstart", *head, "--json"))["draft_model"]["parameters"]
    [line] = [line for line in told(capsys, "quickstart", *head).splitlines() if line.startswith("draft head: ")]
    learns, sent = number * 16 / 2**20, 2 * number * 4 / 2**20
    assert f"trainer {learns + sent:.1f} MiB" in line and f"each engine {sent:.1f} MiB" in line
    still = ("--generator.speculative.method=eagle3", f"--generator.speculative.model={tmp_path / 'head'}")
    lines = told(capsys, "quickstart", *still)
    assert f"{number:,} parameters; of the memory above each engine {sent / 2:.1f} MiB" in lines
    assert "draft" not in told(capsys, "quickstart")


def test_what_drafts_must_bring_is_told(capsys):
    run = ("qwen3_8b_8h100", "--gpus=8", "--prompt-tokens=100")
    drafted = (*run, "--generator.speculative.method=ngram")
    [line] = [line for line in told(capsys, *drafted).splitlines() if "without drafts" in line]
    busy, alone = json.loads(told(capsys, *drafted, "--json"))["forecast"]["drafts"]
    assert alone["requests"] == 1 and 0 < alone["needed_acceptance"] < busy["needed_acceptance"]
    assert line.endswith(f"1 request {alone['ratio']:.2f} x, {alone['needed_acceptance']:.2f}")
    assert "drafts" not in told(capsys, *run)


def test_rows_of_a_run_on_data_are_looked_at_too(capsys):
    assert "rows of data.file: " in told(capsys, "dpo_tiny", "--data.made_rows=40", "--eval.prompts=8")


def test_on_a_cpu_it_tells_the_same_as_a_run(capsys):
    assert told(capsys, "quickstart").startswith("memory: about ")
    assert json.loads(told(capsys, "quickstart", "--json"))["processes"][0]["name"] == "trainer"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("quickstart", "model.path"),
        ("distillation_tiny", "teacher.path"),
        ("quickstart", "generator.speculative.model"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys, name, key):
    line = refused(capsys, name, f"--{key}={tmp_path}", "--generator.speculative.method=draft_model", "--gpus=1")
    assert line.startswith(f"titan-rl: {key} = '{tmp_path}': it holds no config.json")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["quickstart", "--generator.speculative.method=ngram", "--rollout.top_p=0.9"], "drafts are not checked with"),
        (["fp8_tiny", "--lora.rank=8"], "adapters are not trained on layers in FP8"),
        (["calculator_tiny", "--algorithm.name=sdpo"], "is for tasks of one answer"),
        (["mopd_tiny", "--teacher.path=tiny"], "teacher.path = 'tiny'"),
        (["shapes_tiny", "--model.images.max_pixels=32064"], "501 tokens, of the 8 x 8 pixels of a token each"),
        (["shapes_tiny", "--checkpoint.export_quantization=fp8_per_channel"], "a vision tower (vision_config"),
    ],
)
def test_what_a_run_would_be_refused_for_is_planned_by_nobody(capsys, arguments, named):
    assert named in refused(capsys, *arguments)


def test_an_image_that_cannot_be_read_is_named_with_its_row(tmp_path, capsys):
    """After a thousand rows that can be, nobody would find it."""
    row = {"prompt": "a", "answer": "b"}
    rows = [row, row | {"image": "data:image/png;base64,AAAA"}, row | {"prompt": "c"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = 'name = "jsonl"\noptions = { file = "rows.jsonl", held_out_share = 0.3 }\n'
    (tmp_path / "run.toml").write_text(f'model.path = "tiny-vision"\n[task]\n{task}')
    line = refused(capsys, str(tmp_path / "run.toml"))
    assert line == "titan-rl: rows.jsonl line 2: its image 1 is no image of PNG, JPEG, WEBP"


# seconds


def test_seconds_are_told_by_phase_and_a_rate_can_be_given(models, capsys):
    lines = told(capsys, "qwen3_8b_8h100", "--gpus=8", "--answer-tokens=1000", "--days=7")
    for word in ("a step of 64 x 8 answers of 1000 tokens", "decode", "forward_backward", "in 7 days:", "simulated"):
        assert word in lines
    assert "memory of all hosts, together: trainer" in lines
    run = ("qwen3_8b_8h100", "--gpus=8", "--json")
    whole = json.loads(told(capsys, *run))["forecast"]
    slow = json.loads(told(capsys, *run, "--rates.train_share=0.2"))["forecast"]
    assert slow["phases"]["forward_backward"] == pytest.approx(2 * whole["phases"]["forward_backward"], rel=0.05)
    faster = json.loads(told(capsys, *run, "--device=H200"))["forecast"]
    assert faster["phases"]["decode"] < whole["phases"]["decode"]
    assert "--device" in refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--device=H1000")
    assert "train_share" in refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--rates.train_share=0")
    assert "above 0" in refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--days=0")


def test_a_cpu_s_seconds_want_rates(capsys):
    assert "bench plan" in told(capsys, "quickstart")
    assert "forward_backward" in told(capsys, "quickstart", "--rates.peak_flops=3e10")


def test_the_cheapest_is_told_as_a_toml_writes_it_and_is_what_a_plan_of_it_says(models, capsys):
    table = json.loads(told(capsys, "qwen3_8b_8h100", "--gpus=8", "--search", "--json"))
    best = table["found"][0]
    tables = {f"--{name}.{key}={value}" for name, each in best["tables"].items() for key, value in each.items()}
    again = json.loads(told(capsys, "qwen3_8b_8h100", "--gpus=8", "--json", *sorted(tables)))
    assert again["forecast"]["seconds"] == pytest.approx(best["forecast"]["seconds"], rel=0.02)
    own = json.loads(told(capsys, "qwen3_8b_8h100", "--gpus=8", "--json"))
    assert best["forecast"]["seconds"] <= own["forecast"]["seconds"]
    small = ("--gpus=2", "--gpu-memory-gib=16", "--search")
    assert "no placement on this machine fits" in refused(capsys, "qwen3_8b_8h100", *small)


# models that are not here


def test_a_shape_needs_no_download(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "trainer rank 0" in told(capsys, "qwen3_8b_8h100", "--gpus=8")  # its name is a known one
    small = ["--shape=Qwen/Qwen3-8B", "--shape.num_hidden_layers=4"]
    assert "trainer rank 0" in told(capsys, "qwen3_8b_8h100", "--gpus=8", *small)
    assert "no model of this name" in refused(capsys, "quickstart", "--shape=llama-71b", "--gpus=8")


def test_a_name_of_the_hub_that_cannot_be_had_is_one_line(monkeypatch, capsys):
    from titan_rl.config.model_directory import hub

    monkeypatch.setattr(hub, "_newest_revision", lambda name: None)
    line = refused(capsys, "quickstart", "--model.path=nobody/nothing", "--gpus=8")
    assert "the Hub cannot be reached, nor does its cache hold such a model" in line and "--shape" in line


def test_what_cannot_be_compiled_on_a_cpu_can_be_planned_for_gpus(models, capsys):
    assert "compile.enable needs an accelerator" in refused(capsys, "quickstart", "--compile.enable")
    assert "trainer rank 0" in told(capsys, "qwen3_8b_8h100", "--gpus=8", "--compile.enable")


def test_without_a_gpu_what_only_a_cpu_cannot_do_is_told_with_how_gpus_are_planned_for(capsys):
    only_gpus = "there is no GPU here (--gpus N plans for hosts with N each), and on the CPU "
    assert f"{only_gpus}generator.kv_cache_gib = 0.5 cannot hold" in refused(capsys, "qwen3_8b_8h100")
    assert "--gpus" not in refused(capsys, "quickstart", "--generator.tensor_parallel=3")
