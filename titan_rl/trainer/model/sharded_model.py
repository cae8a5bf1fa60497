"""One rank's part of a role's model: built, sharded, loaded, and evaluated on packed rows.

Policy, reference, teacher and critic are such models; what they are for is not known here.

Dimensions: K statistics of a token (2: its log-probability, and the entropy of its distribution; a head for values has
its own), S trained tokens of a row.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.model_directory.chat_template import write_template
from titan_rl.config.model_directory.vision_checks import write_limits
from titan_rl.config.sections.precision import invariant_parts
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import Config, LoraConfig
from titan_rl.data.batches.packing import fit_rows
from titan_rl.data.images import UNLIMITED, PlacedImage, image_processor
from titan_rl.data.types import Row
from titan_rl.models.batch_invariance import convert_to_batch_invariant
from titan_rl.models.context_parallel import ContextParallel
from titan_rl.models.device import to_device
from titan_rl.models.families.qwen2_5_vl import ImageInputs
from titan_rl.models.families.registry import make_family
from titan_rl.models.layers.attention import AttentionPlan, BlockPlan, Form, SpreadPlan, attention_form, plan_attention
from titan_rl.models.layers.gated_delta_net import has_states, recurrence_plan
from titan_rl.models.layers.moe import RoutedPlan
from titan_rl.models.layers.penalties import logit_penalties
from titan_rl.models.spec import model_spec
from titan_rl.models.value_head import has_value_head, load_value_model, save_value_model, value_spec
from titan_rl.models.weights.hf_weights import export_dtypes, load_hf, save_hf
from titan_rl.models.weights.prediction_layers import read_prediction_layers
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.models.weights.shards import Shard, decoder_of, local_shards
from titan_rl.trainer.distributed.ranks import context_parallel
from titan_rl.trainer.model.adapters import Adapters
from titan_rl.trainer.model.parallel import parallel_model
from titan_rl.trainer.model.unsharded import UnshardedModel, can_be_unsharded
from titan_rl.trainer.titan_config import TitanConfig

Columns = dict[str, torch.Tensor]
"""Of one row, on the device that computes: those of ``data.types.Row``, and what roles say of it."""
Kernel = Literal["auto", "reference", "triton"]
_ROW_COLUMNS = ("tokens_T", "positions_T", "source_S", "target_S", "logprob_S", "advantage_S", "weight_S", "offsets_N")
_OF_WHOLE_ROWS = ("tokens_T", "positions_T", "offsets_N")
"""Columns that are not one of the trained tokens."""


def _spread(keywords: dict, row: Row, context: ContextParallel) -> dict:
    """Arguments of the forward on one of the ranks that the row's tokens are spread over."""
    num_tokens, mine = len(row.tokens_T), context.targets(len(row.target_S))
    penalties = keywords["penalties"]
    return keywords | {
        "positions": keywords["positions"][:, context.tokens(num_tokens)],
        "attention_masks": _spread_plan(keywords["attention_masks"], context, num_tokens),
        "logit_index_S": context.route(row.source_S, num_tokens, keywords["target_S"].device),
        "target_S": keywords["target_S"][mine],
        "mask": None if row.mask is None else row.mask.take(np.arange(mine.start, mine.stop)),
        "penalties": None if penalties is None else penalties.at(mine),
    }


def _spread_plan(
    plan: AttentionPlan | RoutedPlan, context: ContextParallel, num_tokens: int
) -> SpreadPlan | RoutedPlan:
    if not isinstance(plan, RoutedPlan):
        return SpreadPlan(plan, context)
    here_TLK = plan.routed_experts_TLK[context.tokens(num_tokens)]
    return replace(plan, plan=SpreadPlan(plan.plan, context), routed_experts_TLK=here_TLK)


def _implementation(kernel: Kernel, device: torch.device) -> Literal["reference", "triton"]:
    if kernel != "auto":
        return kernel
    return "triton" if device.type == "cuda" else "reference"


class ShardedModel:
    """Rank's part of a model; all ranks of the process group call each method together."""

    def __init__(
        self,
        spec: ModelSpec,
        titan: TitanConfig,
        path: str | Path,
        parallel_dims: ParallelDims,
        device: torch.device,
        *,
        temperature: float,
        kernel: Kernel,
        chat_template: str = "",
        images: ImagesConfig = UNLIMITED,
        replays_routing: bool = False,
        parts: int = 0,
    ):
        """``path``: directory of the weights. ``temperature``: of the log-probabilities. ``chat_template``: what is
        saved in the place of the directory's own; empty: that one. ``images``: limits of their pixels, saved, too.
        ``replays_routing``: tokens go through the experts that rows have for them. ``parts``: of a product that ranks
        share, in batch-invariant layers; 0: plain ones."""
        self.spec, self.titan, self.path, self.device = spec, titan, Path(path), device
        self.temperature, self.chat_template, self.replays_routing = temperature, chat_template, replays_routing
        self.implementation: Literal["reference", "triton"] = _implementation(kernel, device)
        if parts and titan.parallelism.context_parallel_degree == 1:
            convert_to_batch_invariant(decoder_of(spec), parts)
        self.attention_form: Form = attention_form(
            decoder_of(spec), device, TORCH_DTYPE_MAP[titan.training.mixed_precision_param]
        )
        self.parts, self.pipeline = parallel_model(spec, titan, parallel_dims, device)
        self.unsharded = (
            UnshardedModel(spec, titan, parallel_dims, self.parts[0]) if can_be_unsharded(titan, device.type) else None
        )
        self.context = context_parallel(parallel_dims)
        self.images, self.image_processor = images, image_processor(path, images)
        self.tables: dict[str, torch.Tensor] = {}
        """Tensors of the directory that are saved as they are."""
        self._routing_counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.adapters: Adapters | None = None
        self.prediction_layer: ShardedModel | None = None
        """The model's own layer for multi-token prediction, if that is trained; else it is saved as it was."""
        self.load(path)
        self._spmd_context = dist_utils.get_spmd_context(parallel_dims=parallel_dims, spmd_typechecking=False)

    def adapt(self, lora: LoraConfig, seed: int) -> None:
        """Initialize the spec's LoRA adapters (models/weights/lora.py)."""
        dtype = TORCH_DTYPE_MAP[self.titan.training.mixed_precision_param]
        self.adapters = Adapters(self.spec, self.parts, lora, self.path, self.device, dtype)
        self.adapters.begin(seed)

    # rows

    def fit(self, rows: list[Row]) -> list[Row]:
        """Pad rows to the layout's multiples; fitted rows stay as they are."""
        return fit_rows(
            rows,
            token_multiple=self.titan.ranks_of_rows,
            row_multiple=self.titan.row_multiple,
            same_length=self.pipeline is not None,
        )

    def columns(self, row: Row) -> Columns:
        """Columns of a row, as tensors on the device."""
        arrays = {name: getattr(row, name) for name in _ROW_COLUMNS} | row.role_columns
        return {name: to_device(values, self.device) for name, values in arrays.items()}

    def tokens(self, columns: Columns) -> torch.Tensor:
        """Tokens of a row that this rank computes, [1, L]."""
        tokens_T = columns["tokens_T"]
        return tokens_T[None] if self.context is None else tokens_T[None, self.context.tokens(len(tokens_T))]

    def keywords(self, row: Row, columns: Columns, keywords_of: Callable[[Columns], dict] = lambda columns: {}) -> dict:
        """Arguments of the model's forward besides the tokens. ``keywords_of(columns)``: further ones of the head, of
        those of the row's trained tokens that this rank has it compute."""
        plan = plan_attention(row.segments, len(row.tokens_T), self.device, self.attention_form)
        if isinstance(plan, BlockPlan) and has_states(decoder_of(self.spec)):
            recurrence_plan(plan)  # once, here, and not on the host in the middle of a forward
        whole = {
            "positions": columns["positions_T"][None],
            "attention_masks": self._routed(plan, row),
            "logit_index_S": columns["source_S"],
            "target_S": columns["target_S"],
            "temperature": self.temperature,
            # penalties are the reference's alone
            "implementation": "reference" if row.penalized else self.implementation,
            "mask": row.mask,
            "penalties": logit_penalties(row, self.device),
            **self._images(row),
        }
        return (whole if self.context is None else _spread(whole, row, self.context)) | keywords_of(self._own(columns))

    def _images(self, row: Row) -> dict[str, ImageInputs]:
        """What the row's tokens show; of a model without a vision tower, nothing.

        The tower is called for each row, of one black image where there is none: ranks gather its weights together, and
        its optimizer steps whatever a batch shows."""
        if self.image_processor is None:
            assert not row.images, "images for a model that sees none"
            return {}
        shown = row.images or [PlacedImage(np.zeros([self.image_processor.cell] * 2 + [3], np.uint8), (1, 1), 0)]
        patches, grid = self.image_processor.patches(shown)
        places = [np.arange(image.start, image.stop) for image in row.images] or [np.zeros(0, np.int64)]
        arrays = patches, grid, np.concatenate(places)
        return {"images": ImageInputs(*(to_device(array, self.device) for array in arrays))}

    def _routed(self, plan: AttentionPlan, row: Row) -> AttentionPlan | RoutedPlan:
        """The plan, with the experts that the row's tokens go through, where they are given."""
        if not self.replays_routing or row.routed_experts is None:
            return plan
        experts_TLK = to_device(row.routed_experts.astype(np.int64), self.device)
        return RoutedPlan(plan, experts_TLK, self._routing_counts)

    def take_routing_changed(self) -> float | None:
        """Share of the given experts, on all ranks since the last call, that routers would not have chosen themselves;
        None where none are given."""
        if not self.replays_routing:
            return None
        counts = self._routing_counts.clone()
        self._routing_counts.zero_()
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        changed, given = counts.tolist()
        return changed / max(given, 1)

    def _own(self, columns: Columns) -> Columns:
        """Columns of the trained tokens that this rank has the head compute."""
        if self.context is None:
            return columns
        mine = self.context.targets(len(columns["target_S"]))
        return {name: column if name in _OF_WHOLE_ROWS else column[mine] for name, column in columns.items()}

    def _statistics(self, output: torch.Tensor, columns: Columns) -> torch.Tensor:
        """Head outputs of all trained tokens of a row, from those of this rank."""
        return output if self.context is None else self.context.gathered(output, len(columns["target_S"]))

    def forward_backward(
        self,
        rows: list[Row],
        loss: Callable[[torch.Tensor, int, Columns], torch.Tensor],
        keywords_of: Callable[[Columns], dict] = lambda columns: {},
        without_gradient: Collection[int] = (),
    ) -> None:
        """Accumulate the gradients of fitted rows' losses.

        ``loss(statistics_KS, index, columns)``: of a row, by its number. ``keywords_of(columns)``: further arguments of
        the head. ``without_gradient``: numbers of rows whose gradient is zero on all ranks: unless there is a
        pipeline, their losses are computed without one. With a pipeline, losses are computed on its last stage alone.
        """
        columns = [self.columns(row) for row in rows]

        def keywords(index: int) -> dict:
            return self.keywords(rows[index], columns[index], keywords_of)

        def loss_of(output: torch.Tensor, index: int) -> torch.Tensor:
            return loss(self._statistics(output, columns[index]), index, columns[index])

        with self.computing() as model:
            if self.pipeline is None:
                order = sorted(
                    range(len(rows)), key=lambda index: index not in without_gradient
                )  # a backward comes last
                for place, index in enumerate(order, 1):
                    self._keep_gathered(place < len(rows))
                    with torch.set_grad_enabled(index not in without_gradient):
                        row_loss = loss_of(model(self.tokens(columns[index]), **keywords(index)), index)
                    if index not in without_gradient:
                        row_loss.backward()
                    del row_loss  # its graph's many small blocks would stand between the next row's activations
            else:
                self.pipeline.forward_backward(
                    [self.tokens(row_columns) for row_columns in columns],
                    [keywords(index) for index in range(len(rows))],
                    self._hidden_shape(rows[0]),
                    loss_of,
                )
        if len(without_gradient) == len(rows):
            self.reshard()

    @contextmanager
    def computing(self) -> Iterator[torch.nn.Module]:
        """What gives the statistics of rows, unless there is a pipeline."""
        with (
            self._spmd_context(),
            self.unsharded.computing() if self.unsharded else nullcontext(self.parts[0]) as model,
        ):
            yield model

    def _keep_gathered(self, yes: bool) -> None:
        """Whether the next backward leaves the weights that were gathered for it to the forward after it, where the
        layout keeps them from a forward to its backward anyway."""
        if self.unsharded is None and self.titan.parallelism.fsdp_reshard_after_forward == "never":
            for module in self.parts[0].modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_backward(not yes, recurse=False)

    @torch.no_grad()
    def measure(
        self, rows: list[Row], keywords_of: Callable[[Columns], dict] = lambda columns: {}, **extra: Any
    ) -> list[torch.Tensor | None]:
        """Head outputs for the trained tokens of fitted rows, [K, S] or [S], without a gradient.

        ``extra``: further arguments of the head; ``keywords_of``: those of each row.

        None on the stages of a pipeline that are not the last.
        """
        outputs = []
        with self.computing() as model:
            for row in rows:
                columns = self.columns(row)
                tokens, keywords = self.tokens(columns), self.keywords(row, columns, keywords_of) | extra
                if self.pipeline is None:
                    output = model(tokens, **keywords)
                else:
                    output = self.pipeline.forward(tokens, keywords, self._hidden_shape(row))
                outputs.append(None if output is None else self._statistics(output, columns))
        self.reshard()
        return outputs

    def reshard(self) -> None:
        """FSDP keeps what it gathered last for a backward. None comes here, and weights may be loaded before the next
        forward, which would go on with the former ones."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _hidden_shape(self, row: Row) -> tuple[int, int, int]:
        """Of what a stage passes on."""
        parallelism = self.titan.parallelism
        split = parallelism.tensor_parallel_degree if parallelism.enable_sequence_parallel else 1
        return 1, len(row.tokens_T) // (split * parallelism.context_parallel_degree), decoder_of(self.spec).dim

    # weights

    def freeze(self) -> "ShardedModel":
        """Freeze all parameters; returns the model."""
        for part in self.parts:
            part.requires_grad_(False)
        return self

    def load(self, path: str | Path) -> None:
        """Load weights from a directory of the same model."""
        read = load_value_model if has_value_head(self.spec) else load_hf
        self.dtypes = read(self.shards(), path)

    def shards(self) -> list[Shard]:
        """Boxes of Hugging Face tensors on this rank; they stay current."""
        shards = local_shards(self.spec, self.parts)
        return self.adapters.merged(shards) if self.adapters else shards

    def digest(self) -> str:
        """Digest of this rank's weights, without adapters."""
        hasher = xxhash.xxh3_128()
        for shard in self.shards():
            hasher.update(shard.tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def save(self, out: str | Path, dtype: str, quantizer: Quantizer | None = None) -> None:
        """Write a Hugging Face directory with adapters merged. ``dtype``: as ``checkpoint.export_dtype``; ``auto`` is
        the engines' dtype beside a ``quantizer``."""
        if quantizer is not None and dtype == "auto":
            dtype = str(quantizer.dtype).removeprefix("torch.")
        shards, dtypes, layer = self.shards(), self.dtypes, self.prediction_layer
        if layer is not None:
            shards, dtypes = shards + layer.shards(), dtypes | layer.dtypes
        what = shards, self.path, Path(out), export_dtypes(self.spec, dtypes, dtype), self.device
        if has_value_head(self.spec):
            save_value_model(*what)
        else:
            # in FP8 all linear layers would be taken for such
            keeps = quantizer is None and layer is None and not dist.get_rank()
            further = read_prediction_layers(self.spec, self.path) if keeps else {}
            save_hf(*what, quantizer, further | self.tables)
        if self.chat_template and not dist.get_rank():
            write_template(Path(out), self.chat_template)
        if self.image_processor is not None and not dist.get_rank():
            write_limits(Path(out), self.images)


def make_sharded(
    config: Config,
    titan: TitanConfig,
    dims: ParallelDims,
    device: torch.device,
    path: str | Path,
    *,
    lora: LoraConfig | None = None,
    head: Literal["vocabulary", "value"] = "vocabulary",
    replays_routing: bool = False,
) -> ShardedModel:
    """Sharded model of a directory, by the run's config."""
    spec = model_spec(path, make_family(config.model.family, config.run.plugin_path), lora)
    return ShardedModel(
        *(value_spec(spec) if head == "value" else spec, titan, path, dims, device),
        temperature=config.rollout.temperature,
        kernel=config.model.kernel,
        chat_template=config.model.chat_template.text,
        images=config.model.images,
        replays_routing=replays_routing,
        parts=invariant_parts(titan.as_dict(), config.generator.tensor_parallel),
    )
