"""Arguments of ``titan-rl principles``."""

import argparse
from pathlib import Path

REVISIONS, SAMPLES = 1, 2
"""Rounds of critique and revision; answers to each prompt that are compared. By default."""
MAX_NEW_TOKENS, TEMPERATURE = 512, 1.0
"""Of the model's replies. By default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="constitution: TOML of [[principles]], or a recipe's name"
    )
    parser.add_argument(
        "--model", type=Path, metavar="RUN_OR_MODEL", help="answers, criticizes, revises; judges without --judge.url"
    )
    parser.add_argument("--prompts", metavar="FILE", help="prompts, which the model answers")
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
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"longest reply of the model ({MAX_NEW_TOKENS})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help=f"of the model ({TEMPERATURE:g})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the rows (principles/NAME)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
