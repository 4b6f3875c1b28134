"""Frames between the HTTP process and the engine process.

A frame is a 4-byte big-endian length and one msgpack value: a tagged union of the messages below,
built from the types of `runtime.request` as they stand. The wire is one end of a private UNIX
socket pair, so nothing outside the two processes can reach it. No pickle: a frame can only ever
become one of these types.

    to the engine      Start, Submit, Abort, Releases, Flush, Pin, Unpin, Look, Ping
    from the engine    Ready, Failed, StepOutputs, Flushed, Pinned, Looked, Pong
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from palmette.runtime.config import EngineConfig
from palmette.runtime.metrics import EngineStats
from palmette.runtime.request import EngineInfo, ErrorInfo, Output, Release, Request
from palmette.runtime.standing import Standing

MAX_FRAME_BYTES = 256 * 1024 * 1024
_READ_BYTES = 64 * 1024  # a larger buffer would be mapped and unmapped for each read
_LENGTH = struct.Struct(">I")


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first frame: what to load."""

    config: EngineConfig


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Requests that are admitted together, or refused together."""

    requests: Sequence[Request]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    request_ids: Sequence[str]


class Releases(msgspec.Struct, tag="releases", frozen=True):
    """What programs are done with."""

    releases: Sequence[Release]


class Flush(msgspec.Struct, tag="flush", frozen=True):
    """Forget the prefixes of a namespace's tenant; None: all."""

    call_id: int
    namespace: tuple[str, ...] | None


class Pin(msgspec.Struct, tag="pin", frozen=True):
    """Keep the cached prefix of `ids` for `seconds`; None: until it is let go."""

    call_id: int
    ids: Sequence[int]
    namespace: tuple[str, ...]
    seconds: float | None


class Unpin(msgspec.Struct, tag="unpin", frozen=True):
    """Let go of the pin of `ids`; None: of all of the tenant."""

    call_id: int
    ids: Sequence[int] | None
    namespace: tuple[str, ...]


class Look(msgspec.Struct, tag="look", frozen=True):
    """What a forecast needs of the engine; with a namespace, also what is kept of it."""

    call_id: int
    namespace: tuple[str, ...] | None


class Ping(msgspec.Struct, tag="ping", frozen=True):
    call_id: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine ends. `user_error`: the message is meant for whoever started it."""

    message: str
    user_error: bool


class StepOutputs(msgspec.Struct, tag="outputs", frozen=True):
    """Everything that one step produced; `step` is the heartbeat."""

    step: int
    outputs: Sequence[Output]


class Flushed(msgspec.Struct, tag="flushed", frozen=True):
    call_id: int
    done: bool


class Pinned(msgspec.Struct, tag="pinned", frozen=True):
    """How many tokens are pinned, or how many pins were let go; or why not."""

    call_id: int
    count: int
    error: ErrorInfo | None = None


class Looked(msgspec.Struct, tag="looked", frozen=True):
    call_id: int
    standing: Standing


class Pong(msgspec.Struct, tag="pong", frozen=True):
    call_id: int
    step: int
    stats: EngineStats


ToEngine = Start | Submit | Abort | Releases | Flush | Pin | Unpin | Look | Ping
FromEngine = Ready | Failed | StepOutputs | Flushed | Pinned | Looked | Pong
Answer = Flushed | Pinned | Looked | Pong
Received = TypeVar("Received")


class TransportClosed(ConnectionError):
    """The other end is gone."""


class FrameError(ValueError):
    """Bytes that are no frame of this protocol."""


class Transport(Generic[Received]):
    """One end of the socket pair: never blocks, except in `wait` and `flush`.

    Frames that do not fit into the socket's buffer stay here until `flush` or the next `send`.
    """

    def __init__(self, sock: socket.socket, receive_type: object):
        sock.setblocking(False)
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receive_type)
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """True while bytes wait for room in the socket's buffer."""
        return bool(self._outgoing)

    def send(self, message: ToEngine | FromEngine) -> None:
        """Queue one frame and write what the socket takes.

        Raises:
            TransportClosed: when the other end is gone.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
        self._outgoing += _LENGTH.pack(len(body))
        self._outgoing += body
        self.write_some()

    def write_some(self) -> None:
        """Write queued bytes until the socket takes no more."""
        while self._outgoing:
            try:
                num_sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise TransportClosed("the other end is gone") from error
            del self._outgoing[:num_sent]

    def receive(self) -> list[Received]:
        """All whole frames that have arrived; [] when there is none yet.

        Raises:
            TransportClosed: at the end of the stream, after the last whole frame.
            FrameError: on bytes that are no frame; the stream is unusable after it.
        """
        closed = self._read_some()
        messages = self._parse()
        if closed and not messages:
            raise TransportClosed("the other end is gone")
        return messages

    def wait(self, timeout_s: float | None) -> None:
        """Block until something arrives, queued bytes can go out, or the time is up."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        if self._outgoing:
            self.write_some()

    def flush(self, timeout_s: float) -> None:
        """Block until all queued bytes are written, `timeout_s` passed without room, or closed."""
        while self._outgoing:
            _, writable, _ = select.select([], [self._socket], [], timeout_s)
            if not writable:
                return
            self.write_some()

    def close(self) -> None:
        self._socket.close()

    def _read_some(self) -> bool:
        """Move arrived bytes into the buffer; True at the end of the stream."""
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._incoming += data
            if len(data) < _READ_BYTES:  # all there was; an end is seen by the next read
                return False

    def _parse(self) -> list[Received]:
        messages: list[Received] = []
        start, end = 0, len(self._incoming)
        with memoryview(self._incoming) as view:
            while end - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
                body = start + _LENGTH.size
                if end - body < length:
                    break
                try:
                    messages.append(self._decoder.decode(view[body : body + length]))
                except msgspec.MsgspecError as error:
                    raise FrameError(str(error)) from error
                start = body + length
        del self._incoming[:start]
        return messages


def engine_end(sock: socket.socket) -> Transport[ToEngine]:
    """The engine process's end."""
    return Transport(sock, ToEngine)


def server_end(sock: socket.socket) -> Transport[FromEngine]:
    """The HTTP process's end."""
    return Transport(sock, FromEngine)
