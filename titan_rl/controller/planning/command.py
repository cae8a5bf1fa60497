"""``titan-rl plan``: what it may be asked, and its answer. Imported before torch."""

import argparse
import json
from typing import Any

from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError


def add_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("file", help="TOML of the run; --section.key value overrides it")
    plan.add_argument("--gpus", type=int, metavar="N", help="GPUs of each host (those here)")
    plan.add_argument("--hosts", type=int, default=1, metavar="H", help="hosts (1)")
    plan.add_argument("--gpu-memory-gib", type=float, metavar="G", help="of each GPU (as here, or the device's)")
    plan.add_argument("--device", help="whose published rates are taken: H100 (the default), H200, A100, B200, MI300X")
    plan.add_argument("--rates", metavar="FILE", help="TOML of rates; --rates.NAME value gives one")
    plan.add_argument("--shape", metavar="NAME", help="a known model or a config.json; --shape.KEY value gives one")
    plan.add_argument("--prompt-tokens", type=float, metavar="N", help="of a prompt (as they are, or 512)")
    plan.add_argument("--answer-tokens", type=float, metavar="N", help="of an answer, on average (half the most)")
    plan.add_argument(
        "--copies", type=int, default=0, metavar="N", help="of the model that trainers send (an engine: 1)"
    )
    plan.add_argument("--days", type=float, metavar="D", help="how many steps are done in so many")
    plan.add_argument("--search", action="store_true", help="the cheapest placement that fits, instead of the TOML's")
    plan.add_argument("--json", action="store_true")


def plan(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    """Print the plan of a run. Errors: ConfigError."""
    from titan_rl.controller.planning import planner as planning
    from titan_rl.controller.planning.forecast.scenarios import Lengths

    prompt = options.prompt_tokens
    if not all(number is None or number > 0 for number in (prompt, options.answer_tokens, options.days)):
        raise ConfigError("--prompt-tokens, --answer-tokens and --days count what there is: give numbers above 0")
    request = planning.PlanRequest(
        device=options.device,
        rates_file=options.rates,
        rates=overrides.get("rates", {}),
        shape=options.shape,
        shape_keys=overrides.get("shape", {}),
        lengths=Lengths(prompt, options.answer_tokens),
        search=options.search,
        days=options.days,
        copies=options.copies,
    )
    machine = planning.machine_of(options.gpus, options.hosts, options.gpu_memory_gib, options.device)
    lines, table = planning.plan(options.file, overrides, machine, request)
    say(json.dumps(table) if options.json else "\n".join(lines))
    return 0
