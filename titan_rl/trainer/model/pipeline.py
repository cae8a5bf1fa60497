"""A rank's pipeline stages, driven by PyTorch's schedules.

Rows differ from step to step in number and length, so each shape gets a schedule of its own. The shapes that stages
exchange are given, so that no trial run is needed. Gradients are sums (token weights hold all normalization), so they
are not scaled. The loss gets each microbatch's output with the microbatch's number.

Dimensions: B = 1 row a microbatch, L tokens of a row (of this rank's part of it under sequence parallel), D features.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from titan_rl.compat.torch.pipelining import step_microbatches


class Pipeline:
    """Pipeline stages of a rank, run by PyTorch's schedules."""

    def __init__(
        self,
        modules: dict[int, torch.nn.Module],
        num_stages: int,
        *,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        hidden_dtype: torch.dtype,
    ):
        """``modules``: this rank's stages by their number in the whole pipeline."""
        self.modules, self.num_stages = modules, num_stages
        self.schedule_class, self.group, self.device = get_schedule_class(schedule), group, device
        self.hidden_dtype = hidden_dtype
        self._built: tuple | None = None

    @property
    def has_first(self) -> bool:
        return 0 in self.modules

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.modules

    def _stage(self, index: int, tokens_BL: torch.Tensor, hidden_shape: tuple[int, int, int]) -> PipelineStage:
        hidden_BLD = torch.empty(hidden_shape, dtype=self.hidden_dtype, device="meta", requires_grad=True)
        return PipelineStage(
            self.modules[index],
            index,
            self.num_stages,
            self.device,
            input_args=torch.empty_like(tokens_BL, device="meta") if index == 0 else hidden_BLD,
            output_args=hidden_BLD,  # the last stage's real output is sent nowhere
            group=self.group,
        )

    def _build(self, tokens_BL: torch.Tensor, hidden_shape: tuple[int, int, int], num_microbatches: int):
        stages = [self._stage(index, tokens_BL, hidden_shape) for index in sorted(self.modules)]
        several = issubclass(self.schedule_class, PipelineScheduleMulti)
        schedule = self.schedule_class(
            stages if several else stages[0], num_microbatches, loss_fn=self._compute_loss, scale_grads=False
        )
        for stage in stages:
            stage.has_backward = True
        return stages, schedule

    def _compute_loss(self, output: torch.Tensor, microbatch: torch.Tensor) -> torch.Tensor:
        return self._loss(output, int(microbatch))

    @torch.no_grad()
    def forward(
        self, tokens_BL: torch.Tensor, keywords: dict, hidden_shape: tuple[int, int, int]
    ) -> torch.Tensor | None:
        """Forward pass of one row through all stages, without a gradient.

        Returns the last stage's output, None on ranks without it."""
        degree, rank, output = self.group.size(), self.group.rank(), None
        for index in sorted(self.modules):  # stage s is on rank s modulo their number
            inputs = tokens_BL if index == 0 else output
            if index and degree > 1:
                inputs = torch.empty(hidden_shape, dtype=self.hidden_dtype, device=self.device)
                dist.recv(inputs, group=self.group, group_src=(rank - 1) % degree)
            output = self.modules[index](inputs, **keywords)
            if index < self.num_stages - 1 and degree > 1:
                dist.send(output.contiguous(), group=self.group, group_dst=(rank + 1) % degree)
        return output if self.has_last else None

    def forward_backward(
        self,
        tokens: list[torch.Tensor],
        keywords: list[dict],
        hidden_shape: tuple[int, int, int],
        loss: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        """Accumulate the gradients of microbatches, whose tokens [B, L] must have one shape."""
        key = (len(tokens), tokens[0].shape)
        if self._built is None or self._built[0] != key:
            self._built = key, *self._build(tokens[0], hidden_shape, len(tokens))
        _, stages, schedule = self._built
        self._loss = loss
        for stage in stages:
            stage.clear_runtime_states()
        # step() would cut one batch into microbatches, but an attention plan cannot be cut
        step_microbatches(
            schedule,
            [(t,) for t in tokens] if self.has_first else None,
            keywords,
            [torch.tensor(index) for index in range(len(tokens))] if self.has_last else None,
        )
