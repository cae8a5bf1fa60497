"""``titan-rl plan``: without a GPU, without weights, with nothing started."""

import json
from pathlib import Path

import pytest

from titan_rl.cli import main

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
PARAMETERS = {"Qwen/Qwen3-1.7B": 1.72e9, "Qwen/Qwen3-8B": 8.19e9, "Qwen/Qwen3-30B-A3B": 30.5e9}
"""As their model cards say."""
SHIPPED = {
    "qwen3_1.7b_h200": ("Qwen/Qwen3-1.7B", 1, ["--gpus=1", "--gpu-memory-gib=140"]),
    "qwen3_8b_8h100": ("Qwen/Qwen3-8B", 4, ["--gpus=8"]),
    "qwen3_30b_a3b_16h100": ("Qwen/Qwen3-30B-A3B", 12, ["--gpus=8", "--hosts=2"]),
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
    assert "needs 4 GPUs, and of 2 GPUs 2 are left" in refused(capsys, "qwen3_8b_8h100", "--gpus=2")
    line = refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--gpu-memory-gib=24")
    assert "GPU 0 of host 0 would have to hold" in line and "Take one of: more ranks in [parallelism]" in line
    assert "numbers above 0" in refused(capsys, "qwen3_8b_8h100", "--gpus=0")
    assert "give --gpus N" in refused(capsys, "quickstart", "--hosts=2")


def test_overrides_count(models, capsys):
    lines = told(capsys, "qwen3_8b_8h100", "--gpus=8", "--placement.generator=[0, 1, 2, 3]", "--generator.replicas=2")
    assert "GPU 0 to 1: " in lines and "generator 0 to generator 1" in lines
    assert "must divide" in refused(capsys, "qwen3_8b_8h100", "--gpus=8", "--generator.tensor_parallel=3")


def test_on_a_cpu_it_tells_the_same_as_a_run(capsys):
    assert told(capsys, "quickstart").startswith("memory: about ")
    assert json.loads(told(capsys, "quickstart", "--json"))["processes"][0]["name"] == "trainer"


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert "config.json cannot be read" in refused(capsys, "quickstart", f"--model.path={tmp_path}", "--gpus=1")
