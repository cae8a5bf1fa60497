"""Arguments of ``titan-rl principles``."""

import argparse
from pathlib import Path

from titan_rl.diagnostics.web.collect.arguments import add_sampling

REVISIONS, SAMPLES = 1, 2
"""Rounds of critique and revision; answers to each prompt that are compared. By default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "--judge.url URL --judge.model NAME: an OpenAI-style server that judges; --generator.*: as of eval"
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="constitution: TOML of [[principles]], or a recipe's name"
    )
    parser.add_argument(
        "--model", type=Path, metavar="RUN_OR_MODEL", help="answers, criticizes, revises; judges without --judge.url"
    )
    add_sampling(parser)
    parser.add_argument("--count", type=int, metavar="N", help="prompts, from the first on (all)")
    parser.add_argument(
        "--revisions", type=int, metavar="N", help=f"rounds of critique and revision, 0: no rows of SFT ({REVISIONS})"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help=f"answers that are compared two by two, 0: no pairs ({SAMPLES})"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN_OR_MODEL",
        help="a model whose answers are compared with those of --model",
    )
    parser.add_argument("--labels", type=Path, metavar="DIR", help="collection of people's choices, for agreement")
    parser.add_argument("--seed", type=int, metavar="S", help="of replies, and of the principles that are drawn (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the rows (principles/NAME)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
