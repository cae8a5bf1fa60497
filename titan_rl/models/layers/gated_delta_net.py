"""Linear attention by a gated delta rule (arXiv 2412.06464), over packed rows whose segments share prefixes.

Where attention has keys and values, this has a state: a segment begins with that in which its prefix ended, or
with zeros. So segments of the prefix tree are scanned level by level, those of similar length together and padded; no
document sees another's state. A short convolution in front of it reads the last tokens of the same document.

Dimensions: T tokens of a row, D segments of a scan, L tokens of its longest one, M chunks, C tokens of a chunk, S kept
states, N heads, K features of keys, V of values, W of the convolution's kernel, F features, B rows, D model features.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_rl.data.types import Segment
from titan_rl.models.layers.attention import BlockPlan  # before any torchtitan module

# isort: split
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from titan_rl.models.layers.memory_saving import LeanRMSNorm

CHUNK = 64
"""Tokens whose updates are solved for at once."""


@dataclass(frozen=True)
class Scan:
    """Segments of one level that are scanned together."""

    token_DL: torch.Tensor
    """Places in the row; 0 in the padding."""
    valid_DL: torch.Tensor
    state_D: torch.Tensor | None
    """Numbers of the kept states that they begin with; None: zeros."""
    kept_S: torch.Tensor
    """Segments whose last states others begin with."""


@dataclass(frozen=True)
class RecurrencePlan:
    """Plan of a row's recurrences, computed once for all layers."""

    scans: list[Scan]
    output_T: torch.Tensor
    """The place of each token of the row in the scans' concatenated outputs."""
    previous_T: torch.Tensor
    """The place of the token before each one in its document, counted from 1; 0: there is none."""


def recurrence_plan(plan: BlockPlan) -> RecurrencePlan:
    """Recurrence plan of an attention plan's row."""
    return plan.once(("recurrence",), lambda: plan_recurrence(plan.segments, plan.output_T.device))


def plan_recurrence(segments: Sequence[Segment], device: torch.device) -> RecurrencePlan:
    """Recurrence plan of a row, which ``segments`` cover."""
    groups: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        groups[len(segment.prefix), (max(segment.length, CHUNK) - 1).bit_length()].append(segment)
    followed = {segment.prefix[-1][0] for segment in segments if segment.prefix}
    states: dict[int, int] = {}
    num_tokens = sum(segment.length for segment in segments)
    scans, output_T, offset = [], torch.full((num_tokens,), -1), 0
    for key in sorted(groups):
        scan = _build_scan(groups[key], followed, states)
        places_DL = torch.arange(offset, offset + scan.token_DL.numel()).view_as(scan.token_DL)
        output_T[scan.token_DL[scan.valid_DL]] = places_DL[scan.valid_DL]
        offset += scan.token_DL.numel()
        scans.append(_on(scan, device))
    assert int(output_T.min()) >= 0, "a token of the row belongs to no segment"
    return RecurrencePlan(scans, output_T.to(device), _previous(segments, num_tokens).to(device))


def _build_scan(segments: list[Segment], followed: set[int], states: dict[int, int]) -> Scan:
    """``followed``: starts of segments that are a prefix; ``states``: numbers of the kept states by such a start, to
    which those of this scan are added."""
    start_D1, length_D1 = torch.tensor([[segment.start, segment.length] for segment in segments]).T[:, :, None]
    step_L = torch.arange(int(length_D1.max()))
    valid_DL = step_L < length_D1
    begins = [states[segment.prefix[-1][0]] for segment in segments if segment.prefix]
    kept = [number for number, segment in enumerate(segments) if segment.start in followed]
    for number in kept:
        states[segments[number].start] = len(states)
    state_D = torch.tensor(begins) if begins else None
    return Scan(torch.where(valid_DL, start_D1 + step_L, 0), valid_DL, state_D, torch.tensor(kept, dtype=torch.long))


def _on(scan: Scan, device: torch.device) -> Scan:
    state_D = None if scan.state_D is None else scan.state_D.to(device)
    return Scan(scan.token_DL.to(device), scan.valid_DL.to(device), state_D, scan.kept_S.to(device))


def _previous(segments: Sequence[Segment], num_tokens: int) -> torch.Tensor:
    previous_T = torch.arange(num_tokens)
    for segment in segments:
        previous_T[segment.start] = sum(segment.prefix[-1]) if segment.prefix else 0
    return previous_T


def causal_convolution(x_TF: torch.Tensor, weight_F1W: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
    """SiLU of a depthwise convolution over a token and those before it: [T, F], computed in fp32."""
    kernel_WF = weight_F1W[:, 0].T.flip(0).float()
    padded_TF = torch.cat([x_TF.new_zeros(1, x_TF.shape[1]), x_TF])
    before_T, previous_of = plan.previous_T, F.pad(plan.previous_T, (1, 0))
    out_TF = x_TF * kernel_WF[0]
    for kernel_F in kernel_WF[1:]:
        out_TF = out_TF + padded_TF.index_select(0, before_T) * kernel_F
        before_T = previous_of.index_select(0, before_T)
    return F.silu(out_TF).to(x_TF.dtype)


def gated_delta_rule(
    q_TNK: torch.Tensor,
    k_TNK: torch.Tensor,
    v_TNV: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    plan: RecurrencePlan,
) -> torch.Tensor:
    """Outputs of a row's tokens, [T, N, V] in ``v_TNV``'s dtype, computed in fp32.

    ``decay_TN``: logarithm of a token's decay of the state; ``beta_TN``: write strength. Queries and keys are
    normalized to unit length, and queries scaled by one over the root of K.
    """
    q_TNK, k_TNK = _unit(q_TNK.float()) * q_TNK.shape[-1] ** -0.5, _unit(k_TNK.float())
    columns = (q_TNK, k_TNK, v_TNV.float(), decay_TN.float(), beta_TN.float())
    outputs, kept_SNKV = [], v_TNV.new_zeros(0, v_TNV.shape[1], k_TNK.shape[2], v_TNV.shape[2], dtype=torch.float32)
    for scan in plan.scans:
        shape = (len(scan.token_DL), *kept_SNKV.shape[1:])
        state_DNKV = kept_SNKV.new_zeros(shape) if scan.state_D is None else kept_SNKV.index_select(0, scan.state_D)
        q_DLNK, k_DLNK, v_DLNV, decay_DLN, beta_DLN = (_padded(x, scan) for x in columns)
        out_DLNV, state_DNKV = scan_chunks(q_DLNK, k_DLNK, v_DLNV, decay_DLN, beta_DLN, state_DNKV)
        kept_SNKV = torch.cat([kept_SNKV, state_DNKV.index_select(0, scan.kept_S)])
        outputs.append(out_DLNV.flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.output_T).to(v_TNV.dtype)


def _unit(x_TNK: torch.Tensor) -> torch.Tensor:
    return x_TNK * torch.rsqrt(x_TNK.square().sum(-1, keepdim=True) + 1e-6)


def _padded(x_T: torch.Tensor, scan: Scan) -> torch.Tensor:
    """Of each segment, with zeros behind it, which neither read nor change a state."""
    x_DL = x_T.index_select(0, scan.token_DL.flatten()).unflatten(0, scan.token_DL.shape)
    return x_DL * scan.valid_DL.view(*scan.valid_DL.shape, *[1] * (x_T.ndim - 1))


def scan_chunks(
    q_DLNK: torch.Tensor,
    k_DLNK: torch.Tensor,
    v_DLNV: torch.Tensor,
    decay_DLN: torch.Tensor,
    beta_DLN: torch.Tensor,
    state_DNKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [D, L, N, V], and the states behind the last token.

    A token reads ``S q`` after ``S <- exp(decay) S (1 - beta k k^T) + beta v k^T`` (arXiv 2412.06464, equation 10).
    Within a chunk, the values that are written, ``beta (v - S k)``, depend on each other by a triangular system. Its
    solutions U, of values, and W, of keys (the WY form, there section 3.3), are computed for all chunks at once; states
    then go from chunk to chunk.
    """
    length = q_DLNK.shape[1]
    size = min(CHUNK, length)
    q, k, v = (_chunks(x, size) for x in (q_DLNK, k_DLNK, v_DLNV))  # D N M C features
    decay, beta = (_chunks(x[..., None], size) for x in (decay_DLN, beta_DLN))
    log_decay = decay.cumsum(-2)
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    pair_decay = (log_decay - log_decay.mT).masked_fill(future, -torch.inf).exp()
    cumulative_decay = log_decay.exp()
    right_side = beta * torch.cat([v, cumulative_decay * k], dim=-1)
    system = beta * (k @ k.mT) * pair_decay
    solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    u, w = solution.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q = (q @ k.mT) * pair_decay, cumulative_decay * q
    k = (log_decay[..., -1:, :] - log_decay).exp() * k
    outputs = []
    for m in range(q.shape[2]):
        written = u[:, :, m] - w[:, :, m] @ state_DNKV
        outputs.append(q[:, :, m] @ state_DNKV + scores[:, :, m] @ written)
        state_DNKV = cumulative_decay[:, :, m, -1:] * state_DNKV + k[:, :, m].mT @ written
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state_DNKV


def _chunks(x_DLNF: torch.Tensor, size: int) -> torch.Tensor:
    """[D, N, M, C, F], with zeros at the end."""
    missing = -x_DLNF.shape[1] % size
    return F.pad(x_DLNF.transpose(1, 2), (0, 0, 0, missing)).unflatten(2, (-1, size))


class GatedDeltaNet(Module):
    """Linear attention with a gated delta rule, behind a short convolution, and a gated norm of its outputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_heads: int
        """Number of value heads, a multiple of the key heads'."""
        n_key_heads: int
        key_size: int
        value_size: int
        kernel_size: int
        projections: Module.Config
        norm: LeanRMSNorm.Config
        out_proj: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.config, self.keys = config, config.n_key_heads * config.key_size
        self.projections, self.norm = config.projections.build(), config.norm.build()
        self.out_proj = config.out_proj.build()
        mixed = 2 * self.keys + config.n_heads * config.value_size
        self.conv_weight = nn.Parameter(torch.empty(mixed, 1, config.kernel_size))
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(config.n_heads)) for _ in range(2))

    def forward(self, x_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(attention_masks, BlockPlan), "linear attention needs the segments of a row"
        plan = recurrence_plan(attention_masks)
        mixed_TF, gate_TF, beta_TN, decay_TN = self.projections(x_BLD.flatten(0, 1))
        mixed_TF = causal_convolution(mixed_TF, self.conv_weight, plan)
        q_TF, k_TF, v_TF = mixed_TF.split([self.keys, self.keys, mixed_TF.shape[1] - 2 * self.keys], dim=-1)
        q_TNK, k_TNK = (self._of_value_heads(x_TF) for x_TF in (q_TF, k_TF))
        v_TNV, gate_TNV = (x_TF.unflatten(-1, (-1, self.config.value_size)) for x_TF in (v_TF, gate_TF))
        decay_TN = -self.A_log.float().exp() * F.softplus(decay_TN.float() + self.dt_bias.float())
        out_TNV = gated_delta_rule(q_TNK, k_TNK, v_TNV, decay_TN, beta_TN.sigmoid(), plan)
        gated_TNV = (self.norm(out_TNV) * F.silu(gate_TNV.float())).to(x_BLD.dtype)
        return self.out_proj(gated_TNV.flatten(1)).view(x_BLD.shape)

    def _of_value_heads(self, x_TF: torch.Tensor) -> torch.Tensor:
        x_TNK = x_TF.unflatten(-1, (-1, self.config.key_size))
        return x_TNK.repeat_interleave(self.config.n_heads // self.config.n_key_heads, dim=1)


class Projections(Module):
    """Projections to queries, keys and values, the output gate, the write strength, and the decay."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_b: Linear.Config
        in_proj_a: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.in_proj_qkv, self.in_proj_z = config.in_proj_qkv.build(), config.in_proj_z.build()
        self.in_proj_b, self.in_proj_a = config.in_proj_b.build(), config.in_proj_a.build()

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.in_proj_qkv(x_TD), self.in_proj_z(x_TD), self.in_proj_b(x_TD), self.in_proj_a(x_TD)


class FusedProjections(Module):
    """Two projections whose outputs stand together by head of keys, as in Qwen3-Next."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_key_heads: int
        sizes: tuple[int, int]
        """Features of keys and of values for each head of keys."""
        in_proj_qkvz: Linear.Config
        in_proj_ba: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.in_proj_qkvz, self.in_proj_ba = config.in_proj_qkvz.build(), config.in_proj_ba.build()

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = self.config.sizes
        by_head = (self.config.n_key_heads, -1)
        parts = self.in_proj_qkvz(x_TD).unflatten(-1, by_head).split([keys, keys, values, values], dim=-1)
        q_TF, k_TF, v_TF, gate_TF = (part.flatten(1) for part in parts)
        beta_TN, decay_TN = (part.flatten(1) for part in self.in_proj_ba(x_TD).unflatten(-1, by_head).chunk(2, dim=-1))
        return torch.cat([q_TF, k_TF, v_TF], dim=-1), gate_TF, beta_TN, decay_TN


def has_states(model_config: Decoder.Config) -> bool:
    """Whether a model has such layers."""
    return any(isinstance(getattr(layer, "attention", None), GatedDeltaNet.Config) for layer in model_config.layers)
