"""What was launched beside the compiled configurations (`benchmarks/machine_code/aot.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from aot import variants
from compiled import divisible_arguments

Parts = dict[str, frozenset[Any]]
_DEFAULTS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}  # triton's


def lacking(launched: Iterable[Mapping[str, Any]], capability: int) -> list[str]:
    """Each launched specialisation that no variant for that GPU is, beside the nearest that is."""
    known = _known(capability)
    missing = []
    for one in launched:
        wanted = _parts(one)
        same = [(name, parts) for name, kernel, parts in known if kernel == one["kernel"]]
        if not any(parts == wanted for _, parts in same):
            name, parts = min(same, key=lambda other: _distance(other[1], wanted))
            differs = {
                part: f"{sorted(map(str, wanted[part] - parts[part]))} "
                f"instead of {sorted(map(str, parts[part] - wanted[part]))}"
                for part in wanted
                if wanted[part] != parts[part]
            }
            missing.append(f"{one['kernel']}: as {name!r} but {differs}")
    return missing


@cache
def _known(capability: int) -> list[tuple[str, str, Parts]]:
    return [
        (variant.name, variant.kernel.fn.__name__, _parts(_described(variant)))
        for variant in variants()
        if capability in variant.capabilities
    ]


def _described(variant: Any) -> dict[str, Any]:
    return {
        "types": dict(variant.types),
        "constants": dict(variant.constants),
        "divisible": divisible_arguments(variant),
        "ones": (),
        "options": {**_DEFAULTS, **variant.options},
    }


def _parts(one: Mapping[str, Any]) -> Parts:
    """What decides the code; numbers of heads and of tokens in a page only
    enter into products and comparisons."""
    constants = dict(one["constants"])
    for name in ("NUM_HEADS", "NUM_KV_HEADS", "GROUP_PAD", "PAGE"):
        constants.pop(name, None)
    if "WINDOW" in constants:
        constants["WINDOW"] = constants["WINDOW"] > 0
    for name in one["ones"]:
        del constants[name]
    return {
        "types": frozenset(one["types"].items()),
        "constants": frozenset(constants.items()),
        "divisible": frozenset(one["divisible"]),
        "ones": frozenset(one["ones"]),
        "options": frozenset(one["options"].items()),
    }


def _distance(a: Parts, b: Parts) -> int:
    return sum(len(a[part] ^ b[part]) for part in a)
