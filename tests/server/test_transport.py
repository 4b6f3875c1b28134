from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from palmette.runtime.metrics import EngineStats
from palmette.runtime.request import (
    ErrorInfo,
    Finish,
    FinishReason,
    LogprobOptions,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from palmette.server import transport as frames
from palmette.server.remote_engine import EngineState, RemoteEngine
from palmette.server.transport import FrameError, Transport, TransportClosed

Ends = tuple[Transport[frames.FromEngine], Transport[frames.ToEngine]]
Wire = tuple[socket.socket, Transport[frames.ToEngine]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a transport."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield frames.server_end(ours), frames.engine_end(theirs)


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A plain socket, and the engine's end of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, frames.engine_end(theirs)


def request(request_id: str, num_tokens: int = 3) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(stop=("ü", "\0"), logit_bias=((7, -1.5),), seed=2**64 - 1),
        logprobs=LogprobOptions(output=True, num_top=2, prompt_start=0),
        namespace=("key", "a"),
    )


def test_every_message_arrives_as_it_was_sent(ends: Ends) -> None:
    server, engine = ends
    output = Output(
        request_id="a",
        token_ids=(1, 2),
        text="é\ud7ff",
        logprobs=(TokenLogprob(token_id=1, logprob=None, top=((2, -0.5),)),),
        finish=Finish(reason=FinishReason.STOP, matched="x"),
        usage=Usage(prompt_tokens=3, miss_reason="evicted"),
        error=ErrorInfo(code="grammar", message="m", field="f"),
    )
    to_engine = [frames.Submit([request("a"), request("b")]), frames.Abort(["a"]), frames.Ping(3)]
    from_engine = [
        frames.StepOutputs(4, [output]),
        frames.Pong(3, 9, EngineStats(running=1, errors={"grammar": 2})),
        frames.Failed("no", True),
    ]
    for message in to_engine:
        server.send(message)
    for answer in from_engine:
        engine.send(answer)
    assert engine.receive() == to_engine
    assert server.receive() == from_engine


def test_a_frame_larger_than_the_sockets_buffer_arrives_in_parts(ends: Ends) -> None:
    server, engine = ends
    large = frames.Submit([request("a", 2_000_000)])
    server.send(large)
    assert server.wants_write, "the frame fits into the buffer; this test proves nothing"
    received: list[frames.ToEngine] = []
    while not received:
        received = engine.receive()
        server.write_some()
    assert received == [large]
    assert not server.wants_write


def test_a_request_that_no_frame_can_hold_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = RemoteEngine()
        engine._transport, engine._state = frames.server_end(ours), EngineState.READY
        with pytest.raises(OverflowError):
            engine.submit([request("fits"), replace(request("huge"), priority=2**70)])
        assert engine.num_open == 0


def test_frames_cut_at_every_byte(wire: Wire) -> None:
    ours, engine = wire
    body = msgspec.msgpack.encode(frames.Abort(["x"]))
    data = struct.pack(">I", len(body)) + body
    received = []
    for byte in data + data:
        ours.send(bytes((byte,)))
        received += engine.receive()
    assert received == [frames.Abort(["x"])] * 2


def test_the_last_frames_come_before_the_end(ends: Ends) -> None:
    server, engine = ends
    server.send(frames.Abort(["a"]))
    server.close()
    assert engine.receive() == [frames.Abort(["a"])]
    with pytest.raises(TransportClosed):
        engine.receive()
    with pytest.raises(TransportClosed):
        engine.send(frames.Failed("x", False))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", frames.MAX_FRAME_BYTES + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + b"\x01",
        struct.pack(">I", 20) + b"\x80\x04\x95\x09\x00\x00\x00\x00\x00\x00\x00\x8c\x05hello\x94.",
    ],
    ids=["too long", "no msgpack", "no message", "a pickle"],
)
def test_what_is_no_frame_is_refused(data: bytes, wire: Wire) -> None:
    ours, engine = wire
    ours.send(data)
    with pytest.raises(FrameError):
        engine.receive()


def test_values_beyond_a_types_range_are_refused(wire: Wire) -> None:
    ours, engine = wire
    wrong = {"type": "submit", "requests": [{"request_id": "a", "prompt_ids": [1], "x": {}}]}
    wrong["requests"][0]["sampling"] = {"temperature": -1.0}  # type: ignore[index]
    body = msgspec.msgpack.encode(wrong)
    ours.send(struct.pack(">I", len(body)) + body)
    with pytest.raises(FrameError, match="temperature"):
        engine.receive()
