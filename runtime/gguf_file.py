"""GGUF files: metadata and tensor table, memory-mapped.

Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian. The `gguf` package's reader is not
used here: it needs seconds for a vocabulary and does not check lengths against the file, so a
damaged count makes it loop or fail far from the cause. Every length here is checked first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from .weight_tensor import ByteArray, check_ranges, tensor_bytes

GgufValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_SCALARS = {  # value type -> (struct code, numpy dtype)
    0: ("<B", "<u1"), 1: ("<b", "<i1"), 2: ("<H", "<u2"), 3: ("<h", "<i2"),
    4: ("<I", "<u4"), 5: ("<i", "<i4"), 6: ("<f", "<f4"), 7: ("<?", "?"),
    10: ("<Q", "<u8"), 11: ("<q", "<i8"), 12: ("<d", "<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string
_MAX_DIMENSIONS = 4
_ENCODING_OF_TYPE = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    30: "bf16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufTensor:
    shape: tuple[int, ...]  # outermost first, as in numpy
    encoding: str
    data: ByteArray  # [bytes] view of the mapped file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufFile:
    """A parsed file; strings that are not UTF-8 keep their bytes as surrogate escapes."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parse the header and map the data. ValueError names the file and the reason."""
    try:
        return _read(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read(path: Path) -> GgufFile:
    if not path.is_file():
        raise ValueError("the file is missing")
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{size} bytes are too few for a GGUF file")
    mapped: ByteArray = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    cursor = _Cursor(mapped)
    if cursor.take(4) != b"GGUF":
        raise ValueError("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} (or big-endian) is not supported; use 2 or 3")
    num_tensors, num_values = int(cursor.scalar("<Q")), int(cursor.scalar("<Q"))
    cursor.check_count(num_tensors, least_bytes=24, what="tensors")
    cursor.check_count(num_values, least_bytes=13, what="metadata values")
    metadata: dict[str, GgufValue] = {}
    for _ in range(num_values):
        key = cursor.name()
        if key in metadata:
            raise ValueError(f"metadata {key} occurs twice")
        metadata[key] = cursor.value(int(cursor.scalar("<I")))
    table = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {alignment!r} is not a power of two")
    data = mapped[min(size, (cursor.at + alignment - 1) // alignment * alignment) :]
    return GgufFile(path=path, metadata=metadata, tensors=_map_tensors(table, data, alignment))


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.name()
    num_dimensions = int(cursor.scalar("<I"))
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} claims {num_dimensions} dimensions; 1 to 4 are allowed")
    shape = tuple(int(cursor.scalar("<Q")) for _ in range(num_dimensions))[::-1]
    kind = int(cursor.scalar("<I"))
    if kind not in _ENCODING_OF_TYPE:
        supported = ", ".join(sorted(_ENCODING_OF_TYPE.values()))
        raise ValueError(
            f"tensor {name} has quantisation type {_type_name(kind)}; supported: {supported}"
        )
    return name, shape, _ENCODING_OF_TYPE[kind], int(cursor.scalar("<Q"))


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType  # for an error message only

    known = {int(member): member.name for member in GGMLQuantizationType}
    return str(known.get(kind, kind)).lower()


def _map_tensors(
    table: list[tuple[str, tuple[int, ...], str, int]], data: ByteArray, alignment: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, shape, encoding, start in table:
        if name in tensors:
            raise ValueError(f"tensor {name} occurs twice")
        if start % alignment:
            raise ValueError(f"tensor {name} is not aligned to {alignment} bytes")
        if prod(shape) == 0:
            raise ValueError(f"tensor {name} is empty")
        try:
            stop = start + tensor_bytes(shape, encoding)
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from None
        ranges.append((start, stop, name))
        tensors[name] = GgufTensor(shape=shape, encoding=encoding, data=data[start:stop])
    check_ranges(ranges, end=len(data))
    return tensors


class _Cursor:
    """Reads values one after the other; never past the end of the file."""

    def __init__(self, data: ByteArray) -> None:
        self._data = data.data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError(
                f"the header needs {count} bytes at {self.at}, the file has {len(self._data)}:"
                " truncated or damaged"
            )
        self.at += count
        return self._data[self.at - count : self.at].tobytes()

    def scalar(self, code: str) -> bool | int | float:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        assert isinstance(value, bool | int | float)
        return value

    def text(self, *, errors: str = "surrogateescape") -> str:
        return self.take(int(self.scalar("<Q"))).decode("utf-8", errors=errors)

    def name(self) -> str:
        """A text that may stand in an error message: always printable as UTF-8."""
        return self.text(errors="backslashreplace")

    def check_count(self, count: int, *, least_bytes: int, what: str) -> None:
        if count * least_bytes > len(self._data) - self.at:
            raise ValueError(
                f"the header claims {count} {what}, more than the file's {len(self._data)} bytes"
                " can hold: truncated or damaged"
            )

    def value(self, kind: int) -> GgufValue:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][0])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(int(self.scalar("<I")), int(self.scalar("<Q")))
        raise ValueError(f"unknown metadata type {kind} at byte {self.at}: the header is damaged")

    def _array(self, kind: int, count: int) -> GgufValue:
        if kind == _STRING:
            self.check_count(count, least_bytes=8, what="strings")
            return self._texts(count)
        if kind not in _SCALARS:
            raise ValueError(f"arrays of metadata type {kind} are not supported")
        dtype = np.dtype(_SCALARS[kind][1])
        values: list[int] = np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype).tolist()
        return values

    def _texts(self, count: int) -> list[str]:
        """As `text`, `count` times: a vocabulary and its merges are 100,000 of them."""
        data, at = self._data, self.at
        end, unpack = len(data) - 8, _LENGTH.unpack_from
        texts = []
        for _ in range(count):
            if at > end:
                break
            stop = at + 8 + unpack(data, at)[0]
            if stop > end + 8:
                break
            texts.append(str(data[at + 8 : stop], "utf-8", "surrogateescape"))
            at = stop
        self.at = at
        while len(texts) < count:  # past the end: the error that `take` raises
            texts.append(self.text())
        return texts
