"""A kernel compiled for a GPU that need not be here, and what its code uses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # CUDA programming guide, bytes

_PRODUCT = re.compile(r"nvidia_mma<.*?warpsPerCTA = \[(.*?)\], instrShape = \[(.*?)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel in one configuration."""

    name: str
    kernel: Any
    types: Mapping[str, str]  # run-time arguments
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()  # integers, and pointers, that need not be multiples of 16
    needs_tensor_core: bool = False
    needs_warpgroup: bool = False  # products of 128 threads together, where a GPU has them
    needs_wide_loads: bool = False  # it streams: 128 bits at a time
    in_short_list: bool = False
    capabilities: tuple[int, ...] = tuple(SHARED_LIMIT)  # that it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the compiler made of a variant."""

    name: str
    capability: int
    registers: int
    spills: int  # local loads and stores
    shared_bytes: int
    tensor_core: int  # HMMA and HGMMA instructions
    warpgroup: int  # of them HGMMA, of sm_90
    wide_loads: int  # 128-bit global loads, asynchronous copies included
    atomics: int
    products: tuple[str, ...]  # "warps along rows x columns: rows, columns, depth" of matrix ones
    problems: tuple[str, ...]


def divisible_arguments(variant: Variant) -> list[str]:
    """What triton takes to be multiples of 16: pointers and sizes, where it looks at them."""
    looked_at = {
        param.name
        for param in variant.kernel.params
        if not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    }
    return [
        name
        for name, kind in variant.types.items()
        if name in looked_at
        and name not in variant.scalars
        and (kind.startswith("*") or kind == "i32")
    ]


def compile_variant(variant: Variant, capability: int) -> Report:
    return _report(variant, capability, build(variant, capability))


def build(variant: Variant, capability: int) -> Any:
    """Triton's compiled kernel: `asm` has every stage of it."""
    kernel = variant.kernel
    names = kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]] for name in divisible_arguments(variant)
    }
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attrs
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options)
    )


def _report(variant: Variant, capability: int, compiled: Any) -> Report:
    sass, usage = disassemble(compiled.asm["cubin"])
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    shared = int(compiled.metadata.shared)
    tensor_core = len(re.findall(r"\b(?:HMMA|HGMMA)\.", sass))
    warpgroup = len(re.findall(r"\bHGMMA\.", sass))
    wide_loads = len(re.findall(r"\b(?:LDG|LDGSTS)\S*\.128", sass))
    atomics = len(re.findall(r"\b(?:ATOM|ATOMG|ATOMS|RED)\.", sass))
    problems = []
    if spills:
        problems.append(f"{spills} spills")
    if shared > SHARED_LIMIT[capability]:
        problems.append(f"{shared} bytes of shared memory")
    if registers * 32 * int(compiled.metadata.num_warps) > 65536:
        problems.append(f"{registers} registers do not fit")
    if variant.needs_tensor_core and not tensor_core:
        problems.append("no tensor-core instruction")
    if variant.needs_warpgroup and capability == 90 and not warpgroup:
        problems.append("no warpgroup instruction")
    if variant.needs_wide_loads and not wide_loads:
        problems.append("no 128-bit load")
    if atomics:
        problems.append(f"{atomics} atomics: an order of additions that is not fixed")
    return Report(
        name=variant.name,
        capability=capability,
        registers=registers,
        spills=spills,
        shared_bytes=shared,
        tensor_core=tensor_core,
        warpgroup=warpgroup,
        wide_loads=wide_loads,
        atomics=atomics,
        products=tuple(
            f"{warps.replace(', ', ' x ')}: {shape}"
            for warps, shape in _PRODUCT.findall(compiled.asm["ttgir"])
        ),
        problems=tuple(problems),
    )


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(instructions, what they use) as cuobjdump prints them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run(
                [str(tool), option, file.name], check=True, capture_output=True, text=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    return sass, usage
