"""A native library built for another processor, called as if it were loaded here.

`RemoteLibrary` stands in for the `ctypes.CDLL` of `kernels.cpu.build.load`. An emulator runs the
library (remote_calls.cpp); what arguments point to is copied there before a call and back after it.
Memory there is never freed: for tests.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palmette.kernels.cpu import build, ops

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
MAX_ARGUMENTS = 16


def missing() -> str | None:
    """What has to be installed, or None."""
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: g++-aarch64-linux-gnu, qemu-user)"
    return None


def compile_for_arm(instruction_set: str, folder: Path) -> RemoteLibrary:
    """Raises RuntimeError: it does not compile."""
    library, driver = folder / f"{instruction_set}.so", folder / "remote_calls"
    flags = (*build.BASE_FLAGS, *build.INSTRUCTION_SETS[instruction_set][1])
    build._compile(COMPILER, flags, sorted(build.SOURCE_DIR.glob("*.cpp")), library)
    source = Path(__file__).with_name("remote_calls.cpp")
    build._run([COMPILER, "-std=c++17", "-O1", str(source), "-o", str(driver), "-ldl"])
    return RemoteLibrary([EMULATOR, "-L", SYSROOT, str(driver), str(library)])


class RemoteLibrary:
    """Functions by name, as attributes: `library.pm_linear(...)`."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._objects: dict[int, Any] = {}  # by the address here: arrays and ctypes structures
        self._copies: dict[int, tuple[int, int]] = {}  # by the address here: address, size there
        self._functions: dict[str, RemoteFunction] = {}

    def __getattr__(self, name: str) -> RemoteFunction:
        return self._functions.setdefault(name, RemoteFunction(self, name))

    def address_of(self, thing: Any) -> int:
        """The address of an array or a structure, which a call may then be given."""
        is_array = isinstance(thing, np.ndarray)
        address = thing.ctypes.data if is_array else ctypes.addressof(thing)
        self._objects[address] = thing
        return int(address)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def call(self, name: str, arguments: list[Any], types: tuple[Any, ...]) -> int:
        number, integers = 0.0, []
        handles, arrays = [], []
        for argument, kind in zip(arguments, types, strict=True):
            if kind is ctypes.c_float:
                number = float(argument)
            elif hasattr(argument, "_obj"):  # byref of a handle to be set
                handles.append((argument._obj, self._allocate(8)))
                integers.append(handles[-1][1])
            elif isinstance(argument, ctypes.c_void_p):
                integers.append(argument.value or 0)
            elif kind is ctypes.c_void_p and argument:
                integers.append(self._copy(argument, arrays))
            else:
                integers.append(int(argument or 0))
        integers += [0] * (MAX_ARGUMENTS - len(integers))
        text = name.encode()
        self._send(b"C" + struct.pack("<q", len(text)) + text)
        self._send(struct.pack(f"<{MAX_ARGUMENTS}qf", *integers, number))
        result = self._receive_number()
        for handle, address in handles:
            handle.value = struct.unpack("<q", self._read(address, 8))[0] or None
        for array, address in arrays:
            if array.flags.writeable:
                array[...] = np.frombuffer(self._read(address, array.nbytes), array.dtype).reshape(
                    array.shape
                )
        return result

    def text(self, address: int) -> bytes:
        self._send(b"S" + struct.pack("<q", address))
        return self._receive(self._receive_number())

    def _copy(self, address: int, arrays: list[tuple[Any, int]]) -> int:
        """The address there of the object at `address` here, after copying it.

        An address inside of an array that this call was given before is the same place in its copy.
        """
        for array, there in arrays:
            if 0 < address - array.ctypes.data < array.nbytes:
                return there + int(address - array.ctypes.data)
        thing = self._objects[address]
        if isinstance(thing, np.ndarray):
            there = self._write(address, thing.tobytes())
            arrays.append((thing, there))
            return there
        values = type(thing).from_buffer_copy(thing)
        for field, kind in thing._fields_:
            pointer = getattr(thing, field)
            if kind is ctypes.c_void_p and pointer:
                setattr(values, field, self._copy(pointer, arrays))
        return self._write(address, bytes(values))

    def _write(self, address: int, data: bytes) -> int:
        there, size = self._copies.get(address, (0, -1))
        if size < len(data):
            there = self._allocate(max(1, len(data)))
            self._copies[address] = there, len(data)
        self._send(b"W" + struct.pack("<qq", there, len(data)) + data)
        return there

    def _allocate(self, size: int) -> int:
        self._send(b"A" + struct.pack("<q", size))
        return self._receive_number()

    def _read(self, address: int, size: int) -> bytes:
        self._send(b"R" + struct.pack("<qq", address, size))
        return self._receive(size)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def _receive_number(self) -> int:
        return int(struct.unpack("<q", self._receive(8))[0])

    def _receive(self, size: int) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.flush()
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"the emulated library died (status {self._process.wait(30)})")
        return data


class RemoteFunction:
    """One function, with the attributes that `ctypes` gives functions."""

    def __init__(self, library: RemoteLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        result = self._library.call(self._name, list(arguments), self.argtypes)
        if self.restype is ctypes.c_char_p:
            return self._library.text(result)
        if self.restype is ctypes.c_int:
            return ctypes.c_int(result & 0xFFFFFFFF).value
        return result


def install(library: RemoteLibrary, instruction_set: str, patch: pytest.MonkeyPatch) -> None:
    """Pools of `instruction_set`, and those of no certain one, call `library` from now on."""
    load_here = ops.load

    class Ctypes:  # the module as ops.py sees it
        addressof = staticmethod(library.address_of)

        def __getattr__(self, name: str) -> Any:
            return getattr(ctypes, name)

    def load(name: str = "auto") -> Any:
        return library if name in ("auto", instruction_set) else load_here(name)

    patch.setattr(ops, "load", load)
    patch.setattr(ops, "_address", library.address_of)
    patch.setattr(ops, "ctypes", Ctypes())
