"""The decoder that all families of this tree share: TorchTitan's, for packed rows, with an output head in fp32.

Dimensions: B rows, L tokens of a row, D features, S chosen positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from transformers import PreTrainedConfig

from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.attention import AttentionPlan, PackedAttention
from titan_rl.models.lean import LeanFeedForward, LeanRMSNorm
from titan_rl.models.moe import moe_config
from titan_rl.models.rope import rope_config

# weights always come from a file, so they are not initialized
_FROM_FILE = {"weight": skip_param_init}


class Float32Head(Linear):
    """An output head that projects in fp32, whatever dtype the model computes in, as the generator's does.

    With targets, it returns their log-probabilities and the entropies, [2, S] in fp32, and computes the logits in
    tiles. This is done here since FSDP gathers a module's weight only for the module's own forward.
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
        implementation: str = "reference",
        expected_grad: Callable[[torch.Tensor, slice], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if target_S is None:
            return F.linear(input.float(), self.weight.float())
        weight, spread = self.weight, {}
        if isinstance(weight, DTensor):  # sharded over tensor-parallel ranks as torch.chunk splits
            mesh = weight.device_mesh
            spread = {"group": mesh.get_group(), "first_word": mesh.get_local_rank() * -(-len(weight) // mesh.size())}
            # each rank's gradient of the hidden states is only a part of the sum: that of its own words
            input, weight = input.to_local(grad_placements=[Partial()]), weight.to_local()
        logprob_S, entropy_S = linear_logprob(
            *(input, weight, target_S),
            temperature=temperature,
            implementation=implementation,
            expected_grad=expected_grad,
            **spread,
        )
        # no loss uses the entropy's gradient, which would cost the backward two more passes
        return torch.stack((logprob_S, entropy_S.detach()))


class PackedDecoder:
    """A TorchTitan decoder, or a pipeline stage of one, that projects only the chosen positions onto the vocabulary.

    Inputs and outputs are plain tensors. Under TP, a stage passes its rank's part of the sequence to the next one, and
    the last stage returns the statistics of all chosen positions, or the logits of its rank's part of the vocabulary.
    """

    tp_mesh = None

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        self.tp_mesh = parallel_dims.get_optional_mesh("tp")
        if self.enable_weight_tying:
            # sharding replaced both; they must be one tensor again before FSDP wraps them
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(
        self, inputs, positions=None, attention_masks: AttentionPlan | None = None, logit_index_S=None, **statistics
    ):
        """Logits of the positions ``logit_index_S``: [S, vocabulary]; if None, of all: [B, L, vocabulary].

        ``inputs`` are tokens [B, L], or the output of the stage before. With ``statistics`` (the keyword arguments of
        the head, such as ``target_S``): log-probabilities and entropies [2, S] instead.
        """
        hidden = self._enter(inputs)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        if self.lm_head is None:
            return _local(hidden)
        if self.tp_mesh is not None:
            hidden = _local(self.norm(hidden))  # the norm gathers the sequence
            return _local(self.lm_head(_select(hidden, logit_index_S), **statistics))
        return self.lm_head(self.norm(_select(hidden, logit_index_S)), **statistics)

    def _enter(self, inputs):
        if self.tok_embeddings is not None:
            return self.tok_embeddings(inputs)
        if self.tp_mesh is None:
            return inputs
        placement = Shard(1) if self.config.sequence_parallel else Replicate()
        return DTensor.from_local(inputs, self.tp_mesh, [placement], run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _select(hidden_BLD: torch.Tensor, index_S: torch.Tensor | None) -> torch.Tensor:
    return hidden_BLD if index_S is None else hidden_BLD.flatten(0, 1).index_select(0, index_S)


def _norm(hf: PreTrainedConfig, size: int) -> LeanRMSNorm.Config:
    return LeanRMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_FROM_FILE)


def _attention(hf: PreTrainedConfig, qk_norm: bool):
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return make_gqa_config(
        dim=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        wqkv_param_init=_FROM_FILE,
        wo_param_init=_FROM_FILE,
        inner_attention=PackedAttention.Config(),
        rope=rope_config(hf, head_dim),
        qk_norm=_norm(hf, head_dim) if qk_norm else None,
    )


def _feed_forward(hf: PreTrainedConfig) -> LeanFeedForward.Config:
    linears = make_ffn_config(
        dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init=_FROM_FILE, w2w3_param_init=_FROM_FILE
    )
    return LeanFeedForward.Config(w1=linears.w1, w2=linears.w2, w3=linears.w3)


def decoder_config(hf: PreTrainedConfig, *, model: type, block: type, qk_norm: bool = False, experts: bool = False):
    """TorchTitan's config of a decoder with grouped-query attention and SwiGLU, by the sizes of a config.json.

    ``model``: a PackedDecoder; ``block``: TorchTitan's class of its layers; ``qk_norm``: normalize queries and keys per
    head, as Qwen3 does; ``experts``: a mixture of experts instead of the SwiGLU.
    """
    layers = [
        block.Config(
            attention_norm=_norm(hf, hf.hidden_size),
            ffn_norm=_norm(hf, hf.hidden_size),
            attention=_attention(hf, qk_norm),
            moe=moe_config(hf) if experts else None,
            feed_forward=None if experts else _feed_forward(hf),
        )
        for _ in range(hf.num_hidden_layers)
    ]
    words = dict(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size)
    return model.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        enable_weight_tying=hf.tie_word_embeddings,
        tok_embeddings=Embedding.Config(**words, param_init=_FROM_FILE),
        norm=_norm(hf, hf.hidden_size),
        lm_head=Float32Head.Config(in_features=hf.hidden_size, out_features=hf.vocab_size, param_init=_FROM_FILE),
        layers=layers,
    )
