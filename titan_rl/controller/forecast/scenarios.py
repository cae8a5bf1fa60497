"""A checked configuration, on a machine, becomes a scenario: which numbers of it a forecast takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from titan_rl.config.schema import Config
from titan_rl.controller.device_memory import kv_bytes
from titan_rl.controller.device_plan import DevicePlan, Machine
from titan_rl.controller.forecast.generating import Engine
from titan_rl.controller.forecast.rates import Rates
from titan_rl.controller.forecast.step import Scenario
from titan_rl.controller.forecast.training import Layout
from titan_rl.controller.forecast.work import Batch, Work
from titan_rl.controller.memory_plan import Size, bytes_of, size_at
from titan_rl.controller.preflight import Checked
from titan_rl.mesh.launch.devices import GENERATOR, TRAINER
from titan_rl.models.rope import num_positions
from titan_rl.trainer.role_names import learned_role, needed_roles
from titan_rl.trainer.titan_config import TitanConfig

_RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 1.0}
"""Of a forward. Selective: all but products and attention; an estimate."""
PROMPT = 512.0


@dataclass(frozen=True)
class Lengths:
    """Of a batch, which no TOML says."""

    prompt: float = PROMPT
    """Tokens of a prompt."""
    answer: float | None = None
    """Of an answer, on average; None: half of what ``rollout.max_new_tokens`` allows."""


@dataclass(frozen=True)
class Models:
    """Of a run: what is read of its models once, however many scenarios are made of them."""

    hf: PreTrainedConfig
    size: Size
    beside: tuple[tuple[Work, bool], ...]
    """Other models that pass a batch in the trainer, and whether they learn."""

    @classmethod
    def of(cls, checked: Checked, hf: PreTrainedConfig) -> "Models":
        config, needs = checked.config, checked.algorithm.needs
        roles = [(role, False) for role in needed_roles(needs) if role != "reference" or not config.lora.rank]
        roles += [(role, True) for role in [learned_role(needs)] if role is not None]
        sizes = [(size_at(checked, getattr(config, role).path), learns) for role, learns in roles]
        own = tuple((Work.of(hf, size), learns) for size, learns in sizes)
        if config.lora.rank and "reference" in needed_roles(needs):
            own += ((Work.of(hf, Size.of(hf, checked.family)), False),)
        return cls(hf, Size.of(hf, checked.family, config.lora), own)

    @property
    def work(self) -> Work:
        return Work.of(self.hf, self.size)


def batch_of(config: Config, lengths: Lengths) -> Batch:
    longest = float(config.rollout.max_new_tokens)
    answer = longest / 2 if lengths.answer is None else min(lengths.answer, longest)
    rollout = config.rollout
    return Batch(
        rollout.prompts_per_step, rollout.group_size, lengths.prompt, answer, longest, rollout.share_prefix
    )


def layout_of(titan: TitanConfig, updates: int, devices_per_host: int) -> Layout:
    parallelism = titan.parallelism
    several = 1 if parallelism.pipeline_parallel_schedule == "1F1B" else 2
    again = {"always": True, "never": False}.get(
        parallelism.fsdp_reshard_after_forward, parallelism.pipeline_parallel_degree == 1
    )
    return Layout(
        replicas=parallelism.data_parallel_replicate_degree,
        shards=parallelism.data_parallel_shard_degree,
        tensor=parallelism.tensor_parallel_degree,
        stages=parallelism.pipeline_parallel_degree,
        stages_of_rank=several,
        recomputed=_RECOMPUTED[titan.as_dict()["activation_checkpoint"]["mode"]],
        gathers_again=again,
        row_tokens=titan.training.seq_len,
        element=bytes_of(titan.training.mixed_precision_param),
        updates=updates,
        devices_per_host=devices_per_host,
    )


def engine_of(checked: Checked, hf: PreTrainedConfig, kv_cache: float, batch: Batch, link: float) -> Engine:
    """``kv_cache``: bytes of each rank of an engine."""
    generator = checked.config.generator
    tokens = min(int(batch.prompt + batch.answer), num_positions(hf))
    fit = int(kv_cache // kv_bytes(hf, generator, tokens))
    requests = max(min(generator.max_num_seqs, fit), 1)
    return Engine(generator.tensor_parallel, requests, bytes_of(generator.dtype), link)


def _beside(models: Models, batch: Batch, recomputed: float) -> float:
    flops = 0.0
    for work, learns in models.beside:
        forward = work.forward_flops(batch.trained, batch.attended)
        flops += forward * (3 + recomputed if learns else 1)
    return flops


def scenario_of(
    checked: Checked, models: Models, lengths: Lengths, rates: Rates, plan: DevicePlan | None, copies: int = 0
) -> Scenario:
    """``plan``: where processes are; None: on a CPU, which is one host and whose ranks share its memory."""
    config, batch = checked.config, batch_of(checked.config, lengths)
    machine = plan.machine if plan else Machine(1 << 20, 0.0)
    layout = layout_of(checked.titan, config.algorithm.updates_per_batch, machine.devices_per_host)
    kv_cache = plan.kv_cache if plan else config.generator.kv_cache_gib * 2**30
    in_turns = bool(plan.in_turns) if plan else config.placement.mode == "colocated"
    return Scenario(
        work=models.work,
        batch=batch,
        rates=rates,
        layout=layout,
        engine=engine_of(checked, models.hf, kv_cache, batch, rates.link),
        replicas=config.generator.replicas,
        trained=models.size.trained,
        staleness=config.rollout.max_staleness,
        in_turns=in_turns,
        scorers=config.verifier.procs,
        beside=_beside(models, batch, layout.recomputed),
        crosses_hosts=_crosses(plan) if plan else False,
        copies=copies,
    )


def _crosses(plan: DevicePlan) -> bool:
    def hosts(role: str) -> set[int]:
        groups: Sequence = plan.table.seats.get(role, ())
        return {seat.host for group in groups for seat in group}

    return not hosts(GENERATOR) <= hosts(TRAINER) or len(hosts(TRAINER)) > 1
