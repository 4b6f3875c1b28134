"""What a runner asks of a device beside computing: pinned memory, copies, events, graphs.

`HostDevice` does the same on the CPU, one call after the other: kernels run by Triton's
interpreter, and graphs replay by running their function again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait on the host for everything before `record`."""
        ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Device(Protocol):
    """Work is enqueued in order; only `Event.synchronize` waits."""

    @property
    def torch_device(self) -> torch.device: ...

    def host_buffer(self, num_words: int) -> Tensor:
        """int32 host memory that copies can read and write without waiting."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy between the host and the device."""
        ...

    def event(self) -> Event: ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Record the launches of `function`, which was run before; replay repeats them on the
        same memory. A function that fails to be captured raises RuntimeError."""
        ...

    def memory_used(self) -> int:
        """Bytes of device memory that this process holds."""
        ...


class CudaDevice:
    """Implements `Device` on the current CUDA device and stream."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._pool: Any = None  # memory that all graphs share

    def host_buffer(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()
        return event

    def capture(self, function: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph

    def memory_used(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device)


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

    def event(self) -> Event:
        return _HostEvent()

    def capture(self, function: Callable[[], None]) -> Graph:
        function()
        return _HostGraph(function)

    def memory_used(self) -> int:
        return 0
