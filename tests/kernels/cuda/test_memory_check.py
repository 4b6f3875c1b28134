"""The checks that run beside all kernels here: each is shown to find what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl
from checked_interpreter import last_programs
from memory_check import Launch, MemoryFault


@triton.jit
def copy_kernel(x, out, size, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at + shift, mask=at < size, other=0.0)
    tl.store(out + at, value, mask=at < size)


@triton.jit
def row_kernel(x, out, row_stride, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(x + row * row_stride + column, mask=inside)
    tl.store(out + row * BLOCK + column, value)


@triton.jit
def scatter_kernel(x, places, out, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out + tl.load(places + at), tl.load(x + at))


@triton.jit
def in_place_kernel(
    x, SHIFT: tl.constexpr, AGAIN: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + (at + SHIFT) % BLOCK)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, value + 1.0)
    if AGAIN:
        if BARRIER:
            tl.debug_barrier()
        tl.store(x + at, tl.load(x + at) + 1.0)


@triton.jit
def total_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at), axis=0))


@triton.jit
def product_kernel(x, out, size):
    tl.store(out, tl.load(x + size.to(tl.int64) * 0) + (size * size > 0).to(tl.float32))


@triton.jit
def bits_kernel(x, out):
    wide = (x + 1).to(tl.pointer_type(tl.int64))
    tl.store(out, tl.load(wide))


@triton.jit
def address_kernel(x, out):
    pointer = x.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(pointer))


def numbers(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


def test_what_lies_in_its_tensor_is_copied() -> None:
    out = torch.zeros(100)
    copy_kernel[(4,)](numbers(130)[:101], out, 100, 1, BLOCK=32)
    assert torch.equal(out, numbers(100) + 1)


@pytest.mark.parametrize("shift", [1, -1])
def test_an_element_beside_a_view_is_a_fault_though_it_is_in_memory(shift: int) -> None:
    x = numbers(130)[1:101]
    message = r"copy_kernel: program \(., 0, 0\) loads x at element (100|-1): it is \[100\]"
    with pytest.raises(MemoryFault, match=message):
        copy_kernel[(4,)](x, torch.zeros(100), 100, shift, BLOCK=32)
    with pytest.raises(MemoryFault, match="stores out at element 99: it is"):
        copy_kernel[(4,)](x, torch.zeros(130)[:99], 100, 0, BLOCK=32)


def test_an_element_between_rows_is_a_fault() -> None:
    x, out = numbers(64).view(4, 16)[:, :9], torch.zeros(4, 16)
    row_kernel[(4,)](x, out, 16, 9, BLOCK=16)
    assert torch.equal(out[:, :9], x)
    message = r"loads x at element \d+: it is \[4, 9\] with strides \[16, 1\]"
    with pytest.raises(MemoryFault, match=message):
        row_kernel[(4,)](x, out, 16, 10, BLOCK=16)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            [0, 1, 2, 3, 3, 4, 5, 6],
            r"program \(., 0, 0\) stores what program \(., 0, 0\) stores out",
        ),
        ([0, 1, 2, 2, 4, 5, 6, 7], "stores twice at once out at element 2; 1 such"),
        ([3, 2, 1, 0, 4, 6, 5, 7], None),
    ],
)
def test_an_address_that_is_stored_twice_is_a_fault(places: list[int], message: Any) -> None:
    out, x = torch.zeros(8), numbers(8)
    launch = scatter_kernel[(2,)]
    arguments = x, torch.tensor(places, dtype=torch.int32), out
    if message is None:
        launch(*arguments, STEP=4, BLOCK=4)
        assert torch.equal(out[places], x)
    else:
        with pytest.raises(MemoryFault, match=message):
            launch(*arguments, STEP=4, BLOCK=4)


def test_what_another_program_stores_must_not_be_loaded() -> None:
    x = numbers(64)
    total_kernel[(4,)](x, torch.zeros(4), BLOCK=16)
    with pytest.raises(MemoryFault, match=r"program \(0, 0, 0\) loads what program \(1, 0, 0\)"):
        total_kernel[(2,)](x, x[1:], BLOCK=16)


@pytest.mark.parametrize(
    ("shift", "again", "warps", "message"),
    [
        (0, False, 4, None),
        (1, False, 4, "loads, and another lane stores, x at element"),
        (0, True, 4, "loads, without a barrier, what it stored x at element 0; 128 such"),
        (0, False, 8, "loads in several warps, and stores, x at element"),
    ],
)
def test_a_program_that_stores_what_it_loads(
    shift: int, again: bool, warps: int, message: str | None
) -> None:
    options = {"SHIFT": shift, "AGAIN": again, "BLOCK": 128, "num_warps": warps}
    if message is not None:
        with pytest.raises(MemoryFault, match=message):
            in_place_kernel[(1,)](numbers(128), BARRIER=False, **options)
    x = numbers(128)
    in_place_kernel[(1,)](x, BARRIER=message is not None, **options)
    assert torch.equal(x, numbers(128).roll(-shift) + 1 + again)


def test_an_int32_that_wraps_is_a_fault() -> None:
    product_kernel[(1,)](numbers(1), torch.zeros(1), 46340)
    with pytest.raises(MemoryFault, match=r"product_kernel: 46341 \* 46341 does not fit"):
        product_kernel[(1,)](numbers(1), torch.zeros(1), 46341)


def test_an_address_that_is_not_a_multiple_is_a_fault() -> None:
    with pytest.raises(MemoryFault, match="not a multiple of 8 bytes"):
        bits_kernel[(1,)](numbers(6), torch.zeros(1, dtype=torch.int64))


def test_programs_run_in_another_order_than_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    begin = Launch.begin
    monkeypatch.setattr(Launch, "begin", lambda *args: (order.append(args[1][0]), begin(*args)))
    out = torch.zeros(9)
    copy_kernel[(9,)](numbers(9), out, 9, 0, BLOCK=1)
    assert torch.equal(out, numbers(9))
    assert sorted(order) == list(range(9)) and order != list(range(9))
    order.clear()
    with last_programs(2):
        copy_kernel[(9,)](numbers(9), torch.zeros(9), 9, 0, BLOCK=1)
    assert sorted(order) == [7, 8]


def test_a_grid_that_no_device_takes_is_a_fault() -> None:
    with pytest.raises(MemoryFault, match=r"copy_kernel: grid \(1, 65536, 1\) is not within"):
        copy_kernel[(1, 65536)](numbers(9), torch.zeros(9), 9, 0, BLOCK=1)


def test_memory_that_nobody_wrote_is_not_zero() -> None:
    assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == 2**31 - 1).all()
    assert torch.empty_like(numbers(3)).isnan().all() and numbers(3).new_empty(2).isnan().all()


def test_lanes_that_are_off_hold_nothing_to_rely_on() -> None:
    out = torch.zeros(1, 16)
    row_kernel[(1,)](numbers(16).view(1, 16)[:, :9], out, 16, 9, BLOCK=16)
    assert torch.equal(out[0, :9], numbers(9)) and out[0, 9:].isnan().all()


def test_a_pointer_from_nowhere_is_a_fault() -> None:
    with pytest.raises(MemoryFault, match=r"program \(0, 0, 0\) loads where no tensor's pointer"):
        address_kernel[(1,)](numbers(1), torch.zeros(1))
