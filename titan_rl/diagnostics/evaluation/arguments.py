"""Arguments of ``titan-rl eval``."""

import argparse
from pathlib import Path

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.suites import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="the model")
    parser.add_argument("--task", help="a task's name, as task.name")
    parser.add_argument("--config", metavar="TOML", help="the TOML to take the task, suites and the rest from")
    parser.add_argument(
        "--suite",
        action="append",
        metavar="NAME",
        help=f"a public set ({', '.join(PRESETS)}), or one of [[eval.suites]]; may be given several times",
    )
    parser.add_argument("--file", metavar="FILE", help="rows of the --suite (those of its data set on the Hub)")
    parser.add_argument("--k", type=int, metavar="K", help="of pass@k; as many answers to each question (1)")
    parser.add_argument("--samples", type=int, metavar="N", help="answers to each question (k)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0 with one answer, else 1)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (by the set)")
    parser.add_argument("--thinking-budget", type=int, metavar="N", help="most tokens of thinking, 0: no limit (0)")
    parser.add_argument("--prompts", type=int, metavar="N", help="questions, from the first on (all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder for results (evaluations/MODEL-DATE)")
    parser.add_argument("--json", action="store_true", help="print all results, of suites and others, as JSON")


def check_file(options: argparse.Namespace) -> None:
    """Check that ``--file`` names rows of one suite. Errors: ConfigError."""
    if options.file is None:
        return
    if not options.file:
        raise ConfigError("--file has no name: give a file of rows, or leave it out")
    if options.file.lower().endswith(".toml") or not options.suite:
        raise ConfigError(f"--file {options.file}: this is for rows of a --suite; a TOML is given as --config")
    if len(options.suite) > 1:
        raise ConfigError(f"--file {options.file}: of several suites each has its own: give them as [[eval.suites]]")
