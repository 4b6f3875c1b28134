"""num_api_spec_tokens: one call of a hosted API for several gens, with the same texts."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import palmette as pm
from palmette.lang import overrun
from palmette.lang.program import Program

CARD = "Name: Ada Lovelace\nBirthday: 10 December 1815\nJob: mathematician and writer\nEnd"


class Model:
    """An OpenAI-compatible server that knows one text by heart and goes on with it."""

    def __init__(self, text: str, *, pieces: int = 1, counts: bool = True) -> None:
        self.text = text
        self.pieces = pieces  # tokens per event; 0: an event per character
        self.counts = counts  # tells the usage
        self.calls: list[dict[str, Any]] = []
        self.num_written = 0
        self.failures: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.calls.append(body)
        if self.failures:
            return httpx.Response(self.failures.pop(0), json={"error": {"message": "no"}})
        is_chat = "messages" in body
        prompt = "" if is_chat else body["prompt"]
        told = self.text.removeprefix(prompt) if self.text.startswith(prompt) else " what"
        if body["temperature"] > 0:
            told = f" draw{len(self.calls)}\nBirthday: day{len(self.calls)}\nJob: x\n"
        limit = body.get("max_tokens", 10**6)
        tokens, reason = self._tokens(told), "stop"
        if len(tokens) >= limit:
            tokens, reason = tokens[:limit], "length"
        text, num_tokens = "", 0
        for token in tokens:
            text += token
            num_tokens += 1
            ends = [text.find(stop) for stop in body.get("stop", ()) if stop in text]
            if ends:
                text, reason = text[: min(ends)], "stop"
                break
        self.num_written += num_tokens
        return httpx.Response(200, text=self._events(text, reason, num_tokens, is_chat))

    @staticmethod
    def _tokens(text: str) -> list[str]:
        return re.findall(r" ?\w+|\W", text)

    def _events(self, text: str, reason: str, num_tokens: int, is_chat: bool) -> str:
        tokens = list(text) if self.pieces == 0 else self._tokens(text)
        size = max(self.pieces, 1)
        events: list[dict[str, Any]] = []
        for start in range(0, len(tokens), size):
            piece = "".join(tokens[start : start + size])
            choice = {"delta": {"content": piece}} if is_chat else {"text": piece}
            events.append({"choices": [choice]})
        events.append({"choices": [{"delta": {}, "text": "", "finish_reason": reason}]})
        if self.counts:
            usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
            events.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@contextmanager
def serving(model: Model, *, is_chat: bool = False) -> Iterator[pm.OpenAI]:
    client = pm.OpenAI("m", is_chat, api_key="k", transport=httpx.MockTransport(model))
    yield client
    client.close()


def card(s: pm.ProgramState, job: str = "Job", **options: Any) -> None:
    s += "Name:" + pm.gen("name", stop="\n", **options)
    s += "\nBirthday:" + pm.gen("birthday", stop="\n", **options)
    s += f"\n{job}:" + pm.gen("job", stop="\n", **options)


async def card_async(s: pm.AsyncState, **options: Any) -> str:
    s += "Name:" + pm.gen("name", stop="\n", **options)
    s += "\nBirthday:" + pm.gen("birthday", stop="\n", **options)
    s += "\nJob:" + pm.gen("job", stop="\n", **options)
    return str(await s["job"])


FACTS = {
    "name": " Ada Lovelace",
    "birthday": " 10 December 1815",
    "job": " mathematician and writer",
}
plain = pm.function(card)
quick = pm.function(num_api_spec_tokens=64)(card)
quick_async = pm.function(num_api_spec_tokens=64)(card_async)


def facts_of(state: pm.ProgramState) -> dict[str, str]:
    return {name: state[name] for name in FACTS}


def calls_of(state: pm.ProgramState) -> list[int]:
    return [state.get_meta_info(name)["api_calls"] for name in FACTS]


def test_one_call_answers_three_gens() -> None:
    with serving(model := Model(CARD)) as client:
        state = plain.run(backend=client, temperature=0)
        assert (facts_of(state), calls_of(state), len(model.calls)) == (FACTS, [1, 1, 1], 3)
    with serving(model := Model(CARD)) as client:
        state = quick.run(backend=client, temperature=0)
        assert (facts_of(state), calls_of(state), len(model.calls)) == (FACTS, [1, 0, 0], 1)
        assert state.text() == CARD.removesuffix("\nEnd")
        metas = [state.get_meta_info(name) for name in FACTS]
        assert [meta["completion_tokens"] for meta in metas] == [model.num_written, 0, 0]
        assert [meta["prompt_tokens"] for meta in metas] == [3, 0, 0]
        assert {meta["finish_reason"]["type"] for meta in metas} == {"stop"}
        explained = pm.explain(state)
        assert [row.num_requests for row in explained.rows] == [1, 0, 0]
    assert "stop" not in model.calls[0]
    assert model.calls[0]["max_tokens"] == 128  # that of the gen: the larger of both


@pytest.mark.parametrize("way", ["eager", "async", "batch", "bound", "compiled", "copied", "read"])
def test_every_way_to_run_saves_the_calls(way: str) -> None:
    with serving(model := Model(CARD)) as client:
        match way:
            case "eager":
                state = quick.run(backend=client, temperature=0, eager=True)
            case "async":
                state = asyncio.run(quick_async.run_async(backend=client, temperature=0))
            case "batch":
                state, other = quick.run_batch([{}, {}], backend=client, temperature=0)
                assert facts_of(other) == FACTS
            case "bound":
                state = quick.bind(job="Job").run(backend=client, temperature=0)
            case "compiled":
                program = Program.from_json(quick.compile().to_json())
                state = program.run(job="Job", backend=client, temperature=0)
            case "copied":
                state = copied.run(backend=client, temperature=0)
            case _:
                state = read.run(backend=client, temperature=0)
        found = {name: state[name] for name in FACTS}
        expected: dict[str, Any] = FACTS
        if way == "copied":
            expected = FACTS | {"birthday": [FACTS["birthday"]], "job": [FACTS["job"]]}
        assert found == expected
        assert len(model.calls) == (2 if way == "batch" else 1)


@pm.function(num_api_spec_tokens=64)
def copied(s: pm.ProgramState) -> None:
    s += "Name:" + pm.gen("name", stop="\n")
    with s.copy() as t:
        t += "\nBirthday:" + pm.gen("birthday", stop="\n")
        t += "\nJob:" + pm.gen("job", stop="\n")


@pm.function(num_api_spec_tokens=64)
def read(s: pm.ProgramState) -> None:
    s += "Name:" + pm.gen("name", stop="\n")
    if "Ada" in s["name"]:
        s += "\nBirthday:" + pm.gen("birthday", stop="\n")
    s += "\nJob:" + pm.gen("job", stop="\n")


def test_forks_that_are_greedy_share_the_overrun() -> None:
    @pm.function(num_api_spec_tokens=64)
    def forked(s: pm.ProgramState) -> None:
        s += "Name:" + pm.gen("name", stop="\n")
        forks = s.fork(3)
        forks += ["\nBirthday:", "\nBirthday:", "\nHobby:"]
        forks += pm.gen("x", stop="\n")
        forks.join()

    with serving(model := Model(CARD)) as client:
        assert forked.run(backend=client, temperature=0)["x"] == [" 10 December 1815"] * 2 + [
            " what"
        ]
        assert len(model.calls) == 2


def test_forks_that_draw_stay_independent() -> None:
    @pm.function(num_api_spec_tokens=64)
    def forked(s: pm.ProgramState) -> None:
        s += "Name:" + pm.gen("name", stop="\n")
        forks = s.fork(3)
        forks += "\nBirthday:" + pm.gen("x", stop="\n")
        forks.join()

    with serving(model := Model(CARD)) as client:
        state = forked.run(backend=client, temperature=0.7)
        assert state["name"] == " draw1"
        assert state["x"][0] == " day1"  # out of the first call
        assert len(set(state["x"])) == 3  # the others of their own
        assert len(model.calls) == 3


def test_a_constant_that_the_model_did_not_write_is_a_call() -> None:
    with serving(model := Model(CARD)) as client:
        state = quick.run(job="Trade", backend=client, temperature=0)
        assert facts_of(state) == FACTS | {"job": " what"}
        assert calls_of(state) == [1, 0, 1]
        assert model.calls[1]["prompt"].endswith("1815\nTrade:")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"logit_bias": {5: 1}},
        {"n": 2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"max_tokens": 2},
        {"stop": "8"},
        {"stop": ()},
    ],
    ids=str,
)
def test_what_the_overrun_cannot_tell_is_a_call(options: dict[str, Any]) -> None:
    def body(s: pm.ProgramState) -> None:
        s += "Name:" + pm.gen("name", stop="\n", temperature=0)
        s += "\nBirthday:" + pm.gen("x", **{"stop": "\n", "temperature": 0} | options)

    results = []
    for decorate in (pm.function, pm.function(num_api_spec_tokens=15)):
        model = Model(CARD.replace("1815", "1915"))
        with serving(model) as client:
            state = decorate(body).run(backend=client, max_new_tokens=15)
            results.append((state["name"], state["x"], len(model.calls)))
    if "temperature" not in options:
        assert results[0][:2] == results[1][:2]
    assert results[0][2] == results[1][2]


def test_a_seed_that_draws_is_a_call_and_one_that_does_not_is_none() -> None:
    for temperature, num_calls in ((0.7, 3), (0, 1)):
        with serving(model := Model(CARD)) as client:
            quick.run(backend=client, temperature=temperature, seed=5).sync()
            assert len(model.calls) == num_calls


@pytest.mark.parametrize("pieces", [1, 3, 0])
@pytest.mark.parametrize("counts", [True, False])
def test_texts_are_those_of_calls_of_their_own(pieces: int, counts: bool) -> None:
    generator = random.Random(pieces + 10 * counts)
    words = ["Name:", " Ada", "\n", "Job:", " x", " 12", ".", "é"]
    num_calls = [0, 0]
    for _ in range(60):
        text = "".join(generator.choices(words, k=30))
        steps, place = [], 0
        for _ in range(4):
            size = generator.randrange(1, 12)
            constant = text[place : place + size] if generator.random() < 0.8 else "Job:"
            stops = tuple(generator.sample(["\n", " x", ".", "12.", "Ad"], generator.randrange(3)))
            steps.append((constant, stops, generator.choice([1, 2, 3, 5, 12, 40])))
            place += size + generator.randrange(0, 8)
        results = []
        for index, num_spec in enumerate((None, generator.choice([1, 8, 30]))):

            @pm.function(num_api_spec_tokens=num_spec)
            def run(s: pm.ProgramState, steps: Any = steps) -> None:
                for place, (constant, stops, limit) in enumerate(steps):
                    s += constant + pm.gen(f"x{place}", stop=stops, max_tokens=limit)

            model = Model(text, pieces=pieces, counts=counts)
            with serving(model) as client:
                state = run.run(backend=client, temperature=0)
                values = [state[f"x{place}"] for place in range(4)]
                kinds = [
                    state.get_meta_info(f"x{place}")["finish_reason"]["type"] for place in range(4)
                ]
                results.append((state.text(), values, kinds))
            num_calls[index] += len(model.calls)
        assert results[0] == results[1], (text, steps)
    assert num_calls[0] == 240


def test_it_streams_up_to_the_stop_while_the_overrun_is_written() -> None:
    goes_on = threading.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        events = Model(CARD)(request).text.split("\n\n")

        async def lines() -> AsyncIterator[bytes]:
            for place, event in enumerate(events):
                if place == 1:
                    await asyncio.to_thread(goes_on.wait, 10)
                yield event.encode() + b"\n\n"

        return httpx.Response(200, content=lines())

    client = pm.OpenAI("m", False, api_key="k", transport=httpx.MockTransport(slow))
    state = quick.run(backend=client, temperature=0)
    pieces = state.text_iter("name")
    first = next(pieces)
    goes_on.set()
    assert first == " Ada"
    assert "".join(pieces) == " Lovelace"
    assert "".join(state.text_iter("birthday")) == " 10 December 1815"
    assert state.text() == CARD.removesuffix("\nEnd")
    client.close()


def test_a_failed_call_fails_its_gen_alone_and_can_be_asked_again() -> None:
    with serving(model := Model(CARD)) as client:
        model.failures = [500]
        state = quick.run(backend=client, temperature=0)
        error = state.error()
        assert isinstance(error, pm.ProgramError) and error.variable == "name"
        model.failures = [500]
        assert facts_of(quick.run(backend=client, temperature=0, retry=1)) == FACTS
        assert len(model.calls) == 3


def test_a_typed_value_that_is_refused_is_drawn_anew() -> None:
    seen: list[str] = []

    class Word(str):
        pass

    @pm.function(num_api_spec_tokens=64)
    def typed(s: pm.ProgramState) -> None:
        s += "Name:" + pm.gen("name", stop="\n")
        s += "\nBirthday:" + pm.gen("birthday", stop="\n", type=str)
        s.call("note", seen.append, "birthday")

    with serving(model := Model(CARD)) as client:
        typed.run(backend=client, temperature=0.5).sync()
        assert seen == [" day1"]
        assert len(model.calls) == 1


# Chat: the whole message is one call, and text of the program must be in it


def chat_card(s: pm.ProgramState, name: str = "Name:") -> None:
    s += pm.user("Who was the first programmer?")
    with s.assistant():
        s += name + pm.gen("name", stop="\n")
        s += "\nBirthday:" + pm.gen("birthday", stop="\n")
        s += "\nJob:" + pm.gen("job", stop="\n")


quick_chat = pm.function(num_api_spec_tokens=64)(chat_card)


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_message_of_several_gens_is_one_call(is_eager: bool) -> None:
    with serving(model := Model(CARD), is_chat=True) as client:
        state = quick_chat.run(backend=client, temperature=0, eager=is_eager)
        assert (facts_of(state), calls_of(state), len(model.calls)) == (FACTS, [1, 0, 0], 1)
        assert state.messages()[-1] == {
            "role": "assistant",
            "content": CARD.removesuffix("\nEnd"),
        }
        assert model.calls[0]["messages"] == [
            {"role": "user", "content": "Who was the first programmer?"}
        ]
    with serving(Model(CARD), is_chat=True) as client:
        error = pm.function(chat_card).run(backend=client, temperature=0).error()
        assert isinstance(error, pm.ProgramError) and error.code == "unsupported"


def test_a_message_that_goes_on_otherwise_is_an_error_with_both_texts() -> None:
    with serving(model := Model(CARD.replace("Birthday", "Born")), is_chat=True) as client:
        state = quick_chat.run(backend=client, temperature=0)
        assert state["name"] == " Ada Lovelace"
        error = state.error()
        assert isinstance(error, pm.ProgramError)
        assert (error.variable, error.code) == ("birthday", "unsupported")
        assert "goes on with 'irthday:'" in error.reason
        assert "it wrote 'orn: 10 December" in error.reason
        assert len(model.calls) == 1
        error = quick_chat.run(name="Nom:", backend=client, temperature=0).error()
        assert isinstance(error, pm.ProgramError) and error.variable == "name"
        assert "the model wrote 'Name: Ada" in error.reason


def test_the_last_gen_of_a_message_needs_no_stop() -> None:
    @pm.function(num_api_spec_tokens=64)
    def run(s: pm.ProgramState) -> None:
        s += pm.user("Who?")
        s += pm.assistant("Name:" + pm.gen("name", stop="\n") + "\nBirthday:" + pm.gen("rest"))
        s += pm.user("And?") + pm.assistant(pm.gen("more", stop="\n"))

    with serving(model := Model(CARD), is_chat=True) as client:
        state = run.run(backend=client, temperature=0)
        assert state["rest"] == CARD.split("Birthday:")[1]
        assert state["more"] == "Name: Ada Lovelace"
        assert len(model.calls) == 2


def test_where_it_has_no_use_it_changes_nothing() -> None:
    script = {"Name:": " Ada\n", "Birthday:": " 1815\n", "Job:": " x\n"}
    results = []
    for program in (plain, quick):
        model = pm.testing.FakeModel(script)
        state = program.run(backend=model)
        assert "api_calls" not in state.get_meta_info("name")
        results.append((facts_of(state), [call.prompt for call in model.calls]))
    assert results[0] == results[1]


def test_a_number_of_tokens_must_be_one() -> None:
    with pytest.raises(ValueError, match="num_api_spec_tokens: 0 is out of range; it must be >= 1"):
        pm.function(num_api_spec_tokens=0)(card)


class Late(Model):
    """Its first two tokens come in one event, as from a server whose reader fell behind."""

    def _events(self, text: str, reason: str, num_tokens: int, is_chat: bool) -> str:
        events = super()._events(text, reason, num_tokens, is_chat).split("\n\n")
        first, second = (json.loads(event.removeprefix("data: ")) for event in events[:2])
        first["choices"][0]["text"] += second["choices"][0].get("text", "")
        return "\n\n".join([f"data: {json.dumps(first)}", *events[2:]])


@pytest.mark.parametrize("wanted", [4, 7, 64])
def test_two_tokens_in_one_event_are_two(wanted: int) -> None:
    def write(s: pm.ProgramState) -> None:
        s += "Name:" + pm.gen("x", stop="never", max_tokens=3, temperature=0)

    for model in (Model("Name: Ada of Byron and then some more"), Late("Name: Ada of Byron is it")):
        with serving(model) as client:
            state = pm.function(num_api_spec_tokens=wanted)(write).run(backend=client)
            assert state["x"] == " Ada of Byron"
            assert state.get_meta_info("x")["finish_reason"]["type"] == "length"


def test_one_long_program_keeps_so_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrun, "MAX_KEPT", 2000)

    @pm.function(num_api_spec_tokens=8)
    def program(s: pm.ProgramState) -> None:
        for place in range(60):
            s += f"{place}" * 10 + pm.gen("x", stop="\n", temperature=0)

    kept = overrun.Overruns(lambda text: list(map(ord, text)))
    with serving(Model("")) as client:
        client._overruns = kept
        program.run(backend=client).sync()
    assert 0 < kept._size == sum(len(a.whole) for one in kept._kept.values() for a in one) <= 2000
