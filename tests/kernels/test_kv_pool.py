from __future__ import annotations

import pytest
import torch

from palmette.kernels.kv_dtype import KVDtype, kv_head_bytes
from palmette.kernels.kv_pool import PagedKVPool

CODES = [torch.int8, torch.float8_e4m3fn]


def pool(dtype: torch.dtype = torch.float32, *, filled: bool = True) -> PagedKVPool:
    made = PagedKVPool(
        num_layers=3, num_pages=5, page_size=4, num_kv_heads=2, head_dim=6, dtype=dtype
    )
    if filled and dtype in CODES:
        for layer in range(3):
            sides = torch.arange(2 * 20 * 2 * 6).view(2, 20, 2, 6) % 241 + 10.0 * layer
            made.write(layer, torch.arange(20), *sides)
    elif filled:
        for layer in range(3):
            for index, side in enumerate((made.keys(layer), made.values(layer))):
                numbers = torch.arange(side.numel()).view(side.shape) % 241
                side.copy_(numbers + 10 * layer + 5 * index)
    return made


def page(of: PagedKVPool, layer: int, page_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slice(4 * page_id, 4 * page_id + 4)
    return of.read(layer, torch.arange(20)[slots])


def equal(first: PagedKVPool, a: int, second: PagedKVPool, b: int) -> bool:
    return all(
        torch.equal(x, y)
        for layer in range(3)
        for x, y in zip(page(first, layer, a), page(second, layer, b), strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.int8, "int8"),
        (torch.float8_e4m3fn, "fp8"),
    ],
)
def test_page_bytes_count_all_layers_and_scales(dtype: torch.dtype, name: KVDtype) -> None:
    bytes_of_head = {"fp32": 6 * 4, "bf16": 6 * 2, "int8": 6 + 4, "fp8": 6 + 4}[name]
    assert pool(dtype).page_bytes == 3 * 2 * 4 * 2 * bytes_of_head
    assert kv_head_bytes(name, 6) == bytes_of_head
    assert (pool().num_pages, pool().page_size) == (5, 4)


@pytest.mark.parametrize("dtype", [torch.float32, *CODES])
def test_copy_reads_all_sources_before_it_writes(dtype: torch.dtype) -> None:
    before, after = pool(dtype), pool(dtype)
    after.copy([0, 1, 4], [1, 0, 3])
    for source, target in ((0, 1), (1, 0), (4, 3), (2, 2), (4, 4)):
        assert equal(before, source, after, target)
    assert not equal(before, 0, before, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *CODES])
def test_exported_pages_are_the_same_bits_in_another_pool(dtype: torch.dtype) -> None:
    source, target = pool(dtype), pool(dtype, filled=False)
    data = source.export([3, 1])
    assert len(data) == 2 * source.page_bytes
    target.import_([0, 4], data)
    assert equal(source, 3, target, 0)
    assert equal(source, 1, target, 4)
    assert not target.keys(0)[4:16].any()
    assert data[: source.page_bytes] == source.export([3])
    assert source.export([]) == b""


def test_wrong_pages_and_sizes_are_refused() -> None:
    made, before = pool(), pool()
    data = made.export([0])
    with pytest.raises(ValueError, match="page 5 is outside"):
        made.copy([0], [5])
    with pytest.raises(ValueError, match="page -1 is outside"):
        made.export([-1])
    with pytest.raises(ValueError, match="2 source and 1 target"):
        made.copy([0, 1], [2])
    with pytest.raises(ValueError, match="target page occurs twice"):
        made.copy([0, 1], [2, 2])
    with pytest.raises(ValueError, match="bytes for 1 pages"):
        made.import_([1], data[:-1])
    with pytest.raises(ValueError, match="page occurs twice"):
        made.import_([1, 1], data + data)
    assert all(equal(made, index, before, index) for index in range(5))
