"""`CudaDevice` over stand-ins for torch, which do what it does when CUDA ends a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from palmette.kernels.cuda.device import CudaDevice


class Stream(str):
    """Known by its name."""

    @property
    def cuda_stream(self) -> str:
        return str(self)


class Cuda:
    """What torch keeps for a thread, and its allocator's captures."""

    def __init__(self) -> None:
        self.index, self.stream = 0, Stream("default")
        self.num_streams = 0
        self.captures: list[str] = []
        self.breaks_off = False
        self.graphs: list[str] = []

    def make_stream(self, _device: Any = None) -> Stream:
        self.num_streams += 1
        return Stream(f"stream {self.num_streams}")

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before = self.index, self.stream
        self.index, self.stream = 0, stream
        try:
            yield
        finally:
            self.index, self.stream = before

    def end_allocate(self, _index: int, pool: str) -> None:
        if pool not in self.captures:
            raise RuntimeError("not currently recording to mempool_id")
        self.captures.remove(pool)

    def recording(self, graph: Any, *, pool: str, stream: Stream, capture_error_mode: str) -> Any:
        return Recording(self, pool, stream, capture_error_mode)


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.graphs.append(self._cuda.stream)


class Recording:
    """As `torch.cuda.graph`: what `capture_end` raises comes before the stream is put back."""

    def __init__(self, cuda: Cuda, pool: str, stream: Stream, mode: str) -> None:
        self._cuda, self._pool, self._stream = cuda, pool, stream
        assert mode == "thread_local"

    def __enter__(self) -> None:
        self._before, self._cuda.stream = self._cuda.stream, self._stream
        self._cuda.captures.append(self._pool)

    def __exit__(self, *_error: object) -> None:
        if self._cuda.breaks_off:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        self._cuda.captures.remove(self._pool)
        self._cuda.stream = self._before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    replaced = {
        "current_device": lambda: cuda.index,
        "current_stream": lambda *_: cuda.stream,
        "stream": cuda.entered,
        "Stream": cuda.make_stream,
        "graph": cuda.recording,
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: Graph(cuda),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, function in (
        ("_cuda_endAllocateToPool", cuda.end_allocate),
        ("_cuda_getCurrentRawStream", lambda _: cuda.stream),
    ):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return cuda


def test_work_goes_into_the_queue_whatever_is_current(cuda: Cuda) -> None:
    """As in a thread that did not make the device, or inside of a caller's own stream."""
    device = CudaDevice()
    seen: list[tuple[int, str]] = []
    graph = device.capture(lambda: None)

    def work() -> None:
        seen.append((cuda.index, cuda.stream))

    device.submit(work)
    for cuda.index, cuda.stream in ((0, Stream("a caller's")), (1, Stream("default"))):
        device.submit(work)
        device.side().submit(work)
        graph.replay()
    assert seen == [(0, name) for name in ("default", "default", "stream 2", "default", "stream 3")]
    assert cuda.graphs == ["default", "default"]
    assert (cuda.index, cuda.stream) == (1, "default")


def test_graphs_are_captured_on_one_stream_without_collections(cuda: Cuda) -> None:
    device = CudaDevice()
    seen: list[tuple[str, bool]] = []
    for _ in range(2):
        device.capture(lambda: seen.append((cuda.stream, gc.isenabled())))
    assert seen == [("stream 1", False)] * 2
    assert gc.isenabled()


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_capture_that_fails_leaves_the_device_usable(cuda: Cuda, breaks_off: bool) -> None:
    device = CudaDevice()

    def fail() -> None:
        cuda.breaks_off = breaks_off
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        device.capture(fail)
    assert (cuda.stream, cuda.captures, gc.isenabled()) == ("default", [], True)
    assert len(device._broken) == breaks_off  # the allocator's filter refers to it
    cuda.breaks_off = False
    device.capture(lambda: None).replay()
    assert cuda.graphs == ["default"]


def test_a_device_is_lost_when_it_cannot_be_waited_for(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CudaDevice()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    assert not device.is_lost()

    def fail(_device: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert device.is_lost()


def test_copies_are_enqueued_between_the_device_and_pinned_memory(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory that is not pinned, or told to block, a copy is waited for."""
    device = CudaDevice()
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "empty", lambda _size, **options: asked.update(options))
    device.host_buffer(3)
    assert asked == {"dtype": torch.int32, "pin_memory": True}
    copied: list[tuple[str, bool, str]] = []

    class Target:
        def copy_(self, source: str, non_blocking: bool = False) -> None:
            copied.append((source, non_blocking, cuda.stream))

    target: Any = Target()
    source: Any = "ids"
    cuda.stream = "a caller's"
    device.copy(target, source)
    assert copied == [("ids", True, "default")]
