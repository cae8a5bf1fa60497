"""What a run will hold in this machine's memory, by process and by reason, told before any process starts.

On GPUs models have memory of their own (device_memory.py); this machine's holds what is put aside of them. With a
launcher, [hosts] or torchrun hosts have memory of their own: nothing is told of these.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from titan_rl.config.device_defaults import MIN_WIDE_SEQUENCES
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import Config, LoraConfig
from titan_rl.controller.planning.colocated_memory import OF_ITS_TURN, peak
from titan_rl.controller.preflight.checks import Checked, read_config
from titan_rl.kernels.linear_logprob import multiplies_wide
from titan_rl.mesh.channel.memory.region import NUM_SLOTS
from titan_rl.mesh.channel.transports import ON_GPU
from titan_rl.mesh.resources.devices import TRAINER
from titan_rl.models.device import DEVICE_TYPE
from titan_rl.models.families.registry import PREDICTION_LAYERS, Family
from titan_rl.models.layers.gated_delta_net import CHUNK
from titan_rl.models.spec import read_hf_config, spec_of
from titan_rl.trainer.roles.names import DRAFTER, configured_paths, learned_role, needed_roles
from titan_rl.trainer.state.snapshot_kinds import spares_memory
from titan_rl.trainer.titan_config import TrainingConfig

GIB = 2**30
LIBRARIES = {"trainer": 0.4, "generator": 0.9, "verifier": 0.25, "controller": 1.3}
"""GiB of a process of each kind before it holds anything, pages that several share counted once (measured)."""
_STANDBY = 0.3
ESTIMATED = ("activations", "libraries")
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes a parameter: trained in fp32, by AdamW."""


@dataclass(frozen=True)
class Need:
    """Memory of all processes of a kind, in bytes by reason."""

    process: str
    bytes_by_reason: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.bytes_by_reason.values())

    @property
    def role(self) -> str:
        """ "generator" of "generators"."""
        return self.process.split()[0].removesuffix("s")

    def __str__(self) -> str:
        largest = sorted(self.bytes_by_reason.items(), key=lambda item: -item[1])
        reasons = ", ".join(f"{reason} {size / GIB:.1f}" for reason, size in largest if size >= 0.05 * GIB)
        return f"{self.process} {self.total / GIB:.1f}" + (f" ({reasons})" if len(largest) > 1 else "")


@dataclass(frozen=True)
class Size:
    """Parameter counts of a model: all, trained, by part."""

    parameters: int
    trained: int
    layer: int = 0
    """Of a layer's parameters, but its experts."""
    experts: int = 0
    """Of a layer's experts."""
    around: int = 0
    """Of what belongs to no layer: embeddings, head and norm."""

    @property
    def is_trained_whole(self) -> bool:
        """Rather than by adapters."""
        return self.trained == self.parameters

    @classmethod
    def of(cls, hf: PreTrainedConfig, family: Family | None, lora: LoraConfig | None = None) -> "Size":
        spec = spec_of(hf, "", family, lora)
        with torch.device("meta"):
            model = spec.model.build()
        counts = [(name, p.numel()) for name, p in model.named_parameters()]
        layers: Counter[str] = Counter()
        experts: Counter[str] = Counter()
        for name, count in counts:
            if name.startswith("layers."):
                (experts if "routed_experts." in name else layers)[name.split(".")[1]] += count
        parameters = sum(count for _, count in counts)
        around = parameters - layers.total() - experts.total()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return cls(parameters, trained, max(layers.values()), max(experts.values(), default=0), around)


def fit_into_memory(checked: Checked) -> tuple[Checked, list[str]]:
    """Run that fits this machine's memory, and lines for people. Errors: as ``check_memory``."""
    fitting, chosen = with_snapshots_that_fit(checked)
    return fitting, [line for line in (check_memory(fitting), _warning_of_episodes(fitting), chosen) if line]


def check_memory(checked: Checked) -> str:
    """Line about the run's memory; empty with remote hosts. Errors: ConfigError for a run that cannot fit."""
    if _is_elsewhere(checked.config):
        return ""
    needs, limit = _needs_here(checked), memory_limit()
    whole, certain = held_at_once(checked.config, needs) / GIB, held_at_once(checked.config, needs, ESTIMATED) / GIB
    by_process = "; ".join(map(str, needs)) + ("; in turns" if checked.config.placement.mode == "colocated" else "")
    if certain > limit / GIB:
        raise ConfigError(
            f"the run needs at least {certain:.1f} GiB of memory, and there are {limit / GIB:.1f}: {by_process}. "
            f"Take a smaller model or [lora], or recovery.snapshot_every = 0, which holds no snapshots"
        )
    where = "memory" if DEVICE_TYPE == "cpu" else "host memory"
    return f"{where}: about {whole:.1f} of {limit / GIB:.1f} GiB: {by_process}"


def _needs_here(checked: Checked) -> list[Need]:
    return (memory_needs if DEVICE_TYPE == "cpu" else host_needs)(checked)


def _warning_of_episodes(checked: Checked) -> str:
    """Warning where episodes may hold more than the rest of the run leaves; empty if they cannot."""
    most = checked.task.most_episode_bytes * checked.config.verifier.procs
    if not most or _is_elsewhere(checked.config):
        return ""
    left = max(memory_limit() - held_at_once(checked.config, _needs_here(checked)), 0)
    if most <= left:
        return ""
    return (
        f"warning: workspaces may hold up to {most / GIB:.1f} GiB of memory (task.options.sessions x (memory_mib + "
        f"disk_mib), in each of verifier.procs processes), and about {left / GIB:.1f} are left: lower one of these"
    )


def _is_elsewhere(config: Config) -> bool:
    """Whether the run's processes are in memory of which nothing is known here."""
    return config.mesh.launcher != "local" or config.hosts.is_on


def held_at_once(config: Config, needs: list[Need], but: tuple[str, ...] = ()) -> float:
    """Bytes of this machine's memory, at most at any time; ``but`` for what has such reasons."""
    in_turns = {TRAINER} if config.placement.mode == "colocated" else ()
    return peak([(need.role, _without(need, but)) for need in needs], in_turns, OF_ITS_TURN)


def _without(need: Need, reasons: tuple[str, ...]) -> dict[str, float]:
    return {why: size for why, size in need.bytes_by_reason.items() if why not in reasons}


def with_snapshots_that_fit(checked: Checked) -> tuple[Checked, str]:
    """On GPUs: without snapshots where this machine's memory does not hold them beside all else, and a line that says
    so; else as it is, and nothing to say. On a CPU such a run is refused (``check_memory``)."""
    recovery = checked.config.recovery
    if DEVICE_TYPE == "cpu" or _is_elsewhere(checked.config) or not recovery.snapshot_every:
        return checked, ""
    needs, limit = host_needs(checked), memory_limit()
    if sum(need.total for need in needs) <= limit:
        return checked, ""
    snapshots = needs[0].bytes_by_reason["snapshots"]
    without = replace(checked.config, recovery=replace(recovery, snapshot_every=0))
    return replace(checked, config=without), (
        f"warning: snapshots of the trainer would take {snapshots / GIB:.1f} GiB of this host's {limit / GIB:.1f}, "
        f"which has no room for them: none are taken, as with recovery.snapshot_every = 0, and a trainer rank's death "
        f"ends the run. A checkpoint (checkpoint.every) is what it can be resumed from"
    )


def memory_limit() -> int:
    """Bytes: the machine's, or the control group's where that has less."""
    with open("/proc/meminfo") as file:
        limit = int(file.readline().split()[1]) * 1024
    group = Path("/sys/fs/cgroup/memory.max")
    text = group.read_text().strip() if group.is_file() else "max"
    return min(limit, int(text)) if text.isdigit() else limit


def memory_needs(checked: Checked) -> list[Need]:
    config, hf = checked.config, read_config(checked)
    size = Size.of(hf, checked.family, config.lora)
    needs = [_trainer(checked, hf, size)]
    if config.has_generators:
        drafting = draft_of(checked)
        drafts = _learned_drafts(checked) + (drafting[1].parameters if drafting else 0)
        needs.append(_generators(config, hf, size.parameters, drafts))
        needs.append(Need("verifiers", {"libraries": config.verifier.procs * LIBRARIES["verifier"] * GIB}))
    return [*needs, _controller(config, len(needs))]


def host_needs(checked: Checked) -> list[Need]:
    """Host memory of a run on GPUs, without CUDA's libraries, whose size is unknown here."""
    config, titan, hf = checked.config, checked.titan, read_config(checked)
    size, copies = Size.of(hf, checked.family, config.lora), titan.parallelism.data_parallel_replicate_degree
    state = sum(model.trained for model in (size, *_roles(checked))) * copies * (WEIGHT + MOMENTS)
    needs = {"checkpoint being written": state, "libraries": titan.world_size * LIBRARIES["trainer"] * GIB}
    if config.recovery.snapshot_every:
        needs["snapshots"] = NUM_SLOTS * state
    others = _beside_the_trainer(config)
    if config.has_generators and config.mesh.transport not in ("auto", *ON_GPU):
        weights = (size.parameters + _learned_drafts(checked)) * bytes_of(config.generator.dtype)
        needs["weights to send"] = NUM_SLOTS * _sent(checked, size)
        replicas = config.generator.replicas + config.placement.helper_generators
        others[0].bytes_by_reason["weights"] = replicas * weights
    return [Need("trainer", needs), *others, _controller(config, 1 + len(others))]


def _beside_the_trainer(config: Config) -> list[Need]:
    """What generators and verifiers take before they hold anything."""
    if not config.has_generators:
        return []
    engines = (config.generator.replicas + config.placement.helper_generators) * config.generator.tensor_parallel
    counts = {"generator": engines, "verifier": config.verifier.procs}
    return [Need(f"{kind}s", {"libraries": count * LIBRARIES[kind] * GIB}) for kind, count in counts.items()]


def _controller(config: Config, num_kinds: int) -> Need:
    standbys = num_kinds * _STANDBY if config.recovery.has_standbys else 0.0
    return Need("controller and servers", {"libraries": (LIBRARIES["controller"] + standbys) * GIB})


def _sent(checked: Checked, size: Size) -> float:
    """Bytes of a version. ``size``: of the policy."""
    config = checked.config
    if config.sends_adapters:
        return size.trained * bytes_of(checked.titan.training.mixed_precision_param)
    return (size.parameters + _learned_drafts(checked)) * bytes_of(config.generator.dtype)


def _learned_drafts(checked: Checked) -> int:
    """Parameters of what drafts, if that learns."""
    drafting = draft_of(checked) if checked.config.drafter.learns else None
    return drafting[1].parameters if drafting else 0


def _trainer(checked: Checked, hf: PreTrainedConfig, size: Size) -> Need:
    """Shards add up to one model for each replica; what FSDP gathers, every rank has by itself."""
    config, titan = checked.config, checked.titan
    parallelism, training = titan.parallelism, titan.training
    copies = parallelism.data_parallel_replicate_degree
    models = [size, *_roles(checked)]
    weights = sum(model.parameters for model in models) * WEIGHT * copies
    trained = sum(model.trained for model in models) * copies
    needs: dict[str, float] = {"weights": weights, "gradients": trained * GRADIENT, "moments": trained * MOMENTS}
    state = trained * (WEIGHT + MOMENTS)
    if config.recovery.snapshot_every and config.lora.rank:
        needs["snapshots"] = NUM_SLOTS * state
    elif config.recovery.snapshot_every and not spares_memory(config, checked.algorithm.needs):
        needs["snapshots"] = state  # and the state itself lies in the other slot
    if config.checkpoint.every:
        needs["checkpoint being written"] = state
    if config.has_generators:
        needs["weights to send"] = NUM_SLOTS * _sent(checked, size)
    groups = titan.batch_degree * parallelism.context_parallel_degree
    gathers = training.mixed_precision_param != "float32" or groups > parallelism.data_parallel_replicate_degree
    if gathers and parallelism.fsdp_reshard_after_forward == "never":
        is_wide = titan.world_size == 1 and training.mixed_precision_param == "bfloat16" and multiplies_wide()
        element = WEIGHT if is_wide else bytes_of(training.mixed_precision_param)  # trainer/model/unsharded.py
        needs["gathered weights"] = size.parameters * element * groups
    of_a_row = activations(
        hf, training, is_kept=titan.activation_checkpoint is None, tower_learns=size.is_trained_whole
    )
    return Need(
        "trainer",
        needs
        | {
            "activations": titan.batch_degree * of_a_row,
            "libraries": titan.world_size * LIBRARIES["trainer"] * GIB,
        },
    )


def _roles(checked: Checked) -> list[Size]:
    """The models beside the policy, wherever in this machine's memory: a frozen one is trained in no parameter."""
    config, needs, sizes = checked.config, checked.algorithm.needs, []
    for role in needed_roles(needs):
        if role != "reference" or not config.lora.rank:  # which is the policy without its adapters
            paths = configured_paths(config, role)
            sizes += [Size(size_at(checked, path).parameters, 0) for path in paths]
    if (learned := learned_role(config, needs)) is not None:
        drafting = draft_of(checked) if learned == DRAFTER else None
        sizes.append(drafting[1] if drafting else size_at(checked, getattr(config, learned).path))
    return sizes


def size_at(checked: Checked, path: str) -> Size:
    return Size.of(read_hf_config(path, checked.family) if path else read_config(checked), checked.family)


def draft_of(checked: Checked) -> tuple[PreTrainedConfig, Size] | None:
    """Config and size of the model, the head, or the policy's own layers that draft, if any do."""
    drafts = checked.config.generator.speculative
    if drafts.model:
        return read_hf_config(drafts.model, checked.family), size_at(checked, drafts.model)
    if drafts.method != "mtp":
        return None
    hf = copy(read_config(checked))
    size = Size.of(hf, PREDICTION_LAYERS[hf.model_type])
    hf.num_hidden_layers = hf.num_nextn_predict_layers
    counts = {name: hf.num_hidden_layers * getattr(size, name) for name in ("parameters", "trained")}
    return hf, replace(size, **counts)


def activations(hf: PreTrainedConfig, training: TrainingConfig, is_kept: bool, *, tower_learns: bool = True) -> float:
    """Bytes of activations of one full row: layers, and the head's tiles and fp32 copies.

    ``tower_learns``: whether a backward goes through a vision tower, if there is one."""
    width = hf.hidden_size
    if is_kept:
        width = 10 * width + 3 * getattr(hf, "intermediate_size", 4 * width)
    layers = training.seq_len * hf.num_hidden_layers * width * bytes_of(training.mixed_precision_param)
    states = (getattr(hf, "layer_types", None) or []).count("linear_attention")
    if states:
        layers += training.seq_len * (states if is_kept else 1) * _recurrence(hf)  # made again for a layer at a time
    if vision := getattr(hf, "vision_config", None):
        layers += _of_images(vision, training, is_kept, tower_learns)
    return layers + 8 * hf.vocab_size * hf.hidden_size + 2**27


def _of_images(vision: PreTrainedConfig, training: TrainingConfig, is_kept: bool, learns: bool) -> float:
    """Bytes of a vision tower's activations of a row that is images throughout."""
    forward = tower_forward(vision, training.seq_len, training.mixed_precision_param)
    if not learns:
        return forward
    patches, block = training.seq_len * vision.spatial_merge_size**2, _block(vision)
    # made again one by one where they are not kept
    further = (vision.depth - 1) * block if is_kept else vision.depth * vision.hidden_size
    return forward + patches * further * bytes_of(training.mixed_precision_param)


def tower_forward(vision: PreTrainedConfig, tokens: int, dtype: str) -> float:
    """Bytes of a vision tower's activations of so many tokens of images, of which nothing is kept for a backward."""
    merger = 5 * vision.hidden_size
    return tokens * vision.spatial_merge_size**2 * (_block(vision) + merger) * bytes_of(dtype)


def _block(vision: PreTrainedConfig) -> int:
    """Numbers of a patch that a block of the tower makes."""
    return 16 * vision.hidden_size + 3 * vision.intermediate_size


def _recurrence(hf: PreTrainedConfig) -> float:
    """Bytes that a layer of linear attention keeps of a token for its backward, in fp32, without padding.

    Counted from models/layers/gated_delta_net.py: copies of queries and keys by head of values, a chunk's matrices, a
    state for each chunk, and three for the convolution.
    """
    heads, keys, values = hf.linear_num_value_heads, hf.linear_key_head_dim, hf.linear_value_head_dim
    mixed = 2 * hf.linear_num_key_heads * keys + heads * values
    rule = heads * (12 * keys + 3 * values + keys * values / CHUNK + 6 * CHUNK)
    return torch.float32.itemsize * (rule + 3 * mixed)


def _generators(config: Config, hf: PreTrainedConfig, parameters: int, drafts: int) -> Need:
    """An engine's weights, and what it reads the next ones into. ``drafts``: parameters of a draft model, twice if
    it learns."""
    generator, element = config.generator, bytes_of(config.generator.dtype)
    words = hf.vocab_size * hf.hidden_size
    head = 4 * words if element < 4 else 0
    is_wide = generator.dtype == "bfloat16" and generator.max_num_seqs >= MIN_WIDE_SEQUENCES and multiplies_wide()
    is_wide |= generator.is_quantized  # E4M3 values lie in fp32
    needs = {
        "weights": 2 * parameters * element,
        "draft model": drafts * element,
        "head in fp32": head,
        "layers in fp32": (WEIGHT - element) * (parameters - words) if is_wide else 0,
        "KV cache": generator.kv_cache_gib * GIB,
        "libraries": generator.tensor_parallel * LIBRARIES["generator"] * GIB,
    }
    count = generator.replicas + config.placement.helper_generators
    return Need("generators", {reason: count * size for reason, size in needs.items()})


def bytes_of(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
