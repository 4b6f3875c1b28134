"""`torch.cuda` without CUDA: what is called is noted, and what a capture forbids is a fault."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from .log import LOG
from .tensors import CUDA, MEMORY, Block

_capability = [(9, 0)]
_handles = itertools.count()
PROCESSORS = 132  # of an H200
TOTAL_BYTES = 141 << 30


def capability(of: tuple[int, int] | None = None) -> tuple[int, int]:
    """Of the device; `of` makes it another."""
    if of is not None:
        _capability[0] = of
    return _capability[0]


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, name: str = "side") -> None:
        self.name = name
        self.device = CUDA
        self.cuda_stream = next(_handles)

    def wait_event(self, event: Event) -> None:
        LOG.refused("a wait for an event")
        if not event.is_recorded:
            LOG.fault("a stream waits for an event that was not recorded")
        LOG.call(f"{self.name} waits for {event.stream}")

    def wait_stream(self, stream: Stream) -> None:
        LOG.call(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        LOG.waits("a stream is waited for")


MAIN = Stream(name="main")
_current = [MAIN]


class Event:
    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self.is_recorded = False
        self.stream = ""

    def record(self, stream: Stream | None = None) -> None:
        LOG.refused("an event")
        self.is_recorded, self.stream = True, (stream or _current[-1]).name
        LOG.call(f"{self.stream} event")

    def synchronize(self) -> None:
        LOG.refused("a wait for an event")
        LOG.call("event waited for" if self.is_recorded else "event never recorded")

    def query(self) -> bool:
        LOG.refused("a query of an event")
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class _OnStream:
    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream or _current[-1]

    def __enter__(self) -> None:
        _current.append(self._stream)
        LOG.stream = self._stream.name

    def __exit__(self, *error: object) -> None:
        _current.pop()
        LOG.stream = _current[-1].name


class CUDAGraph:
    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}  # that its kernels read and write
        self.num_launches = 0

    def replay(self) -> None:
        LOG.refused("a replay")
        LOG.call("replay")
        for block in self.blocks.values():
            if block.made_in is not self and block.is_free:
                LOG.fault(f"a graph uses {block.num_bytes} bytes that were freed")


class graph:
    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, **options: Any) -> None:
        self._graph = cuda_graph
        self._on = _OnStream(Stream(name="capture"))

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._before = sum(LOG.counts.values())
        LOG.capture = self._graph
        self._on.__enter__()

    def __exit__(self, *error: object) -> None:
        self._on.__exit__(*error)
        LOG.capture = None
        self._graph.num_launches = sum(LOG.counts.values()) - self._before
        if self._graph.num_launches == 0:
            LOG.fault("a graph without launches")


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


def _synchronize(device: Any = None) -> None:
    LOG.waits("the device is waited for")


def install() -> None:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="rehearsal", multi_processor_count=PROCESSORS, total_memory=TOTAL_BYTES,
    )  # fmt: skip
    replaced = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "rehearsal",
        "get_device_capability": lambda device=None: capability(),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (TOTAL_BYTES - MEMORY.used(), TOTAL_BYTES),
        "memory_reserved": lambda device=None: MEMORY.used(),
        "memory_allocated": lambda device=None: MEMORY.used(),
        "empty_cache": lambda: LOG.refused("the cache emptied"),
        "synchronize": _synchronize,
        "current_stream": lambda device=None: _current[-1],
        "stream": _OnStream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    bindings: Any = torch._C
    bindings._cuda_getCurrentRawStream = lambda device: _current[-1].cuda_stream
    bindings._cuda_getDevice = lambda: 0
    bindings._cuda_sleep = lambda cycles: LOG.call("sleep")
    library: Any = torch
    library.Generator = _Generator
