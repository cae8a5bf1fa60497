"""``titan-rl plan``: placement, memory and step time of a run on a machine that need not exist.

Of the model it reads config.json and, where it is there, the tokenizer, to see how long prompts are (data_plan.py): no
weights. Nothing is started.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.model_directory.config_checks import read_config as read_directory
from titan_rl.config.model_directory.draft_heads import read_head_config
from titan_rl.config.model_directory.hub import fetch_config, is_hub_name
from titan_rl.config.sections.schema import MADE_MODELS, Config
from titan_rl.controller.planning.data_plan import measure_data
from titan_rl.controller.planning.device_plan import (
    DevicePlan,
    Machine,
    Models,
    machine_of_hosts,
    plan_devices,
    this_machine,
)
from titan_rl.controller.planning.device_report import as_json, placement_lines
from titan_rl.controller.planning.draft_memory import draft_memory
from titan_rl.controller.planning.forecast import report
from titan_rl.controller.planning.forecast.rates import DEFAULT, Rates, rates_of
from titan_rl.controller.planning.forecast.scenarios import PROMPT, Lengths, scenario_of
from titan_rl.controller.planning.forecast.search import cheapest
from titan_rl.controller.planning.forecast.shapes import is_known, known, shape_of, write_shape
from titan_rl.controller.planning.forecast.simulation import as_words, simulated
from titan_rl.controller.planning.forecast.step import forecast
from titan_rl.controller.planning.memory_plan import GIB, Need, check_memory, host_needs, memory_needs
from titan_rl.controller.preflight.checks import (
    Checked,
    check_laid_out,
    check_together,
    read_config,
    resolve,
)
from titan_rl.controller.preflight.device import check_placement
from titan_rl.controller.preflight.engine_checks import check_decoding, check_export
from titan_rl.controller.preflight.ineffective_settings import check_read
from titan_rl.controller.preflight.role_checks import check_image_limits, check_roles
from titan_rl.trainer.model.layout import check_products
from titan_rl.trainer.roles.names import DRAFTER

_ROLES = ("model", "reference", "teacher", "critic", "implicit_reward", "drafter")
OWN_TABLES = ("shape", "rates")
"""Of what is given as ``--table.key value``, those that are no section of a run."""

PlanReport = tuple[list[str], dict[str, Any]]
"""Report as lines of text, and as a JSON table."""


@dataclass(frozen=True)
class PlanRequest:
    """Options of ``titan-rl plan`` beside the run's settings."""

    device: str | None = None
    """One of devices.toml; None: an H100 where there are GPUs, and no seconds for a CPU."""
    rates_file: str | None = None
    rates: Mapping[str, Any] = field(default_factory=dict)
    shape: str | None = None
    shape_keys: Mapping[str, Any] = field(default_factory=dict)
    lengths: Lengths = Lengths()
    search: bool = False
    days: float | None = None
    copies: int = 0
    """Of the model that trainers send in a sync; 0: one for each engine."""

    @property
    def has_rates(self) -> bool:
        return bool(self.device or self.rates_file or self.rates)

    def rates_for(self, machine: Machine | None) -> Rates | None:
        """Rates of the machine; None for a CPU without given rates."""
        if machine is None and not self.has_rates:
            return None
        return rates_of(self.device or DEFAULT, self.rates_file, self.rates)


def machine_of(gpus: int | None, hosts: int, gpu_memory_gib: float | None, device: str | None = None) -> Machine | None:
    """Hosts with so many GPUs each; what is not given is as here. None: a CPU. Errors: ConfigError."""
    here = this_machine()
    if gpus is None:
        if here is None:
            if hosts != 1 or gpu_memory_gib is not None:
                raise ConfigError("--hosts and --gpu-memory-gib are of GPUs, and there are none here: give --gpus N")
            return None
        gpus = here.devices_per_host
    published = rates_of(device or DEFAULT).memory_gib * GIB
    memory = gpu_memory_gib * GIB if gpu_memory_gib is not None else here.memory if here and not device else published
    if gpus < 1 or hosts < 1 or not memory > 0:
        raise ConfigError("--gpus, --hosts and --gpu-memory-gib count what there is: give numbers above 0")
    return Machine(gpus, memory, hosts)


def plan(
    config_file: str | None,
    overrides: dict[str, dict[str, Any]],
    machine: Machine | None,
    request: PlanRequest = PlanRequest(),
) -> PlanReport:
    """Placement, memory and forecast of a run. Errors: ConfigError, also for what does not fit."""
    sections = {name: table for name, table in overrides.items() if name not in OWN_TABLES}
    config = load_config(config_file, sections, with_models=False)
    machine = machine or machine_of_hosts(config.hosts, config.hosts.count or len(config.hosts.addresses))
    rates = request.rates_for(machine)
    with _with_shapes(config, request) as shaped:
        checked = resolve(shaped, on_cpu=machine is None)
        hf = _hf(checked)
        check_read(checked.config, checked.algorithm, checked.titan, checked.task)
        check_together(checked.config, checked.titan)
        check_export(checked.config, checked.algorithm, hf, on_cpu=machine is None)
        if shaped == config:
            check_image_limits(checked.config, checked.titan, hf)
        if not config.data.file:
            check_decoding(checked.config, checked.algorithm, hf)
        if shaped == config:  # all models are here
            check_roles(checked.config, checked.algorithm, checked.family, checked.task)
        data = measure_data(checked)
        if request.lengths.prompt is None:
            if data.mean is None and rates is not None and not config.data.file:
                data = replace(data, line=f"{data.line}: {PROMPT:.0f} tokens are assumed (--prompt-tokens)")
            request = replace(request, lengths=replace(request.lengths, prompt=data.mean or PROMPT))
        try:
            lines, table = _planned(checked, machine, rates, request)
        except ConfigError as error:
            if machine is None and _can_be_laid_out_on_gpus(shaped):
                raise ConfigError(
                    f"there is no GPU here (--gpus N plans for hosts with N each), and on the CPU {error}"
                ) from None
            raise
        if (drafts := draft_memory(checked)) is not None:
            lines, table = [*lines, str(drafts)], table | {"draft_model": drafts.as_dict()}
        return [*lines, data.line], table | {"data": data.as_dict()}


def _planned(checked: Checked, machine: Machine | None, rates: Rates | None, request: PlanRequest) -> PlanReport:
    if machine is None:
        _check_layouts(checked, on_cpu=True)
        return _on_cpu(checked, rates, request)
    assert rates is not None, "a GPU has published ones"
    if request.search:
        return _searched(checked, machine, rates, request)
    _check_layouts(checked, on_cpu=False)
    return _on_gpus(checked, machine, rates, request)


@contextmanager
def _with_shapes(config: Config, request: PlanRequest) -> Iterator[Config]:
    """Every model by a directory that has its config.json. Errors: ConfigError."""
    with tempfile.TemporaryDirectory(prefix="titan_rl_plan_") as folder:
        if request.shape or request.shape_keys:
            path = write_shape(shape_of(request.shape, request.shape_keys), Path(folder) / "model")
            config = replace(config, model=replace(config.model, path=path))
        for role in _ROLES:
            settings = getattr(config, role)
            is_head = role == DRAFTER and config.generator.speculative.method == "eagle3"
            path = _shaped(settings.path, f"{role}.path", Path(folder) / role, is_head=is_head)
            if path != settings.path:
                config = replace(config, **{role: replace(settings, path=path)})
        drafts = config.generator.speculative
        if drafts.model:
            place = Path(folder) / "draft"
            path = _shaped(drafts.model, "generator.speculative.model", place, is_head=drafts.method == "eagle3")
            drafts = replace(drafts, model=path)
            config = replace(config, generator=replace(config.generator, speculative=drafts))
        paths = config.teacher.by_task
        by_task = {
            task: _shaped(path, f"teacher.by_task.{task}", Path(folder) / f"teacher of {task}")
            for task, path in paths.items()
        }
        yield replace(config, teacher=replace(config.teacher, by_task=by_task))


def _shaped(path: str, setting: str, folder: Path, *, is_head: bool = False) -> str:
    """``is_head``: it is a draft head's. Errors: ConfigError."""
    if not path or setting == "model.path" and path in MADE_MODELS:
        return path
    if is_known(path) and not Path(path).exists():
        return write_shape(known(path), folder)
    try:
        if is_hub_name(path) and not Path(path).exists():
            return fetch_config(path)
        (read_head_config if is_head else read_directory)(Path(path))
    except ValueError as error:
        raise ConfigError(f"{setting} = {path!r}: {error}" + ("" if is_head else "; or give its --shape")) from None
    return path


def _check_layouts(checked: Checked, *, on_cpu: bool) -> None:
    check_placement(checked.config, checked.titan, checked.task, on_cpu=on_cpu)
    hf = _hf(checked)
    check_products(hf, checked.titan, checked.family, on_cpu=on_cpu)
    check_laid_out(checked.config, checked.titan, hf, checked.family, on_cpu=on_cpu)


def _can_be_laid_out_on_gpus(config: Config) -> bool:
    try:
        _check_layouts(resolve(config, on_cpu=False), on_cpu=False)
    except ConfigError:
        return False
    return True


def _hf(checked: Checked) -> PreTrainedConfig:
    """Errors: ConfigError."""
    path = checked.config.model.path
    try:
        return read_config(checked)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        mend = "" if "give " in reason else "; give a directory"
        raise ConfigError(f"model.path = {path!r}: its config.json cannot be read: {reason}{mend}") from None


def _on_cpu(checked: Checked, rates: Rates | None, request: PlanRequest) -> PlanReport:
    needs = memory_needs(checked)
    lines = [check_memory(checked) or f"memory, on whatever hosts: {'; '.join(map(str, needs))}"]
    table = {"processes": _listed(needs)}
    if checked.config.data.file:
        return lines, table
    if rates is None:
        return [*lines, "seconds: unknown of a CPU; `titan-rl bench plan` measures what --rates FILE takes"], table
    its = forecast(scenario_of(Models(checked), request.lengths, rates, None, request.copies))
    return [*lines, *report.forecast_lines(its, request.days, checked.titan.training.steps)], table | {
        "forecast": report.as_json(its)
    }


def _on_gpus(checked: Checked, machine: Machine, rates: Rates, request: PlanRequest) -> PlanReport:
    _hf(checked)
    models = Models(checked)
    placement = plan_devices(checked, machine, cached=models)
    lines, table = _placed(checked, placement)
    if checked.config.data.file:
        return lines, table
    scenario = scenario_of(models, request.lengths, rates, placement, request.copies)
    if not scenario.engine.max_requests:
        raise ConfigError("the KV cache holds not one request of these lengths: give fewer --answer-tokens")
    its, simulation = forecast(scenario), simulated(scenario)
    alone = simulated(replace(scenario, helpers=0)) if scenario.helpers else None
    lines += [*report.forecast_lines(its, request.days, checked.titan.training.steps), as_words(simulation, alone)]
    helped = {"simulation_without_helpers": alone.as_dict()} if alone else {}
    return lines, table | {"forecast": report.as_json(its), "simulation": simulation.as_dict(), **helped}


def _searched(checked: Checked, machine: Machine, rates: Rates, request: PlanRequest) -> PlanReport:
    """Errors: ConfigError."""
    if checked.config.data.file:
        raise ConfigError(
            "--search shares devices out to trainer and generators, and a run on data.file has none: leave it out"
        )
    _hf(checked)
    ranking = cheapest(Models(checked), request.lengths, rates, machine, request.copies)
    first, steps = ranking[0], checked.titan.training.steps
    simulation = simulated(first.forecast.scenario)
    lines = [
        *report.ranking_lines(ranking),
        *placement_lines(first.plan),
        *report.forecast_lines(first.forecast, request.days, steps),
    ]
    return [*lines, as_words(simulation)], as_json(first.plan) | {
        "found": report.ranking_as_json(ranking),
        "forecast": report.as_json(first.forecast),
        "simulation": simulation.as_dict(),
    }


def _placed(checked: Checked, placement: DevicePlan) -> PlanReport:
    needs = host_needs(checked)
    all_hosts = f"  memory of all hosts, together: {'; '.join(map(str, needs))}"
    return [*placement_lines(placement), all_hosts], as_json(placement) | {"all_hosts": _listed(needs)}


def _listed(needs: list[Need]) -> list[dict[str, Any]]:
    return [{"name": need.process, "bytes": need.bytes_by_reason} for need in needs]
