"""Compile every kernel for GPUs that are not here, and read what the code needs.

`python -m palmette.kernels.cuda.aot [--all] [--json]` prints registers, spills, shared memory and
tensor-core instructions per configuration. ptxas and cuobjdump come with triton; no driver is
needed. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .add_rms_norm import add_rms_norm_kernel
from .bitmask import bitmask_kernel
from .common import padded
from .gemm import linear_kernel, tiles_of
from .paged_decode import paged_decode_kernel, reduce_kernel
from .paged_extend import paged_extend_kernel
from .rope_write import rope_write_kernel
from .sampler import MAX_BLOCK, NUM_WARPS, edit_kernel, sample_kernel
from .silu_mul import silu_mul_kernel
from .triton_attention import Tiles, narrow_tiles, wide_tiles
from .work import SPLIT

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # CUDA programming guide, bytes
_POINTER_KINDS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel in one configuration."""

    name: str
    kernel: Any
    types: Mapping[str, str]  # run-time arguments
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()  # integers that need not be multiples of 16
    needs_tensor_core: bool = False
    in_short_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the compiler made of a variant."""

    name: str
    capability: int
    registers: int
    spills: int  # local loads and stores
    shared_bytes: int
    tensor_core: int  # HMMA and HGMMA instructions
    wide_loads: int  # 128-bit global loads, asynchronous copies included
    problems: tuple[str, ...]


def compile_variant(variant: Variant, capability: int) -> Report:
    kernel = variant.kernel
    names = kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    aligned = [
        name
        for name, kind in variant.types.items()
        if kind.startswith("*") or (kind == "i32" and name not in variant.scalars)
    ]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=dict(variant.constants), attrs=attrs
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(variant.options)
    )
    return _report(variant, capability, compiled)


def _report(variant: Variant, capability: int, compiled: Any) -> Report:
    sass, usage = _disassemble(compiled.asm["cubin"])
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", usage))
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    shared = int(compiled.metadata.shared)
    tensor_core = len(re.findall(r"\b(?:HMMA|HGMMA)\.", sass))
    problems = []
    if spills and capability == 90:  # the tiles are chosen for it; elsewhere they are shown
        problems.append(f"{spills} spills")
    if shared > SHARED_LIMIT[capability]:
        problems.append(f"{shared} bytes of shared memory")
    if registers * 32 * int(compiled.metadata.num_warps) > 65536:
        problems.append(f"{registers} registers do not fit")
    if variant.needs_tensor_core and not tensor_core:
        problems.append("no tensor-core instruction")
    return Report(
        name=variant.name,
        capability=capability,
        registers=registers,
        spills=spills,
        shared_bytes=shared,
        tensor_core=tensor_core,
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\S*\.128", sass)),
        problems=tuple(problems),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run(  # noqa: S603 - triton's own tool on our own file
                [str(tool), option, file.name], check=True, capture_output=True, text=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    return sass, usage


def variants() -> Iterator[Variant]:
    for kind in ("bf16", "fp16", "fp32"):
        for head_dim in (64, 96, 128, 256) if kind != "fp32" else (64, 128):
            for group in (1, 3, 4, 8) if kind == "bf16" else (4,):
                yield from _attention(kind, head_dim, group)
        yield from _elementwise(kind)
        for rows in (64, 2048) if kind != "fp32" else (64,):
            yield _linear(kind, rows)


def _attention(kind: str, head_dim: int, group: int) -> Iterator[Variant]:
    size = 4 if kind == "fp32" else 2
    wide, narrow = wide_tiles(head_dim, size), narrow_tiles(head_dim, group, size)
    is_main = kind == "bf16" and head_dim in (64, 128) and group == 4
    for mode, tiles, fused in (("narrow", narrow, True), ("wide", wide, False)):
        yield _decode(kind, head_dim, group, mode, tiles, fused=fused, is_main=is_main)
    for mode, split in (("plain", 0), ("deterministic", SPLIT)):
        yield _extend(kind, head_dim, group, mode, wide, split=split, is_main=is_main)
    if group == 4:
        yield Variant(
            name=f"reduce {kind} D{head_dim}",
            kernel=reduce_kernel,
            types={
                **dict.fromkeys(("part_acc", "part_peak", "part_total"), "*fp32"),
                "out": _POINTER_KINDS[kind],
                **dict.fromkeys(("rows", "first_parts", "num_parts"), "*i32"),
            },
            constants={"NUM_HEADS": 4 * group, "HEAD_DIM": head_dim, "DIM_PAD": padded(head_dim)},
            options={"num_warps": 1, "enable_fp_fusion": False},
            in_short_list=is_main,
        )


def _shape(head_dim: int, group: int, tiles: Tiles) -> dict[str, Any]:
    return {
        "NUM_HEADS": 8 * group,
        "NUM_KV_HEADS": 8,
        "GROUP_PAD": padded(group),
        "HEAD_DIM": head_dim,
        "DIM_PAD": padded(head_dim),
        "PAGE": 16,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "WINDOW": 0,
        "UPCAST": False,
    }


def _decode(
    kind: str, head_dim: int, group: int, mode: str, tiles: Tiles, *, fused: bool, is_main: bool
) -> Variant:
    pointers = ("num_items", "item_first", "item_count", "item_pages", "item_split", "item_rows")
    return Variant(
        name=f"decode {mode} {kind} D{head_dim} G{group}",
        kernel=paged_decode_kernel,
        types={
            **dict.fromkeys(("q", "keys", "values"), _POINTER_KINDS[kind]),
            **dict.fromkeys(("part_acc", "part_peak", "part_total"), "*fp32"),
            **dict.fromkeys((*pointers, "row_parts", "positions", "page_ids"), "*i32"),
            "q_stride": "i32",
            "scale": "fp32",
        },
        constants={**_shape(head_dim, group, tiles), "SPLIT": SPLIT},
        options=_options(tiles, fused=fused),
        needs_tensor_core=kind != "fp32",
        in_short_list=is_main,
    )


def _extend(
    kind: str, head_dim: int, group: int, mode: str, tiles: Tiles, *, split: int, is_main: bool
) -> Variant:
    pointers = ("tile_rows", "tile_tokens", "tile_pages", "tile_starts", "tile_ends")
    return Variant(
        name=f"extend {mode} {kind} D{head_dim} G{group}",
        kernel=paged_extend_kernel,
        types={
            **dict.fromkeys(("q", "keys", "values", "out"), _POINTER_KINDS[kind]),
            **dict.fromkeys((*pointers, "positions", "page_ids"), "*i32"),
            "q_stride": "i32",
            "scale": "fp32",
        },
        constants={**_shape(head_dim, group, tiles), "SPLIT": split},
        options=_options(tiles, fused=split == 0),
        needs_tensor_core=kind != "fp32",
        in_short_list=is_main,
    )


def _options(tiles: Tiles, *, fused: bool) -> dict[str, Any]:
    return {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": fused,
    }


def _elementwise(kind: str) -> Iterator[Variant]:
    pointer = _POINTER_KINDS[kind]
    is_main = kind == "bf16"
    yield Variant(
        name=f"silu_mul {kind}",
        kernel=silu_mul_kernel,
        types={"gate_up": pointer, "out": pointer, "num_columns": "i32", "row_stride": "i32"},
        constants={"BLOCK": 1024},
        in_short_list=is_main,
    )
    yield Variant(
        name=f"add_rms_norm {kind}",
        kernel=add_rms_norm_kernel,
        types={
            **dict.fromkeys(("x", "residual", "weight", "out"), pointer),
            "num_columns": "i32",
            "row_stride": "i32",
            "eps": "fp32",
        },
        constants={"HAS_RESIDUAL": True, "BLOCK": 4096},
        options={"num_warps": 8},
        in_short_list=is_main,
    )
    for norm in (False, True):
        yield Variant(
            name=f"rope_write {kind}{' norm' if norm else ''}",
            kernel=rope_write_kernel,
            types={
                **dict.fromkeys(("qkv", "q_out", "keys", "values", "q_norm", "k_norm"), pointer),
                **dict.fromkeys(("positions", "slots"), "*i32"),
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                "eps": "fp32",
                "row_stride": "i32",
            },
            constants={
                **{"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF_PAD": 64},
                **{"HEAD_BLOCK": 8, "QK_NORM": norm},
            },
            options={"num_warps": 1},
            in_short_list=is_main and norm,
        )
    if is_main:
        yield Variant(
            name="bitmask",
            kernel=bitmask_kernel,
            types={
                **{"logits": "*fp32", "masks": "*i32", "vocab_size": "i32"},
                **{"logits_stride": "i32", "mask_stride": "i32"},
            },
            constants={"BLOCK": 4096},
            scalars=("mask_stride",),
            in_short_list=True,
        )
        yield _sampler()
        yield Variant(
            name="edit logits",
            kernel=edit_kernel,
            types={
                **dict.fromkeys(("logits", "repetitions", "subtracts", "adds"), "*fp32"),
                **{"rows": "*i32", "ids": "*i32", "num_edits": "i32", "stride": "i32"},
            },
            constants={"BLOCK": 256},
            scalars=("num_edits",),
        )


def _linear(kind: str, rows: int) -> Variant:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    tiles = tiles_of(rows, dtype)
    sizes = ("num_rows", "num_columns", "depth", "x_stride", "weight_stride")
    return Variant(
        name=f"linear {kind} {rows} rows",
        kernel=linear_kernel,
        types={
            **dict.fromkeys(("x", "weight", "bias", "out"), _POINTER_KINDS[kind]),
            **dict.fromkeys(sizes, "i32"),
        },
        constants={
            **{name: tiles[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
            **{"GROUP": 8, "HAS_BIAS": False, "UPCAST": False},
        },
        options={name: tiles[name] for name in ("num_warps", "num_stages")},
        scalars=("num_rows",),
        needs_tensor_core=True,
        in_short_list=kind == "bf16",
    )


def _sampler() -> Variant:
    strides = ("vocab_size", "raw_stride", "edited_stride", "mask_stride")
    return Variant(
        name="sample",
        kernel=sample_kernel,
        types={
            **dict.fromkeys(("raw", "edited", "temperatures", "top_ps", "min_ps"), "*fp32"),
            **dict.fromkeys(("masks", "has_masks", "targets", "top_ks", "wants_logprob"), "*i32"),
            **{"randoms": "*fp64", "out_ids": "*i32", "out_logprobs": "*fp32"},
            **dict.fromkeys(strides, "i32"),
        },
        constants={"BLOCK": MAX_BLOCK},
        options={"num_warps": NUM_WARPS},
        scalars=("mask_stride",),
        in_short_list=True,
    )


def reports(*, everything: bool, name_part: str = "") -> Iterator[Report]:
    """The short list for sm_90; with `everything` all variants, and the short list for 80, 89."""
    for variant in variants():
        if name_part not in variant.name:
            continue
        if everything or variant.in_short_list:
            yield compile_variant(variant, 90)
        if everything and variant.in_short_list:
            yield compile_variant(variant, 80)
            yield compile_variant(variant, 89)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="part of a variant's name")
    options = parser.parse_args()
    failed = 0
    for report in reports(everything=options.all, name_part=options.only):
        failed += bool(report.problems)
        if options.json:
            print(json.dumps(asdict(report)), flush=True)
        else:
            print(
                f"{report.name:36} sm_{report.capability}  {report.registers:3} regs  "
                f"{report.spills:3} spills  {report.shared_bytes / 1024:5.0f} KB  "
                f"{report.tensor_core:3} mma  {report.wide_loads:3} ld128  "
                f"{'; '.join(report.problems)}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
