"""The flags of `palmette schema check`, without what it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from palmette.constrained.spec import OPTION_NAMES, Additional, Formats, KeyOrder, Policy

_VALUES = {
    "whitespace": "bounded, compact, flexible, indent=n",
    "formats": ", ".join(Formats),
    "order": ", ".join(KeyOrder),
    "additional": ", ".join(Additional),
    "policy": ", ".join(Policy),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a JSON Schema; - reads standard input"
    )
    for name in OPTION_NAMES:
        parser.add_argument(f"--{name}", help=f"as in a request: {_VALUES[name]}")
    parser.add_argument(
        "--model",
        default="bytes",
        help="whose tokens are counted: a model as of `serve`, default for the built-in one, or "
        "bytes (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
