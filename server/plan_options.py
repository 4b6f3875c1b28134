"""The flags of `palmette plan`; they are read without loading what makes the plan."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

from palmette.kernels.kv_dtype import KV_DTYPES
from palmette.runtime.device_plan import PLANNED_WEIGHTS, PlanOptions
from palmette.runtime.model_store import MODELS
from palmette.runtime.models.presets import PRESETS

_UNITS = {"": 1, "B": 1} | {
    unit + suffix: base**power
    for suffix, base in (("", 1000), ("B", 1000), ("iB", 1024))
    for power, unit in enumerate("KMGT", start=1)
}
_LEAST_BARE = 1024  # less without a unit is rather a unit forgotten
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes of `80GB`, `80GiB`, `80G`, `80000000000` or `0`.

    Raises:
        ValueError: it is none of these, or a small number without a unit.
    """
    match = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): count for unit, count in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"size: {text!r} is not understood; write 80GB (10^9) or 80GiB (2^30)")
    number = Fraction(match[1])
    if not match[2] and 0 < number < _LEAST_BARE:
        raise ValueError(f"size: {text} needs a unit, as in {match[1]}GB; {match[1]}B means bytes")
    return int(number * units[match[2].lower()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = PlanOptions(memory_bytes=1)
    names = ", ".join((*MODELS, *PRESETS))
    text = f"a directory with config.json, a config.json, a .gguf file, or one of {names}"
    parser.add_argument("--model", required=True, help=text)
    parser.add_argument("--memory", required=True, help="of one device: 80GB, 24GiB, ...")
    text = f"auto or one of {', '.join(PLANNED_WEIGHTS)}; auto: as a .gguf file is kept, else bf16"
    parser.add_argument("--weights", default="auto", help=text)
    text = "inputs that share a scale, of int8 and int4; 0: scales are not counted"
    parser.add_argument("--group-size", type=int, default=defaults.group_size, help=text)
    text = f"auto or one of {', '.join(KV_DTYPES)}; auto: as the weights of a .gguf file, else bf16"
    parser.add_argument("--kv-dtype", default="auto", help=text)
    parser.add_argument("--page-size", type=int, default=defaults.page_size, help="tokens")
    text = "tokens of one sequence; default: the model's own"
    parser.add_argument("--context", type=int, default=None, help=text)
    text = "sequences at once; default: as many as fit"
    parser.add_argument("--concurrency", type=int, default=None, help=text)
    parser.add_argument("--tp", type=int, default=1, help="devices that share each layer")
    text = "most tokens of one step, for the workspace; default: %(default)s"
    parser.add_argument("--token-budget", type=int, default=defaults.token_budget, help=text)
    parser.add_argument("--workspace", help="size; default: from the token budget")
    parser.add_argument("--overhead", help="size; default: 2.5%% of the memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
