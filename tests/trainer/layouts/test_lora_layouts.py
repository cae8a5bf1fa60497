"""Adapters in every layout: the steps, the merged weights and the files are those that one rank makes."""

import json

import pytest
import torch
from family_models import even, make
from layout_ranks import (
    MODELS,
    NUM_STEPS,
    Layout,
    assert_close,
    assert_same_tensors,
    one_step,
    parallelism,
    run_layouts,
)
from safetensors.torch import load_file

from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.weights.peft_files import WEIGHTS

LORA = {"rank": 3, "alpha": 12.0}
"""Two ranks share its rows unevenly."""
TOLERANCE = 1e-5
LAYOUTS = {
    1: {model: Layout(model, lora=LORA) for model in ("llama", "qwen3")},
    2: {
        "dp2": Layout("llama", parallelism(dp=2), lora=LORA),
        "tp2 from dp2": Layout("llama", parallelism(tp=2), start_from="dp2", lora=LORA),
        "tp2": Layout("llama", parallelism(tp=2), lora=LORA),
        "pp2 AC": Layout("qwen3", parallelism(pp=2), checkpointing="full", lora=LORA),
    },
    4: {"dp2 tp2": Layout("llama", parallelism(dp=2, tp=2), lora=LORA)},
}
ALL = {name: layout for layouts in LAYOUTS.values() for name, layout in layouts.items()}
SPREAD = [name for name, layout in ALL.items() if name not in LAYOUTS[1] and not layout.start_from]
FAMILIES = {"phi3 window": ("tp",), "gpt_oss": ("tp",), "olmo2": ("tp",), "deepseek_v3": ("tp",)}
TARGETS = {"gpt_oss": ["q_proj", "k_proj", "v_proj"], "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj", "gate_proj"]}
"""Where not all can have adapters under tensor parallelism."""


class Studies:
    """Each world's layouts are run at the first question about one of them."""

    def __init__(self, folder):
        self.folder, self.done = folder, set()
        for model in LAYOUTS[1]:
            make_tiny(folder / "models" / model, seed=1, hidden_size=64, num_layers=2, **MODELS[model])

    def __getitem__(self, name: str) -> dict:
        [world_size] = [size for size, layouts in LAYOUTS.items() if name in layouts]
        if world_size not in self.done:
            self.done.add(world_size)
            run_layouts(world_size, self.folder / "models", self.folder, LAYOUTS[world_size])
        return torch.load(self.folder / f"{name}.pt")


@pytest.fixture(scope="module")
def studies(tmp_path_factory) -> Studies:
    return Studies(tmp_path_factory.mktemp("layouts"))


def adapted(name: str) -> bool:
    return name.endswith("_proj.weight") and ".experts." not in name


@pytest.mark.parametrize("name", ALL)
def test_a_new_adapter_changes_nothing_and_trained_ones_only_their_own_weights(studies, name):
    layout, study = ALL[name], studies[name]
    base = load_file(studies.folder / "models" / layout.model / "model.safetensors")
    if not layout.start_from:
        assert_same_tensors(study["loaded"], base)
    for tensor_name, values in study["trained"].items():
        assert torch.equal(values, base[tensor_name]) != adapted(tensor_name), tensor_name


@pytest.mark.parametrize("name", SPREAD)
def test_steps_and_merged_weights_are_those_of_one_rank(studies, name):
    study, reference = studies[name], studies[ALL[name].model]
    for step in range(NUM_STEPS):
        assert_close(study["metrics"][0][step], reference["metrics"][0][step])
    for tensor_name, wanted in filter(lambda item: adapted(item[0]), reference["trained"].items()):
        moved = (wanted - reference["loaded"][tensor_name]).norm()
        assert moved > 100 * TOLERANCE * wanted.norm(), tensor_name
        assert (study["trained"][tensor_name] - wanted).norm() <= TOLERANCE * wanted.norm(), tensor_name


@pytest.mark.parametrize("name", ALL)
def test_saved_are_the_merged_weights_and_the_adapter_that_makes_them(studies, name):
    layout, folder = ALL[name], studies.folder
    assert_same_tensors(studies[name]["trained"], load_file(folder / name / "saved" / "model.safetensors"))
    base = load_file(folder / "models" / layout.model / "model.safetensors")
    adapter = load_file(folder / name / "adapter" / WEIGHTS)
    config = json.loads((folder / name / "adapter" / "adapter_config.json").read_text())
    scale, num_adapted = config["lora_alpha"] / config["r"], 0
    for tensor_name, merged in filter(lambda item: adapted(item[0]), studies[name]["trained"].items()):
        stem = f"base_model.model.{tensor_name.removesuffix('.weight')}"
        a, b = adapter[f"{stem}.lora_A.weight"], adapter[f"{stem}.lora_B.weight"]
        torch.testing.assert_close(base[tensor_name] + scale * b @ a, merged, rtol=1e-5, atol=1e-6)
        num_adapted += 1
    assert len(adapter) == 2 * num_adapted


@pytest.mark.parametrize("name", ALL)
def test_checkpoint_gives_the_next_steps_back_bit_for_bit(studies, name):
    study = studies[name]
    for rank, resumed in enumerate(study["after_resuming"]):
        assert resumed == study["metrics"][rank][NUM_STEPS:]


@pytest.mark.parametrize("name", [name for name, layout in ALL.items() if layout.start_from])
def test_checkpoint_of_one_layout_goes_on_in_another(studies, name):
    first, other = studies[ALL[name].start_from], studies[name]
    for tensor_name, wanted in first["trained"].items():
        torch.testing.assert_close(other["loaded"][tensor_name], wanted, rtol=1e-5, atol=1e-6)
    for metrics, reference in zip(other["metrics"][0], first["after_resuming"][0], strict=False):
        assert_close(metrics, reference)


def _lora(case: str) -> dict:
    return LORA | {"targets": TARGETS.get(case, [])}


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A step of families that do things in their own way, by two processes; and by one."""
    folder = tmp_path_factory.mktemp("families")
    for case in FAMILIES:
        make(folder / "models" / case, case, scale=0.15, **even(case))  # as test_families.py does
    layouts = {
        f"{case}, {kind}": Layout(case, parallelism(**{kind: 2}), lora=_lora(case))
        for case, kinds in FAMILIES.items()
        for kind in kinds
    }
    run_layouts(2, folder / "models", folder, layouts, one_step)
    run_layouts(1, folder / "models", folder, {case: Layout(case, lora=_lora(case)) for case in FAMILIES}, one_step)
    return folder


@pytest.mark.confirms
@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, kinds in FAMILIES.items() for kind in kinds])
def test_two_ranks_step_as_one_does_whatever_the_family(spread, case, kind):
    step, wanted = torch.load(spread / f"{case}, {kind}.pt"), torch.load(spread / f"{case}.pt")
    for name in ("loss", "grad_norm", "entropy"):
        assert step["metrics"][0][0][name] == pytest.approx(wanted["metrics"][0][0][name], rel=1e-5), name
    for name, tensor in wanted["loaded"].items():
        assert torch.equal(step["loaded"][name], tensor), name
        difference = (step["trained"][name] - wanted["trained"][name]).norm()
        assert difference <= 1e-3 * (wanted["trained"][name] - tensor).norm(), name
        is_target = adapted(name) and name.split(".")[-2] in TARGETS.get(case, [name.split(".")[-2]])
        assert torch.equal(step["trained"][name], tensor) != is_target, name
