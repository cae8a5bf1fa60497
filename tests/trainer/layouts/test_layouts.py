"""Whatever the layout of the trainer's ranks: the same loss, gradient norm, metrics and weights as one rank gives."""

import json
from collections.abc import Callable

import pytest
import torch
from batches import FAULTS
from layout_ranks import (
    MODELS,
    NUM_STEPS,
    TOLERANCE,
    Layout,
    assert_close,
    assert_same_tensors,
    parallelism,
    run_layouts,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from titan_rl.data.types import StepMetrics
from titan_rl.models.builtin.tiny import make_tiny

pytestmark = pytest.mark.slow

FLOAT8 = "rowwise_with_gw_hp"
# the vocabulary has 99 words, which no degree here divides
LAYOUTS = {
    1: {
        **{model: Layout(model) for model in MODELS},
        "full AC": Layout("qwen3", checkpointing="full"),
        "selective AC": Layout("qwen3", checkpointing="selective"),
        "float8": Layout("qwen3", float8=FLOAT8),
    },
    2: {
        "dp2": Layout("llama", parallelism(dp=2), faults=FAULTS),
        "tp2": Layout("llama", parallelism(tp=2), faults=FAULTS),
        "tp2 from dp2": Layout("llama", parallelism(tp=2), start_from="dp2"),
        "dp2 untied": Layout("qwen3", parallelism(dp=2)),
        "pp2": Layout("qwen3", parallelism(pp=2), faults=FAULTS),
        "pp2 from dp2": Layout("qwen3", parallelism(pp=2), start_from="dp2 untied"),
        "pp2 interleaved": Layout("qwen3", parallelism(pp=2, schedule="Interleaved1F1B")),
        "ep2": Layout("moe", parallelism(dp=2, ep=2)),
        "cp2": Layout("llama", parallelism(cp=2), faults=FAULTS),
        "cp2 AC": Layout("qwen3", parallelism(cp=2), checkpointing="selective"),
        "tp2 of experts": Layout("moe", parallelism(tp=2)),
        "pp2 of experts AC": Layout("moe", parallelism(pp=2), checkpointing="full"),
        "dp2 float8": Layout("qwen3", parallelism(dp=2), float8=FLOAT8),
        "tp2 float8": Layout("qwen3", parallelism(tp=2), float8=FLOAT8),
        "pp2 float8": Layout("qwen3", parallelism(pp=2), float8=FLOAT8),
        "cp2 float8": Layout("qwen3", parallelism(cp=2), float8=FLOAT8),
    },
    4: {
        "dp2 tp2": Layout("llama", parallelism(dp=2, tp=2)),
        "dp2 pp2": Layout("qwen3", parallelism(dp=2, pp=2)),
        "tp2 pp2": Layout("qwen3", parallelism(tp=2, pp=2)),
        "cp4 from cp2": Layout("llama", parallelism(cp=4), start_from="cp2"),
        "cp2 tp2": Layout("llama", parallelism(cp=2, tp=2)),
        "cp2 pp2": Layout("qwen3", parallelism(cp=2, pp=2)),
        "HSDP": Layout("llama", parallelism(replicate=2, dp=2)),
        "dp2 tp2 ep2": Layout("moe", parallelism(dp=2, tp=2, ep=2)),
        "dp2 cp2 ep4": Layout("moe", parallelism(dp=2, cp=2, ep=4)),
    },
}
CONFIRMING = {
    "dp2 tp2 from dp2": Layout("llama", parallelism(dp=2, tp=2), start_from="dp2"),
    "tp2 pp2 AC": Layout("qwen3", parallelism(tp=2, pp=2), checkpointing="selective"),
    "tp2 pp2 no SP": Layout("qwen3", parallelism(tp=2, pp=2, enable_sequence_parallel=False)),
}
WORLDS = [*LAYOUTS.items(), (4, CONFIRMING)]
"""Number of ranks, and the layouts that are run one after the other."""
ALL = {name: layout for _, layouts in WORLDS for name, layout in layouts.items()}


def of_layouts(choose: Callable[[str, Layout], bool] = lambda name, layout: True) -> pytest.MarkDecorator:
    names = [name for name, layout in ALL.items() if choose(name, layout)]
    confirms = {name: [pytest.mark.confirms] for name in CONFIRMING}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=confirms.get(name, [])) for name in names])


all_layouts = of_layouts()


class Studies:
    """Each world's layouts are run at the first question about one of them."""

    def __init__(self, folder):
        self.folder, self.models, self.done, self.failed = folder, folder / "models", set(), {}
        for model, settings in MODELS.items():
            make_tiny(self.models / model, seed=1, hidden_size=64, num_layers=4, **settings)

    def __getitem__(self, name: str) -> dict:
        [(number, (world_size, layouts))] = [each for each in enumerate(WORLDS) if name in each[1][1]]
        if number not in self.done:
            self.done.add(number)
            for layout in layouts.values():
                if layout.start_from and layout.start_from not in layouts:
                    self[layout.start_from]
            try:
                run_layouts(world_size, self.models, self.folder, layouts)
            except Exception as error:
                self.failed[number] = error
        file = self.folder / f"{name}.pt"
        if not file.exists():
            raise RuntimeError(f"{name} did not come to its end") from self.failed[number]
        return torch.load(file)


@pytest.fixture(scope="module")
def studies(tmp_path_factory) -> Studies:
    return Studies(tmp_path_factory.mktemp("layouts"))


@of_layouts(lambda name, layout: name not in MODELS and not layout.start_from and layout.float8 == "none")
def test_metrics_and_weights_are_those_of_one_rank(studies, name):
    layout = ALL[name]
    study, reference = studies[name], studies[layout.model]
    for step in range(NUM_STEPS):
        assert_close(study["metrics"][0][step], reference["metrics"][0][step])
    assert study["trained"].keys() == reference["trained"].keys()
    for tensor_name, wanted in reference["trained"].items():
        moved = (wanted - reference["loaded"][tensor_name]).norm()
        difference = (study["trained"][tensor_name] - wanted).norm()
        assert moved > 100 * TOLERANCE * wanted.norm(), tensor_name
        assert difference <= TOLERANCE * wanted.norm(), tensor_name


@of_layouts(lambda name, layout: layout.float8 != "none" and name != "float8")
def test_float8_begins_as_one_rank_and_stays_near_it(studies, name):
    """What differs in its last bit may become the next value of E4M3, which is up to 1/8 away: gradients in the first
    backward, on some CPUs, and weights in the steps after it."""
    study, reference, plain = studies[name], studies["float8"], studies[ALL[name].model]
    first, wanted = study["metrics"][0][0], reference["metrics"][0][0]
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3)
    assert_close(first | {"grad_norm": wanted["grad_norm"]}, wanted)

    def distance(trained: dict) -> float:
        wanted, loaded = reference["trained"], reference["loaded"]
        off = [(trained[each] - wanted[each]).norm() for each in wanted]
        return float(torch.stack(off).norm() / torch.stack([(wanted[n] - loaded[n]).norm() for n in wanted]).norm())

    assert distance(study["trained"]) < 0.1 < 0.2 < distance(plain["trained"])


@all_layouts
def test_metrics_are_the_same_on_every_rank(studies, name):
    first, *others = studies[name]["metrics"]
    assert set(first[0]) == set(StepMetrics.__dataclass_fields__) and all(other == first for other in others)


@pytest.mark.parametrize("fault", FAULTS)
@of_layouts(lambda name, layout: bool(layout.faults))
def test_all_ranks_leave_a_bad_batch_out_and_name_the_same_sample(studies, name, fault):
    first, *others = (found[fault] for found in studies[name]["found"])
    assert ("weights are not finite" if fault == "weights" else f": {fault} of p1 sample 2") in first
    assert all(other == first for other in others)


@all_layouts
def test_boxes_make_the_files_tensors_bit_for_bit(studies, name):
    layout = ALL[name]
    source = studies.folder / layout.start_from / "saved" if layout.start_from else studies.models / layout.model
    assert_same_tensors(studies[name]["loaded"], load_file(source / "model.safetensors"))


@all_layouts
def test_saved_directory_holds_the_trained_weights(studies, name):
    study, saved = studies[name], studies.folder / name / "saved"
    assert_same_tensors(study["trained"], load_file(saved / "model.safetensors"))
    source = json.loads((studies.models / ALL[name].model / "config.json").read_text())
    assert json.loads((saved / "config.json").read_text()) == source


@pytest.mark.parametrize("name", ["dp2 tp2", "tp2 pp2", "ep2"])
def test_saved_directory_is_loaded_by_transformers(studies, name):
    wanted = studies[name]["trained"]
    model, report = AutoModelForCausalLM.from_pretrained(studies.folder / name / "saved", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(model.get_input_embeddings().weight, wanted["model.embed_tokens.weight"])


@all_layouts
def test_checkpoint_gives_the_next_steps_back_bit_for_bit(studies, name):
    study = studies[name]
    for rank, resumed in enumerate(study["after_resuming"]):
        assert resumed == study["metrics"][rank][NUM_STEPS:]


@of_layouts(lambda name, layout: bool(layout.start_from))
def test_checkpoint_of_one_layout_goes_on_in_another(studies, name):
    """Weights, moments and schedule: the steps after it are those that the first layout makes."""
    first, other = studies[ALL[name].start_from], studies[name]
    assert_same_tensors(other["loaded"], first["trained"])
    for metrics, reference in zip(other["metrics"][0], first["after_resuming"][0], strict=False):
        assert_close(metrics, reference)
