"""TorchTitan's sections of the TOML, built into TorchTitan's own dataclasses."""

from dataclasses import dataclass, fields

import titan_rl.model.device as device  # isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from titan_rl.config import Config, ConfigError, build_section, nearest

# what TorchTitan 0.3 defaults to serves pre-training on GPUs; these serve RL on any device
_TRAINING = dict(seq_len=2048, steps=100, mixed_precision_param="float32", local_batch_size=1)
_PARALLELISM = dict(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")
_LR_SCHEDULER = dict(warmup_steps=0, decay_ratio=0.0)
_ADAMW = dict(lr=1e-5, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.0)
_ACTIVATION_CHECKPOINT = {"none": None, "full": FullAC, "selective": SelectiveAC}


@dataclass(frozen=True)
class TitanConfig:
    training: TrainingConfig
    parallelism: ParallelismConfig
    optimizer: OptimizersContainer.Config
    lr_scheduler: LRSchedulersContainer.Config
    compile: CompileConfig
    activation_checkpoint: object | None
    comm: CommConfig
    debug: DebugConfig

    @property
    def world_size(self) -> int:
        return self.parallelism.data_parallel_shard_degree


def adamw(lr: float, **kwargs) -> OptimizersContainer.Config:
    """One AdamW for all parameters, in the fused form where there is one."""
    config = default_adamw(lr=lr, **kwargs)
    config.implementation = "fused"
    return config


def _optimizer(values: dict) -> OptimizersContainer.Config:
    """TorchTitan's section, or the short form: ``lr``, ``betas``, ``eps``, ``weight_decay`` of one AdamW."""
    known = {f.name for f in fields(OptimizersContainer.Config)} | set(_ADAMW)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key optimizer.{key}: {nearest(key, known)}")
    if "param_groups" in values:
        if short := set(values) & set(_ADAMW):
            raise ConfigError(
                f"optimizer.{min(short)} and optimizer.param_groups exclude each other: move it into a group"
            )
        return build_section(OptimizersContainer.Config, values, "optimizer")
    short = _ADAMW | {key: value for key, value in values.items() if key in _ADAMW}
    for key, value in short.items():
        numbers = value if key == "betas" else [value]
        if not isinstance(numbers, list) or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise ConfigError(
                f"optimizer.{key} = {value!r}: give {'two numbers' if key == 'betas' else 'a number'} of at least 0"
            )
    config = build_section(
        OptimizersContainer.Config, {k: v for k, v in values.items() if k not in _ADAMW}, "optimizer"
    )
    config.param_groups = adamw(**short).param_groups
    return config


def _activation_checkpoint(values: dict):
    mode = values.pop("mode", "none")
    if mode not in _ACTIVATION_CHECKPOINT:
        raise ConfigError(f"activation_checkpoint.mode = {mode!r}: {nearest(str(mode), _ACTIVATION_CHECKPOINT)}")
    policy = _ACTIVATION_CHECKPOINT[mode]
    if policy is None:
        return build_section(SelectiveAC.Config, values, "activation_checkpoint") and None
    return build_section(policy.Config, values, "activation_checkpoint")


def build_titan(config: Config) -> TitanConfig:
    """Errors: ConfigError for an unknown key, a wrong type, or a layout that this release does not train."""
    section = {name: dict(values) for name, values in config.titan.items()}
    titan = TitanConfig(
        training=build_section(TrainingConfig, _TRAINING | section.get("training", {}), "training"),
        parallelism=build_section(ParallelismConfig, _PARALLELISM | section.get("parallelism", {}), "parallelism"),
        optimizer=_optimizer(section.get("optimizer", {})),
        lr_scheduler=build_section(
            LRSchedulersContainer.Config, _LR_SCHEDULER | section.get("lr_scheduler", {}), "lr_scheduler"
        ),
        compile=build_section(CompileConfig, section.get("compile", {}), "compile"),
        activation_checkpoint=_activation_checkpoint(section.get("activation_checkpoint", {})),
        comm=build_section(CommConfig, section.get("comm", {}), "comm"),
        debug=build_section(DebugConfig, section.get("debug", {}), "debug"),
    )
    _check(config, titan)
    return titan


def _check(config: Config, titan: TitanConfig) -> None:
    parallelism, training = titan.parallelism, titan.training
    for key in (
        "data_parallel_replicate",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "expert_parallel",
    ):
        if getattr(parallelism, f"{key}_degree") != 1:
            raise ConfigError(
                f"parallelism.{key}_degree must be 1: trainers shard with FSDP2 (data_parallel_shard_degree) only"
            )
    if parallelism.data_parallel_shard_degree < 1:
        raise ConfigError("parallelism.data_parallel_shard_degree must be at least 1: give the number of trainer ranks")
    if training.local_batch_size != 1 or training.global_batch_size != -1:
        raise ConfigError(
            "training.local_batch_size and global_batch_size stay at 1 and -1: rows are packed up to training.seq_len "
            "tokens, and a batch is rollout.prompts_per_step x rollout.group_size samples"
        )
    if training.steps < 1:
        raise ConfigError(f"training.steps = {training.steps} must be at least 1")
    if config.rollout.max_new_tokens >= training.seq_len:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in "
            f"training.seq_len = {training.seq_len}: raise seq_len"
        )
    if device.DEVICE_TYPE == "cpu" and titan.compile.enable:
        raise ConfigError("compile.enable needs an accelerator: packed rows change length at every step on a CPU")
