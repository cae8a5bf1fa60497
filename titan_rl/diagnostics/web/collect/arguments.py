"""Arguments of ``titan-rl collect``."""

import argparse
from pathlib import Path

COUNT, LABELLERS = 200, 1
"""Of a run's prompts; judgements of each. By default."""
MAX_NEW_TOKENS, TEMPERATURE = 512, 1.0
"""Of a model's answers. By default."""


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Prompts, and how a model answers them (``checked_prompts``)."""
    parser.add_argument("--prompts", metavar="FILE", help="prompts, which the model answers")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"longest answer of the model ({MAX_NEW_TOKENS})"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help=f"of the model ({TEMPERATURE:g})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="RUN_OR_MODEL",
        help="run directory, model, or a collection to go on with",
    )
    parser.add_argument("--pairs", metavar="FILE", help="prompts with two answers each, as data.file; instead of a run")
    add_sampling(parser)
    parser.add_argument("--planted", metavar="FILE", help="pairs whose chosen answer is known to be better")
    parser.add_argument("--rate", action="store_true", help="one answer at a time: rate it, and write a better one")
    parser.add_argument("--labellers", type=int, metavar="N", help=f"judgements wanted of each ({LABELLERS})")
    parser.add_argument("--count", type=int, metavar="N", help=f"prompts (all of a file, {COUNT} of a run)")
    parser.add_argument("--step", type=int, metavar="N", help="of the run (the newest)")
    parser.add_argument("--seed", type=int, metavar="S", help="of orders, and of the answers that are taken (1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the collection (preferences/NAME)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of 127.0.0.1 (any that is free)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print how far a collection is, and write its rows")
    parser.add_argument("--json", action="store_true", help="of --report")
