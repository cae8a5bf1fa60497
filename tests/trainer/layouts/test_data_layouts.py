"""Steps on data that others wrote come out the same however ranks, stages, rows and microbatches share them."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_ranks import NUM_STEPS, Case, begins_at, data_steps
from layout_ranks import parallelism, run_layouts
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from titan_rl.models.builtin.tiny import make_tiny

TOLERANCE = 1e-5
ALGORITHMS = {
    "sft": {"name": "sft"},
    "sft by sample": {"name": "sft", "aggregation": "sequence"},
    "dpo": {"name": "dpo", "label_smoothing": 0.1},
    "ipo": {"name": "dpo", "loss": "ipo", "length_normalize": True},
    "simpo": {"name": "simpo"},
    "orpo": {"name": "orpo"},
    "kto": {"name": "kto", "undesirable_weight": 0.5},
    "reward_model": {"name": "reward_model", "centering": 0.01},
}
TIGHT, PADDED = dict(seq_len=64), dict(seq_len=64, share_prefix=False)
"""Many rows of few samples each; and each sample behind a question of its own. A pipeline fills all rows up to one
length, tensor parallelism to an even one."""
LAYOUTS = {
    "dp2 tight": dict(parallelism=parallelism(dp=2), **TIGHT),
    "tp2": dict(parallelism=parallelism(tp=2)),
    "pp2 padded": dict(parallelism=parallelism(pp=2), **PADDED),
}
"""Of every algorithm."""
MORE = {
    ("hsdp2 padded", "kto"): dict(parallelism=parallelism(replicate=2), **PADDED),
    ("tp2 no SP, tight", "reward_model"): dict(parallelism=parallelism(tp=2, enable_sequence_parallel=False), **TIGHT),
    ("dp2 of one example", "dpo"): dict(parallelism=parallelism(dp=2), num_examples=1),
    ("dp2 of one example", "reward_model"): dict(parallelism=parallelism(dp=2), num_examples=1),
}
"""Of what shares the least: a loss of pairs on values, and one that a pass before the step has a part in. Of one
example one rank has none."""
PACKINGS = {"tight": TIGHT, "padded": PADDED, "padded in one row": dict(share_prefix=False)}
NAMES = ("sft", "dpo", "simpo", "orpo", "kto", "reward_model")
SPREAD = {(layout, name): settings for layout, settings in LAYOUTS.items() for name in NAMES}
SPREAD |= MORE


def write_rows(folder: Path) -> None:
    """Questions and answers of ragged lengths: of pairs with margins, of labels both kinds to one question or one."""
    draw = random.Random(3)
    rows = {"pairs": [], "labels": [], "demonstrations": []}
    for number in range(24):
        ask = f"{number} " + "".join(draw.choices("abcdef", k=draw.randint(1, 12)))
        good, bad = ("".join(draw.choices("uvwxyz", k=draw.randint(1, 14))) for _ in range(2))
        rows["demonstrations"].append({"prompt": ask, "completion": good})
        rows["pairs"].append({"prompt": ask, "chosen": good, "rejected": bad, "margin": draw.random()})
        rows["labels"].append({"prompt": ask, "completion": good, "label": True})
        if number % 3:
            rows["labels"].append({"prompt": ask, "completion": bad, "label": False})
    for kind, lines in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("tiny", "reference"), 1):
        make_tiny(folder / name, seed=seed, hidden_size=64, num_layers=2, tie_word_embeddings=False)
    torch.manual_seed(1)  # of the head, which the files do not have
    model = AutoModelForSequenceClassification.from_pretrained(folder / "tiny", num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(folder / "reward_model")
    write_rows(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder, process_group) -> dict[str, dict]:
    """Of one rank, everything of a step in as few rows as can be."""
    cases = {name: Case(algorithm) for name, algorithm in ALGORITHMS.items()}
    cases |= {f"{name} of one example": replace(cases[name], num_examples=1) for name in ("dpo", "reward_model")}
    return {name: vars(data_steps(case, folder, folder)) for name, case in cases.items()}


@pytest.fixture(scope="module")
def spread(folder) -> Path:
    """All cases of two ranks, in two processes."""
    out = folder / "out"
    out.mkdir()
    cases = {
        f"{layout}, {name}": Case(ALGORITHMS[name], **settings, meets_a_bad_row=name == "dpo")
        for (layout, name), settings in SPREAD.items()
    }
    run_layouts(2, folder, out, cases, data_steps)
    return out


def assert_same(found: dict, wanted: dict) -> None:
    [steps], [held_out], [largest] = wanted["steps"], wanted["held_out"], wanted["largest"]
    for rank in range(len(found["steps"])):
        for step in range(NUM_STEPS):
            assert found["steps"][rank][step] == pytest.approx(steps[step], rel=TOLERANCE, abs=1e-6)
        assert found["held_out"][rank] == pytest.approx(held_out, rel=TOLERANCE, abs=1e-6)
        assert found["largest"][rank] == pytest.approx(largest, rel=TOLERANCE)
    assert found["trained"].keys() == wanted["trained"].keys()
    for name, tensor in wanted["trained"].items():
        assert (found["trained"][name] - tensor).norm() <= TOLERANCE * tensor.norm(), name


@pytest.mark.parametrize(("layout", "algorithm"), SPREAD)
def test_two_ranks_step_as_one_does(spread, alone, layout, algorithm):
    wanted = f"{algorithm} of one example" if layout.endswith("of one example") else algorithm
    assert_same(torch.load(spread / f"{layout}, {algorithm}.pt", weights_only=False), alone[wanted])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_name_the_pair_whose_gradient_is_not_finite(spread, layout):
    """By its row: neither answer has a loss of its own."""
    (place, said), *others = torch.load(spread / f"{layout}, dpo.pt", weights_only=False)["blamed"]
    assert "pairs.jsonl line" in place and said.endswith(f": gradient of {place}")
    assert others == [[place, said]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_changes_nothing(folder, alone, packing, algorithm):
    assert_same(vars(data_steps(Case(ALGORITHMS[algorithm], **PACKINGS[packing]), folder, folder)), alone[algorithm])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_steps_are_ones_to_speak_of(folder, alone, algorithm):
    """What is the same everywhere is not nothing: a loss, weights that moved, a zero that is none."""
    found, case = alone[algorithm], Case(ALGORITHMS[algorithm])
    before = load_file(folder / begins_at(case) / "model.safetensors")
    moved = [(tensor - before[name]).norm() / tensor.norm() for name, tensor in found["trained"].items()]
    assert min(moved) > 100 * TOLERANCE
    [steps], [largest] = found["steps"], found["largest"]
    assert all(step["loss"] > 0.01 and step["grad_norm"] > 0.01 for step in steps)
    if algorithm == "kto":
        assert min(largest) > 1.01, "1 + z"
