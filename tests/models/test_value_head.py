"""Value heads against transformers' models for sequence classification, in every family and spread over ranks."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import batch_of
from family_models import CASES, EVEN, make
from layout_ranks import Layout, run_layouts, whole_tensors
from parity import TOLERANCE, distance
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.role_checks import check_roles
from titan_rl.data.batches.packing import fit_rows
from titan_rl.data.types import Row, Segment
from titan_rl.environments.registry import make_task
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.layers.attention import plan_attention
from titan_rl.models.spec import model_spec
from titan_rl.models.value_head import check_value_weights, load_value_model, save_value_model, value_spec
from titan_rl.models.weights.shards import local_shards
from titan_rl.train import main

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")


class Values:
    """One rank's part of a model with a value head."""

    def __init__(self, path: Path, parallelism: dict):
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as dist_utils

        from titan_rl.trainer.model.parallel import parallel_model
        from titan_rl.trainer.titan_config import build_titan

        self.titan = build_titan(load_config(None, {"parallelism": parallelism}))
        dist_utils.set_spmd_backend(self.titan.parallelism.spmd_backend)
        dims = ParallelDims.from_config(self.titan.parallelism, dist.get_world_size())
        self.context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
        self.spec = value_spec(model_spec(path))
        self.parts, self.pipeline = parallel_model(self.spec, self.titan, dims, CPU)
        self.shards = local_shards(self.spec, self.parts)
        self.dtypes = load_value_model(self.shards, path)

    def keywords(self, row: Row) -> dict:
        return dict(
            positions=torch.from_numpy(row.positions_T)[None],
            attention_masks=plan_attention(row.segments, len(row.tokens_T), CPU),
            logit_index_S=torch.from_numpy(row.source_S),
            target_S=torch.from_numpy(row.target_S),
            temperature=0.5,
        )

    def forward_backward(self, rows: list[Row]) -> list[torch.Tensor]:
        """Half the weighted squares of the values' distance from 1, differentiated; the values, if a rank has them."""
        p, values = self.titan.parallelism, {}
        rows = fit_rows(
            rows,
            token_multiple=p.tensor_parallel_degree,
            row_multiple=self.titan.row_multiple,
            same_length=self.pipeline is not None,
        )
        tokens = [torch.from_numpy(row.tokens_T)[None] for row in rows]

        def loss(values_S, index):
            values[index] = values_S.detach()
            return ((values_S - 1).square() * torch.from_numpy(rows[index].weight_S)).sum() / 2

        with self.context():
            if self.pipeline is None:
                for index, row in enumerate(rows):
                    loss(self.parts[0](tokens[index], **self.keywords(row)), index).backward()
            else:
                shape = (1, tokens[0].shape[1], self.spec.model.dim)
                self.pipeline.forward_backward(tokens, [self.keywords(row) for row in rows], shape, loss)
        return [values[index] for index in sorted(values)]


CLASSIFIED = [case for case, (kind, _) in CASES.items() if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
"""Critics of the others are refused."""


def make_classifier(path: Path, case: str, dtype: torch.dtype = torch.float32):
    """A directory of transformers' own, and its model; the head is as wide awake as the rest."""
    make(path, case, dtype=dtype)
    settings = dict(num_labels=1, dtype=dtype, experts_implementation="eager")
    model = AutoModelForSequenceClassification.from_pretrained(path, **settings).eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("case", CLASSIFIED)
def test_values_are_those_of_transformers_at_every_position(tmp_path, case):
    model = make_classifier(tmp_path, case)
    check_value_weights(value_spec(model_spec(tmp_path)), tmp_path)
    tokens, places = np.random.default_rng(0).integers(0, 101, 40), np.arange(40)
    nothing = np.zeros(0, np.float32)
    row = Row(tokens, places, [Segment(0, 40)], places, places, nothing, nothing, nothing)
    values = Values(tmp_path, {})
    got_S = values.parts[0](torch.from_numpy(tokens)[None], **values.keywords(row))
    with torch.no_grad():
        hidden_SD = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
        wanted_S = model.score(hidden_SD)[:, 0]
    assert got_S.shape == (40,) and got_S.dtype == torch.float32
    assert distance(got_S.detach(), wanted_S) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CLASSIFIED)
def test_a_critic_comes_back_bit_for_bit_and_transformers_loads_it(tmp_path, case, dtype):
    source, out, again = tmp_path / "source", tmp_path / "out", tmp_path / "again"
    make_classifier(source, case, dtype)
    for before, after in ((source, out), (out, again)):
        values = Values(before, {})
        save_value_model(values.shards, before, after, values.dtypes, CPU)
    first, last = load_file(source / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    biases = {name for name in last if name.endswith("e_score_correction_bias")}  # always in float32
    assert all(last[name].dtype == dtype for name in last.keys() - biases)
    model, notes = AutoModelForSequenceClassification.from_pretrained(again, output_loading_info=True)
    assert model.num_labels == 1 and not notes["missing_keys"] and not notes["unexpected_keys"]


@pytest.mark.parametrize("case", ["qwen2", "qwen2 tied", "gpt_oss"])
def test_a_policy_becomes_a_critic_whose_values_are_zero(tmp_path, case):
    source, out = tmp_path / "source", tmp_path / "out"
    make(source, case, dtype=torch.bfloat16)
    spec = model_spec(source)
    assert not value_spec(spec).model.enable_weight_tying and spec.model.lm_head.out_features == 101
    check_value_weights(value_spec(spec), source)
    values = Values(source, {})
    assert all(not value_S.any() for value_S in values.forward_backward(batch_of(0).rows[0]))
    head = values.parts[0].lm_head.weight
    assert head.grad.any()  # so it learns from the first step on
    save_value_model(values.shards, source, out, values.dtypes, CPU)
    policy, critic = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert critic.pop("score.weight").dtype == torch.float32
    policy.pop("lm_head.weight", None)
    assert policy.keys() == critic.keys() and all(torch.equal(policy[name], critic[name]) for name in policy)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and len(config["id2label"]) == 1


def test_every_parameter_of_a_critic_is_trained(tmp_path):
    make_classifier(tmp_path, "qwen2 tied")
    values = Values(tmp_path, {})
    values.forward_backward(batch_of(0).rows[0])
    for name, parameter in values.parts[0].named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update({"score.weight": torch.ones(2, 60)}), ["score.weight", "(2, 60)", "one label"]),
        (lambda tensors: tensors.pop("model.norm.weight"), ["lacks 1 tensors", "model.norm.weight"]),
        (lambda tensors: tensors.update(other=torch.ones(1)), ["does not ask for", "other"]),
    ],
)
def test_a_directory_that_is_no_critic_is_refused_in_one_line(tmp_path, change, words):
    make_classifier(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        check_value_weights(value_spec(model_spec(tmp_path)), tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


LAYOUTS = {
    "dp2": dict(data_parallel_shard_degree=2),
    "tp2": dict(tensor_parallel_degree=2),
    "tp2 no SP": dict(tensor_parallel_degree=2, enable_sequence_parallel=False),
    "pp2": dict(pipeline_parallel_degree=2),
}


@dataclass
class Pass:
    gradients: dict[str, torch.Tensor]


def pass_of(layout: Layout, models: Path, out: Path) -> Pass:
    values = Values(models / layout.model, dict(layout.parallelism))
    titan = values.titan
    batch = batch_of(0, num_ranks=titan.batch_degree, row_tokens=64, row_multiple=titan.row_multiple)
    values.forward_backward(batch.rows[titan.batch_rank(dist.get_rank())])
    with torch.no_grad():
        for part in values.parts:
            for parameter in part.parameters():
                parameter.copy_(parameter.grad)
    return Pass(whole_tensors(local_shards(values.spec, values.parts)))


CASES_SPREAD = ("qwen2 tied", "gpt_oss", "gemma3_text")


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("values")
    for case in CASES_SPREAD:
        make(folder / "models" / case, case, scale=0.15, **EVEN)
        torch.manual_seed(1)  # of the head, which the files do not have
        model = AutoModelForSequenceClassification.from_pretrained(folder / "models" / case, num_labels=1)
        model.save_pretrained(folder / "models" / case)
    layouts = {f"{c}, {name}": Layout(c, LAYOUTS[name]) for c in CASES_SPREAD for name in LAYOUTS}
    run_layouts(2, folder / "models", folder, layouts, pass_of)
    return folder


@pytest.mark.parametrize("case", CASES_SPREAD)
def test_two_ranks_compute_the_gradients_of_one(spread, case):
    alone = pass_of(Layout(case), spread / "models", spread)
    for name in LAYOUTS:
        found = torch.load(spread / f"{case}, {name}.pt")
        assert found["gradients"].keys() == alone.gradients.keys()
        for tensor, wanted in alone.gradients.items():
            got = found["gradients"][tensor]
            assert (got - wanted).norm() <= 1e-5 * wanted.norm() + 1e-7, (name, tensor)


@pytest.mark.parametrize(("name", "role"), [("ppo", "critic"), ("reward_model", "model")])
@pytest.mark.parametrize("case", ["glm4", "glm4_moe"])
def test_a_critic_that_transformers_could_not_load_is_refused(tmp_path, name, role, case):
    make(tmp_path, case)
    character_tokenizer().save_pretrained(tmp_path)
    config = load_config(None, {"algorithm": {"name": name}, "model": {"path": str(tmp_path)}})
    said = f"^{role}.path = .*'glm4_moe' has no class for sequence classification .*another family$"
    with nullcontext() if case == "glm4" else pytest.raises(ConfigError, match=said):
        check_roles(
            config,
            make_algorithm(config.algorithm, [], on_data=name == "reward_model"),
            None,
            make_task(config.task, []),
        )


@pytest.mark.parametrize("role", ["model", "reference", "teacher"])
@pytest.mark.parametrize("says", ["LlamaForSequenceClassification", "LlamaForCausalLM"])
def test_a_classifier_where_words_are_wanted_is_one_line_with_the_mend(tmp_path, capsys, role, says):
    """Also where its config.json calls it a model for generation: its weights tell."""
    path = classifier(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": [says]}))
    assert main(["--run.dir", str(tmp_path / "run"), f"--{role}.path", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and f"{role}.path = '{path}'" in said and "sequence classification" in said
    assert "give the language model that it was made of" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_language_model_where_a_reward_is_wanted_is_one_line_with_the_mend(tmp_path, capsys, is_tied):
    make_tiny(tmp_path / "words", seed=1, hidden_size=64, num_layers=1, tie_word_embeddings=is_tied)
    assert main(["--run.dir", str(tmp_path / "run"), "--reward_model.path", str(tmp_path / "words")]) == 2
    said = capsys.readouterr().err.strip()
    assert (
        "\n" not in said
        and "a language model without score.weight" in said
        and "algorithm.name = 'reward_model'" in said
    )


def classifier(folder: Path) -> Path:
    """With one label, beside the tokenizer of the language model that it was made of."""
    path = folder / "classifier"
    make_tiny(path, seed=1, hidden_size=64, num_layers=1)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model.save_pretrained(path)
    return path
