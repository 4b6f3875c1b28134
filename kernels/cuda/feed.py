"""What a step takes from the choice before it, on the device: its token ids, and random numbers.

The steps of a graph also write down there which pages their rows have begun.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import Launch, check

_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows"])
def feed_kernel(
    token_ids, sources, chosen, out, positions, slots, row_pages, page_ids, num_rows,
    BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    given = tl.load(token_ids + row, mask=inside, other=0)
    source = tl.load(sources + row, mask=inside, other=-1)
    fed = tl.load(chosen + source, mask=inside & (source >= 0), other=0)
    tl.store(out + row, tl.where(source >= 0, tl.maximum(fed, 0), given), mask=inside)
    if PAGE > 0:
        slot = tl.load(slots + row, mask=inside, other=-1)
        first = tl.load(row_pages + row, mask=inside, other=-1)
        index = tl.load(positions + row, mask=inside, other=0) // PAGE
        tl.store(page_ids + first + index, slot // PAGE, mask=(slot >= 0) & (first >= 0))


def feed_tokens(
    token_ids: Tensor,
    sources: Tensor,
    chosen: Tensor,
    *,
    lists: Mapping[str, Tensor] | None = None,
    page_size: int = 0,
) -> Tensor:
    """[T], [T], [C] int32 -> [T]: chosen[source] where source >= 0, else the given id.

    A row whose choice failed (-1) gets id 0. lists: also puts the page of each row's slot into its
    list: page_ids[row_pages + positions // page_size] = slots // page_size, all int32, the others
    [T]; rows whose slot or row_pages is -1 have none.
    """
    check("token_ids", token_ids, ndim=1, dtypes=(torch.int32,))
    check("sources", sources, ndim=1, dtypes=(torch.int32,))
    out = torch.empty_like(token_ids)
    num_rows = len(token_ids)
    if num_rows:
        names = ("positions", "slots", "row_pages", "page_ids")
        own = [token_ids if lists is None else lists[name] for name in names]
        feed_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            token_ids, sources, chosen, out, *own, num_rows,
            BLOCK=_BLOCK, PAGE=0 if lists is None else page_size, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["num_rows"])
def uniforms_kernel(
    seeds, choices, positions, rows, out, num_rows, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    at = row
    if HAS_ROWS:
        at = tl.load(rows + row, mask=inside, other=0)
    position = (tl.load(positions + at, mask=inside, other=0) + 1).to(tl.int64).to(tl.uint64)
    choice = tl.load(choices + row, mask=inside, other=0).to(tl.int64).to(tl.uint64)
    z = _mix(tl.load(seeds + row, mask=inside, other=0).to(tl.uint64) + 0x9E3779B97F4A7C15)
    z = _mix((z ^ choice) + 0x9E3779B97F4A7C15)
    z = _mix((z ^ position) + 0x9E3779B97F4A7C15)
    bits = (z >> 11).to(tl.int64)  # 53 of them: exact in float64
    tl.store(out + row, bits.to(tl.float64) * 1.1102230246251565e-16, mask=inside)


def uniforms(seeds: Tensor, choices: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
    """float64 [S] in [0, 1): `kernels.sampling.uniforms` for tokens behind `positions`.

    seeds [S] int64, the bits of uint64; choices [S] int32; positions int32 of the step's tokens,
    of which `rows` [S] int32 are meant, None: the first S.
    """
    out, launch = uniforms_launch(seeds, choices, positions, rows)
    launch()
    return out


def uniforms_launch(
    seeds: Tensor, choices: Tensor, positions: Tensor, rows: Tensor | None
) -> tuple[Tensor, Launch]:
    """What `uniforms` returns, and the launch that fills it."""
    check("seeds", seeds, ndim=1, dtypes=(torch.int64,))
    check("positions", positions, ndim=1, dtypes=(torch.int32,))
    num_rows = len(seeds)
    out = torch.empty(num_rows, dtype=torch.float64, device=seeds.device)
    return out, Launch(
        uniforms_kernel,
        (triton.cdiv(num_rows, _BLOCK),),
        (seeds, choices, positions, choices if rows is None else rows, out, num_rows),
        {"BLOCK": _BLOCK, "HAS_ROWS": rows is not None, "num_warps": 4},
    )
