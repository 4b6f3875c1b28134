"""Safetensors files, memory-mapped; bf16 needs neither torch nor a numpy dtype.

Format (huggingface/safetensors, README): u64 little-endian header length, JSON header
{name: {dtype, shape, data_offsets}}, then the data. Everything is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .weight_tensor import ByteArray, TensorEntry, check_ranges, tensor_bytes

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_ENCODING_OF_DTYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. ValueError names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_directory(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of model.safetensors, or of the shards its index lists."""
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        if not single.exists():
            raise ValueError(
                f"{directory}: neither {_SINGLE} nor {_INDEX} is there; pickled weights"
                " (.bin, .pt) are not read, convert them to safetensors"
            )
        return read_file(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is missing or empty")
    shards: dict[str, dict[str, TensorEntry]] = {}
    entries: dict[str, TensorEntry] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(
                f"{index}: {file_name!r} of {name} is not the name of a file beside it"
            )
        if file_name not in shards:
            shards[file_name] = read_file(directory / file_name)
        if name not in shards[file_name]:
            raise ValueError(f"{index}: {name} is not in {file_name}, where the index puts it")
        entries[name] = shards[file_name][name]
    return entries


def read_file(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. ValueError names the file and the reason."""
    try:
        return _read_file(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_file(path: Path) -> dict[str, TensorEntry]:
    if not path.is_file():
        raise ValueError("the file is missing")
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{size} bytes are too few for a safetensors file")
    mapped: ByteArray = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    header_bytes = int.from_bytes(mapped[:8].tobytes(), "little")
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(
            f"the header claims {header_bytes} bytes, the file has {size}: truncated, or not a"
            " safetensors file"
        )
    header = _parse_header(mapped[8 : 8 + header_bytes].tobytes())
    data = mapped[8 + header_bytes :]
    entries: dict[str, TensorEntry] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        encoding, shape, (start, stop) = _parse_entry(name, value)
        ranges.append((start, stop, name))
        entries[name] = TensorEntry(
            shape=shape, encoding=encoding, data=data[start:stop], source=str(path)
        )
    check_ranges(ranges, end=len(data))
    return entries


def _parse_header(raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice in the header")
        return result

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is damaged: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return header


def _parse_entry(name: str, value: object) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"the header of tensor {name} is damaged")
    dtype = value.get("dtype")
    shape = _naturals(value.get("shape"))
    offsets = _naturals(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"the header of tensor {name} is damaged")
    encoding = _ENCODING_OF_DTYPE.get(dtype) if isinstance(dtype, str) else None
    if encoding is None:
        raise ValueError(
            f"tensor {name} has dtype {dtype!r}; supported: {', '.join(_ENCODING_OF_DTYPE)}"
        )
    expected = tensor_bytes(shape, encoding)
    if offsets[1] - offsets[0] != expected:
        raise ValueError(
            f"tensor {name} {list(shape)} {dtype} needs {expected} bytes, the header gives it"
            f" {offsets[1] - offsets[0]}"
        )
    return encoding, shape, (offsets[0], offsets[1])


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)
