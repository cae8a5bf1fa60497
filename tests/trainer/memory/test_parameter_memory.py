"""What a rank trains goes on as it would have, wherever its memory was moved to, with padding that FSDP2 adds."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from titan_rl.trainer.memory.offloading import moments_of, move, onload
from titan_rl.trainer.memory.parameter_memory import gradients_of, trained_tensors
from titan_rl.trainer.model.optimizer import begin_moments

NUM_RANKS, STEPS = 2, 3


def move_all(learner) -> None:
    for held in trained_tensors(learner):
        with torch.no_grad():
            held.move(torch.empty_like(held.memory))


def take_a_turn(learner) -> None:
    """As a rank on a GPU does: its moments and gradients lie on the host, and come back."""
    moments, gradients = moments_of(learner), gradients_of(learner)
    assert len(moments) == 2 * len(gradients) == 2 * len({id(held.parameter) for held in moments}) > 0
    for held in moments + gradients:
        before = held.memory.data_ptr()
        move(held, torch.device("cpu"))
        assert held.memory.data_ptr() != before
    onload(learner, moments + gradients)


def trained(moves_before: int | None, moves=move_all) -> list[torch.Tensor]:
    """All weights after some steps on rows of which 5 over 2 ranks leave one padded; moved before a step, or never."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    begin_moments(optimizer)
    learner = SimpleNamespace(
        device=torch.device("cpu"),
        optimizers=lambda: [optimizer],
        learning=lambda: {"policy": SimpleNamespace(model_parts=[model])},
    )
    for step in range(STEPS):
        if step == moves_before and moves is move_all:
            moves(learner)
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        if step == moves_before and moves is take_a_turn:
            moves(learner)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def _rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS)
    torch.set_num_threads(1)
    never = trained(None)
    for step in range(STEPS):
        for moves in (move_all, take_a_turn):
            assert all(map(torch.equal, trained(step, moves), never)), f"{moves.__name__} before step {step}"
    dist.destroy_process_group()


def test_moved_weights_are_trained_as_others_are(tmp_path):
    run_ranks(_rank, NUM_RANKS, tmp_path)
