"""What rank 0 tells the others: one frame each, in the order in which it does the same itself."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import numpy as np

from palmette.kernels.batch import ForwardBatch


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How each rank builds its runner."""

    model: str  # path of the checkpoint
    num_pages: int
    page_size: int
    size: int
    folder: str = ""  # where the ranks find each other: rank 0 makes it
    runner: str  # torch or cuda
    device: str  # cpu or cuda
    weights: str
    kv_dtype: str
    attention: str = "auto"
    deterministic: bool = True
    max_running: int = 1
    timeout_s: float = 60.0


class Start(msgspec.Struct, frozen=True, tag=True):
    rank: int
    options: RankOptions


class Launch(msgspec.Struct, frozen=True, tag=True):
    arrays: list[bytes]  # of a ForwardBatch, in order


class Copy(msgspec.Struct, frozen=True, tag=True):
    sources: list[int]
    targets: list[int]


class Export(msgspec.Struct, frozen=True, tag=True):
    """Answered with the bytes of the rank's part of the pages."""

    pages: list[int]


class Import(msgspec.Struct, frozen=True, tag=True):
    pages: list[int]
    data: bytes


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True):
    """A worker's first answers: it has the model's files open; it is built."""

    error: str | None = None


Frame = Start | Launch | Copy | Export | Import | Stop

_NAMES = [field.name for field in fields(ForwardBatch)]
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    return _decoder.decode(data)


def launch_frame(batch: ForwardBatch) -> Launch:
    return Launch([getattr(batch, name).tobytes() for name in _NAMES])


def batch_of(frame: Launch) -> ForwardBatch:
    arrays = [np.frombuffer(data, np.int32) for data in frame.arrays]
    return ForwardBatch(**dict(zip(_NAMES, arrays, strict=True)))
