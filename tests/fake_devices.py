"""Devices on the CPU that note what they are asked for, in order.

`QueueDevice` computes as late as it may: whatever is enqueued runs when an event behind it is
waited for. Its queues run in turns that a seed decides, so that an order which only happens to
hold on one machine does not hold here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from palmette.kernels.cuda.device import HostDevice


class RecordingDevice(HostDevice):
    """Computes at once. `calls` are those of copies, graphs and waits."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.append("copy")
        super().copy(target, source)

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                device.calls.append("wait")

        return Event()

    def capture(self, function: Callable[[], None]) -> Any:
        self.calls.append("capture")
        device, plain = self, super().capture(function)

        class Graph:
            def replay(self) -> None:
                device.calls.append("replay")
                plain.replay()

        return Graph()


class QueueDevice:
    """One queue of a device; `side` gives others. `calls` are shared by all of them.

    A wait that finds its work done is not noted: nothing stood still for it.
    """

    torch_device = torch.device("cpu")

    def __init__(self, seed: int = 0, parent: QueueDevice | None = None) -> None:
        self.queues: list[deque[Any]] = [] if parent is None else parent.queues
        self.calls: list[str] = [] if parent is None else parent.calls
        self._random = random.Random(seed) if parent is None else parent._random
        self._queue: deque[Any] = deque()
        self._name = "" if parent is None else "side "
        self.queues.append(self._queue)

    def host_buffer(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), -77, dtype=torch.int32)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.append(f"{self._name}copy")
        self._queue.append(lambda: target.copy_(source))

    def submit(self, work: Callable[[], object]) -> None:
        self.calls.append(f"{self._name}kernels")
        self._queue.append(work)

    def event(self) -> QueueEvent:
        return QueueEvent(self)

    def wait(self, event: QueueEvent) -> None:
        self._queue.append(event)

    def side(self) -> QueueDevice:
        return QueueDevice(parent=self)

    def capture(self, function: Callable[[], None]) -> Any:
        self.calls.append("capture")
        self.finish()
        device = self

        class Graph:
            def replay(self) -> None:
                device.calls.append("replay")
                device._queue.append(function)

        return Graph()

    def memory_used(self) -> int:
        return 0

    def is_lost(self) -> bool:
        return False

    def finish(self) -> None:
        """Run everything, as a device does in time."""
        while any(self.queues):
            self._advance()

    def _advance(self) -> None:
        """Run the next of some queue that is not held up."""
        ready = [queue for queue in self.queues if queue and not _is_held(queue[0])]
        assert ready, "the queues wait for each other"
        work = self._random.choice(ready).popleft()
        with torch.inference_mode():
            if isinstance(work, _Mark):
                work.event.num_done += 1
            elif not isinstance(work, QueueEvent):
                work()


class QueueEvent:
    def __init__(self, device: QueueDevice) -> None:
        self._device = device
        self.num_recorded = self.num_done = 0

    def record(self) -> None:
        self.num_recorded += 1
        self._device._queue.append(_Mark(self))

    def synchronize(self) -> None:
        if self.num_done < self.num_recorded:
            self._device.calls.append("wait")
        while self.num_done < self.num_recorded:
            self._device._advance()


class _Mark:
    def __init__(self, event: QueueEvent) -> None:
        self.event = event


def _is_held(work: Any) -> bool:
    return isinstance(work, QueueEvent) and work.num_done < work.num_recorded
