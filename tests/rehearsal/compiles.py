"""Compiles what a rehearsal launched: `python -m rehearsal.compiles`, a report per line.

stdin: lines of `[capability, {what Kernel.describe gives}]`. Rehearses nothing itself.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from aot import variants
from compiled import Variant, compile_variant


def variant_of(one: dict[str, Any], capability: int) -> Variant:
    alike = next(v for v in variants() if v.kernel.fn.__name__ == one["kernel"])
    return Variant(
        name=f"{one['kernel']} {one['constants']}",
        kernel=alike.kernel,
        types=one["types"],
        constants=one["constants"],
        options=one["options"],
        scalars=tuple(name for name in one["types"] if name not in one["divisible"]),
        needs_wide_loads=alike.needs_wide_loads and not _is_odd(one),
        needs_tensor_core=alike.needs_tensor_core and one["types"].get("q") != "*fp32",
        capabilities=(capability,),
    )


def _is_odd(one: dict[str, Any]) -> bool:
    """Rows that begin anywhere are read number by number; products of float32 are not looked at,
    and e4m3 beside few rows comes in copies of 64 bits."""
    types, constants = one["types"], one["constants"]
    sizes = {"vocab_size", "num_columns", "stride"} & types.keys()
    is_few_fp8 = constants.get("PER_GROUP") is False and constants["BLOCK_M"] < 64
    is_float = "*fp32" in (types.get("q"), types.get("x") if "codes" in types else None)
    return bool(sizes - set(one["divisible"])) or is_float or is_few_fp8


def report_of(line: str) -> dict[str, Any]:
    capability, one = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asdict(compile_variant(variant_of(one, capability), capability))


def main() -> None:
    lines = sorted(set(sys.stdin))
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(report_of, lines):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
