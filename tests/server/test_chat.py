"""`palmette chat` with an engine in this process: interrupts, cut answers, failures."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from palmette.lang.testing import CHATML
from palmette.runtime.client import LocalClient
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine
from palmette.runtime.request import Output, Request
from palmette.server.chat import LocalChat, Message, converse


def engine() -> Engine:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = CHATML
    return fake_engine(tokenizer=tokenizer)


def ask(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def whole(chat: LocalChat, question: str) -> str:
    return "".join(piece.text for piece in chat.answer(ask(question)))


class Interrupted(LocalClient):
    """Polls with these numbers are interrupted after their step: their outputs come late."""

    def __init__(self, *at: int) -> None:
        super().__init__(engine())
        self._at = at
        self._num_polls = 0
        self._late: list[Output] = []

    def poll(self) -> list[Output]:
        self._num_polls += 1
        outputs, self._late = [*self._late, *super().poll()], []
        if self._num_polls in self._at:
            self._late = outputs
            raise KeyboardInterrupt
        return outputs


# the second one interrupts the drain as well: then the old end comes in the next turn
@pytest.mark.parametrize("at", [(3,), (3, 4), (1,), (1, 2)])
def test_the_answer_after_an_interrupted_one_is_its_own(at: tuple[int, ...]) -> None:
    alone = whole(LocalChat(LocalClient(engine()), max_tokens=20, temperature=0.0), "second")
    client = Interrupted(*at)
    chat = LocalChat(client, max_tokens=20, temperature=0.0)
    with pytest.raises(KeyboardInterrupt):
        whole(chat, "first")
    assert whole(chat, "second") == alone
    assert alone and not client.engine.has_work
    client.engine.check()


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = iter(["first", "second", "/quit"])
    monkeypatch.setattr(console, "input", lambda prompt: next(lines))
    client = Interrupted(3)
    converse(LocalChat(client, max_tokens=20, temperature=0.0), console, [])
    first, second, *_ = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "[stopped]" in first and "[stopped]" not in second
    assert not client.engine.has_work


def test_an_answer_cut_by_the_limit_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = LocalChat(LocalClient(engine()), max_tokens=3, temperature=0.0)
    assert [piece.is_cut for piece in chat.answer(ask("x"))][-1] is True
    console = Console(file=io.StringIO(), width=200)
    lines = iter(["x", "/quit"])
    monkeypatch.setattr(console, "input", lambda prompt: next(lines))
    converse(chat, console, [])
    assert "[cut: the limit of new tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_client_that_gives_up_is_an_error_and_no_endless_wait() -> None:
    class Silent(LocalClient):
        def submit(self, requests: object) -> None:
            pass

    chat = LocalChat(Silent(engine()), max_tokens=3, temperature=0.0)
    with pytest.raises(ValueError, match="without an answer"):
        whole(chat, "x")


def test_outputs_of_other_requests_are_no_part_of_an_answer() -> None:
    client = LocalClient(engine())
    alone = whole(LocalChat(client, max_tokens=9, temperature=0.0), "x")
    client.submit([Request(request_id="other", prompt_ids=(5, 6, 7))])
    assert whole(LocalChat(client, max_tokens=9, temperature=0.0), "x") == alone
