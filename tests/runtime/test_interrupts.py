"""Ctrl-C in the middle of a step loses nothing: the step ends, then the interrupt is raised."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import FakeRunner, fake_engine
from palmette.runtime.interrupts import deferred_interrupt
from palmette.runtime.request import Request, SamplingParams


@pytest.fixture(autouse=True)
def python_answers_ctrl_c() -> Iterator[None]:
    """As in a terminal: a process in a shell's background starts with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def texts_of(engine: Engine) -> tuple[dict[str, str], int]:
    """Run two requests to their ends; their texts, and how often the run was interrupted."""
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
    engine.submit(
        [
            Request(request_id=name, prompt_ids=tuple(b"abcd" + name.encode()), sampling=sampling)
            for name in ("x", "y")
        ]
    )
    texts, num_interrupts = {"x": "", "y": ""}, 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            engine.check()
            continue
        for output in outputs:
            assert output.error is None
            texts[output.request_id] += output.text
    return texts, num_interrupts


def test_an_interrupted_step_is_finished_and_its_outputs_come_later() -> None:
    def interrupt(batch: ForwardBatch) -> None:
        signal.raise_signal(signal.SIGINT)

    runner = FakeRunner(num_pages=64, page_size=4, vocab_size=300, on_launch=interrupt)
    texts, num_interrupts = texts_of(fake_engine(runner=runner))
    assert num_interrupts == 6, "one a step"
    assert (texts, 0) == texts_of(fake_engine(num_pages=64, page_size=4))


def test_a_handler_of_the_program_is_called_once_and_stays() -> None:
    calls: list[int] = []

    def handler(number: int, frame: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_the_block_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="inside"), deferred_interrupt():
        raise ValueError("inside")
