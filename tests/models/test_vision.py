"""A vision model on packed rows against transformers, and images on their way there."""

import io
import json
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batches import VOCABULARY
from layout_ranks import EPS, Layout, parallelism, run_layouts, whole_tensors
from parity import TOLERANCE, distance, learner_of
from PIL import Image
from safetensors.torch import load_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.model_directory.checks import find_model
from titan_rl.config.model_directory.vision_checks import pixel_limits, read_image_form
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.images import ImageProcessor, PlacedImage, image_processor, rope_positions
from titan_rl.data.storage.stored_images import check_covered, check_images, image_rows, images_of
from titan_rl.data.types import Batch, Prompt, Provenance, Sample
from titan_rl.models.builtin.tiny_vision import make_tiny_vision
from titan_rl.models.spec import read_hf_config
from titan_rl.models.weights.shards import is_adapter
from titan_rl.trainer.model.layout import check_layout
from titan_rl.trainer.model.lora_checks import check_lora
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")
SIZES = [[(24, 40)], [], [(16, 16), (50, 20)]]
"""Height and width of each prompt's images."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(Directory, transformers' model)."""
    path = tmp_path_factory.mktemp("model")
    return path, make_tiny_vision(path, seed=3, hidden_size=64, num_layers=2).eval()


@pytest.fixture(scope="module")
def processor(model) -> ImageProcessor:
    return image_processor(model[0])


def encoded(height: int, width: int, form: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    pixels = np.random.default_rng([seed, height, width]).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    return file.getvalue()


def samples_of(processor: ImageProcessor) -> list[list[Sample]]:
    """Three prompts with none to two images, three samples each; ``advantage`` serves as the name of a sample."""
    rng, groups = np.random.default_rng(1), []
    before, behind = processor.around
    for group, sizes in enumerate(SIZES):
        marked = [5, 6, *[before, processor.token, behind] * len(sizes), 7, 8]
        tokens, images = processor.expand(np.array(marked), [processor.decode(encoded(*size)) for size in sizes])
        groups.append([])
        for number in range(3):
            answer = rng.integers(3, VOCABULARY, 4 + number)
            provenance = np.repeat([Provenance.TEMPLATE, Provenance.MODEL], [len(tokens), len(answer)]).astype(np.int8)
            whole = np.concatenate([tokens, answer]).astype(np.int32)
            logprobs = np.full(len(whole), -4.6, np.float32)
            name = float(3 * group + number)
            groups[-1].append(Sample(whole, provenance, logprobs, name, f"p{group}", number, images=images))
    return groups


def packed(groups: list[list[Sample]], share_prefix: bool = True, num_ranks: int = 1) -> Batch:
    weigh = lambda part: token_weights(part, "token", 16)  # noqa: E731
    return pack(groups, num_ranks=num_ranks, row_tokens=100, share_prefix=share_prefix, weigh=weigh)


@torch.no_grad()
def reference_logits(reference, processor: ImageProcessor, sample: Sample) -> torch.Tensor:
    tokens = torch.from_numpy(sample.tokens).long()[None]
    shown = {}
    if sample.images:
        patches, grid = map(torch.from_numpy, processor.patches(sample.images))
        shown = dict(pixel_values=patches, image_grid_thw=grid, mm_token_type_ids=(tokens == processor.token).int())
    return reference(input_ids=tokens, attention_mask=torch.ones_like(tokens), **shown).logits[0]


@pytest.mark.parametrize("share_prefix", [True, False])
def test_packed_rows_with_images_agree_with_transformers(model, processor, share_prefix):
    path, reference = model
    learner, groups, seen = learner_of(path).policy, samples_of(processor), set()
    for row in learner.fit(packed(groups, share_prefix).rows[0]):
        columns = learner.columns(row)
        wanted = ("positions", "attention_masks", "logit_index_S", "images")
        keywords = {name: value for name, value in learner.keywords(row, columns).items() if name in wanted}
        with torch.no_grad():
            logits = learner.parts[0](learner.tokens(columns), **keywords)
        for name in set(row.advantage_S.tolist()):
            sample = groups[int(name) // 3][int(name) % 3]
            first = int(sample.provenance.argmax())
            agreed = reference_logits(reference, processor, sample)[first - 1 : -1]
            assert distance(logits[torch.from_numpy(row.advantage_S == name)], agreed) < TOLERANCE
            blind = replace(sample, images=())
            if sample.images:
                assert distance(reference_logits(reference, processor, blind)[first - 1 : -1], agreed) > 0.01
            seen.add(name)
    assert len(seen) == 9


def test_a_checkpointed_tower_keeps_less_and_has_the_same_gradients(model, processor):
    rows, found = packed(samples_of(processor)).rows[0], []
    for mode in ("none", "full"):
        learner, kept = learner_of(model[0], activation_checkpoint={"mode": mode}), 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            learner.forward_backward(rows)
        gradients = {
            name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in learner.weights()
        }
        found.append((kept, {name: each for name, each in gradients.items() if ".tower." in name}))
    (plain, of_plain), (kept, of_kept) = found
    assert kept < plain / 2 and of_plain and of_plain.keys() == of_kept.keys()
    assert all(torch.equal(of_kept[name], each) for name, each in of_plain.items())


def test_the_tower_is_trained_and_comes_back_bit_for_bit(model, processor, tmp_path):
    learner = learner_of(model[0], model={"images": {"max_pixels": 4096}})
    learner.save_hf(tmp_path / "same", dtype="float32")
    assert pixel_limits(read_image_form(tmp_path / "same")) == (256, 4096), "it sees images as it learned them"
    before, after = load_file(model[0] / "model.safetensors"), load_file(tmp_path / "same" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert image_processor(tmp_path / "same").patches(samples_of(processor)[0][0].images)[0].shape[1] == 3 * 2 * 16
    learner.forward_backward(packed(samples_of(processor)).rows[0])
    for name, parameter in learner.model_parts[0].named_parameters():
        assert float(parameter.grad.abs().max()) > 0, name


@dataclass
class Trained:
    weights: dict[str, torch.Tensor]
    losses: list[float]
    shows: list[bool]
    """Of each rank: whether its rows have images."""


def two_steps(layout: Layout, models: Path, out: Path) -> Trained:
    tables = {"optimizer": {"lr": 1e-3, "eps": EPS}, "parallelism": dict(layout.parallelism)}
    config = load_config(None, tables)
    learner = Learner(config, build_titan(config), models / layout.model)
    groups, (rank, ranks) = samples_of(image_processor(models / layout.model)), (dist.get_rank(), dist.get_world_size())
    batch = packed(groups[:2], num_ranks=ranks)
    losses = [learner.train_step([batch.rows[rank]], [True])[0].loss for _ in range(2)]
    shows = [None] * ranks
    dist.all_gather_object(shows, any(row.images for row in batch.rows[rank]))
    return Trained(whole_tensors(learner.shards()), losses, shows)


@pytest.mark.slow
def test_ranks_of_which_one_sees_nothing_train_as_one_rank(tmp_path):
    make_tiny_vision(tmp_path / "policy", seed=3, hidden_size=64, num_layers=2)
    run_layouts(1, tmp_path, tmp_path, {"one": Layout("policy")}, two_steps)
    run_layouts(2, tmp_path, tmp_path, {"dp2": Layout("policy", parallelism(dp=2))}, two_steps)
    one, both = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "dp2"))
    assert both["shows"] == [True, False]
    assert both["losses"] == pytest.approx(one["losses"], rel=1e-5)
    torch.testing.assert_close(both["weights"], one["weights"], atol=1e-5, rtol=0)


def test_adapters_are_the_language_model_s_and_peft_reads_them(model, processor, tmp_path):
    """Merged or apart, what is saved computes what transformers does with PEFT's copy, and a run begins with it."""
    peft = pytest.importorskip("peft")
    lora = {"rank": 4, "alpha": 8.0}
    learner, samples = learner_of(model[0], lora=lora, optimizer={"lr": 1e-2}), samples_of(processor)
    learner.train(packed(samples).rows[0], True)
    assert all(is_adapter(name) == each.requires_grad for name, each in learner.model_parts[0].named_parameters())
    learner.save_hf(tmp_path / "merged", tmp_path / "adapter", dtype="float32")
    before, merged = (load_file(path / "model.safetensors") for path in (model[0], tmp_path / "merged"))
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight") and name.startswith("model.layers.")}
    whole = model[1].from_pretrained(tmp_path / "merged").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of tensors that PEFT misses, or does not know
        adapted = peft.PeftModel.from_pretrained(model[1].from_pretrained(model[0]), tmp_path / "adapter").eval()
    assert not [name for name, _ in adapted.named_modules() if "visual" in name and "lora" in name]
    for sample in (samples[0][0], samples[2][0]):
        wanted = reference_logits(whole, processor, sample)
        assert distance(reference_logits(adapted, processor, sample), wanted) < TOLERANCE
        assert distance(reference_logits(model[1], processor, sample), wanted) > 0.01
    lora |= {"adapter": str(tmp_path / "adapter")}
    config = load_config(None, {"lora": lora})
    check_lora(read_hf_config(model[0]), config, build_titan(config), None)
    begun = {shard.name: shard.merged() for shard in learner_of(model[0], lora=lora).shards()}
    assert all(torch.equal(shard.merged(), begun[shard.name]) for shard in learner.shards())


def test_an_image_is_laid_out_as_transformers_does(processor):
    """Times, rows and columns of tokens by Qwen's formula, and pixels of every encoding by the library's processor."""
    positions = rope_positions(9, [PlacedImage(np.zeros((16, 24, 3), np.uint8), (2, 3), 2)])
    assert positions.T.tolist() == [[0, 1, *[2] * 6, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    for form, mode in (("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "L"), ("WEBP", "RGB")):
        data = encoded(30, 50, form, mode)
        pixels = processor.decode(data)
        assert processor.grid(pixels) == (4, 6)
        whole = processor._processor.preprocess(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
        found, grid = processor.patches([PlacedImage(pixels, (4, 6), 0)])
        assert grid.tolist() == whole["image_grid_thw"].tolist() == [[1, 8, 12]]
        assert np.array_equal(found, whole["pixel_values"])


@pytest.mark.parametrize(
    ("limits", "size", "shown"),
    [
        ({"max_pixels": 256}, (64, 64), (16, 16)),
        ({"min_pixels": 4096}, (16, 16), (64, 64)),
        ({"min_pixels": 64, "max_pixels": 1024}, (8, 8), (8, 8)),
        ({"min_pixels": 64, "max_pixels": 1024}, (100, 50), (40, 16)),
        ({}, (64, 64), (64, 64)),
    ],
)
def test_a_run_s_limits_resize_images_as_transformers_does(model, limits, size, shown):
    processor = image_processor(model[0], ImagesConfig(**limits))
    data = encoded(*size)
    pixels = processor.decode(data)
    assert pixels.shape == (*shown, 3) and pixels.size <= 3 * limits.get("max_pixels", 128 * 128)
    edges = {"shortest_edge": limits.get("min_pixels", 16 * 16), "longest_edge": limits.get("max_pixels", 128 * 128)}
    theirs = Qwen2VLImageProcessorPil.from_pretrained(model[0])
    whole = theirs.preprocess(Image.open(io.BytesIO(data)), size=edges, return_tensors="np")
    patches, _ = processor.patches([PlacedImage(pixels, processor.grid(pixels), 0)])
    assert np.array_equal(patches, whole["pixel_values"])


def bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no image", "no image of PNG"),
        (encoded(16, 16, "BMP"), "no image of PNG"),
        (encoded(16, 16)[:60], "cannot be read"),
        (bomb(), "9000 x 9000 pixels"),
        (encoded(1, 500), "one side is more than 200 times the other"),
    ],
)
def test_what_is_no_image_is_refused(processor, data, words):
    with pytest.raises(ValueError, match=words):
        processor.decode(data)


def test_recorded_images_are_the_same_and_forged_ones_are_found(processor):
    sample = samples_of(processor)[2][0]
    images = images_of(image_rows(sample.images), len(sample.tokens))
    assert [(one.start, one.grid) for one in images] == [(one.start, one.grid) for one in sample.images]
    assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(images, sample.images, strict=True))
    check_images(sample.tokens, images, processor)
    first, second = images
    for forged in ([first.moved(1)], [second, first], [replace(first, grid=(1, 1))], [first.moved(-99)]):
        with pytest.raises(ValueError, match="an image at token"):
            check_images(sample.tokens, forged, processor)
    with pytest.raises(ValueError, match="the model sees none"):
        check_images(sample.tokens, images, None)
    with pytest.raises(ValueError, match="cannot be read"):
        images_of([{"png": b"x", "rows": 1, "columns": 1, "start": 0}], 9)
    for forged in ({"rows": 9}, {"start": -1}, {"columns": 0}):
        with pytest.raises(ValueError, match="an image at token"):
            images_of([image_rows(sample.images)[0] | forged], 12)
    with pytest.raises(ValueError, match="an image of 9000 x 9000"):
        images_of([{"png": bomb(), "rows": 1, "columns": 1, "start": 0}], 9)
    is_prompt = sample.provenance == Provenance.TEMPLATE
    check_covered(sample.tokens, is_prompt, images, processor)
    with pytest.raises(ValueError, match="images of 0"):
        check_covered(sample.tokens, is_prompt, [], processor)


def test_an_image_is_shown_as_vllm_would(processor):
    """Upright, and on white."""
    pixels = np.zeros((16, 32, 4), np.uint8)
    pixels[:, :16] = 255
    turned, file, shown = Image.fromarray(pixels[..., :3]), io.BytesIO(), io.BytesIO()
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(file, "PNG", exif=exif)
    upright = processor.decode(file.getvalue())
    assert upright.shape == (32, 16, 3) and upright[0].all() and not upright[-1].any()
    Image.fromarray(pixels, "RGBA").save(shown, "PNG")
    assert (processor.decode(shown.getvalue()) == 255).all()


def test_questions_differ_by_what_they_show():
    first, second, third = (Prompt("a", "what?", "", {}, images=images) for images in ([b"1"], [b"2"], []))
    assert len({each.question_key for each in (first, second, third)}) == 3 and third.question_key == "what?"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, "no preprocessor_config.json"),
        ({"patch_size": 8}, "patch_size = 8 .* patch_size = 4 in config.json"),
        ({"merge_size": 0}, "merge_size = 0"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std"),
        ({"size": {"shortest_edge": 99, "longest_edge": 9}}, "min_pixels = 99 and max_pixels = 9"),
        ({"size": {"shortest_edge": 1, "longest_edge": 63}}, "the 8 x 8 pixels of a token"),
        ({"size": {"height": 9, "width": 9}}, "shortest_edge and longest_edge"),
        ({"size": {"longest_edge": 99}}, "both shortest_edge and longest_edge"),
        ({"min_pixels": 10**12}, "min_pixels = 1000000000000"),
        ({"do_normalize": False}, "do_normalize = False"),
        ({"rescale_factor": 1.0}, "rescale_factor = 1.0"),
        ({"size": {"shortest_edge": 1, "longest_edge": 10**12}}, "max_pixels = 1000000000000"),
    ],
)
def test_a_wrong_form_of_images_is_one_line(model, tmp_path, changes, words):
    path = tmp_path / "model"
    shutil.copytree(model[0], path)
    file = path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    file.unlink()
    if changes is not None:
        file.write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=words):
        find_model(str(path))


@pytest.mark.parametrize("key", ["tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"])
def test_a_tower_is_not_cut(model, key):
    titan = build_titan(load_config(None, {"parallelism": {key: 2}}))
    with pytest.raises(ConfigError, match=f"parallelism.{key} = 2.*data_parallel_shard_degree"):
        check_layout(read_hf_config(model[0]), titan.parallelism)
