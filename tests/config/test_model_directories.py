"""What a model's directory is read as, and refused for: in the parent, in one line, before torch is imported."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from family_models import CASES, make
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForConditionalGeneration
from tree import TREE

from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.model_directory import weight_checks
from titan_rl.config.model_directory.config_checks import HAVE_BIASES
from titan_rl.config.model_directory.directory import INDEX, SINGLE, belonging_files, read_object, stored_tensors
from titan_rl.config.model_directory.tensor_names import LAYERS, expected_tensors
from titan_rl.config.model_directory.weight_checks import check_finite
from titan_rl.config.sections.schema import LoraConfig
from titan_rl.controller.preflight.checks import check, check_model
from titan_rl.controller.wiring import make_meshes
from titan_rl.data.types import Request
from titan_rl.diagnostics.bench.models.model_directories import make_good, refuse, spoiled
from titan_rl.diagnostics.bench.models.wrong_models import (
    WRONG_MODELS,
    Tensors,
    read_tensors,
    shard,
    write_raw,
    write_tensors,
)
from titan_rl.diagnostics.bench.weights.weight_pairs import batch_of
from titan_rl.diagnostics.bench.weights.weight_speed import BENCH_ACTORS
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.builtin.tokenizer import character_tokenizer
from titan_rl.models.families.registry import FAMILIES
from titan_rl.models.spec import model_spec
from titan_rl.models.weights.hf_weights import check_weights, load_hf
from titan_rl.models.weights.peft_files import AdapterForm, check_adapter
from titan_rl.models.weights.shards import Shard, expected_shapes
from titan_rl.trainer.titan_config import build_titan

EMBEDDING, UP = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
WRONG = {wrong.name: wrong for wrong in WRONG_MODELS}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[bool, Path]:
    return make_good(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(good, tmp_path) -> Path:
    """A tied model of one's own."""
    return Path(shutil.copytree(good[False], tmp_path / "model"))


def load(path: Path | str, *arguments: str):
    return load_config(None, parse_overrides(["--model.path", str(path), *arguments]))


def refusal(path: Path | str, *arguments: str) -> str:
    """The one line that a directory earns."""
    with pytest.raises(ConfigError) as caught:
        load(path, *arguments)
    [line] = str(caught.value).splitlines()
    return line


RUN = {"run": {"seed": 1}, "model": {"path": "tiny"}, "training": {}, "algorithm": {}, "checkpoint": {}}


def test_a_relative_directory_is_looked_for_beside_the_toml_too(model, tmp_path, monkeypatch):
    (tmp_path / "my.toml").write_text('model.path = "model"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(tmp_path / "my.toml").model.path == str(model)
    with pytest.raises(
        ConfigError, match=f"there is no directory {tmp_path / 'elsewhere' / 'no' / 'model'}, and the Hub"
    ):
        load_config(tmp_path / "my.toml", {"model": {"path": "no/model"}})


@pytest.mark.parametrize(
    "key",
    [
        *("model.path", "reference.path", "teacher.path", "critic.path", "reward_model.path", "drafter.path"),
        "generator.speculative.model",
    ],
)
def test_a_run_directory_is_told_with_the_model_in_it(model, key):
    run = model.parent
    (run / "config.json").write_text(json.dumps(RUN | {"task": {"name": "gcd"}}))
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    for path in (run, run / "checkpoints" / "step-000002"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, parse_overrides([f"--{key}", str(path)]))
        assert f"give the model that the run wrote, {model}" in str(caught.value), path
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match="has written no model yet, which will be .*: let it end"):
        load_config(None, parse_overrides([f"--{key}", str(run)]))


def test_an_adapter_of_a_run_is_told_too(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="give the adapter that the run wrote, .*/adapter"):
        check_adapter(tmp_path, LoraConfig(rank=4), [], {}, AdapterForm())


def write_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# what is refused


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_directory_is_one_line(good, tmp_path, name):
    wrong = WRONG[name]
    path = spoiled(wrong, good, tmp_path / "model")
    line = refusal(path, *wrong.arguments)
    assert all(word in line for word in wrong.words), line
    assert line.startswith(f"model.path = '{path}'")


@pytest.mark.parametrize("name", ["a stale shard beside it", "NaN", "end outside", "no chat template"])
def test_the_command_line_refuses_it_with_code_2_and_makes_nothing(good, tmp_path, name):
    refused = refuse(WRONG[name], good, tmp_path)
    assert refused.is_right(WRONG[name]), refused


def test_a_refusal_needs_neither_torch_nor_transformers(good, tmp_path):
    path = spoiled(WRONG["head and tied"], good, tmp_path / "model")
    program = f"""
import sys
from titan_rl.config.load import ConfigError, load_config
try:
    load_config(None, {{"model": {{"path": {str(path)!r}}}}})
except ConfigError:
    sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_of_a_large_model_the_first_part_of_every_tensor_is_searched(model, monkeypatch):
    tensors = read_tensors(model / SINGLE)
    dtype, shape, values = tensors[UP]
    nan = np.float32(np.nan).tobytes()
    for place, is_found in ((0, True), (len(values) - 4, False)):
        spoiled_values = values[:place] + nan + values[place + 4 :]
        write_tensors(model / SINGLE, tensors | {UP: (dtype, shape, spoiled_values)})
        monkeypatch.setattr(weight_checks, "SCANNED_BYTES", 2**20)
        stored = stored_tensors(model)
        if is_found:
            with pytest.raises(ValueError, match=UP):
                check_finite(stored)
        else:
            check_finite(stored)
            monkeypatch.undo()
            with pytest.raises(ValueError, match=UP):
                check_finite(stored)


def test_a_trainer_that_loads_nan_names_tensor_and_file(model):
    tensors = read_tensors(model / SINGLE)
    dtype, shape, values = tensors[UP]
    write_tensors(model / SINGLE, tensors | {UP: (dtype, shape, values[:-4] + np.float32(np.inf).tobytes())})
    half = torch.zeros(shape[0] // 2, shape[1])
    load_hf([Shard(UP, shape, (0, 0), half)], model)  # the other rank's half holds it
    with pytest.raises(ValueError, match=f"{UP} in .*{SINGLE} holds NaN"):
        load_hf([Shard(UP, shape, (shape[0] // 2, 0), half)], model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "'silu'")),
        ({"initializer_range": "wide"}, ("initializer_range",)),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ("rope",)),
    ],
)
def test_what_only_the_built_model_tells_is_one_line_too(model, changes, words):
    write_json(model / "config.json", **changes)
    with pytest.raises(ConfigError) as caught:
        check_model(load(model))
    [line] = str(caught.value).splitlines()
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: write_json(path / "tokenizer_config.json", eos_token="[END]"), ("id 99", "does not stop")),
        (lambda path: (path / "special_tokens_map.json").write_text("{"), ("its tokenizer cannot be used",)),
        (lambda path: write_json(path / "tokenizer_config.json", eos_token=None), ("sft.steps", "eos_token")),
        (lambda path: write_json(path / "tokenizer_config.json", **REMOTE_CODE), ("custom code",)),
    ],
)
def test_a_tokenizer_that_transformers_cannot_use_is_one_line(model, spoil, words):
    spoil(model)
    with pytest.raises(ConfigError) as caught:
        check(load(model, "--sft.steps", "1"))
    [line] = str(caught.value).splitlines()
    assert line.startswith("model.path") and all(word in line for word in words)


REMOTE_CODE = dict(tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]})


def test_a_prompt_with_a_token_that_has_no_row_is_one_line(model):
    with_a_special_token_that_has_no_row(model)
    assert check(load(model))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<image>")
    with pytest.raises(ConfigError, match="token 99 .*vocab_size = 99"):
        check(load(model, "--task.style", "chat"))


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages + 1 }}", "{{ messages[5].content.strip() }}"])
def test_a_chat_template_that_fails_is_one_line(model, template):
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="chat template") as caught:
        check(load(model, "--task.style", "chat"))
    assert len(str(caught.value).splitlines()) == 1


def test_names_and_shapes_are_checked_for_a_family_that_the_table_does_not_know(model, monkeypatch):
    """As of a family of one's own: what was not told before is told by the built model."""
    monkeypatch.setitem(LAYERS, "llama", {})
    tensors = read_tensors(model / SINGLE)
    del tensors[UP]
    write_tensors(model / SINGLE, tensors)
    with pytest.raises(ConfigError, match=f"lacks 1 tensors.*{UP}"):
        check_model(load(model))


def test_sizes_and_names_of_a_family_of_ones_own_are_left_to_it(model):
    write_json(model / "config.json", model_type="foreign", hidden_size=None, architectures=["Foreign"])
    assert "'foreign'" in refusal(model)
    assert load(model, "--model.family", "my_family:FOREIGN").model.path == str(model)
    (model / SINGLE).write_bytes(b"")
    assert SINGLE in refusal(model, "--model.family", "my_family:FOREIGN")


# what is read


def changed(tensors: Tensors) -> Tensors:
    """Weights of the same names and shapes, all others."""
    return {name: (dtype, shape, values[::-1]) for name, (dtype, shape, values) in tensors.items()}


def sharded_with_stale_files(path: Path) -> Tensors:
    """Two shards and an index, and beside them three files with other weights; what the index names."""
    tensors = read_tensors(path / SINGLE)
    shard(path)
    for name in ("model-00003-of-00003.safetensors", "backup.safetensors", "consolidated.safetensors"):
        write_tensors(path / name, {n: t for n, t in changed(tensors).items() if "norm" in n or n == UP})
    return tensors


def with_equal_head(path: Path) -> Tensors:
    tensors = read_tensors(path / SINGLE)
    tensors["lm_head.weight"] = tensors[EMBEDDING]
    write_tensors(path / SINGLE, tensors)
    return tensors


def with_old_buffers(path: Path) -> Tensors:
    tensors = read_tensors(path / SINGLE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", (16,), bytes(64)
    write_tensors(path / SINGLE, tensors)
    return tensors


def with_consolidated(path: Path) -> Tensors:
    tensors = read_tensors(path / SINGLE)
    write_tensors(path / "consolidated.safetensors", {"tok_embeddings.weight": tensors[EMBEDDING]})
    return tensors


def with_padded_vocabulary(path: Path) -> Tensors:
    tensors = read_tensors(path / SINGLE)
    dtype, (rows, columns), values = tensors[EMBEDDING]
    tensors[EMBEDDING] = dtype, (rows + 29, columns), values + bytes(29 * columns * 4)
    write_tensors(path / SINGLE, tensors)
    write_json(path / "config.json", vocab_size=rows + 29)
    return tensors


def as_the_hubs_cache(path: Path) -> Tensors:
    """Links to blobs elsewhere."""
    tensors = sharded_with_stale_files(path)
    (path.parent / "blobs").mkdir()
    for file in list(path.iterdir()):
        file.rename(path.parent / "blobs" / file.name)
        file.symlink_to(path.parent / "blobs" / file.name)
    return tensors


def in_half_precision(path: Path) -> Tensors:
    tensors = {n: ("BF16", s, v[: len(v) // 2]) for n, (_, s, v) in read_tensors(path / SINGLE).items()}
    tensors = {n: (d, s, bytes(len(v))) for n, (d, s, v) in tensors.items()}
    write_tensors(path / SINGLE, tensors)
    return tensors


def with_a_special_token_that_has_no_row(path: Path) -> Tensors:
    """As Gemma 3 has one for images."""
    token = dict(
        id=99, content="<image>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True
    )
    known = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    write_json(path / "tokenizer.json", added_tokens=[*known, token])
    return read_tensors(path / SINGLE)


GOOD = [
    with_a_special_token_that_has_no_row,
    sharded_with_stale_files,
    with_equal_head,
    with_old_buffers,
    with_consolidated,
    with_padded_vocabulary,
    as_the_hubs_cache,
    in_half_precision,
]


@pytest.mark.parametrize("make", GOOD, ids=lambda make: make.__name__)
def test_a_directory_as_they_are_is_read_by_its_index_or_its_one_file(model, make):
    tensors = make(model)
    config = load(model)
    stored = stored_tensors(config.model.path)
    assert {name: (t.dtype, t.shape, t.file.read_bytes()[t.start : t.stop]) for name, t in stored.items()} == tensors
    check_model(config)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: (path / "chat_template.jinja").write_text("{{ messages }}"),
        lambda path: write_json(path / "tokenizer_config.json", chat_template="{{ messages }}"),
    ],
)
def test_a_chat_template_is_found_wherever_transformers_looks(model, make):
    make(model)
    assert load(model, "--task.style", "chat").model.path == str(model)


def test_a_damaged_header_is_refused_or_means_the_same(model):
    """Whatever a byte of it is changed to: no other error, and no other tensors."""
    whole = (model / SINGLE).read_bytes()
    wanted, random, num_refused = read_tensors(model / SINGLE), np.random.default_rng(1), 0
    for place in random.integers(0, 900, 100):
        (model / SINGLE).write_bytes(whole[:place] + bytes([random.integers(256)]) + whole[place + 1 :])
        try:
            load(model)
            assert read_tensors(model / SINGLE) == wanted
        except ConfigError:
            num_refused += 1
    assert num_refused > 50


def test_a_name_that_is_twice_in_a_header_is_refused(model):
    header = '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}'
    write_raw(model / SINGLE, {}, b"")
    (model / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    assert "the key 'a' stands there twice" in refusal(model)


# the table of names


SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


@pytest.mark.parametrize("model_type", [name for name in LAYERS if LAYERS[name]])
@pytest.mark.parametrize("is_tied", [True, False])
def test_expected_names_and_shapes_are_those_that_transformers_writes(tmp_path, model_type, is_tied):
    more = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24) if "moe" in model_type else {}
    if model_type != "phi3":
        more["head_dim"] = 16
    config = AutoConfig.for_model(model_type, **SMALL, **more, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = stored_tensors(tmp_path)
    assert {name: tensor.shape for name, tensor in stored.items()} == expected_tensors(
        read_object(tmp_path / "config.json")
    )


def test_every_family_is_known_before_torch_is_imported():
    assert set(FAMILIES) == set(LAYERS)
    assert set(HAVE_BIASES) == {
        name for name, family in FAMILIES.items() if family.required.get("attention_bias") is not False
    }


def assert_told_as_built(path: Path) -> None:
    told = expected_tensors(read_object(path / "config.json"))
    assert told == expected_shapes(model_spec(path))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_expected_names_and_shapes_are_those_of_the_built_model(tmp_path, architecture):
    make_tiny(tmp_path, seed=1, architecture=architecture, num_layers=2)
    assert_told_as_built(tmp_path)


@pytest.mark.parametrize("case", [name for name, (kind, _) in CASES.items() if LAYERS[kind]])
def test_so_they_are_of_every_family_that_the_table_tells(tmp_path, case):
    make(tmp_path, case)
    assert_told_as_built(tmp_path)


SIGHT = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, num_position_embeddings=16)


def test_a_model_with_vision_is_refused_with_a_mend_that_helps(tmp_path):
    seeing, text = tmp_path / "seeing", tmp_path / "text"
    words = SMALL | dict(vocab_size=101, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, eos_token_id=1)
    sizes = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    config = AutoConfig.for_model("qwen3_5", text_config=words | sizes, vision_config=SIGHT)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(seeing)
    character_tokenizer().save_pretrained(seeing)
    (seeing / "chat_template.jinja").write_text("{{ messages[0].content }}")
    _, mend, _ = refusal(seeing).split("`")
    exec(f"from transformers import AutoTokenizer, Qwen3_5ForCausalLM; {mend}", {"path": seeing, "out": text})
    load(text, "--task.style", "chat")
    check_weights(model_spec(text), text)
    assert AutoTokenizer.from_pretrained(text).chat_template == "{{ messages[0].content }}"


# what belongs to a model


def test_what_belongs_to_a_model_is_copied_and_nothing_else(tmp_path):
    belongs = [
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
        ),
        *("vocab.json", "merges.txt", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja", "chat_template.json"),
        *("additional_chat_templates/tool_use.jinja", "LICENSE", "LICENSE.md", "license.txt", "NOTICE"),
        *("USE_POLICY.md", "configuration_mine.py", "modeling_mine.py"),
    ]
    others = [
        *(SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "consolidated.safetensors"),
        *("optimizer.pt", "trainer_state.json", "training_args.bin", "train_results.json", "params.json", "README.md"),
        *("runs/a.json", "checkpoint-5/config.json", "original/params.json", "onnx/config.json", ".gitattributes"),
        *("rng_state.pth", "scheduler.pt", "adapter_config.json"),
    ]
    for name in (*belongs, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert {file.as_posix() for file in belonging_files(tmp_path)} == set(belongs)


# the Hub


REVISION = "0123abc"


class FakeHub:
    """``snapshot_download``, from a directory."""

    def __init__(self, source: Path, cache: Path):
        self.source, self.folder, self.revision = source, cache / "snapshots" / REVISION, REVISION

    def __call__(self, name: str, *, allow_patterns: list[str], revision: str | None, local_files_only: bool) -> str:
        assert name == "someone/tiny" and revision == self.revision and local_files_only == (revision is None)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns) and not local_files_only:
                shutil.copyfile(file, self.folder / file.name)
        return str(self.folder)

    @property
    def fetched(self) -> set[str]:
        return {file.name for file in self.folder.iterdir()}


@pytest.fixture
def hub(model, tmp_path, monkeypatch) -> FakeHub:
    fake = FakeHub(model, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, timeout: SimpleNamespace(sha=REVISION))
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_model_of_the_hub_is_fetched_without_what_is_not_read(hub):
    sharded_with_stale_files(hub.source)
    config = load("someone/tiny")
    assert config.model.path == str(hub.folder)
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert hub.fetched & {file.name for file in hub.source.glob("*.safetensors")} == shards
    assert hub.fetched > {"config.json", "tokenizer.json", INDEX}


def test_without_a_network_the_cache_must_do(hub, monkeypatch):
    load("someone/tiny")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", raising(httpx.ConnectError("no route")))
    hub.revision = None
    assert load("someone/tiny").model.path == str(hub.folder)


def test_a_model_of_the_hub_without_index_is_one_file(hub):
    with_consolidated(hub.source)
    assert load("someone/tiny").model.path == str(hub.folder)
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == {SINGLE}


def test_a_model_of_the_hub_that_cannot_be_trained_is_refused_before_its_weights_are_fetched(hub):
    write_json(hub.source / "config.json", quantization_config={"quant_method": "fp8"})
    assert "fp8" in refusal("someone/tiny") and SINGLE not in hub.fetched


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RepositoryNotFoundError("404\n\nnot found", response=RESPONSE), ("no such model", "hf auth login")),
        (GatedRepoError("403\n\ngated", response=RESPONSE), ("agreed", "hf auth login")),
        (
            LocalEntryNotFoundError("offline\nand not cached"),
            ("cannot be reached", "hf download someone/tiny", "that directory"),
        ),
        (httpx.ReadTimeout("too late"), ("does not give", "too late")),
        (PermissionError(13, "Permission denied"), ("does not give", "Permission denied")),
    ],
)
def test_a_hub_that_does_not_give_the_model_is_one_line(hub, monkeypatch, error, words):
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
    line = refusal("someone/tiny")
    assert all(word in line for word in words)


def test_a_model_that_a_command_makes_is_told_with_it_whether_its_folder_is_there(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(LocalEntryNotFoundError("offline")))
    told = refusal("models/smollm2")
    assert told.endswith("there is no such directory: `titan-rl model smollm2 models/smollm2` makes it")
    Path("models").mkdir()  # the path names nothing of the Hub now
    assert refusal("models/smollm2") == told
    assert refusal("smollm2").endswith("`titan-rl model smollm2 smollm2` makes it")


def raising(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize("path", ["./someone/tiny", "/someone/tiny", "a/b/c", "tiny-model", "..", "here/tiny"])
def test_what_looks_like_a_path_is_not_asked_for_at_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert "config.json" in refusal(path)


@pytest.mark.waits
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_hub_that_cannot_be_reached_or_does_not_answer_is_given_up_soon(tmp_path, is_silent):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and says nothing
        port = server.getsockname()[1] if is_silent else 9
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        root = TREE
        command = [
            sys.executable,
            "-m",
            "titan_rl.cli",
            "train",
            "configs/quickstart.toml",
            "--model.path",
            "someone/t",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=60)
    [line] = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 2 and "someone/t" in line and "cannot be reached" in line


# what the actors hold


@pytest.mark.slow
def test_both_sides_hold_what_the_index_names_and_not_the_stale_shard(model, tmp_path):
    """Before the first sync too, when vLLM has what its own loader read: `titan-rl eval` has no other."""
    tensors = sharded_with_stale_files(model)
    tables = {
        "model": {"path": str(model)},
        "training": {"seq_len": 256, "steps": 10},
        "generator": {"kv_cache_gib": 0.1},
        "recovery": {"snapshot_every": 0},
    }
    config = load_config(None, tables)
    titan, parts = build_titan(config), frozenset({"trainer", "generators"})

    async def run():
        meshes = make_meshes(config, titan, str(model), actors=BENCH_ACTORS, parts=parts, logs=tmp_path)
        try:
            await meshes.start()
            generator = meshes.generators.replicas[0].leader
            prompt = np.arange(10, 40, dtype=np.int32)
            loaded = await generator.generate.call_one(Request(prompt, [1, 2], 16, 1.0))
            await meshes.weights.stage(0)
            await meshes.weights.announce(0)
            wanted = {name: sha256(values).hexdigest() for name, (_, _, values) in tensors.items()}
            assert await generator.digests.call_one() == wanted
            assert await meshes.trainer.call(TrainerEndpoints.digests()) == [wanted]
            [metrics] = await meshes.trainer.train([batch_of([(prompt, loaded)], titan, None)], 1)
            assert abs(np.log(metrics.agreement_max)) < 1e-4
        finally:
            await meshes.stop()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}/b", f"{'a' * 300}/b/c"])
def test_a_name_that_no_file_can_have_is_one_line(name):
    with pytest.raises(ConfigError, match="^model.path = 'aaa") as caught:
        load_config(None, {"model": {"path": name}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["model.path", "teacher.path", "reference.path", "critic.path", "reward_model.path"]
)
def test_a_model_that_is_not_there_is_mended_by_what_the_setting_takes(setting):
    with pytest.raises(ConfigError, match=f"{setting} = 'tinny': there is no such directory: ") as refused:
        load_config(None, parse_overrides([f"--{setting}", "tinny"]))
    mend = str(refused.value)
    assert ("or 'tiny'" in mend) == (setting == "model.path")
    assert ("on the Hub" in mend) == ("train a reward model" not in mend) == (setting != "reward_model.path")


def test_the_tiny_model_is_offered_to_no_role():
    by_task = {"teacher": {"by_task": {"gcd": "tiny"}}}
    for tables in ({"teacher": {"path": "tiny"}}, {"reference": {"path": "tiny"}}, by_task):
        with pytest.raises(ConfigError, match="= 'tiny': there is no such directory: .*Hub$"):
            load_config(None, tables)
