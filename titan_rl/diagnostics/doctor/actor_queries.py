"""What actors are asked, inside their processes (``examine`` of actors/). Generators import this file, so it must not
import the controller's side of the mesh (as diagnostics/bench/weights/weight_actors.py has it)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import xxhash
from safetensors import safe_open

from titan_rl.mesh.channel.plan import Box

if TYPE_CHECKING:  # each brings along what the others do without
    from transformers import PreTrainedTokenizerBase

    from titan_rl.data.types import Row
    from titan_rl.generator.engine import GenerationEngine
    from titan_rl.trainer.step.learner import Learner

_PROBES = ("12+3=", "What is 7 times 8?", "  two  spaces\n", "naïve — 東京", "<|im_end|>", "<eos>")
"""Texts that tokenizers read differently."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, as a generator has it."""

    name: str
    box: Box
    dtype: str
    checksum: str


def _checksum(values: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


# of an engine


def fetched_pieces(engine: "GenerationEngine") -> list[Piece]:
    """Fetched pieces of the version in use on this rank."""
    reader = engine.reader
    assert reader is not None, "nothing was fetched yet"
    return [
        Piece(name, box, str(values.dtype).removeprefix("torch."), _checksum(values))
        for name, _, box, values in reader.pieces()
    ]


def misquantized(engine: "GenerationEngine") -> list[str]:
    """Layers of this rank that multiply in FP8 by something else than the version's weights."""
    return engine.misquantized()


def end_tokens(engine: "GenerationEngine") -> list[int]:
    """Tokens that end an answer of this rank's."""
    return sorted(engine.stop_token_ids)


# of a learner


@torch.no_grad()
def unlike_pieces(learner: "Learner", pieces: Sequence[Piece]) -> tuple[int, list[str]]:
    """Number of these boxes in this rank's weights, and the names of those with other values."""
    count, unlike = 0, []
    shards: dict[str, list] = {}
    for shard in learner.shards():
        shards.setdefault(shard.name, []).append(shard)
    for piece in pieces:
        for shard in shards.get(piece.name, ()):
            outer = Box(shard.start, tuple(shard.tensor.shape))
            if outer.intersect(piece.box) != piece.box:
                continue
            part = piece.box.within(outer)
            values = shard.tensor[part] if shard.low_rank is None else shard.merged(part)
            count += 1
            if _checksum(values.to(getattr(torch, piece.dtype))) != piece.checksum:
                unlike.append(piece.name)
    return count, unlike


@torch.no_grad()
def unlike_files(learner: "Learner", files: Mapping[str, Path]) -> tuple[int, list[str]]:
    """Number of boxes compared with ``files``, by tensor names, and the names of different or missing ones."""
    count, unlike, opened = 0, [], {}
    for shard in learner.shards():
        count += 1
        if shard.name not in files:
            unlike.append(shard.name)
            continue
        file = opened.setdefault(files[shard.name], safe_open(files[shard.name], "pt"))
        place = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.tensor.shape, strict=True))
        values = file.get_slice(shard.name)[place] if shard.tensor.dim() else file.get_tensor(shard.name)
        if not torch.equal(values.to(shard.tensor.dtype), shard.tensor.detach().cpu()):
            unlike.append(shard.name)
    return count, unlike


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor  # generators do without

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def policy_digest(learner: "Learner") -> str:
    return learner.policy.digest()


def learned_digests(learner: "Learner") -> str:
    """Digests of all trainable weights, adapters included."""
    hasher = xxhash.xxh3_128()
    for _, parameter in learner.weights():
        hasher.update(_local(parameter).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Of all ranks together, which call this at the same time."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_sizes(learner: "Learner") -> dict[str, float]:
    """The sum of the gradient's absolute values, of each parameter of this rank's stages, as clipping left it. All
    ranks call this together."""
    return {
        name: float(_full_tensor(parameter.grad.abs().sum()))
        for part in learner.model_parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


_KEPT: list[Callable[[], None]] = []
"""What takes this process's model back to where it was kept."""


@torch.no_grad()
def keep(learner: "Learner") -> None:
    """Put weights and schedules aside. Moments are zero as long as every update is taken back."""
    from titan_rl.trainer.model.optimizer import load_schedule  # generators do without

    assert not _KEPT, "what was kept before was not put back"
    saved = [(p, _local(p).detach().clone()) for _, p in learner.weights() if p.requires_grad]
    schedules = {name: scheduler.state_dict() for name, scheduler in learner.schedulers().items()}

    def back() -> None:
        learner.before_update()
        for parameter, values in saved:
            _local(parameter).copy_(values)
        for optimizer in learner.optimizers():
            for moment in (m for state in optimizer.state.values() for m in state.values()):
                if isinstance(moment, torch.Tensor):
                    _local(moment).zero_()
        for name, scheduler in learner.schedulers().items():
            load_schedule(scheduler, schedules[name])
        learner.optimizer.zero_grad()
        learner.weights_changed()

    _KEPT.append(back)


@torch.no_grad()
def put_back(learner: "Learner") -> None:
    """The model, its optimizer and its schedule as they were when they were kept."""
    _KEPT.pop()()


def unweighed_nan(learner: "Learner", row: "Row") -> list[str]:
    """Which of a row's loss and gradient a token makes NaN whose log-probability is, and which weighs nothing."""
    from titan_rl.trainer.objective.objective import loss_inputs, no_statistics
    from titan_rl.trainer.objective.preparation import completed

    weight_S, advantage_S = row.weight_S.copy(), row.advantage_S.copy()
    weight_S[0] = advantage_S[0] = 0.0
    [row] = completed([replace(row, weight_S=weight_S, advantage_S=advantage_S)], learner.zero_columns)
    columns = learner.policy.columns(row)
    statistics = no_statistics(learner.algorithm, len(weight_S), learner.device) - 1.0
    statistics[0, 0] = torch.nan
    statistics.requires_grad_()
    loss, _ = learner.algorithm.loss(loss_inputs(learner.algorithm, statistics, columns, columns["offsets_N"]))
    [gradient] = torch.autograd.grad(loss, statistics, allow_unused=True) if loss.requires_grad else [None]
    nan_parts = ["loss"] * (not torch.isfinite(loss).item())
    return nan_parts + ["gradient"] * (gradient is not None and not torch.isfinite(gradient).all().item())


def take_rate(learner: "Learner", rate: float) -> None:
    """The learning rate of the next update."""
    for optimizer in learner.optimizer.optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def forget_gradients(learner: "Learner") -> None:
    learner.optimizer.zero_grad()


def trainable_roles(learner: "Learner") -> list[str]:
    """Roles that never learn, and of which a parameter takes a gradient or is in the optimizer."""
    optimized = {id(p) for one in learner.optimizer.optimizers for group in one.param_groups for p in group["params"]}
    names = []
    for name, role in learner.roles.items():
        if role.model is learner.policy:  # with its adapters off
            continue
        parameters = [p for part in role.model.parts for p in part.parameters()]
        if any(p.requires_grad or id(p) in optimized for p in parameters):
            names.append(name)
    return names


def other_temperatures(learner: "Learner") -> str:
    """Roles whose log-probabilities are of another temperature than the policy's; empty if there are none."""
    own = learner.policy.temperature
    others = [f"{name} {r.model.temperature:g}" for name, r in learner.roles.items() if r.model.temperature != own]
    return f"{', '.join(others)}; the policy {own:g}" if others else ""


def device_bytes(_: object) -> tuple[int, int]:
    """Peak GPU bytes of this process, and the GPU's total; zeros without one."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


# of a verifier, and of a tokenizer here


def tokenizer_facts(tokenizer: "PreTrainedTokenizerBase") -> dict[str, object]:
    """Facts of a tokenizer that all processes must share."""
    facts: dict[str, object] = {f"special {name}": value for name, value in tokenizer.special_tokens_map.items()}
    facts |= {"end of sequence": tokenizer.eos_token_id, "size": len(tokenizer)}
    facts["chat template"] = getattr(tokenizer, "chat_template", None)
    for text in _PROBES:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        facts[f"tokens of {text!r}"] = tokens
        facts[f"text of {text!r}"] = tokenizer.decode(tokens)
    return facts


class _Tokenizing(Protocol):
    """A verifier, as far as it is asked here."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...


def verifier_facts(verifier: _Tokenizing) -> dict[str, object]:
    return tokenizer_facts(verifier.tokenizer)
