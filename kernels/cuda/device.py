"""What a runner asks of a device: kernels in order, pinned memory, copies, events, graphs.

A `Device` is one queue of it (a CUDA stream); `side` gives a second one. `HostDevice` does the
same on the CPU, one call after the other: kernels run by Triton's interpreter, and graphs replay
by running their function again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceLost(RuntimeError):
    """CUDA runs nothing more in this process. Clients may read it."""

    def __init__(self) -> None:
        super().__init__("cuda: the device was lost; the engine has to be started anew")


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait on the host for everything before `record`."""
        ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Device(Protocol):
    """Work is enqueued in order; on the host only `Event.synchronize` waits."""

    @property
    def torch_device(self) -> torch.device: ...

    def host_buffer(self, num_words: int) -> Tensor:
        """int32 host memory that copies can read and write without waiting."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between the host and the device."""
        ...

    def submit(self, work: Callable[[], object]) -> None:
        """Enqueue the kernels that `work` launches; it runs now or, on a fake, in its turn."""
        ...

    def event(self) -> Event:
        """One that `record` puts into this queue."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from here on waits on the device for `event`; the host does not."""
        ...

    def side(self) -> Device:
        """Another queue of the same device, for copies beside the kernels."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Record the launches of `function`, which was run before; replay repeats them on the
        same memory. A function that fails to be captured raises RuntimeError."""
        ...

    def memory_used(self) -> int:
        """Bytes of device memory that this process holds."""
        ...

    def is_lost(self) -> bool:
        """Whether an error has ended all work on the device: only a new process can use it."""
        ...


class _CudaEvent:
    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event()
        self._stream = stream

    def record(self) -> None:
        self.event.record(self._stream)

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaGraph:
    def __init__(self, device: CudaDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def replay(self) -> None:
        self._device.submit(self._graph.replay)


class CudaDevice:
    """Implements `Device` on the current CUDA device and its current stream, or on `stream`.

    Which device and stream are current is a matter of each thread: whichever thread submits work,
    it goes to those of the thread that made this object.
    """

    def __init__(self, stream: Any = None) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.current_stream() if stream is None else stream
        self._raw_stream: int = self._stream.cuda_stream
        self._pool: Any = None  # memory that all graphs share
        self._capture_stream: Any = None
        self._broken: list[Any] = []  # graphs that the allocator may still ask

    def host_buffer(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.submit(lambda: target.copy_(source, non_blocking=True))

    def submit(self, work: Callable[[], object]) -> None:
        index = self.torch_device.index
        is_current = torch._C._cuda_getCurrentRawStream(index) == self._raw_stream
        if is_current and torch.cuda.current_device() == index:
            work()
        else:
            with torch.cuda.stream(self._stream):
                work()

    def event(self) -> Event:
        return _CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def side(self) -> Device:
        return CudaDevice(torch.cuda.Stream(self.torch_device))

    def capture(self, function: Callable[[], None]) -> Graph:
        """What other threads ask of CUDA meanwhile does not end the capture."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._capture_stream = torch.cuda.Stream(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
        )
        try:
            # The stream outside is what torch does not go back to when a capture is broken off.
            with torch.cuda.stream(self._stream), _no_collection(), recording:
                function()
        except BaseException:
            self._give_up(graph)
            raise
        return _CudaGraph(self, graph)

    def _give_up(self, graph: Any) -> None:
        """When CUDA breaks a capture off, torch's allocator stays in it and refers to the graph."""
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # of torch 2.8 and later
        try:
            if end is not None:
                end(self.torch_device.index, self._pool)
        except RuntimeError:
            return  # it has ended as it should
        self._broken.append(graph)

    def memory_used(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return True
        return False


@contextmanager
def _no_collection() -> Iterator[None]:
    """A tensor or graph that the collector frees may call what a capture forbids."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _HostEvent:
    def record(self) -> None:
        """The work is done already."""

    def synchronize(self) -> None:
        """The work is done already."""


class _HostGraph:
    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class HostDevice:
    """Implements `Device` on the CPU."""

    torch_device = torch.device("cpu")

    def host_buffer(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def event(self) -> Event:
        return _HostEvent()

    def wait(self, event: Event) -> None:
        """The work is done already."""

    def side(self) -> Device:
        return self

    def capture(self, function: Callable[[], None]) -> Graph:
        function()
        return _HostGraph(function)

    def memory_used(self) -> int:
        return 0

    def is_lost(self) -> bool:
        return False
