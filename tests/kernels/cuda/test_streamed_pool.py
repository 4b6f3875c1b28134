"""Pages that go out and in beside the kernels: as if everything happened in order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from palmette.kernels.backend import StreamedPool
from palmette.kernels.cuda.streamed_pool import StreamedKVPool
from palmette.kernels.kv_pool import PagedKVPool

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "num_pages": 12,
    "page_size": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
PAGES = range(SHAPE["num_pages"])


def pools(
    devices: Any, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, StreamedKVPool, PagedKVPool]:
    device = devices.QueueDevice(seed)
    page_bytes = PagedKVPool(dtype=dtype, **SHAPE).page_bytes
    streamed = StreamedKVPool(device, dtype=dtype, chunk_bytes=2 * page_bytes, **SHAPE)
    device.finish()
    device.calls.clear()
    return device, streamed, PagedKVPool(dtype=dtype, **SHAPE)


def write(pool: PagedKVPool, page: int, seed: int) -> None:
    """As a kernel does."""
    slots = torch.arange(page * 4, page * 4 + 4)
    numbers = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(seed))
    for layer in range(2):
        pool.write(layer, slots, numbers, numbers + layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_the_queues_gives_what_one_after_the_other_gives(
    seed: int, dtype: torch.dtype, fake_devices: Any
) -> None:
    rng = random.Random(seed)
    device, streamed, plain = pools(fake_devices, seed, dtype)
    pending: list[tuple[Any, bytes]] = []
    for step in range(60):
        kind = rng.choice(("write", "write", "copy", "export", "import", "read"))
        some = rng.sample(PAGES, rng.randint(1, 5))
        if kind == "write":
            for page in some:
                write(plain, page, step)
                device.submit(lambda page=page, step=step: write(streamed, page, step))
        elif kind == "copy":
            others = rng.sample(PAGES, len(some))
            plain.copy(some, others)
            streamed.copy(some, others)
        elif kind == "export":
            pending.append((streamed.export_later(some), plain.export(some)))
        elif kind == "import":
            data = rng.choice([b for _, b in pending] or [plain.export(some)])
            count = len(data) // plain.page_bytes
            pages = rng.sample(PAGES, count)
            plain.import_(pages, data)
            streamed.import_(pages, data)
        elif pending:
            found, expected = rng.choice(pending)
            assert found.data() == expected
    assert [found.data() for found, _ in pending] == [expected for _, expected in pending]
    assert streamed.export(PAGES) == plain.export(PAGES)


def test_the_host_waits_only_for_what_it_reads(fake_devices: Any) -> None:
    device, pool, _ = pools(fake_devices, 0)
    device.submit(lambda: write(pool, 3, 1))
    pages = pool.export_later([3, 4, 5])
    pool.import_([6, 7], bytes(2 * pool.page_bytes))
    pool.copy([6], [8])
    device.submit(lambda: write(pool, 3, 2))
    assert "wait" not in device.calls
    assert "side copy" in device.calls
    expected = PagedKVPool(dtype=torch.float32, **SHAPE)
    write(expected, 3, 1)
    assert pages.data() == expected.export([3, 4, 5])  # not what was written behind it
    assert device.calls.count("wait") == 1


def test_memory_of_the_side_queue_may_hold_what_earlier_kernels_read(fake_devices: Any) -> None:
    """It was free when it was taken on the host; the device may be behind."""
    device = fake_devices.QueueDevice()
    done: list[str] = []
    device.submit(lambda: done.append("an earlier kernel"))
    pool = StreamedKVPool(device, dtype=torch.float32, **SHAPE)
    pool._side.submit(lambda: done.append("the first copy"))
    device.finish()
    assert done == ["an earlier kernel", "the first copy"]


def test_errors_and_nothing_at_all(fake_devices: Any) -> None:
    device, pool, _ = pools(fake_devices, 0)
    assert isinstance(pool, StreamedPool)
    assert pool.export([]) == b""
    pool.import_([], b"")
    for call in (
        lambda: pool.export([99]),
        lambda: pool.copy([0], [99]),
        lambda: pool.import_([99], bytes(pool.page_bytes)),
    ):
        with pytest.raises(ValueError, match="outside of the pool of 12"):
            call()
    with pytest.raises(ValueError, match="bytes for 1 pages"):
        pool.import_([0], b"1234")
    device.finish()
    np.testing.assert_array_equal(np.frombuffer(pool.export(PAGES), np.uint8), 0)
