"""``titan-rl plan``: where a run's processes would go, and what they would hold, on a machine that need not be here.

Of the model it reads config.json alone: no weights, no tokenizer. Nothing is started.
"""

from typing import Any

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.device_plan import Machine, plan_devices, this_machine
from titan_rl.controller.device_report import as_json, told
from titan_rl.controller.memory_plan import GIB, check_memory, memory_needs
from titan_rl.controller.preflight import Checked, check_generator_layout, check_placement, read_config, resolve
from titan_rl.trainer.layout import check_layout

_GPU_GIB = 79.0
"""Of an H100, as CUDA counts them: where there is no GPU here, and nobody says."""


def machine_of(gpus: int | None, hosts: int, gpu_memory_gib: float | None) -> Machine | None:
    """Hosts with so many GPUs each; what is not given is as here. None: a CPU. Errors: ConfigError."""
    here = this_machine()
    if gpus is None and here is None:
        if hosts != 1 or gpu_memory_gib is not None:
            raise ConfigError("--hosts and --gpu-memory-gib are of GPUs, and there are none here: give --gpus N")
        return None
    count = gpus if gpus is not None else here.devices_per_host
    memory = gpu_memory_gib * GIB if gpu_memory_gib is not None else here.memory if here else _GPU_GIB * GIB
    if count < 1 or hosts < 1 or not memory > 0:
        raise ConfigError("--gpus, --hosts and --gpu-memory-gib count what there is: give numbers above 0")
    return Machine(count, memory, hosts)


def plan(
    config_file: str | None, overrides: dict[str, dict[str, Any]], machine: Machine | None
) -> tuple[list[str], dict[str, Any]]:
    """Lines for people, and the same for programs. Errors: ConfigError, also for what does not fit."""
    config = load_config(config_file, overrides, with_models=False)
    checked = resolve(config, on_cpu=machine is None)
    _check_layouts(checked, on_cpu=machine is None)
    if machine is not None:
        made = plan_devices(checked, machine)
        return told(made), as_json(made)
    needs = memory_needs(checked)
    lines = [check_memory(checked) or f"memory, on whatever hosts: {'; '.join(map(str, needs))}"]
    return lines, {"processes": [{"name": need.process, "bytes": need.bytes_by_reason} for need in needs]}


def _check_layouts(checked: Checked, *, on_cpu: bool) -> None:
    path = checked.config.model.path
    check_placement(checked.config)
    try:
        hf = read_config(checked)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"model.path = {path!r}: its config.json cannot be read: {said}; give a directory") from None
    check_layout(hf, checked.titan.parallelism)
    if not checked.config.data.file:
        check_generator_layout(hf, checked.config.generator.tensor_parallel, on_cpu=on_cpu)
