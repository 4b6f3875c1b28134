"""Many small arrays in one copy to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .device import Device

_ALIGN = 4  # words: 16 bytes, what kernels are specialised for
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int64): torch.int64,
}
_MAX_FRONTS = 64  # views kept of parts that were uploaded
_DEPTH = 3  # host buffers in turn: of the step that runs, the one launched ahead, and the next


@dataclass(frozen=True, slots=True)
class Section:
    start: int  # in words of 4 bytes
    num_words: int
    dtype: torch.dtype


def layout_of(
    arrays: Mapping[str, NDArray[Any]], capacities: Mapping[str, int] | None = None
) -> dict[str, Section]:
    """Sections for `arrays` in their order, for at least `capacities` elements each."""
    sections = {}
    start = 0
    for name, array in arrays.items():
        length = max(array.size, (capacities or {}).get(name, 0))
        num_words = length * array.dtype.itemsize // 4
        sections[name] = Section(start, num_words, _DTYPES[array.dtype])
        start += -(-num_words // _ALIGN) * _ALIGN
    return sections


def num_words(layout: Mapping[str, Section]) -> int:
    return max((s.start + s.num_words for s in layout.values()), default=0)


class Staging:
    """Host buffers and one device buffer, which never moves unless it must grow."""

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._turn = 0
        self._reserve(capacity)

    def _reserve(self, capacity: int) -> None:
        self._target = torch.zeros(capacity, dtype=torch.int32, device=self._device.torch_device)
        self._hosts = [self._device.host_buffer(capacity) for _ in range(_DEPTH)]
        self._words = [host.numpy() for host in self._hosts]
        self._copied = [self._device.event() for _ in range(_DEPTH)]
        self._fronts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def views(self, layout: Mapping[str, Section]) -> dict[str, Tensor]:
        """The sections on the device; valid until the buffer grows."""
        return {
            name: self._target[s.start : s.start + s.num_words].view(s.dtype)
            for name, s in layout.items()
        }

    def upload(self, arrays: Mapping[str, NDArray[Any]], layout: Mapping[str, Section]) -> None:
        """Copy `arrays` to the front of their sections, in one copy; does not wait for it.

        It takes what lies between them along: give neighbours.
        """
        end = num_words(layout)
        if end > len(self._target):
            self._reserve(2 * end)
        turn = self._next_turn()
        words = self._words[turn]
        first, last = end, 0
        for name, array in arrays.items():
            start = layout[name].start
            flat = np.ascontiguousarray(array).reshape(-1).view(np.int32)
            words[start : start + len(flat)] = flat
            first, last = min(first, start), max(last, start + len(flat))
        if last > first:
            self._device.copy(self._target[first:last], self._hosts[turn][first:last])
        self._copied[turn].record()

    def upload_front(self, words: NDArray[np.int32]) -> None:
        """Copy `words`, no more than there is room for, to the start; does not wait for it."""
        turn = self._next_turn()
        end = len(words)
        self._words[turn][:end] = words
        front = self._fronts.get((turn, end))
        if front is None:
            if len(self._fronts) >= _MAX_FRONTS:
                self._fronts.clear()
            front = self._fronts[turn, end] = self._target[:end], self._hosts[turn][:end]
        self._device.copy(*front)
        self._copied[turn].record()

    def _next_turn(self) -> int:
        """Which host buffer to fill: its last copy has been read."""
        self._turn = (self._turn + 1) % _DEPTH
        self._copied[self._turn].synchronize()
        return self._turn
