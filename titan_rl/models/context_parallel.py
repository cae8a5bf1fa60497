"""Context parallelism: the tokens of a row spread over ranks, and what these exchange.

Each rank computes a part of a row's positions. Attention sees the whole row, for a part of the heads: so whatever a row
shares, and whichever kernel there is, stays as it is, and the work is the same on all ranks (DeepSpeed-Ulysses, arXiv
2309.14509). The head has a part of the trained tokens, whose hidden states come from the ranks that have their
positions; what it says of them is gathered, and the loss of the whole row is computed on each rank. Each adds the
gradient of its own part, and FSDP adds up all parts.

Dimensions: T tokens of a row, L of one rank, N heads, n of one rank, H head size, S trained tokens, X of those sent,
D features, K statistics of a token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan_rl.compat.torch.sharding import all_to_all_single_autograd


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share their rows, each with a part of the tokens."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def tokens(self, num_tokens: int) -> slice:
        """Positions of this rank; the number of tokens must be a multiple of the ranks'."""
        length = num_tokens // self.size
        assert length * self.size == num_tokens, "rows are padded to a multiple of the ranks"
        return slice(self.rank * length, (self.rank + 1) * length)

    def targets(self, num_targets: int) -> slice:
        """Trained tokens whose statistics this rank computes: the last ranks may have fewer, or none."""
        most = -(-num_targets // self.size)
        return slice(min(self.rank * most, num_targets), min((self.rank + 1) * most, num_targets))

    def by_heads(self, x_LNH: torch.Tensor, num_queries: int) -> torch.Tensor:
        """All tokens, [T, n, H], of this rank's heads. ``num_queries``: heads of queries, among which those of keys are
        repeated where they cannot be divided."""
        num_heads = x_LNH.shape[1]
        if num_heads % self.size:
            x_LNH = x_LNH.repeat_interleave(num_queries // num_heads, dim=1)
        length, num_heads, size = x_LNH.shape
        parts = x_LNH.view(length, self.size, num_heads // self.size, size).transpose(0, 1)
        return self._exchanged(parts.flatten(0, 1))

    def by_tokens(self, x_TnH: torch.Tensor) -> torch.Tensor:
        """All heads, [L, N, H], of this rank's tokens."""
        parts = self._exchanged(x_TnH).view(self.size, -1, *x_TnH.shape[1:])
        return parts.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Part r goes to rank r, and what comes from rank r is part r."""
        counts = [len(x) // self.size] * self.size
        return all_to_all_single_autograd(x.contiguous(), counts, counts, self.group)

    def heads(self, num_heads: int) -> slice:
        """Heads of this rank."""
        count = num_heads // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def route(self, source_S: np.ndarray, num_tokens: int, device: torch.device) -> "HeadRoute":
        """Route of hidden states. ``source_S``: position in the row that predicts each trained token."""
        here, mine = self.tokens(num_tokens), self.targets(len(source_S))
        owner_S = source_S // (num_tokens // self.size)
        receiver_S = np.arange(len(source_S)) // max(-(-len(source_S) // self.size), 1)
        is_sent_S = owner_S == self.rank
        order_S = np.argsort(np.argsort(owner_S[mine], kind="stable"))
        return HeadRoute(
            self.group,
            torch.from_numpy(source_S[is_sent_S] - here.start).to(device),
            np.bincount(receiver_S[is_sent_S], minlength=self.size).tolist(),
            np.bincount(owner_S[mine], minlength=self.size).tolist(),
            torch.from_numpy(order_S).to(device),
        )

    def gathered(self, statistics: torch.Tensor, num_targets: int) -> torch.Tensor:
        """Statistics of all trained tokens, [K, S] or [S], from each rank's part of them.

        The gradient is that of this rank's part: all ranks compute the same loss of the whole."""
        return _Gathered.apply(statistics, self, num_targets)


@dataclass(frozen=True)
class HeadRoute:
    """Hidden states from the ranks that have their positions to those that have the tokens which they predict."""

    group: dist.ProcessGroup
    sent_X: torch.Tensor
    """int64: positions of this rank, in the order of the trained tokens."""
    num_sent: list[int]
    """To each rank."""
    num_received: list[int]
    order_S: torch.Tensor
    """int64: place of each of this rank's trained tokens among what it receives."""

    def exchanged(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, D] for this rank's trained tokens."""
        sent_XD = hidden_LD.index_select(0, self.sent_X)
        received = all_to_all_single_autograd(sent_XD, self.num_received, self.num_sent, self.group)
        return received.index_select(0, self.order_S)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_KS: torch.Tensor, context: ContextParallel, num_targets: int) -> torch.Tensor:
        ctx.mine = context.targets(num_targets)
        most = -(-num_targets // context.size)
        padded_KS = F.pad(part_KS.detach(), (0, most - part_KS.shape[-1])).contiguous()
        parts = [torch.empty_like(padded_KS) for _ in range(context.size)]
        dist.all_gather(parts, padded_KS, group=context.group)
        return torch.cat(parts, dim=-1)[..., :num_targets]

    @staticmethod
    def backward(ctx: Any, grad_KS: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        return grad_KS[..., ctx.mine], None, None
