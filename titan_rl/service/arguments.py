"""Arguments of ``titan-rl serve``, without its imports."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="TOML with the model and [lora]; --section.key value overrides it")
    parser.add_argument("--name", metavar="NAME", help="base model that clients ask for (the model's folder)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen at (any that is free)")
    parser.add_argument("--listen", metavar="NAME", help="this machine, as clients reach it; with --certificates")
    parser.add_argument("--certificates", metavar="DIR", help="for TLS: titan-rl host --make-certificates DIR NAME")
    parser.add_argument("--json", action="store_true", help="print a line with base_url, api_key and base_model")
