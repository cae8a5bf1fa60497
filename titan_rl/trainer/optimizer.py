"""Optimizer and schedule of a rank's part of the model, as TorchTitan builds them."""

import torch


@torch.no_grad()
def begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zero moments and count, as AdamW would make them at its first step.

    Left to that step, a checkpoint before it would make them, by an empty step of its own, which counts: the first
    real update then came out 0.735 times as large (torch.distributed.checkpoint's ``_init_optim_state``).
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            count = torch.zeros((), device=parameter.device if on_device else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": count, **moments}
