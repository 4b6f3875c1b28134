"""What a memory and race checker of a GPU tells, from the loads and stores of one launch.

A `Launch` is given every load and store of its programs, in the order in which they ran. It raises
`MemoryFault` at once for an access outside of the tensor that its pointer came from, and at the
end for accesses to one address whose order a GPU does not keep:

    two programs, one of which stores
    one program, which loads what it stored: no barrier lies between, another thread may load
    one program, which stores what it loaded elsewhere in a tile, or what more threads hold than
    one: another thread may load later

Addresses are bytes. Tiles [L] are flattened: an element's place in its tile is its lane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS = 32  # of a warp
Addresses = NDArray[np.uint64]


class MemoryFault(AssertionError):
    """What would be undefined on a GPU."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that a launch was given: what may be read and written through its pointer."""

    name: str
    base: int
    end: int  # of the last element
    item_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    storage: int  # what tensors that share memory have in common

    @staticmethod
    def of(name: str, tensor: Any) -> Argument:
        base, item_size = int(tensor.data_ptr()), int(tensor.element_size())
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        end = base + (last + 1) * item_size if tensor.numel() else base
        if base % item_size:
            raise MemoryFault(f"{name}: at {base:#x}, not a multiple of {item_size} bytes")
        storage = int(tensor.untyped_storage().data_ptr())
        return Argument(name, base, end, item_size, shape, strides, storage)

    @property
    def is_dense(self) -> bool:
        """Whether every element between the first and the last is the tensor's."""
        count = int(np.prod(self.shape))
        return (self.end - self.base) // self.item_size == count

    def lacks(self, addresses: Addresses) -> NDArray[np.bool_]:
        """Which addresses are no element of the tensor, for one whose rows lie apart."""
        rest = (addresses - np.uint64(self.base)) // np.uint64(self.item_size)
        outside = np.zeros(addresses.shape, np.bool_)
        for stride, count in sorted(zip(self.strides, self.shape, strict=True), reverse=True):
            if count > 1:
                outside |= rest // np.uint64(stride) >= count
                rest = rest % np.uint64(stride)
        return outside | (rest > 0)


@dataclass(slots=True)
class _Access:
    """Loads or stores of one instruction of one program."""

    program: int
    time: int  # in its program
    epoch: int  # barriers before it, in its program
    argument: Argument
    addresses: Addresses  # [L], of the lanes that are on
    lanes: NDArray[np.intp]  # [L]
    num_lanes: int  # of the tile
    bits: NDArray[np.uint8] | None = None  # of the values stored, one after the other


@dataclass(slots=True)
class Launch:
    """num_warps: that run a program."""

    kernel: str
    num_warps: int
    _index: int = 0
    _time: int = 0
    _epoch: int = 0
    _loads: dict[int, list[_Access]] = field(default_factory=dict)  # by storage
    _stores: dict[int, list[_Access]] = field(default_factory=dict)
    _programs: list[tuple[int, int, int]] = field(default_factory=list)

    def begin(self, program: tuple[int, int, int]) -> None:
        """The accesses from here on are this program's."""
        self._index = len(self._programs)
        self._programs.append(program)
        self._time = self._epoch = 0

    def barrier(self) -> None:
        self._epoch += 1

    def load(self, addresses: Addresses, mask: Any, item_size: int, argument: Any) -> None:
        access = self._checked("loads", addresses, mask, item_size, argument)
        if access is not None:
            self._loads.setdefault(access.argument.storage, []).append(access)

    def store(
        self, addresses: Addresses, mask: Any, item_size: int, argument: Any, values: Any
    ) -> None:
        access = self._checked("stores", addresses, mask, item_size, argument)
        if access is None:
            return
        whole = np.ascontiguousarray(np.broadcast_to(values, addresses.shape))
        flat = whole.reshape(-1)[access.lanes]
        access.bits = flat.view(np.uint8)
        self._stores.setdefault(access.argument.storage, []).append(access)

    def _checked(
        self, verb: str, addresses: Addresses, mask: Any, item_size: int, argument: Any
    ) -> _Access | None:
        """The lanes that are on, when each of them lies in the argument; None: none is."""
        flat = addresses.reshape(-1)
        if mask.all():
            lanes = np.arange(flat.size)
            on = flat
        else:
            lanes = np.flatnonzero(np.broadcast_to(mask, addresses.shape))
            on = flat[lanes]
        if not on.size:
            return None
        if argument is None:
            raise MemoryFault(f"{self._where(self._index)} {verb} where no tensor's pointer leads")
        self._check_bounds(verb, on, item_size, argument)
        self._time += 1
        return _Access(self._index, self._time, self._epoch, argument, on, lanes, flat.size)

    def _check_bounds(
        self, verb: str, addresses: Addresses, item_size: int, argument: Argument
    ) -> None:
        lowest, highest = int(addresses.min()), int(addresses.max())
        if lowest % item_size:
            raise MemoryFault(
                f"{self._where(self._index)} {verb} {argument.name} at {lowest:#x}, "
                f"not a multiple of {item_size} bytes"
            )
        if lowest < argument.base or highest + item_size > argument.end:
            bad = lowest if lowest < argument.base else highest
            raise MemoryFault(self._outside(verb, bad, argument))
        if not argument.is_dense:
            lacks = argument.lacks(addresses)
            if lacks.any():
                raise MemoryFault(self._outside(verb, int(addresses[lacks][0]), argument))

    def _outside(self, verb: str, address: int, argument: Argument) -> str:
        element = (address - argument.base) // argument.item_size
        return (
            f"{self._where(self._index)} {verb} {argument.name} at element {element}: it is "
            f"{list(argument.shape)} with strides {list(argument.strides)}"
        )

    def _where(self, index: int) -> str:
        return f"{self.kernel}: program {self._programs[index]}"

    def finish(self) -> None:
        """MemoryFault when two accesses have no order that a GPU keeps."""
        for storage, stores in self._stores.items():
            low = min(int(a.addresses.min()) for a in stores)
            high = max(int(a.addresses.max()) for a in stores)
            loads = [
                a
                for a in self._loads.get(storage, [])
                if low <= int(a.addresses.max()) and int(a.addresses.min()) <= high
            ]
            unit = min(a.argument.item_size for a in (*stores, *loads))
            written = _Units(stores, unit)
            self._check_stores(written)
            if loads:
                self._check_loads(written, _Units(loads, unit))

    def _check_stores(self, written: _Units) -> None:
        order = np.lexsort((written.time, written.program, written.address))
        address = written.address[order]
        same = np.flatnonzero(address[1:] == address[:-1])
        if not len(same):
            return
        one, other = written.part(order[same]), written.part(order[same + 1])
        apart = one.program != other.program
        at_once = one.time == other.time
        late = ~at_once & (one.epoch == other.epoch) & one.is_moved(other)
        self._tell(apart, one, other, "stores what {} stores")
        self._tell(at_once & (one.value != other.value), one, other, "stores twice at once")
        self._tell(late, one, other, "stores again, by another lane and without a barrier,")

    def _check_loads(self, written: _Units, read: _Units) -> None:
        order = np.argsort(written.address, kind="stable")
        known = written.address[order]
        first = np.searchsorted(known, read.address, side="left")
        counts = np.searchsorted(known, read.address, side="right") - first
        loads = np.repeat(np.arange(len(counts)), counts)
        rest = np.arange(len(loads)) - np.repeat(np.cumsum(counts) - counts, counts)
        load, store = read.part(loads), written.part(order[first[loads] + rest])
        own = load.program == store.program
        unordered = own & (load.epoch == store.epoch)
        before = unordered & (load.time < store.time)
        held_twice = (self.num_warps > 1) & (load.tile < THREADS * self.num_warps)
        self._tell(~own, load, store, "loads what {} stores")
        self._tell(unordered & ~before, load, store, "loads, without a barrier, what it stored")
        self._tell(before & load.is_moved(store), load, store, "loads, and another lane stores,")
        self._tell(before & held_twice, load, store, "loads in several warps, and stores,")

    def _tell(self, is_fault: NDArray[np.bool_], one: _Units, other: _Units, what: str) -> None:
        if not is_fault.any():
            return
        place = int(is_fault.argmax())
        argument = one.arguments[int(one.access[place])]
        element = (int(one.address[place]) - argument.base) // argument.item_size
        told = what.format(f"program {self._programs[int(other.program[place])]}")
        raise MemoryFault(
            f"{self._where(int(one.program[place]))} {told} {argument.name} at element {element}; "
            f"{int(is_fault.sum())} such"
        )


class _Units:
    """What accesses touch, cut into units of equal size: arrays [N]."""

    def __init__(self, accesses: list[_Access], unit: int) -> None:
        self.arguments = [access.argument for access in accesses]
        parts = np.array([argument.item_size // unit for argument in self.arguments])
        counts = np.array([len(access.addresses) for access in accesses])
        owner = np.repeat(np.arange(len(accesses)), counts)
        addresses = np.concatenate([access.addresses for access in accesses]).astype(np.int64)
        times = parts[owner]
        source = np.repeat(np.arange(len(owner)), times)
        inside = np.arange(len(source)) - np.repeat(np.cumsum(times) - times, times)
        self.access = owner[source]
        self.address = addresses[source] + unit * inside
        self.lane = np.concatenate([access.lanes for access in accesses])[source]
        self.program, self.time, self.epoch, self.tile = (
            np.array([getattr(access, name) for access in accesses])[self.access]
            for name in ("program", "time", "epoch", "num_lanes")
        )
        self.value = np.concatenate(
            [
                np.zeros(0, f"u{unit}"),
                *(a.bits.view(f"u{unit}") for a in accesses if a.bits is not None),
            ]
        )

    def part(self, at: NDArray[np.intp]) -> _Units:
        """The units `at`; not their values' owner."""
        chosen = _Units.__new__(_Units)
        chosen.arguments = self.arguments
        for name in ("access", "address", "lane", "program", "time", "epoch", "tile"):
            setattr(chosen, name, getattr(self, name)[at])
        chosen.value = self.value[at] if len(self.value) else self.value
        return chosen

    def is_moved(self, other: _Units) -> NDArray[np.bool_]:
        """Whether the same address is at another place of its tile: in another thread."""
        return (self.lane != other.lane) | (self.tile != other.tile)
