"""The loop of the engine process, over its socket."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from palmette.runtime.config import EngineConfig
from palmette.runtime.fake_runner import FakeRunner, fake_engine
from palmette.runtime.faults import SequenceFault
from palmette.runtime.request import ErrorInfo, Request, SamplingParams
from palmette.server import transport as frames
from palmette.server.engine_process import serve


class DeviceLost(RuntimeError):
    """As that of the cuda runner, which is known by its name."""


INFO = ErrorInfo(code="unavailable", message="the device was lost")


@pytest.mark.parametrize("error", [SequenceFault(INFO, is_final=True), DeviceLost(INFO.message)])
def test_the_process_ends_when_its_engine_can_compute_nothing_more(error: Exception) -> None:
    """Not before all requests have been told why."""

    class LostRunner(FakeRunner):
        def launch(self, batch: Any) -> Any:
            raise error

    runner = LostRunner(None, num_pages=64, page_size=16, vocab_size=300)
    theirs, ours = socket.socketpair()
    codes: list[int] = []

    def run() -> None:
        codes.append(serve(frames.engine_end(theirs), lambda _: fake_engine(runner=runner)))
        theirs.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = frames.server_end(ours)
    found: list[Any] = []

    def wait_for(kind: type) -> None:
        deadline = time.monotonic() + 30
        while not any(isinstance(message, kind) for message in found):
            assert time.monotonic() < deadline
            end.wait(1)
            found.extend(end.receive())

    sampling = SamplingParams(max_new_tokens=4)
    requests = [
        Request(request_id=name, prompt_ids=(5, 6, 7), sampling=sampling) for name in ("a", "b")
    ]
    end.send(frames.Start(EngineConfig()))
    wait_for(frames.Ready)
    end.send(frames.Submit(requests))
    wait_for(frames.Failed)
    thread.join(10)
    ours.close()
    assert codes == [1]
    steps = [message for message in found if isinstance(message, frames.StepOutputs)]
    outputs = [output for step in steps for output in step.outputs]
    assert {out.request_id for out in outputs} == {"a", "b"}
    for output in outputs:
        assert output.error is not None
        assert output.error.message == "the device was lost"
