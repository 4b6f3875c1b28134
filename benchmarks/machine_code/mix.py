"""What bounds the hottest loop of a kernel, read from its machine code: a prediction.

`python benchmarks/machine_code/mix.py [--only PART] [--json] [--table]` compiles the kernels of a
decode step and of a prefill for sm_90, finds the loop that streams, counts its instructions by the
unit that executes them, and prints the clocks that each unit needs beside those of the memory for
what an iteration reads. Nothing is run: latencies that are not hidden, bank conflicts and the ends
of a launch are not in it. Rates are those of an H200 (CUDA programming guide, throughput of
arithmetic instructions of compute capability 9.0; Hopper's data sheet).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aot import variants
from compiled import SHARED_LIMIT, Variant, build, disassemble

CAPABILITY = 90
PROCESSORS = 132
CLOCK = 1.75e9  # Hz under load
MEMORY = 4.8e12 / PROCESSORS / CLOCK  # bytes a clock of one processor's share
CACHE = 7.0e12 / PROCESSORS / CLOCK  # the same of the second-level cache: an estimate
IN_FLIGHT = 48 * 1024  # bytes that a processor must have asked for, at that rate and about 1.3 us
_SHARED_BYTES = 128  # a clock
_MACS = 2048  # a clock, 16-bit factors, dense
# threads of one processor that a unit serves in a clock
_LANES = {
    **{"issue": 128, "float": 128, "integer": 64, "multiply": 64, "convert": 64, "special": 16}
}
_UNITS = {
    "float": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"),
    "multiply": ("IMAD",),
    "integer": (
        *("IADD3", "VIADD", "LOP3", "PRMT", "SHF", "LEA", "SEL", "ISETP", "FSETP", "FSEL"),
        *("FMNMX", "PLOP3", "P2R", "R2P", "SGXT", "VIMNMX", "IMNMX", "BMSK", "VOTE"),
    ),
    "convert": ("F2FP", "I2FP", "F2F", "F2I", "I2F"),
    "special": ("MUFU",),
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names}
_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
HOT = (  # variants, by name, whose loops a step spends its time in
    "decode narrow bf16 D64 G4",
    "decode narrow bf16 D128 G4",
    "decode wide bf16 D64 G4",
    "decode wide bf16 D128 G4",
    "decode narrow bf16 D128 G4 kv int8",
    "decode narrow bf16 D128 G4 kv fp8",
    "decode wide bf16 D128 G4 kv int8",
    "decode wide bf16 D128 G4 kv fp8",
    "extend plain bf16 D128 G4",
    "extend deterministic bf16 D128 G4",
    "linear bf16 1 rows 4096 columns",
    "linear bf16 64 rows 32768 columns",
    "linear bf16 2048 rows 4096 columns",
    "quantised int8/32 bf16 1 rows",
    "quantised int4/32 bf16 1 rows",
    "quantised int4/32 min bf16 1 rows",
    "quantised fp8 bf16 1 rows",
    "quantised int4/32 min bf16 2048 rows",
    "sample",
    "rope_write bf16 norm",
    "add_rms_norm bf16",
    "silu_mul bf16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One iteration of the hottest loop, or the whole kernel where there is none."""

    name: str
    registers: int
    programs: int  # of one processor at once
    buffers: int  # bytes of one processor that copies are in flight to, at most
    instructions: int  # of one warp
    seldom: int  # more of them that most iterations jump over
    streamed: int  # bytes of a program that come from memory, once each
    copied: int  # bytes that a program asks for, from wherever they come
    clocks: dict[str, float]  # by limit
    counts: dict[str, int]  # instructions of a warp by name

    @property
    def bound(self) -> str:
        return max(self.clocks, key=lambda name: self.clocks[name])

    @property
    def share(self) -> float:
        """Of the best that memory or tensor cores allow, if nothing else were in the way."""
        best = max(self.clocks.get("memory", 0.0), self.clocks.get("tensor", 0.0))
        return best / self.clocks[self.bound]


def mix(variant: Variant) -> Mix:
    compiled = build(variant, CAPABILITY)
    sass, usage = disassemble(compiled.asm["cubin"])
    warps = int(compiled.metadata.num_warps)
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    body, seldom = hottest_loop([(int(at, 16), text) for at, text in _LINE.findall(sass)])
    counts = Counter(_name(text).split(".")[0] for text in body)
    per_unit = Counter({"issue": len(body)})
    for name, count in counts.items():
        per_unit[_UNIT_OF.get(name, "")] += count
    clocks = {unit: per_unit[unit] * 32 * warps / lanes for unit, lanes in _LANES.items()}
    macs = sum(_macs(_name(text)) for text in body) * warps
    clocks["tensor"] = macs / _MACS
    clocks["shared"] = sum(_shared_bytes(_name(text)) for text in body) * 32 * warps / _SHARED_BYTES
    copied = sum(_copied_bytes(_name(text)) for text in body) * 32 * warps - _masked(variant)
    streamed = _streamed(variant, copied)
    clocks["memory"] = streamed / MEMORY
    clocks["cache"] = copied / CACHE
    shared = int(compiled.metadata.shared)
    programs = min(
        65536 // (-(-registers // 8) * 8 * 32 * warps),
        SHARED_LIMIT[CAPABILITY] // (shared + 1024),
        2048 // (32 * warps),
    )
    return Mix(
        name=variant.name,
        registers=registers,
        programs=programs,
        buffers=programs * _buffers(compiled.asm["ttgir"]),
        instructions=len(body),
        seldom=seldom,
        streamed=streamed,
        copied=copied,
        clocks=clocks,
        counts=dict(counts.most_common()),
    )


def hottest_loop(code: Sequence[tuple[int, str]]) -> tuple[list[str], int]:
    """Of [(address, instruction)]: the innermost loop with most matrix products and copies, all
    of it where nothing loops; less what a branch inside of it jumps over, which is counted: masks
    of a last tile, sums that are folded now and then."""
    branches = [
        (at, int(target[1], 16))
        for at, text in code
        if (target := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text))
    ]
    loops = [(target, at) for at, target in branches if target < at]
    inner = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    bodies = [[(at, text) for at, text in code if first <= at <= last] for first, last in inner]
    if not bodies:
        return [text for _, text in code], 0
    body = max(bodies, key=_weight)
    last = body[-1][0]
    jumps = [(at, to) for at, to in branches if body[0][0] <= at < to <= last]
    kept = [text for at, text in body if not any(start < at < stop for start, stop in jumps)]
    return kept, len(body) - len(kept)


def _weight(body: Sequence[tuple[int, str]]) -> tuple[int, int]:
    names = [_name(text) for _, text in body]
    return sum(map(_macs, names)), sum(map(_copied_bytes, names))


def _name(text: str) -> str:
    """`@!P0 LDG.E.128 R4, ...` -> `LDG.E.128`."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def _macs(name: str) -> int:
    """Products of 16-bit factors that a warp's instruction stands for."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x16\b", name):
        return int(found[1]) * int(found[2]) * 16 // 4  # of four warps together
    return 16 * 8 * 16 if name.startswith("HMMA.16816") else 0


def _size(name: str) -> int:
    """Bytes of a thread."""
    found = re.search(r"\.(U8|S8|U16|S16|64|128)\b", name)
    return {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[found[1]] if found else 4


def _copied_bytes(name: str) -> int:
    return _size(name) if name.startswith(("LDG.", "LDGSTS")) else 0


def _shared_bytes(name: str) -> int:
    if name.startswith(("LDSM", "STSM")):
        tiles = re.search(r"\.([24])$", name)
        return 4 * int(tiles[1]) if tiles else 4
    if name.startswith("LDGSTS"):
        return _size(name)
    # a byte takes a bank as four do
    return max(4, _size(name)) if name.startswith(("LDS", "STS")) else 0


def _buffers(ttgir: str) -> int:
    """Bytes of the buffers that asynchronous copies fill."""
    total = 0
    for shape, kind in re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<([\dx]+)x(\w+),", ttgir):
        bits = re.search(r"\d+", kind)
        size = int(bits[0]) // 8 if bits else 1
        for extent in shape.split("x"):
            size *= int(extent)
        total += size
    return total


def _masked(variant: Variant) -> int:
    """Bytes of rows of x that a product with few rows does not read."""
    of: dict[str, Any] = dict(variant.constants)
    rows = re.search(r"(\d+) rows", variant.name)
    depth = of.get("BLOCK_K", of.get("GROUP", 0) * of.get("GROUPS", 1))
    return max(0, of["BLOCK_M"] - int(rows[1])) * depth * 2 if rows else 0


def _streamed(variant: Variant, copied: int) -> int:
    """What comes from memory once: K and V, weights; the rest is another program's, too."""
    of: dict[str, Any] = dict(variant.constants)
    kind = variant.name.split()[0]
    if kind == "extend" or of.get("BLOCK_M", 0) > 64:
        return 0
    if kind == "decode":
        size = 1 if of["SCALED"] else 2
        return int(2 * of["BLOCK_N"] * (of["HEAD_DIM"] * size + 4 * of["SCALED"]))
    if kind == "linear":
        return int(of["BLOCK_N"] * of["BLOCK_K"] * 2)
    if kind == "quantised":
        inputs = of["GROUP"] * of.get("GROUPS", 1)
        scales = 2 * of.get("GROUPS", 1) * (1 + of["HAS_MINIMUM"]) if of["PER_GROUP"] else 0
        return int(of["BLOCK_N"] * (inputs // (2 if of["IS_INT4"] else 1) + scales))
    return copied


def line(found: Mix) -> str:
    clocks = "  ".join(
        f"{name} {clocks:5.0f}" for name, clocks in found.clocks.items() if clocks >= 0.5
    )
    return (
        f"{found.name:38} {found.registers:3} regs  {found.programs:2} programs  "
        f"{found.buffers / 1024:4.0f} KB in flight  {found.instructions:4} instructions  "
        f"{found.streamed / 1024:5.1f} KB streamed  {clocks}  -> {found.bound} {found.share:.0%}"
    )


def row(found: Mix) -> str:
    """A row of the table in docs/performance.md."""
    clocks = {name: round(count) for name, count in found.clocks.items()}
    other = max(
        (name for name in clocks if name not in ("memory", "tensor", "cache")),
        key=lambda name: clocks[name],
    )
    flying = f"{found.buffers / 1024:.0f} KB" if found.buffers else ""
    return (
        f"| {found.name} | {found.registers} | {found.programs} | {flying} | {clocks['memory']} | "
        f"{clocks['tensor']} | {clocks['cache']} | {clocks[other]} {other} | {found.bound} | "
        f"{found.share:.0%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a variant's name")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--table", action="store_true", help="rows in Markdown")
    options = parser.parse_args()
    chosen = {
        variant.name: variant
        for variant in variants()
        if CAPABILITY in variant.capabilities
        and variant.name in HOT
        and options.only in variant.name
    }
    for variant in chosen.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = mix(variant)
        text = json.dumps(asdict(found)) if options.json else line(found)
        print(row(found) if options.table else text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
