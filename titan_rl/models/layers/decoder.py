"""The decoder that all families of this tree share: TorchTitan's, for packed rows, with an output head in fp32.

Dimensions: B rows, L tokens of a row, D features, S chosen positions.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from transformers import PreTrainedConfig

from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.context_parallel import HeadRoute
from titan_rl.models.layers.attention import AttentionPlan, SpreadPlan
from titan_rl.models.layers.cpu_products import with_lean_linears
from titan_rl.models.layers.layer_configs import FROM_FILE, layer_config, norm
from titan_rl.models.layers.memory_saving import LeanRMSNorm
from titan_rl.models.layers.moe import RoutedPlan
from titan_rl.models.layers.penalties import LogitPenalties
from titan_rl.models.layers.top_tokens import likeliest_words, word_logprobs


class Float32Head(Linear):
    """An output head that projects in fp32, whatever dtype the model computes in, as the generator's does.

    With targets, it returns their log-probabilities and the entropies, [2, S] in fp32, from logits in tiles; below
    them, if they are asked for, the log-probabilities of ``words_SK`` [K, S], or the ``num_likeliest`` words (as
    numbers, exact up to 2^24) and their log-probabilities [2K, S]. With a mask, of the distributions that it leaves,
    and with penalties, of penalized logits; then without any such words. ``is_frozen``: the weight gets no gradient.
    This is done here since FSDP gathers a module's weight only for the module's own forward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # TorchTitan's sharding declaration names the first argument and needs a value for every other positional one
    def forward(
        self,
        input: torch.Tensor,
        *,
        target_S: torch.Tensor | None = None,
        temperature: float = 1.0,
        implementation: Literal["reference", "triton"] = "reference",
        expected_grad: Callable[[torch.Tensor, slice], torch.Tensor] | None = None,
        entropy_gradient: bool = False,
        words_SK: torch.Tensor | None = None,
        num_likeliest: int = 0,
        mask: SamplingMask | None = None,
        penalties: LogitPenalties | None = None,
        is_frozen: bool = False,
    ) -> torch.Tensor:
        if target_S is None:
            return F.linear(input.float(), self.weight.float())
        has_words = words_SK is not None or num_likeliest > 0
        assert mask is None or not has_words, "words besides the targets may be among those that a mask leaves out"
        assert penalties is None or not has_words, "words besides the targets are not penalized"
        weight = self.weight.detach() if is_frozen else self.weight
        spread: dict[str, Any] = {}
        if isinstance(weight, DTensor):  # sharded over tensor-parallel ranks as torch.chunk splits
            mesh = weight.device_mesh
            spread = {"group": mesh.get_group(), "first_word": mesh.get_local_rank() * -(-len(weight) // mesh.size())}
            assert isinstance(input, DTensor)
            # each rank's gradient of the hidden states is only a part of the sum: that of its own words
            input, weight = input.to_local(grad_placements=[Partial()]), weight.to_local()
        logprob_S, entropy_S = linear_logprob(
            *(input, weight, target_S),
            temperature=temperature,
            implementation=implementation,
            expected_grad=expected_grad,
            penalties=penalties,
            mask_SB=None if mask is None else torch.from_numpy(mask.bits()).to(target_S.device),
            **spread,
        )
        tokens, spread = (input, weight, target_S, logprob_S), spread | {"temperature": temperature}
        # the entropy's gradient costs the backward two more passes
        rows = [logprob_S, entropy_S if entropy_gradient else entropy_S.detach()]
        if words_SK is not None:
            rows += word_logprobs(*tokens, words_SK, **spread).unbind(1)
        if num_likeliest:
            found_SK, found_logprob_SK = likeliest_words(*tokens, num_likeliest, **spread)
            rows += [*found_SK.to(logprob_S.dtype).unbind(1), *found_logprob_SK.unbind(1)]
        return torch.stack(rows)


class SequenceParallelConfig(Protocol):
    """Fields of every ``PackedDecoder.Config`` besides TorchTitan's."""

    sequence_parallel: bool


class PackedDecoder(Decoder):
    """A TorchTitan decoder, or a pipeline stage of one, that projects only the chosen positions onto the vocabulary.

    Inputs and outputs are plain tensors. Under TP, a stage passes its rank's part of the sequence to the next one, and
    the last stage returns the statistics of all chosen positions, or the logits of its rank's part of the vocabulary.
    """

    tp_mesh: DeviceMesh | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self.tp_mesh = parallel_dims.get_optional_mesh("tp")
        if self.enable_weight_tying:
            # sharding replaced both; they must be one tensor again before FSDP wraps them
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionPlan | SpreadPlan | RoutedPlan | AttentionMasksType | None = None,
        logit_index_S: torch.Tensor | HeadRoute | None = None,
        hidden_before: Collection[int] = (),
        **statistics: Any,
    ) -> torch.Tensor:
        """Logits of the positions ``logit_index_S``: [S, vocabulary]; if None, of all: [B, L, vocabulary].

        ``tokens``: [B, L], or the output of the stage before. With a route for ``logit_index_S``, of the positions
        that it leads here. With ``statistics`` (the keyword arguments of
        the head, such as ``target_S``): log-probabilities and entropies [2, S] instead. With ``hidden_before``: the
        embedded tokens and the inputs of these layers, or the head's, which has the number behind the last, side by
        side [B, L, (1 + layers) D], and nothing is computed behind them.
        """
        hidden = self._enter(tokens)
        states = [hidden]
        for name, layer in self.layers.items():
            if int(name) in hidden_before:
                states.append(hidden)
                if len(states) > len(hidden_before):
                    return torch.cat(states, dim=-1)
            plan = attention_masks.at(int(name)) if isinstance(attention_masks, RoutedPlan) else attention_masks
            hidden = layer(hidden, plan, positions)
        if self.lm_head is None:
            return _local(hidden)
        if hidden_before:
            return torch.cat([*states, self.norm(hidden)], dim=-1)
        if self.tp_mesh is not None:
            hidden = _local(self.norm(hidden))  # the norm gathers the sequence
            return _local(self.lm_head(_select(hidden, logit_index_S), **statistics))
        return self.lm_head(self.norm(_select(hidden, logit_index_S)), **statistics)

    def _enter(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.tok_embeddings is not None:
            return self.tok_embeddings(inputs)
        if self.tp_mesh is None:
            return inputs
        placement = Shard(1) if cast(SequenceParallelConfig, self.config).sequence_parallel else Replicate()
        return DTensor.from_local(inputs, self.tp_mesh, [placement], run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _select(hidden_BLD: torch.Tensor, index_S: torch.Tensor | HeadRoute | None) -> torch.Tensor:
    if isinstance(index_S, HeadRoute):
        return index_S.exchanged(hidden_BLD.flatten(0, 1))
    return hidden_BLD if index_S is None else hidden_BLD.flatten(0, 1).index_select(0, index_S)


def decoder_config(
    hf: PreTrainedConfig,
    *,
    model: type[PackedDecoder],
    block: type[TransformerBlock],
    layer: Callable[..., Any] = layer_config,
    norm: Callable[[PreTrainedConfig, int], LeanRMSNorm.Config] = norm,
    embedding: type[Embedding] = Embedding,
    **parts: Any,
) -> Decoder.Config:
    """TorchTitan's config of a decoder by the sizes of a config.json; unless said otherwise with grouped-query
    attention and SwiGLU.

    ``model``: a PackedDecoder; ``block``: TorchTitan's class of its layers; ``layer``: makes a layer's config, by the
    config.json, the layer's number, the block and ``parts``; ``norm``: of the last hidden states.
    """
    words = dict(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size)
    return model.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        enable_weight_tying=hf.tie_word_embeddings,
        tok_embeddings=embedding.Config(**words, param_init=FROM_FILE),
        norm=norm(hf, hf.hidden_size),
        lm_head=Float32Head.Config(in_features=hf.hidden_size, out_features=hf.vocab_size, param_init=FROM_FILE),
        layers=[with_lean_linears(layer(hf, number, block=block, **parts)) for number in range(hf.num_hidden_layers)],
    )
