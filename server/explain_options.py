"""The flags of `palmette explain`; they are read without loading what makes the forecast."""

from __future__ import annotations

import argparse

FORMS = ("text", "json", "dot", "svg", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "palmette explain [options] FILE:FUNCTION"
    parser.description = (
        "Compile a program and tell what a run takes: tokens and cache hits of each call, forward "
        "passes, pages, seconds."
    )
    parser.add_argument("target", metavar="FILE:FUNCTION", help="a program in a Python file")
    text = "an argument of the program; numbers, true, false and null are read as such"
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "an argument whose value the function looks at; may be a list or object as JSON"
    parser.add_argument("--const", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "run it too, and show what was measured"
    parser.add_argument("--analyze", action="store_true", help=text)
    text = "given what the cache of the server at --url holds now, not an empty one"
    parser.add_argument("--warm", action="store_true", help=text)
    parser.add_argument("--format", choices=FORMS, default="text", help="default: %(default)s")
