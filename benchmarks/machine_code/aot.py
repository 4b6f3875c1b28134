"""Compile every kernel for GPUs that are not here, and read what the code needs.

`python benchmarks/machine_code/aot.py [--all] [--brief] [--json] [--only PART] [--jobs N]` prints a
table of registers, spills, shared memory, tensor-core instructions and 128-bit loads. ptxas and
cuobjdump come with triton; no driver is needed. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from aot_further import further
from aot_quantised import quantised_variants
from compiled import Report, Variant, compile_variant

from palmette.kernels.cuda.add_rms_norm import add_rms_norm_kernel
from palmette.kernels.cuda.bitmask import bitmask_kernel
from palmette.kernels.cuda.common import padded
from palmette.kernels.cuda.feed import feed_kernel, uniforms_kernel
from palmette.kernels.cuda.gemm import linear_kernel, tiles_of
from palmette.kernels.cuda.paged_decode import REDUCED_TOGETHER, paged_decode_kernel, reduce_kernel
from palmette.kernels.cuda.paged_extend import paged_extend_kernel
from palmette.kernels.cuda.rope_write import rope_write_kernel
from palmette.kernels.cuda.sampler import MAX_BLOCK, NUM_WARPS, edit_kernel, sample_kernel
from palmette.kernels.cuda.silu_mul import silu_mul_kernel
from palmette.kernels.cuda.triton_attention import Tiles, extend_tiles, narrow_tiles, wide_tiles
from palmette.kernels.cuda.work import SPLIT

_POINTER_KINDS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_ROWS = {"num_rows": "i32"}
_KV_ARGUMENTS = ("keys", "values", "key_scales", "value_scales")
_KV_CODES = tuple(  # name, the GPUs that read it so
    (name, capabilities) for name in ("int8", "fp8") for capabilities in ((90,), (80, 89))
)


def variants() -> Iterator[Variant]:
    """The whole table: main configurations, and what follows from them."""
    main = list(_main_variants())
    yield from main
    yield from further(main)


def _main_variants() -> Iterator[Variant]:
    for kind in ("bf16", "fp16", "fp32"):
        for head_dim in (64, 96, 128, 256) if kind != "fp32" else (64, 128):
            for group in (1, 3, 4, 8) if kind == "bf16" else (4,):
                yield from _attention(kind, head_dim, group)
        yield from _elementwise(kind)
        yield from _linears(kind)
    yield from quantised_variants()
    yield from _feed()


def _attention(kind: str, head_dim: int, group: int) -> Iterator[Variant]:
    size = 4 if kind == "fp32" else 2
    is_main = kind == "bf16" and (head_dim, group) in ((64, 4), (128, 4), (128, 8))
    for capabilities in ((90,), (80, 89)):
        narrow = narrow_tiles(head_dim, group, size, capability=capabilities[0])
        wide = wide_tiles(head_dim, size, capability=capabilities[0])
        tall = extend_tiles(head_dim, size, capability=capabilities[0])
        for variant in (
            _decode(kind, head_dim, group, "narrow", narrow, fused=True, is_main=is_main),
            _decode(kind, head_dim, group, "wide", wide, fused=False, is_main=is_main),
            _extend(kind, head_dim, group, "plain", tall, split=0, is_main=is_main),
            _extend(kind, head_dim, group, "deterministic", tall, split=SPLIT, is_main=is_main),
        ):
            yield replace(variant, capabilities=capabilities)
    if kind != "fp32" and group == 4:
        yield from _attention_of_codes(kind, head_dim, group)
    if group == 4:
        yield Variant(
            name=f"reduce {kind} D{head_dim}",
            kernel=reduce_kernel,
            types={
                **dict.fromkeys(("part_acc", "part_peak", "part_total"), "*fp32"),
                "out": _POINTER_KINDS[kind],
                **dict.fromkeys(("rows", "first_parts", "num_parts"), "*i32"),
            },
            constants={
                **{"NUM_HEADS": 4 * group, "HEAD_DIM": head_dim, "DIM_PAD": padded(head_dim)},
                "PARTS": REDUCED_TOGETHER,
            },
            options={"num_warps": 1, "enable_fp_fusion": False},
            in_short_list=is_main,
        )


def _attention_of_codes(kind: str, head_dim: int, group: int) -> Iterator[Variant]:
    is_main = kind == "bf16" and head_dim == 128
    for codes, capabilities in _KV_CODES:
        narrow = narrow_tiles(head_dim, group, scaled=True, capability=capabilities[0])
        wide = wide_tiles(head_dim, scaled=True, capability=capabilities[0])
        tall = extend_tiles(head_dim, scaled=True, capability=capabilities[0])
        for variant in (
            _decode(kind, head_dim, group, "narrow", narrow, fused=True, is_main=is_main),
            _decode(kind, head_dim, group, "wide", wide, fused=False, is_main=False),
            _extend(kind, head_dim, group, "deterministic", tall, split=SPLIT, is_main=is_main),
        ):
            yield replace(
                variant,
                name=f"{variant.name} kv {codes}",
                types={
                    **variant.types,
                    **dict.fromkeys(("keys", "values"), "*u32"),
                    **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
                },
                constants={**variant.constants, "SCALED": True, "E4M3": codes == "fp8"},
                capabilities=capabilities,
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
        "SCALED": False,
        "E4M3": False,
    }


def _decode(
    kind: str, head_dim: int, group: int, mode: str, tiles: Tiles, *, fused: bool, is_main: bool
) -> Variant:
    pointers = ("num_items", "item_first", "item_count", "item_pages", "item_split", "item_rows")
    return Variant(
        name=f"decode {mode} {kind} D{head_dim} G{group}",
        kernel=paged_decode_kernel,
        types={
            **dict.fromkeys(("q", *_KV_ARGUMENTS), _POINTER_KINDS[kind]),
            **dict.fromkeys(("part_acc", "part_peak", "part_total"), "*fp32"),
            **dict.fromkeys((*pointers, "row_parts", "positions", "page_ids"), "*i32"),
            "q_stride": "i32",
            "scale": "fp32",
        },
        constants={**_shape(head_dim, group, tiles), "SPLIT": SPLIT},
        options=_options(tiles, fused=fused),
        needs_tensor_core=kind != "fp32",
        needs_wide_loads=kind != "fp32",
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
            **dict.fromkeys(("q", *_KV_ARGUMENTS, "out"), _POINTER_KINDS[kind]),
            **dict.fromkeys((*pointers, "positions", "page_ids"), "*i32"),
            "q_stride": "i32",
            "scale": "fp32",
        },
        constants={**_shape(head_dim, group, tiles), "SPLIT": split},
        options=_options(tiles, fused=split == 0),
        needs_tensor_core=kind != "fp32",
        needs_warpgroup=kind != "fp32",
        needs_wide_loads=kind != "fp32",
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
        needs_wide_loads=True,
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
        needs_wide_loads=True,
        in_short_list=is_main,
    )
    for norm, codes in ((False, ""), (True, ""), (True, "int8"), (True, "fp8")):
        kv = {"": pointer, "int8": "*i8", "fp8": "*u8"}[codes]
        yield Variant(
            name=f"rope_write {kind}{' norm' if norm else ''}{f' kv {codes}' if codes else ''}",
            kernel=rope_write_kernel,
            types={
                **dict.fromkeys(("qkv", "q_out"), pointer),
                **dict.fromkeys(("q_norm", "k_norm"), pointer if norm else "*fp32"),
                **dict.fromkeys(("keys", "values"), kv),
                **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
                **dict.fromkeys(("positions", "slots"), "*i32"),
                **dict.fromkeys(("cos", "sin"), "*fp32"),
                "eps": "fp32",
                "row_stride": "i32",
            },
            constants={
                **{"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF_PAD": 64},
                **{"HEAD_BLOCK": 8, "QK_NORM": norm, "SCALED": bool(codes)},
            },
            options={"num_warps": 1},
            needs_wide_loads=True,
            in_short_list=is_main and not codes,
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
            in_short_list=True,
        )


def _linears(kind: str) -> Iterator[Variant]:
    """The tiles of one row, of tens and of many, over matrices of few and of many outputs."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    for capabilities in ((90,), (80, 89)):
        known = []
        for rows in (1, 64, 256, 2048):
            for columns in (4096, 32768):
                tiles = tiles_of(rows, columns, dtype, capability=capabilities[0])
                if tiles not in known:
                    known.append(tiles)
                    variant = _linear(kind, f"{rows} rows {columns} columns", tiles)
                    yield replace(variant, capabilities=capabilities)


def _linear(kind: str, shape: str, tiles: Mapping[str, int]) -> Variant:
    sizes = ("num_rows", "num_columns", "depth", "x_stride", "weight_stride")
    return Variant(
        name=f"linear {kind} {shape}",
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
        needs_warpgroup=kind != "fp32",
        needs_wide_loads=True,
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
        scalars=("mask_stride", "out_logprobs"),
        needs_wide_loads=True,
        in_short_list=True,
    )


def _feed() -> Iterator[Variant]:
    """Of no floating-point kind: what a step takes from the choice before it."""
    pointers = ("token_ids", "sources", "chosen", "out")
    lists = ("positions", "slots", "row_pages", "page_ids")
    for page in (0, 16):
        yield Variant(
            name=f"feed_tokens{' pages' if page else ''}",
            kernel=feed_kernel,
            types={**dict.fromkeys((*pointers, *lists), "*i32"), **_ROWS},
            constants={"BLOCK": 256, "PAGE": page},
            scalars=("num_rows",),
            in_short_list=bool(page),
        )
    for has_rows in (False, True):
        yield Variant(
            name=f"uniforms{' rows' if has_rows else ''}",
            kernel=uniforms_kernel,
            types={
                **{"seeds": "*i64", "out": "*fp64"},
                **dict.fromkeys(("choices", "positions", "rows"), "*i32"),
                **_ROWS,
            },
            constants={"BLOCK": 256, "HAS_ROWS": has_rows},
            scalars=("num_rows",),
            in_short_list=has_rows,
        )


def wanted(*, everything: bool, name_part: str = "", brief: bool = False) -> list[tuple[int, int]]:
    """(index in `variants`, capability): the short list for each GPU; with `everything` the
    others too, for sm_90. `brief`: of older GPUs only what `_is_brief` keeps."""
    return [
        (index, capability)
        for index, variant in enumerate(variants())
        if name_part in variant.name
        for capability in variant.capabilities
        if variant.in_short_list or (everything and capability == 90)
        if capability == 90 or not brief or _is_brief(variant, capability)
    ]


def _is_brief(variant: Variant, capability: int) -> bool:
    """On sm_80 what has matrix products, on sm_89, whose tiles are the same, attention alone."""
    if not variant.needs_tensor_core or variant.name.endswith("G8"):
        return False
    is_attention = variant.name.startswith(("decode", "extend")) and " kv " not in variant.name
    return is_attention or capability == 80


def report_of(place: tuple[int, int]) -> Report:
    """Of one of `wanted`."""
    index, capability = place
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a default of triton's that kernels do not depend on
        return compile_variant(list(variants())[index], capability)


def line(report: Report) -> str:
    return (
        f"{report.name:36} sm_{report.capability}  {report.registers:3} regs  "
        f"{report.spills:3} spills  {report.shared_bytes / 1024:5.0f} KB  "
        f"{report.tensor_core:3} mma  {report.warpgroup:3} wgmma  {report.wide_loads:3} ld128  "
        f"{'; '.join(report.problems)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant for sm_90")
    parser.add_argument("--brief", action="store_true", help="less for sm_80 and sm_89")
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--only", default="", help="part of a variant's name")
    parser.add_argument("--jobs", type=int, default=1, help="compile so many at once")
    options = parser.parse_args()
    places = wanted(everything=options.all, name_part=options.only, brief=options.brief)
    failed = 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(report_of, places):
            failed += bool(report.problems)
            text = json.dumps(asdict(report)) if options.json else line(report)
            print(text, flush=True)
    print(f"{len(places)} configurations, {failed} with problems", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
