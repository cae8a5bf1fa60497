"""TorchTitan's sections of the TOML, as TorchTitan's own dataclasses."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import titan_rl.models.device  # noqa: F401  # isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC

from titan_rl.config.load import ConfigError, build_section, nearest, nearest_key
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Layout
from titan_rl.models.float8 import Float8Config
from titan_rl.trainer.titan_limits import (
    check_comm,
    check_compile_keys,
    check_groups,
    check_recomputing,
    check_schedule,
)

# TorchTitan 0.3's defaults are for pre-training on GPUs; these are for RL on any device
_TRAINING = dict(seq_len=2048, steps=100, mixed_precision_param="float32", local_batch_size=1)
_PARALLELISM = dict(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")
_LR_SCHEDULER = dict(warmup_steps=0, decay_ratio=0.0)
_ADAMW: dict[str, Any] = dict(lr=1e-5, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0)
# a setting without effect would be a silent mistake, so only these are accepted
_HONOURED = {
    "training": {"seq_len", "steps", "max_norm", "mixed_precision_param"},
    "parallelism": {
        "data_parallel_shard_degree",
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "enable_sequence_parallel",
        "pipeline_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "module_fqns_per_model_part",
        "context_parallel_degree",
        "expert_parallel_degree",
        "fsdp_reshard_after_forward",
    },
    "comm": {"init_timeout_seconds"},
    "debug": {"deterministic", "batch_invariant"},
}
_REFUSED = {
    "training.enable_cpu_offload": "weights are published and saved from the device that trains them",
    "parallelism.spmd_backend": "only 'partial_dtensor' trains with this release of torch",
}
_SCHEDULES = ("1F1B", "Interleaved1F1B")
_ACTIVATION_CHECKPOINT = {"none": None, "full": FullAC, "selective": SelectiveAC}


@dataclass(frozen=True)
class TitanConfig:
    """TorchTitan's sections of a run's config."""

    training: TrainingConfig
    parallelism: ParallelismConfig
    optimizer: OptimizersContainer.Config
    lr_scheduler: LRSchedulersContainer.Config
    compile: CompileConfig
    float8: Float8Config
    activation_checkpoint: ActivationCheckpointing.Config | None
    comm: CommConfig
    debug: DebugConfig

    def as_dict(self) -> dict[str, Any]:
        """All sections as plain values, defaults included; ``build_titan`` reads them back."""
        sections, policy = asdict(self), self.activation_checkpoint
        modes = {cls.Config if cls else type(None): mode for mode, cls in _ACTIVATION_CHECKPOINT.items()}
        checkpointing = {"mode": modes[type(policy)]} | (sections["activation_checkpoint"] or {})
        return sections | {"activation_checkpoint": checkpointing}

    @property
    def world_size(self) -> int:
        """Number of trainer ranks. Expert parallelism adds none: it uses those of the other kinds."""
        p = self.parallelism
        return self.batch_degree * self.ranks_of_rows * p.pipeline_parallel_degree

    @property
    def ranks_of_rows(self) -> int:
        """Number of ranks of a stage that share their rows: tensor and context parallel ones."""
        return self.parallelism.tensor_parallel_degree * self.parallelism.context_parallel_degree

    @property
    def batch_degree(self) -> int:
        """Number of groups of ranks that take rows of their own."""
        return self.parallelism.data_parallel_replicate_degree * self.parallelism.data_parallel_shard_degree

    def batch_rank(self, rank: int) -> int:
        """Data-parallel group of a rank; TorchTitan counts pipeline, replicate, shard, context, tensor."""
        return rank // self.ranks_of_rows % self.batch_degree

    @property
    def row_multiple(self) -> int:
        """Divisor of the number of rows per group, by the pipeline's schedule."""
        return self.parallelism.pipeline_parallel_degree

    @property
    def layout(self) -> Layout:
        """Layout of batches for these ranks."""
        return Layout(self.batch_degree, self.training.seq_len, self.row_multiple)


def titan_keys() -> dict[str, tuple[type, dict[str, Any]]]:
    """TorchTitan's class of each of its sections, and the keys that have an effect here, to their defaults."""
    classes = {"training": TrainingConfig, "parallelism": ParallelismConfig, "comm": CommConfig, "debug": DebugConfig}
    defaults = {"training": _TRAINING, "parallelism": _PARALLELISM}
    honoured = {
        name: (
            cls,
            {key: (_defaults(cls) | defaults.get(name, {}))[key] for key in _defaults(cls) if key in _HONOURED[name]},
        )
        for name, cls in classes.items()
    }
    schedule, modes = LRSchedulersContainer.Config, {"mode": "none"}
    return honoured | {
        "optimizer": (OptimizersContainer.Config, dict(_ADAMW)),
        "lr_scheduler": (schedule, _defaults(schedule) | _LR_SCHEDULER),
        "compile": (CompileConfig, _defaults(CompileConfig)),
        "float8": (Float8Config, _defaults(Float8Config)),
        "activation_checkpoint": (FullAC.Config, modes),
    }


def _defaults(cls: type) -> dict[str, Any]:
    """Of a section of TorchTitan's without any key."""
    return asdict(cls())


def adamw(lr: float, **kwargs: Any) -> OptimizersContainer.Config:
    """One fused AdamW for all parameters."""
    config = default_adamw(lr=lr, **kwargs)
    config.implementation = "fused"
    return config


def _optimizer(values: dict, section: str = "optimizer") -> OptimizersContainer.Config:
    """TorchTitan's section, or the short form: ``lr``, ``betas``, ``eps``, ``weight_decay`` of one AdamW."""
    known = {f.name for f in fields(OptimizersContainer.Config)} | set(_ADAMW)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key {section}.{key}: {nearest_key(key, section, known)}")
    if "param_groups" in values:
        if short := set(values) & set(_ADAMW):
            raise ConfigError(
                f"{section}.{min(short)} and {section}.param_groups exclude each other: move it into a group"
            )
        for group in values["param_groups"]:
            build_section(ParamGroupConfig, group, f"{section}.param_groups")
        config = build_section(OptimizersContainer.Config, values, section)
        check_groups(config, section)
        return config
    short = _ADAMW | {key: value for key, value in values.items() if key in _ADAMW}
    betas = short["betas"]
    if not isinstance(betas, list) or len(betas) != 2 or not all(type(b) in (int, float) and 0 <= b < 1 for b in betas):
        raise ConfigError(f"{section}.betas = {betas!r}: give two numbers from 0 to below 1, as [0.9,0.99]")
    for key in ("lr", "eps", "weight_decay"):
        if type(short[key]) not in (int, float) or not 0 <= short[key] < float("inf"):
            raise ConfigError(f"{section}.{key} = {short[key]!r}: give a number of at least 0")
    config = build_section(OptimizersContainer.Config, {k: v for k, v in values.items() if k not in _ADAMW}, section)
    short["betas"] = [float(beta) for beta in betas]  # torch takes no 0 for 0.0
    config.param_groups = adamw(**short).param_groups
    check_groups(config, section)
    return config


def _lr_scheduler(values: dict, section: str = "lr_scheduler") -> LRSchedulersContainer.Config:
    config = build_section(LRSchedulersContainer.Config, _LR_SCHEDULER | values, section)
    check_schedule(config, section)
    return config


def _activation_checkpoint(values: dict[str, Any]) -> ActivationCheckpointing.Config | None:
    mode = values.pop("mode", "none")
    if not isinstance(mode, str) or mode not in _ACTIVATION_CHECKPOINT:
        raise ConfigError(f"activation_checkpoint.mode = {mode!r}: {nearest(str(mode), _ACTIVATION_CHECKPOINT)}")
    policy = _ACTIVATION_CHECKPOINT[mode]
    if policy is None:
        if build_section(SelectiveAC.Config, values, "activation_checkpoint") != SelectiveAC.Config():
            raise ConfigError(f"activation_checkpoint.{min(values)} has no effect with mode = 'none': set mode, too")
        return None
    return build_section(policy.Config, values, "activation_checkpoint")


def build_titan(config: Config) -> TitanConfig:
    """TorchTitan's config of a run.

    Errors: ConfigError for an unknown key, a wrong type, or a layout that this version cannot train."""
    section = {name: dict(values) for name, values in config.titan.items()}
    _refuse_unhonoured(section)
    titan = TitanConfig(
        training=build_section(TrainingConfig, _TRAINING | section.get("training", {}), "training"),
        parallelism=build_section(ParallelismConfig, _PARALLELISM | section.get("parallelism", {}), "parallelism"),
        optimizer=_optimizer(section.get("optimizer", {})),
        lr_scheduler=_lr_scheduler(section.get("lr_scheduler", {})),
        compile=build_section(CompileConfig, section.get("compile", {}), "compile"),
        float8=build_section(Float8Config, section.get("float8", {}), "float8"),
        activation_checkpoint=_activation_checkpoint(section.get("activation_checkpoint", {})),
        comm=build_section(CommConfig, section.get("comm", {}), "comm"),
        debug=build_section(DebugConfig, section.get("debug", {}), "debug"),
    )
    _check(config, titan)
    return titan


def role_titan(config: Config, role: str) -> TitanConfig:
    """Config of a role with its own processes: its own layout, no optimizer. Errors: ConfigError."""
    shared = {name: table for name, table in config.titan.items() if name not in ("optimizer", "lr_scheduler")}
    own = replace(config, titan=shared | {"parallelism": getattr(config, role).parallelism})
    try:
        return build_titan(own)
    except ConfigError as error:
        raise ConfigError(str(error).replace("parallelism.", f"{role}.parallelism.", 1)) from None


def learned_titan(config: Config, titan: TitanConfig, role: str) -> TitanConfig:
    """Config of a learned role: its layout, optimizer and schedule.

    ``titan``: config of the processes that it shares. Errors: ConfigError."""
    settings = getattr(config, role)
    optimizer = _optimizer(settings.optimizer, f"{role}.optimizer")
    schedule = _lr_scheduler(settings.lr_scheduler, f"{role}.lr_scheduler")
    layout = role_titan(config, role) if settings.placement == "own" else titan
    own = replace(layout, optimizer=optimizer, lr_scheduler=schedule)
    _check_optimizer(own, f"{role}.optimizer")
    return own


def _refuse_unhonoured(section: dict[str, dict]) -> None:
    own_defaults = {"training": _TRAINING, "parallelism": _PARALLELISM}
    classes = {"training": TrainingConfig, "parallelism": ParallelismConfig, "comm": CommConfig, "debug": DebugConfig}
    for name, honoured in _HONOURED.items():
        defaults = {f.name: f.default for f in fields(classes[name])} | own_defaults.get(name, {})
        for key, value in section.get(name, {}).items():
            if key in defaults and key not in honoured and value != defaults[key]:
                why = _REFUSED.get(f"{name}.{key}", "it has no effect here")
                raise ConfigError(f"{name}.{key} = {value!r} is refused: {why}; leave it out")


def _check_parallelism(parallelism: ParallelismConfig) -> None:
    """What can be checked without the model; layout.py checks the rest."""
    kinds = (
        "data_parallel_shard",
        "data_parallel_replicate",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
    )
    for name in (f"{kind}_degree" for kind in kinds):
        if getattr(parallelism, name) < 1:
            under = (
                ", or start the run by torchrun, which fills in -1" if name.startswith("data_parallel_shard") else ""
            )
            raise ConfigError(
                f"parallelism.{name} = {getattr(parallelism, name)} must be at least 1: give the number of ranks{under}"
            )
    for name in ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers"):
        value = getattr(parallelism, f"pipeline_parallel_{name}")
        if value is not None and value < (least := int(name == "layers_per_stage")):
            raise ConfigError(f"parallelism.pipeline_parallel_{name} = {value} must be at least {least}")
    schedule = parallelism.pipeline_parallel_schedule
    if schedule not in _SCHEDULES:
        raise ConfigError(f"parallelism.pipeline_parallel_schedule = {schedule!r}: {nearest(schedule, _SCHEDULES)}")
    experts = parallelism.expert_parallel_degree
    ranks = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    ranks *= parallelism.tensor_parallel_degree
    if ranks % experts:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {experts} must divide data_parallel_shard_degree x "
            f"context_parallel_degree x tensor_parallel_degree = {ranks}, whose ranks hold the experts: change one"
        )


def _check_optimizer(titan: "TitanConfig", section: str = "optimizer") -> None:
    if titan.parallelism.pipeline_parallel_degree > 1 and len(titan.optimizer.param_groups) > 1:
        raise ConfigError(
            f"{section}.param_groups: with a pipeline, each pattern must match parameters in every stage: give one "
            "group"
        )


def _check(config: Config, titan: TitanConfig) -> None:
    training = titan.training
    _check_parallelism(titan.parallelism)
    _check_optimizer(titan)
    check_compile_keys(titan.compile)
    check_comm(titan.comm)
    check_recomputing(titan.activation_checkpoint)
    if training.steps < 1:
        raise ConfigError(f"training.steps = {training.steps} must be at least 1")
    if not 0 < training.max_norm < float("inf"):
        raise ConfigError(f"training.max_norm = {training.max_norm} must be a number above 0")
    if not config.data.file and config.rollout.max_new_tokens >= training.seq_len:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in "
            f"training.seq_len = {training.seq_len}: raise seq_len"
        )
