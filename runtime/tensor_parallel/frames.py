"""What rank 0 tells the others: one frame each, in the order in which it does the same itself."""

from __future__ import annotations

from dataclasses import fields
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from palmette.kernels.batch import ForwardBatch, Int32Array


class RankOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How each rank builds its runner."""

    model: str  # path of the checkpoint
    num_pages: int
    page_size: int
    size: int
    folder: str = ""  # where the ranks find each other: rank 0 makes it
    runner: str  # torch or cuda
    device: str  # cpu or cuda
    weights: str  # how matrices are kept
    dtype: str = ""  # of activations, where that is not weights
    kv_dtype: str
    attention: str = "auto"
    sampling: str = "triton"  # of rank 0, which alone chooses
    deterministic: bool = True
    graph_rows: tuple[int, ...] = ()
    timeout_s: float = 60.0  # for what all ranks do in one step
    may_shrink: bool = False  # the pool, where a rank has less memory than rank 0


class Start(msgspec.Struct, frozen=True, tag=True):
    rank: int
    options: RankOptions


class Build(msgspec.Struct, frozen=True, tag=True):
    num_pages: int


class GoOn(msgspec.Struct, frozen=True, tag=True):
    """All ranks have come so far."""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """A step; see `Launches`."""

    arrays: list[bytes | None]  # of a ForwardBatch, in order, and sources; None: as before
    has_sources: bool = False


class Copy(msgspec.Struct, frozen=True, tag=True):
    sources: list[int]
    targets: list[int]


class Export(msgspec.Struct, frozen=True, tag=True):
    """Answered with `Pages`, when they are asked for by `Fetch`."""

    pages: list[int]
    id: int


class Fetch(msgspec.Struct, frozen=True, tag=True):
    id: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Exports that nobody is going to fetch."""

    ids: list[int]


class Import(msgspec.Struct, frozen=True, tag=True):
    pages: list[int]
    data: bytes


class Sync(msgspec.Struct, frozen=True, tag=True):
    """The launch told before has failed on rank 0. Answered with `Synced`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The files are open; the weights are loaded; the runner is built; or why not."""

    error: str | None = None
    free_bytes: int = 0  # of the rank's device, before it builds


class Pages(msgspec.Struct, frozen=True, tag=True):
    """The bytes of the rank's part of pages."""

    data: bytes


class Synced(msgspec.Struct, frozen=True, tag=True):
    has_failed: bool  # here as well
    num_calls: int  # collectives so far


Frame = Start | Build | GoOn | Launch | Copy | Export | Fetch | Forget | Import | Sync | Stop
Answer = Ready | Pages | Synced

_NAMES = [field.name for field in fields(ForwardBatch)]
_encoder = msgspec.msgpack.Encoder()
_frames: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(frame: Frame | Answer) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    return _frames.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _answers.decode(data)


def receive(connection: Connection) -> Frame:
    """Raises EOFError, or another OSError, when rank 0 is gone."""
    return decode(connection.recv_bytes())


class Launches:
    """Steps as frames, on either end: what is as in the step before is not sent again.

    Decodes list the same pages for many steps, which is most of what a step holds.
    """

    def __init__(self) -> None:
        self._arrays: list[bytes] = [b""] * (len(_NAMES) + 1)

    def frame(self, batch: ForwardBatch, sources: Int32Array | None) -> Launch:
        arrays = [getattr(batch, name).tobytes() for name in _NAMES]
        arrays.append(self._arrays[-1] if sources is None else sources.tobytes())
        known, self._arrays = self._arrays, arrays
        return Launch(
            [None if new == old else new for new, old in zip(arrays, known, strict=True)],
            has_sources=sources is not None,
        )

    def read(self, frame: Launch) -> tuple[ForwardBatch, Int32Array | None]:
        """The next of the frames that the other end made."""
        pairs = zip(frame.arrays, self._arrays, strict=True)
        self._arrays = [old if new is None else new for new, old in pairs]
        arrays = [np.frombuffer(data, np.int32) for data in self._arrays]
        batch = ForwardBatch(**dict(zip(_NAMES, arrays[:-1], strict=True)))
        return batch, arrays[-1] if frame.has_sources else None
