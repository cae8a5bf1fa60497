"""A Hugging Face config.json becomes a TorchTitan model: Llama, Qwen3 and Qwen3-MoE.

Parameters keep Hugging Face's shapes and row order (separate q, k and v; half-rotated rope), so a tensor of the
file is a parameter of the model under another name.

Dimensions: B rows, L tokens of a row, D features, S chosen positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoConfig, PreTrainedConfig

from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.attention import AttentionPlan, PackedAttention
from titan_rl.models.lean import LeanFeedForward, LeanRMSNorm
from titan_rl.models.moe import moe_config
from titan_rl.models.rope import rope_config

# weights always come from a file, so nothing is initialized
_FROM_FILE = {"weight": skip_param_init}


class Float32Head(Linear):
    """An output head that projects in fp32 whatever the model computes in, as the generator's does.

    Asked for targets, it gives their log-probabilities and the entropies, [2, S] in fp32, and goes over the logits in
    tiles. It is done here because FSDP has the weight gathered in a module's own forward alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # TorchTitan's sharding declaration names the first argument, and wants a value for every other positional one
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
        if isinstance(weight, DTensor):  # over tensor-parallel ranks, cut as torch.chunk cuts
            mesh = weight.device_mesh
            spread = {"group": mesh.get_group(), "first_word": mesh.get_local_rank() * -(-len(weight) // mesh.size())}
            # each rank's part of the hidden states' gradient is its words'
            input, weight = input.to_local(grad_placements=[Partial()]), weight.to_local()
        logprob_S, entropy_S = linear_logprob(
            *(input, weight, target_S),
            temperature=temperature,
            implementation=implementation,
            expected_grad=expected_grad,
            **spread,
        )
        # no loss asks for the entropy's gradient, which would cost the backward two passes
        return torch.stack((logprob_S, entropy_S.detach()))


class PackedDecoder:
    """A TorchTitan decoder, or a pipeline stage of one, that projects only the chosen positions onto the vocabulary.

    What goes in and comes out are plain tensors: under TP, a stage passes on its rank's part of the sequence, and the
    last one gives back the statistics of all chosen positions, or the logits of its rank's part of the vocabulary.
    """

    tp_mesh = None

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        self.tp_mesh = parallel_dims.get_optional_mesh("tp")
        if self.enable_weight_tying:
            # sharding replaced both; they must be one again before FSDP takes them
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(
        self, inputs, positions=None, attention_masks: AttentionPlan | None = None, logit_index_S=None, **statistics
    ):
        """Logits of the positions ``logit_index_S``: [S, vocabulary]; if None, of all: [B, L, vocabulary].

        ``inputs`` are tokens [B, L], or what the stage before gave. With ``statistics`` (the head's arguments, targets
        first): log-probabilities and entropies [2, S] instead.
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


class PackedLlama(PackedDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        sequence_parallel: bool = True


class PackedQwen3(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True


@dataclass(frozen=True)
class Family:
    """What differs between architectures."""

    model: type
    block: type
    parallelize: object
    qk_norm: bool
    experts: bool = False


FAMILIES = {
    "llama": Family(PackedLlama, Llama3TransformerBlock, parallelize_llama, qk_norm=False),
    "qwen3": Family(PackedQwen3, Qwen3TransformerBlock, parallelize_qwen3, qk_norm=True),
    "qwen3_moe": Family(PackedQwen3, Qwen3TransformerBlock, parallelize_qwen3, qk_norm=True, experts=True),
}


def read_hf_config(path: str | Path) -> PreTrainedConfig:
    """The config.json of an HF directory. Errors: ValueError for what the trainer cannot build."""
    hf = AutoConfig.from_pretrained(path)
    if hf.model_type not in FAMILIES:
        raise ValueError(f"model type {hf.model_type!r} is not supported: use one of {', '.join(sorted(FAMILIES))}")
    for key, wanted in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
        ("mlp_only_layers", []),
        ("decoder_sparse_step", 1),
    ):
        if getattr(hf, key, wanted) != wanted:
            raise ValueError(f"{key} = {getattr(hf, key)!r} in config.json is not supported, only {wanted!r}")
    return hf


def longest_rollout(seq_len: int, path: str | Path) -> int:
    """Tokens that a rollout may have, prompt included: what a packed row and the model's positions have room for."""
    return min(seq_len, read_hf_config(path).max_position_embeddings)


def model_config(hf: PreTrainedConfig):
    """TorchTitan's model config for an HF config."""
    family = FAMILIES[hf.model_type]
    dim, num_heads = hf.hidden_size, hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or dim // num_heads
    rope = rope_config(hf, head_dim)

    def norm(size: int) -> LeanRMSNorm.Config:
        return LeanRMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=_FROM_FILE)

    linears = make_ffn_config(
        dim=dim, hidden_dim=hf.intermediate_size, w1_param_init=_FROM_FILE, w2w3_param_init=_FROM_FILE
    )

    def layer():
        return family.block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=num_heads,
                n_kv_heads=hf.num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init=_FROM_FILE,
                wo_param_init=_FROM_FILE,
                inner_attention=PackedAttention.Config(),
                rope=rope,
                qk_norm=norm(head_dim) if family.qk_norm else None,
            ),
            moe=moe_config(hf) if family.experts else None,
            feed_forward=None
            if family.experts
            else LeanFeedForward.Config(w1=replace(linears.w1), w2=replace(linears.w2), w3=replace(linears.w3)),
        )

    return family.model.Config(
        dim=dim,
        vocab_size=hf.vocab_size,
        enable_weight_tying=hf.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=hf.vocab_size, embedding_dim=dim, param_init=_FROM_FILE),
        norm=norm(dim),
        lm_head=Float32Head.Config(in_features=dim, out_features=hf.vocab_size, param_init=_FROM_FILE),
        layers=[layer() for _ in range(hf.num_hidden_layers)],
    )


def model_spec(path: str | Path) -> ModelSpec:
    """The TorchTitan ModelSpec of an HF directory."""
    hf = read_hf_config(path)
    return ModelSpec(
        name=hf.model_type,
        flavor=Path(path).name,
        model=model_config(hf),
        parallelize_fn=FAMILIES[hf.model_type].parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        # the names are Qwen3's for all, and its adapter leaves the row order alone
        state_dict_adapter=Qwen3StateDictAdapter,
    )


def apply_parallelism(spec: ModelSpec, parallelism: ParallelismConfig, training: TrainingConfig) -> None:
    """Let TorchTitan fill in the sharding declarations of the model config."""
    spec.model.sequence_parallel = parallelism.enable_sequence_parallel
    spec.model.update_from_config(
        config=SimpleNamespace(
            parallelism=parallelism,
            training=training,
            compile=CompileConfig(),
            debug=SimpleNamespace(moe_force_load_balance=False),
        )
    )
    # statistics come out whole, and logits carry their placement by themselves
    head = spec.model.lm_head
    head.sharding_config = replace(head.sharding_config, out_src_shardings=None, out_dst_shardings=None)
