"""One training run from a TOML: check everything, start the meshes, run the loop, leave a whole run directory.

``titan-rl train FILE --section.key value`` or ``python -m titan_rl.train --job.config_file FILE --section.key value``.
"""

import asyncio
import sys
from typing import Any

from titan_rl.config.load import ConfigError, as_dict, load_config, parse_overrides
from titan_rl.controller.session import EXIT_USER, check_resumable, run
from titan_rl.environments.base import make_task
from titan_rl.environments.prompts import held_out_prompts
from titan_rl.records.rundir import new_run_dir, run_dir_to_resume


def train(config_file: str | None, overrides: dict[str, dict[str, Any]], resume: bool) -> int:
    """Run to the end; the exit code. Errors: ConfigError before any process is started."""
    config = load_config(config_file, overrides)
    task = make_task(config.task, config.run.plugin_path)
    held_out = held_out_prompts(task, config.eval.prompts)
    run_dir = run_dir_to_resume(config, config_file) if resume else new_run_dir(config, config_file)

    from titan_rl.controller.preflight import check_algorithm, check_model, check_prompts, check_transport
    from titan_rl.trainer.titan_config import build_titan

    titan = build_titan(config)
    check_algorithm(config)
    check_model(config)
    check_transport(config)
    check_prompts(config, titan.training.seq_len, task, held_out)
    if resume:
        check_resumable(run_dir, config)
    run_dir.open(as_dict(config) | titan.as_dict())
    return asyncio.run(run(config, titan, run_dir, task, held_out, resume))


def main(arguments: list[str] | None = None) -> int:
    """TorchTitan's manner: the file as ``--job.config_file``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        resume = "--resume" in arguments
        overrides = parse_overrides([argument for argument in arguments if argument != "--resume"])
        job = overrides.pop("job", {})
        if not isinstance(job, dict) or not isinstance(job.get("config_file", ""), str):
            raise ConfigError("--job.config_file takes the path of a TOML file")
        if set(job) - {"config_file"}:
            raise ConfigError(f"unknown key job.{min(set(job) - {'config_file'})}: [job] takes config_file only")
        return train(job.get("config_file"), overrides, resume)
    except ConfigError as error:
        print(f"titan-rl: {error}", file=sys.stderr)
        return EXIT_USER


if __name__ == "__main__":
    sys.exit(main())
