"""Parameters of gen: the same on an engine in this process, over HTTP and on FakeModel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from running_server import RunningServer, StartServer

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import FakeRunner, fake_engine

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def letters(ids: object) -> int:
    return ord("a") + len(ids) % 26  # type: ignore[arg-type]


def following(prompt: str) -> str:
    """What the engine's model writes after a prompt of one byte per character."""
    return (ALPHABET * 3)[len(prompt) % 26 :][:40]


@pytest.fixture(params=["engine", "http", "fake"])
def backend(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    if request.param == "http":
        server: RunningServer = request.getfixturevalue("server")
        endpoint = pm.RuntimeEndpoint(server.url)
        yield endpoint
        endpoint.close()
    elif request.param == "engine":
        yield LocalClient(fake_engine(letters, num_pages=256, context_length=2048))
    else:
        yield FakeModel(following)


@pm.function
def stops(s: pm.ProgramState) -> None:
    s += "x" + pm.gen("a", stop_regex=r"[x-z]|gh+", temperature=0) + "|"
    s += pm.gen("b", stop="xyz", stop_regex=[r"\d", "q.s"], max_tokens=40, temperature=0)


def test_a_stop_pattern_ends_the_text_before_its_match(backend: EngineClient) -> None:
    state = stops.run(backend=backend)
    assert state["a"] == "bcdef"
    meta = state.get_meta_info("a")
    assert isinstance(meta, dict)
    assert meta["finish_reason"] == {"type": "stop", "matched": r"[x-z]|gh+"}
    assert state["b"] == "hijklmnop"
    assert state.text() == "xbcdef|hijklmnop"


def test_a_stop_pattern_does_not_count_before_min_tokens() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", stop_regex="[1-9]{3}", min_tokens=5, temperature=0)

    model = FakeModel(["123456789"])
    assert program.run(backend=model)["a"] == "1234"
    engine = LocalClient(fake_engine(lambda ids: ord("0") + len(ids)))
    assert program.run(backend=engine)["a"] == "1234"


def test_a_stop_pattern_can_be_a_default_of_the_run(backend: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a") + pm.gen("b", stop_regex="k")

    state = program.run(backend=backend, stop_regex="f|g", temperature=0)
    assert (state["a"], state["b"]) == ("bcde", "fghij")


def test_text_that_may_be_a_match_is_not_streamed(backend: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", stop_regex="cd?efg", max_tokens=20, temperature=0)

    assert "".join(program.run(backend=backend).text_iter("a")) == "b"


def test_a_gen_that_takes_too_long_ends_alone(start_server: StartServer) -> None:
    def body(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks[0] += "slow" + pm.gen("a", max_tokens=200, timeout=0.15, temperature=0)
        forks[1] += "fast" + pm.gen("b", max_tokens=30, temperature=0)
        s["forks"] = list(forks)

    program = pm.function(body)
    server = start_server(engine={"model": "script=letters&delay=0.02"})
    endpoint = pm.RuntimeEndpoint(server.url)
    fake = FakeModel({"slow": " s" * 200, "fast": "1" * 30}, seconds_per_poll=0.002)
    for backend in (endpoint, fake):
        slow, fast = program.run(backend=backend)["forks"]
        with pytest.raises(pm.ProgramError, match=r"gen 'a' failed: .*0\.15 s has passed") as told:
            slow["a"]
        assert told.value.code == "deadline"
        assert len(fast["b"]) == 30
    endpoint.close()


@pm.function
def too_long(s: pm.ProgramState) -> None:
    s += "x" + pm.gen("a", max_tokens=60, timeout=0.5)


def test_an_engine_s_own_clock_ends_a_gen() -> None:
    now = [0.0]
    runner = FakeRunner(
        letters, num_pages=64, page_size=16, vocab_size=300, on_launch=lambda batch: tick(now)
    )
    engine = fake_engine(runner=runner, clock=lambda: now[0])
    state = too_long.run(backend=LocalClient(engine))
    with pytest.raises(pm.ProgramError) as told:
        state["a"]
    assert told.value.code == "deadline"
    engine.check()
    assert engine.stats().used_pages == 0


def tick(now: list[float]) -> None:
    now[0] += 0.02


def test_a_server_that_keeps_no_deadline_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.lang import remote

    monkeypatch.setattr(remote, "_DEADLINE_GRACE_S", 0.05)

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"model_path": "m"})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1]})
        return httpx.Response(200, content=Silence())

    client = pm.HttpClient("http://silent", transport=httpx.MockTransport(answer))
    state = too_long.run(backend=client)
    with pytest.raises(pm.ProgramError) as told:
        state["a"]
    assert told.value.code == "deadline"
    client.close()


class Silence(httpx.AsyncByteStream):
    """An answer that never comes."""

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        import asyncio

        yield b": ping\n\n"
        await asyncio.Event().wait()


def test_special_tokens_can_stay_in_the_text() -> None:
    eos = 256

    @pm.function
    def program(s: pm.ProgramState, keeps: bool) -> None:
        s += "x" + pm.gen("a", max_tokens=3, ignore_eos=True, skip_special_tokens=not keeps)

    backend = LocalClient(fake_engine(lambda ids: eos if len(ids) == 2 else ord("k")))
    assert program.run(True, backend=backend, temperature=0)["a"] == "k<eos>k"
    assert program.run(False, backend=backend, temperature=0)["a"] == "kk"


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}],
    "triggers": ["<n>"],
}


def test_a_structural_tag_leaves_other_text_free(backend: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState, tag: object) -> None:
        s += "x" + pm.gen("a", structural_tag=tag, max_tokens=6, stop="g", temperature=0)  # type: ignore[arg-type]

    if isinstance(backend, FakeModel):
        backend = FakeModel(["bcdefgh"] * 2)
    assert program.run(TAG, backend=backend)["a"] == "bcdef"
    assert program.run(json.dumps(TAG), backend=backend)["a"] == "bcdef"


# Asking again


@pm.function
def patient(s: pm.ProgramState, retry: int) -> None:
    s += "x" + pm.gen("a", retry=retry, temperature=0) + "y" + pm.gen("b", max_tokens=2)


@pytest.mark.parametrize("code", ["overloaded", "unavailable", "unreachable"])
@pytest.mark.parametrize("eager", [False, True])
def test_what_passes_is_asked_again(code: str, eager: bool) -> None:
    busy = pm.RequestError("come back", code=code)
    model = FakeModel([busy, busy, " one", " two"])
    start = time.monotonic()
    state = patient.run(2, backend=model, eager=eager)
    assert (state["a"], state["b"]) == (" one", " two")
    assert time.monotonic() - start >= 0.15  # 0.05 s and 0.1 s
    prompts = [call.request.prompt_ids for call in model.calls]
    assert prompts[0] == prompts[1] == prompts[2]
    with pytest.raises(pm.ProgramError, match="come back") as caught:
        patient.run(1, backend=FakeModel([busy, busy]), eager=eager)["b"]
    assert caught.value.code == code and caught.value.variable == "a"


def test_what_does_not_pass_is_not_asked_again() -> None:
    model = FakeModel([pm.RequestError("bad", code="grammar")])
    with pytest.raises(pm.ProgramError, match="bad"):
        patient.run(5, backend=model)["a"]
    model.assert_calls(1)


def test_a_lost_connection_is_tried_again() -> None:
    num_calls = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_calls
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"model_path": "m"})
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [1]})
        num_calls += 1
        if num_calls == 1:
            raise httpx.ReadError("reset by peer")
        if num_calls == 2:
            return httpx.Response(502, content=b"<html>bad gateway</html>")
        event = {"text": "ok", "output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}}
        return httpx.Response(200, content=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    client = pm.HttpClient("http://shaky", transport=httpx.MockTransport(answer))
    state = patient.run(2, backend=client)
    assert state["a"] == "ok"
    client.close()


def test_others_go_on_while_one_waits_to_ask_again() -> None:
    busy = pm.RequestError("come back", code="overloaded")
    model = FakeModel({"slow": [busy, busy, busy, " late"], "fast": " 1" * 50})

    @pm.function
    def program(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks[0] += "slow" + pm.gen("a", retry=3)
        forks[1] += "fast" + pm.gen("b", max_tokens=50)
        s["forks"] = list(forks)

    slow, fast = program.run(backend=model)["forks"]
    assert fast["b"].startswith(" 1 1") and slow["a"] == " late"
