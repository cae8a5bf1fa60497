"""What a config says of algorithms and models, checked before any process starts. Needs torch, so it comes last."""

from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.config.schema import Config
from titan_rl.data.types import Prompt
from titan_rl.environments.base import Task

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def check_algorithm(config: Config) -> None:
    """Errors: ConfigError for an algorithm that is unknown or does not work, or for keys that it does not have."""
    from titan_rl.algorithms import registry

    algorithm = registry.make_algorithm(config.algorithm, config.run.plugin_path)
    registry.check_algorithm(algorithm, f"algorithm.name = {config.algorithm.name!r}")


def check_prompts(config: Config, seq_len: int, task: Task, prompts: list[Prompt]) -> None:
    """Errors: ConfigError if a prompt, tokenized as it will be, leaves no room for an answer."""
    if config.model.path == "tiny":
        return
    from transformers import AutoTokenizer

    from titan_rl.environments.episode import encode_prompt
    from titan_rl.models.spec import longest_rollout

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    longest = max(len(encode_prompt(task, tokenizer, prompt)) for prompt in prompts)
    room = longest_rollout(seq_len, config.model.path) - config.rollout.max_new_tokens
    if longest > room:
        raise ConfigError(
            f"training.seq_len = {seq_len} leaves {room} tokens for prompts, but they have up to {longest}: "
            f"raise it (the model's positions are the limit), or ask for less in task.options"
        )


def check_model(config: Config) -> None:
    """Errors: ConfigError for an architecture that cannot be built or laid out as ``[parallelism]`` and
    ``[generator]`` say, a directory without weights or a tokenizer, or a kernel that this machine cannot run."""
    from titan_rl.models.device import DEVICE_TYPE
    from titan_rl.models.safetensors_files import tensor_files
    from titan_rl.models.spec import read_hf_config
    from titan_rl.models.tiny import tiny_config
    from titan_rl.trainer.layout import check_layout
    from titan_rl.trainer.titan_config import build_titan

    if config.model.kernel == "triton" and DEVICE_TYPE == "cpu":
        raise ConfigError("model.kernel = 'triton' needs a GPU, and there is none: leave it out, or take 'reference'")
    parallelism, path = build_titan(config).parallelism, config.model.path
    try:
        hf = tiny_config() if path == "tiny" else read_hf_config(path)
        if path != "tiny":
            tensor_files(path)
    except ValueError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from None
    check_layout(hf, parallelism)
    _check_generator_layout(hf, config.generator.tensor_parallel)
    names = ("tokenizer.json", "tokenizer_config.json")
    if path != "tiny" and not any((Path(path) / name).is_file() for name in names):
        raise ConfigError(f"model.path = {path!r} holds no tokenizer: copy tokenizer.json into it")


def _check_generator_layout(hf, ranks: int) -> None:
    """As vLLM cuts a model: key and value heads are repeated where there are fewer than ranks."""
    from titan_rl.models.device import DEVICE_TYPE

    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if heads % ranks:
        raise ConfigError(
            f"generator.tensor_parallel = {ranks} must divide the model's num_attention_heads = {heads}: "
            f"lower it, or use more replicas"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"generator.tensor_parallel = {ranks} and the model's num_key_value_heads = {kv_heads}: one must divide "
            f"the other; lower it, or use more replicas"
        )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if DEVICE_TYPE == "cpu" and head_dim not in _CPU_HEAD_SIZES:
        raise ConfigError(
            f"the model's head_dim = {head_dim} has no attention kernel in vLLM for CPUs: use a model with one of "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}"
        )


def check_transport(config: Config) -> None:
    """Errors: ConfigError for a transport that this machine has no hardware for."""
    from titan_rl.models.device import DEVICE_TYPE

    setting = config.mesh.transport
    if setting == "cuda_ipc" and DEVICE_TYPE != "cuda":
        raise ConfigError("mesh.transport = 'cuda_ipc' needs a GPU, and there is none: leave it out")
    if setting == "rdma_ibverbs":
        from titan_rl.mesh.channel.transports import has_ibverbs

        if not has_ibverbs():
            raise ConfigError(
                "mesh.transport = 'rdma_ibverbs' needs an RDMA network card, and there is none: leave it out, or take "
                "'rdma_tcp'"
            )
