"""Gradients of a pass over some rows, added up in memory that is one block from before the first forward.

Made one by one in the backward, they would come to lie between activations, and what is free between them fits the
next row's badly.

Dimensions: T tokens, D hidden size, V words of the vocabulary, U different ones of them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_rl.compat.torch.sharding import local_memory

Copies = dict[nn.Parameter, nn.Parameter]
"""What is computed with, by the parameter that is trained."""


class GradientSum:
    """Owner of gradients until each trained parameter has its own, of the parameter's dtype."""

    def __init__(self, copies: Copies):
        learning = [trained for trained, copy in copies.items() if copy.requires_grad]
        missing = [trained for trained in learning if trained.grad is None]
        sizes = [local(trained).numel() for trained in missing]
        block = local(missing[0]).new_empty(sum(sizes)) if missing else torch.empty(0)
        parts = zip(missing, block.split(sizes), strict=True)
        self._memory = {trained: part.view(local(trained).shape) for trained, part in parts}
        self._trained = {copy: trained for trained, copy in copies.items()}
        self._table: nn.Parameter | None = None
        """Parameter that is looked up in."""
        self._lookups: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Words [U] of a row, and their gradients [U, D], which are not added up yet."""
        for trained in learning:
            copies[trained].register_post_accumulate_grad_hook(partial(self._take, trained))

    def look_up(self, tokens: torch.Tensor, weight_VD: nn.Parameter) -> torch.Tensor:
        """Rows of the copy ``weight_VD``, whose gradient is not made as a table that is zero nearly everywhere."""
        self.finish()  # of the row before
        self._table = self._trained[weight_VD]
        return _Lookup.apply(tokens, weight_VD, self._lookups)

    def _take(self, trained: nn.Parameter, copy: nn.Parameter) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is None:  # of a table that is only looked up in
            return
        if trained is self._table:  # the head's, too: FSDP would round the sum of both
            self._add_lookups(gradient)
        if trained.grad is None:
            trained.grad = _as_trained(self._memory[trained].copy_(gradient), trained)
        else:
            local(trained.grad).add_(gradient)

    def finish(self) -> None:
        """Add up what was looked up in a table that the head does not share."""
        if self._table is None or not self._lookups:
            return
        if self._table.grad is None:
            self._table.grad = _as_trained(self._memory[self._table].zero_(), self._table)
        self._add_lookups(local(self._table.grad))

    def close(self) -> None:
        """Let go of copies, whose hooks lead back here, and of memory that no gradient was put into."""
        for held in (self._trained, self._memory, self._lookups):
            held.clear()

    def _add_lookups(self, into_VD: torch.Tensor) -> None:
        for words_U, gradient_UD in self._lookups:
            into_VD[words_U] += gradient_UD
        self._lookups.clear()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weight_VD: torch.Tensor, lookups: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.lookups = lookups
        return F.embedding(tokens, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        [tokens] = ctx.saved_tensors
        words_U, places = tokens.unique(return_inverse=True)
        gradient_UD = torch.ops.aten.embedding_dense_backward(grad_TD, places, len(words_U), -1, False)
        ctx.lookups.append((words_U, gradient_UD))
        return None, None, None


def _as_trained(gradient: torch.Tensor, trained: nn.Parameter) -> torch.Tensor:
    if not isinstance(trained, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        trained.device_mesh,
        trained.placements,
        run_check=False,
        shape=trained.shape,
        stride=trained.stride(),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor."""
    return local_memory(tensor) if isinstance(tensor, DTensor) else tensor
