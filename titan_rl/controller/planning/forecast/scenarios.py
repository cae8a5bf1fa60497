"""A checked configuration, on a machine, becomes a scenario: which numbers of it a forecast takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_rl.config.mixture import parts_of, teachers_of
from titan_rl.config.sections.schema import Config, GeneratorConfig
from titan_rl.controller.planning.device_memory import kv_bytes
from titan_rl.controller.planning.device_plan import DevicePlan, Machine, Models
from titan_rl.controller.planning.forecast.generation import Drafting, Engine
from titan_rl.controller.planning.forecast.rates import Rates
from titan_rl.controller.planning.forecast.step import Scenario
from titan_rl.controller.planning.forecast.training import Layout
from titan_rl.controller.planning.forecast.work import Batch, Work
from titan_rl.controller.planning.memory_plan import WEIGHT, bytes_of
from titan_rl.mesh.resources.devices import GENERATOR, TRAINER
from titan_rl.models.layers.rope import num_positions
from titan_rl.trainer.roles.names import needed_roles
from titan_rl.trainer.titan_config import TitanConfig

_RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 1.0}
"""Of a forward. Selective: all but products and attention; an estimate."""
PROMPT = 512.0


@dataclass(frozen=True)
class Lengths:
    """Of a batch, which no TOML says."""

    prompt: float | None = PROMPT
    """Tokens of a prompt; None: as the data has them (planner.py settles it)."""
    answer: float | None = None
    """Of an answer, on average; None: half of what ``rollout.max_new_tokens`` allows."""


def works_beside(models: Models) -> list[tuple[Work, bool, float]]:
    """Other models that pass a batch in the trainer, whether they learn, and the share of the batch that they pass."""
    roles = [(role, False) for role in models.frozen] + [(role, True) for role in [models.learned] if role]
    works = [
        (Work.of(models.hf, size), learns, share)
        for role, learns in roles
        for size, share in zip(models.sizes_of(role), _shares(models.config, role), strict=True)
    ]
    if models.config.lora.rank and "reference" in needed_roles(models.checked.algorithm.needs):
        works.append((Work.of(models.hf, models.policy), False, 1.0))  # it is the policy without its adapters
    return works


def _shares(config: Config, role: str) -> list[float]:
    """Of a batch, for each model of a role: each of several teachers passes its tasks' prompts."""
    teachers = teachers_of(config)
    if role != "teacher" or len(teachers.paths) < 2:
        return [1.0]
    weights = {name: part.weight for name, part in parts_of(config.task).items()}
    return [sum(weights[task] for task in tasks) / sum(weights.values()) for tasks in teachers.tasks]


def batch_of(config: Config, lengths: Lengths) -> Batch:
    longest = float(config.rollout.max_new_tokens)
    answer = longest / 2 if lengths.answer is None else min(lengths.answer, longest)
    rollout, prompt = config.rollout, PROMPT if lengths.prompt is None else lengths.prompt
    return Batch(rollout.prompts_per_step, rollout.group_size, prompt, answer, longest, rollout.share_prefix)


def layout_of(titan: TitanConfig, updates: int, devices_per_host: int) -> Layout:
    parallelism = titan.parallelism
    several = 1 if parallelism.pipeline_parallel_schedule == "1F1B" else 2
    again = {"always": True, "never": False}.get(
        parallelism.fsdp_reshard_after_forward, parallelism.pipeline_parallel_degree == 1
    )
    return Layout(
        replicas=parallelism.data_parallel_replicate_degree,
        shards=parallelism.data_parallel_shard_degree,
        context=parallelism.context_parallel_degree,
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


def engine_of(
    models: Models, generator: GeneratorConfig, kv_cache: float, batch: Batch, link: float, *, on_cpu: bool = False
) -> Engine:
    """``kv_cache``: bytes of each rank of an engine; with too few for one request, none runs. ``on_cpu``: where FP8
    lies in fp32."""
    tokens = min(int(batch.prompt + batch.answer), num_positions(models.hf))
    fit = int(kv_cache // kv_bytes(models.of_engine, generator, tokens))
    requests = max(min(generator.max_num_seqs, fit), 0)
    element = bytes_of(generator.dtype)
    layer_element = element if not generator.is_quantized else WEIGHT if on_cpu else 1
    return Engine(generator.tensor_parallel, requests, element, link, layer_element)


def _beside(models: Models, batch: Batch, recomputed: float) -> float:
    flops = 0.0
    for work, learns, share in works_beside(models):
        forward = share * work.forward_flops(batch.trained, batch.attended)
        flops += forward * (3 + recomputed if learns else 1)
    return flops


def scenario_of(models: Models, lengths: Lengths, rates: Rates, plan: DevicePlan | None, copies: int = 0) -> Scenario:
    """``plan``: where processes are; None: on a CPU, which is one host and whose ranks share its memory."""
    checked, config, batch = models.checked, models.config, batch_of(models.config, lengths)
    machine = plan.machine if plan else Machine(1 << 20, 0.0)
    layout = layout_of(checked.titan, config.algorithm.updates_per_batch, machine.devices_per_host)
    kv_cache = plan.kv_cache if plan else config.generator.kv_cache_gib * 2**30
    in_turns = config.placement.mode == "colocated"
    return Scenario(
        work=Work.of(models.hf, models.policy),
        batch=batch,
        rates=rates,
        layout=layout,
        engine=engine_of(models, config.generator, kv_cache, batch, rates.link, on_cpu=plan is None),
        replicas=config.generator.replicas,
        trained=models.policy.trained,
        sends_adapters=config.sends_adapters,
        staleness=config.rollout.max_staleness,
        in_turns=in_turns,
        scorers=config.verifier.procs,
        beside=_beside(models, batch, layout.recomputed),
        crosses_hosts=_crosses(plan) if plan else False,
        copies=copies,
        helpers=config.placement.helper_generators,
        drafting=_drafting(models),
    )


def _drafting(models: Models) -> Drafting | None:
    drafts = models.config.generator.speculative
    if drafts.method == "none":
        return None
    return Drafting(drafts.num_speculative_tokens, Work.of(*models.drafting) if models.drafting else None)


def _crosses(plan: DevicePlan) -> bool:
    def hosts(role: str) -> set[int]:
        groups: Sequence = plan.table.seats.get(role, ())
        return {seat.host for group in groups for seat in group}

    return not hosts(GENERATOR) <= hosts(TRAINER) or len(hosts(TRAINER)) > 1
