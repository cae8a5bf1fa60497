"""Draft heads beside their policy: they are trained on the hidden states that the policy has of a row.

EAGLE-3 heads have a directory of their own; a layer for multi-token prediction is part of the policy's.

Dimensions: T tokens of a row, S trained tokens of it, V tokens of the policy's vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.config.model_directory.directory import read_object, stored_tensors
from titan_rl.config.model_directory.draft_heads import MAPPING, TABLES, layers_read
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Row, Segment
from titan_rl.models.device import to_device
from titan_rl.models.families.drafting import PolicyStates
from titan_rl.models.families.registry import make_family
from titan_rl.models.spec import model_spec, prediction_layer_spec, read_hf_config
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.models.weights.shards import decoder_of
from titan_rl.trainer.model.sharded_model import Columns, ShardedModel
from titan_rl.trainer.titan_config import TitanConfig

_OF_LAYERS = ("positions", "attention_masks")
"""Arguments of a forward that ends before the head."""


def tokens_before(segments: list[Segment], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Place of the token before each token of a row [T], and whether there is one [T].

    Without one the place is its own."""
    before_T, has_before_T = np.arange(-1, num_tokens - 1), np.ones(num_tokens, bool)
    for segment in segments:
        if segment.prefix:
            start, length = segment.prefix[-1]
            before_T[segment.start] = start + length - 1
        else:
            before_T[segment.start], has_before_T[segment.start] = segment.start, False
    return before_T, has_before_T


def without_first_tokens(segments: list[Segment]) -> list[Segment]:
    """Segments in which no token sees the first of its text, which a head never reads: it has no token before."""
    firsts = {segment.start for segment in segments if not segment.prefix}

    def cut(start: int, length: int) -> tuple[tuple[int, int], ...]:
        start, length = (start + 1, length - 1) if start in firsts else (start, length)
        return ((start, length),) if length else ()

    read = []
    for segment in segments:
        prefix = tuple(part for each in segment.prefix for part in cut(*each))
        if segment.start in firsts:
            read.append(Segment(segment.start, 1))
        read += [Segment(start, length, prefix) for start, length in cut(segment.start, segment.length)]
    return read


class DraftHead(ShardedModel):
    """Rank's part of a head. Its statistics are means over all tokens of a draft."""

    layers: tuple[int, ...]
    """Layers of the policy whose inputs it reads; the number behind the last: the output head's."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        dims: ParallelDims,
        spec: ModelSpec,
        path: str | Path,
        policy: ShardedModel,
    ):
        self.policy = policy
        self._num_drafts = config.generator.speculative.num_speculative_tokens
        super().__init__(
            *(spec, titan, path, dims, policy.device),
            temperature=config.rollout.temperature,
            kernel=config.model.kernel,
        )

    def columns(self, row: Row) -> Columns:
        """Columns in which tokens that follow a text's first have no weight."""
        columns = super().columns(row)
        _, has_before_T = tokens_before(row.segments, len(row.tokens_T))
        return columns | {"weight_S": columns["weight_S"] * to_device(has_before_T[row.source_S], self.device)}

    def keywords(self, row: Row, columns: Columns, keywords_of: Callable[[Columns], dict] = lambda columns: {}) -> dict:
        common = super().keywords(replace(row, segments=without_first_tokens(row.segments)), columns, keywords_of)
        return common | {"states": self._states(row), "num_drafts": self._num_drafts}

    @torch.no_grad()
    def _states(self, row: Row) -> PolicyStates:
        """What the policy has of a row."""
        columns = self.policy.columns(row)
        keywords = self.policy.keywords(row, columns)
        states_BLD = self.policy_model(
            self.policy.tokens(columns), hidden_before=self.layers, **{name: keywords[name] for name in _OF_LAYERS}
        )
        dim = decoder_of(self.policy.spec).dim
        before_L, has_before_L = (
            to_device(each, self.device) for each in tokens_before(row.segments, len(row.tokens_T))
        )
        return PolicyStates(states_BLD[..., :dim], states_BLD[..., dim:], before_L, has_before_L)

    @contextmanager
    def computing(self) -> Iterator[torch.nn.Module]:
        with ExitStack() as stack:
            stack.callback(self.policy.reshard)
            with torch.no_grad():  # its gradients are its own affair
                self.policy_model = stack.enter_context(self.policy.computing())
            yield stack.enter_context(super().computing())


class Eagle3DraftHead(DraftHead):
    def __init__(self, config: Config, titan: TitanConfig, dims: ParallelDims, path: str | Path, policy: ShardedModel):
        super().__init__(config, titan, dims, model_spec(path), path, policy)
        self.layers = layers_read(read_object(Path(path) / "config.json"), len(decoder_of(policy.spec).layers))
        stored = stored_tensors(path)
        for name in TABLES:
            if name in stored:
                with safe_open(stored[name].file, "pt") as tensors:
                    self.tables[name] = tensors.get_tensor(name)
        self._drafted_V = self._numbers_in_drafts().to(self.device) if MAPPING in self.tables else None

    def _numbers_in_drafts(self) -> torch.Tensor:
        """Number of each of the policy's tokens in the head's vocabulary [V]; -1: it is none of it."""
        difference = self.tables[MAPPING]
        numbers = torch.arange(len(difference))
        drafted_V = torch.full((decoder_of(self.policy.spec).vocab_size,), -1)
        drafted_V[numbers + difference] = numbers
        return drafted_V

    def columns(self, row: Row) -> Columns:
        """Columns in which tokens that cannot be drafted have no weight either."""
        columns = super().columns(row)
        if self._drafted_V is None:
            return columns
        target_S = self._drafted_V[columns["target_S"]]
        return columns | {"target_S": target_S.clamp(min=0), "weight_S": columns["weight_S"] * (target_S >= 0)}


class MTPDraftHead(DraftHead):
    """Layer for multi-token prediction, whose embeddings and output head are the policy's."""

    def __init__(self, config: Config, titan: TitanConfig, dims: ParallelDims, path: str | Path, policy: ShardedModel):
        hf = read_hf_config(path, make_family(config.model.family, config.run.plugin_path))
        super().__init__(config, titan, dims, prediction_layer_spec(hf), path, policy)
        self.layers = (hf.num_hidden_layers,)
        policy.prediction_layer = self

    def keywords(self, row: Row, columns: Columns, keywords_of: Callable[[Columns], dict] = lambda columns: {}) -> dict:
        head = partial(self.policy_model.get_submodule("lm_head"), is_frozen=True)
        return super().keywords(row, columns, keywords_of) | {"head": head}

    def save(self, out: str | Path, dtype: str, quantizer: Quantizer | None = None) -> None:
        """No-op: it is in the policy's directory."""


HEADS = {"eagle3": Eagle3DraftHead, "mtp": MTPDraftHead}
"""By ``generator.speculative.method``."""
