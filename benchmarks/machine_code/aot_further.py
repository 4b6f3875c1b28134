"""Configurations of the table that follow from its main ones: what steps launch beside them.

Rows of other widths, heads of other sizes, windows, biases, sizes that are no multiples of 16.
That every launch of a runner is in the table is what `tests/rehearsal` finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from compiled import Variant

from palmette.kernels.cuda.common import padded

_WINDOW = 4096  # tokens
_WIDTHS = (1024, 2048, 8192)  # of a hidden state, padded; 4096 is a main one
_HEAD_DIMS = (64, 96, 128, 256)


def further(variants: Iterable[Variant]) -> Iterator[Variant]:
    """Of the main configurations, those that differ in one or two respects."""
    for variant in variants:
        kernel = variant.name.split()[0]
        if kernel == "decode":
            yield from _decode(variant)
        elif kernel == "extend":
            yield from _extend(variant)
        elif kernel == "reduce" and variant.name.split()[1] != "parts":
            yield _changed(variant, "free", options={"enable_fp_fusion": True})
        elif kernel == "add_rms_norm":
            yield from _norm(variant)
        elif kernel == "rope_write":
            yield from _rope(variant)
        elif kernel in ("linear", "sample", "edit"):
            yield from _odd(variant)


def _changed(
    variant: Variant,
    suffix: str,
    *,
    types: dict[str, str] | None = None,
    constants: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    scalars: tuple[str, ...] = (),
) -> Variant:
    return replace(
        variant,
        name=f"{variant.name} {suffix}",
        types={**variant.types, **(types or {})},
        constants={**variant.constants, **(constants or {})},
        options={**variant.options, **(options or {})},
        scalars=(*variant.scalars, *scalars),
        needs_wide_loads=variant.needs_wide_loads and not scalars,
        in_short_list=False,
    )


def _pages(variant: Variant) -> Iterator[Variant]:
    """Of other sizes than 16, where a tile of keys is in many pages or in one."""
    if "bf16 D128 G4" in variant.name and not variant.constants["SCALED"]:
        for size in (1, 64):
            yield _changed(variant, f"page {size}", constants={"PAGE": size})


def _decode(variant: Variant) -> Iterator[Variant]:
    """Where bits may differ, decodes of shared pages take the wide tiles too."""
    yield from _pages(variant)
    windowed = {"WINDOW": _WINDOW}
    if "bf16 D128 G4" in variant.name and not variant.constants["SCALED"]:
        yield _changed(variant, "window", constants=windowed)
    if " wide " in variant.name and "fp32" not in variant.name:
        shared = _changed(variant, "free", options={"enable_fp_fusion": True})
        yield shared
        if "bf16 D128 G4" in variant.name and not variant.constants["SCALED"]:
            yield _changed(shared, "window", constants=windowed)


def _extend(variant: Variant) -> Iterator[Variant]:
    yield from _pages(variant)
    if "bf16 D128 G4" in variant.name and not variant.constants["SCALED"]:
        yield _changed(variant, "window", constants={"WINDOW": _WINDOW})
    if variant.constants["SCALED"]:  # beside codes only the deterministic one is a main one
        yield _changed(variant, "free", constants={"SPLIT": 0}, options={"enable_fp_fusion": True})


def _norm(variant: Variant) -> Iterator[Variant]:
    first = {"HAS_RESIDUAL": False}  # of a model: nothing to add yet
    yield _changed(variant, "first", constants=first)
    if "bf16" in variant.name:
        for block in _WIDTHS:
            options = {"num_warps": min(16, max(1, block // 512))}
            wide = _changed(variant, str(block), constants={"BLOCK": block}, options=options)
            yield wide
            yield _changed(wide, "first", constants=first)


def _rope(variant: Variant) -> Iterator[Variant]:
    if "bf16" not in variant.name or (variant.constants["QK_NORM"] and " kv " not in variant.name):
        return
    for head_dim in _HEAD_DIMS:
        shape = {"HEAD_DIM": head_dim, "HALF_PAD": padded(head_dim // 2), "QK_NORM": False}
        stands_in = dict.fromkeys(("q_norm", "k_norm"), "*fp32")
        if shape.items() - variant.constants.items() or stands_in.items() - variant.types.items():
            yield _changed(variant, f"D{head_dim}", types=stands_in, constants=shape)


def _odd(variant: Variant) -> Iterator[Variant]:
    """With a bias; over a vocabulary whose size is no multiple of 16."""
    if "HAS_BIAS" in variant.constants:
        yield _changed(variant, "bias", constants={"HAS_BIAS": True})
    sizes = ("num_columns", "vocab_size", "raw_stride", "edited_stride", "stride")
    yield _changed(variant, "odd", scalars=tuple(n for n in sizes if n in variant.types))
