"""Ctrl-C in a read: its program is given up, everything else goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from running_server import RunningServer

import palmette as pm
from palmette.lang.remote import HttpClient
from palmette.lang.testing import FakeModel
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Output, Request


class Interrupted(LocalClient):
    """The poll with the number `at` is interrupted after its step: its outputs come late."""

    def __init__(self, at: int) -> None:
        super().__init__(fake_engine(num_pages=2048))
        self.at = at
        self.aborted: list[str] = []
        self._num_polls = 0
        self._late: list[Output] = []

    def poll(self) -> list[Output]:
        self._num_polls += 1
        outputs, self._late = [*self._late, *super().poll()], []
        if self._num_polls == self.at:
            self._late = outputs
            raise KeyboardInterrupt
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        super().abort(request_ids)


@pm.function
def ask(s: pm.ProgramState, question: str) -> None:
    s += question + pm.gen("a", max_tokens=12, temperature=0, ignore_eos=True)
    s += " and " + pm.gen("b", max_tokens=4, temperature=0, ignore_eos=True)


@pm.function
def reading(s: pm.ProgramState) -> None:
    s += "read" + pm.gen("a", max_tokens=12, temperature=0, ignore_eos=True)
    try:
        s["copy"] = s["a"]
    except Exception:
        s["copy"] = "went on"


READS: list[Callable[[pm.ProgramState], object]] = [
    lambda state: state["a"],
    lambda state: state.text(),
    lambda state: state.sync(),
    lambda state: list(state.text_iter("a")),
]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_after_an_interrupted_read_later_programs_give_their_own_answer(
    read: Callable[[pm.ProgramState], object], at: int
) -> None:
    alone = ask.run("second", backend=fake_engine(num_pages=2048)).text()
    client = Interrupted(at)
    first = ask.run("first", backend=client)
    with pytest.raises(KeyboardInterrupt):
        read(first)
    second = ask.run("second", backend=client)
    assert second.text() == alone
    assert len(client.aborted) == 1 and not client.engine.has_work
    with pytest.raises(pm.ProgramError, match="interrupted"):
        first["b"]
    client.engine.check()


def test_the_body_that_waits_ends_and_does_not_catch_it_as_an_error() -> None:
    client = Interrupted(3)
    state = reading.run(backend=client)
    with pytest.raises(KeyboardInterrupt):
        state["copy"]
    assert ask.run("x", backend=client)["a"]
    assert len(client.aborted) == 1
    with pytest.raises(RuntimeError, match="interrupted"):
        state["copy"]
    assert state.error() is not None


def test_other_programs_of_the_session_go_on() -> None:
    client = Interrupted(3)
    other = ask.run("other", backend=client)
    state = ask.run("mine", backend=client)
    with pytest.raises(KeyboardInterrupt):
        state["a"]
    assert other.text() == ask.run("other", backend=fake_engine(num_pages=2048)).text()


def test_all_programs_of_an_interrupted_batch_are_aborted() -> None:
    client = Interrupted(3)
    with pytest.raises(KeyboardInterrupt):
        ask.run_batch([{"question": f"{i}"} for i in range(5)], backend=client)
    assert len(client.aborted) == 5
    assert ask.run("x", backend=client).error() is None
    assert not client.engine.has_work


def test_an_interrupt_in_the_python_code_of_a_program_drops_what_it_recorded() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        raise KeyboardInterrupt

    model = FakeModel()
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=model)
    assert ask.run("x", backend=model)["b"] == " ok" * 4
    model.assert_calls(2)


def test_an_interrupted_submit_loses_no_later_program() -> None:
    class Once(FakeModel):
        is_broken = True

        def submit(self, requests: Sequence[Request]) -> None:
            if self.is_broken:
                self.is_broken = False
                raise KeyboardInterrupt
            super().submit(requests)

    model = Once()
    state = ask.run("x", backend=model)
    with pytest.raises(KeyboardInterrupt):
        state["a"]
    assert ask.run("y", backend=model)["b"] == " ok" * 4
    with pytest.raises(pm.ProgramError, match="interrupted"):
        state["a"]


class InterruptedRemote(HttpClient):
    """Its first poll is interrupted."""

    num_polls = 0

    def poll(self) -> list[Output]:
        self.num_polls += 1
        if self.num_polls == 1:
            raise KeyboardInterrupt
        return super().poll()


def test_after_an_interrupted_read_a_server_is_quiet_and_answers(server: RunningServer) -> None:
    client = InterruptedRemote(server.url)
    other = HttpClient(server.url)
    alone = ask.run("second", backend=other).text()
    other.close()
    first = ask.run("first", backend=client)
    with pytest.raises(KeyboardInterrupt):
        first.sync()
    assert ask.run("second", backend=client).text() == alone
    with pytest.raises(pm.ProgramError, match="interrupted"):
        first["b"]
    assert server.stats()["running"] == 0
    client.close()
