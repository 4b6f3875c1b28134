"""/v1/programs: registered programs run on the server, with the answers they have here."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pydantic
import pytest
from running_server import RunningServer, StartServer, events

import palmette as pm
from palmette.lang.served import ServedRun
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine


def letters(ids: object) -> int:
    return ord("a") + len(ids) % 26  # type: ignore[arg-type]


@pytest.fixture
def client(server: RunningServer) -> Iterator[pm.RuntimeEndpoint]:
    endpoint = pm.RuntimeEndpoint(server.url)
    yield endpoint
    endpoint.close()


@pytest.fixture
def local() -> EngineClient:
    """The same engine in this process."""
    return LocalClient(fake_engine(letters, num_pages=256, context_length=2048))


@pm.function
def everything(s: pm.ProgramState, question: str, limit: int = 4) -> object:
    s += "Q: " + question + pm.gen("a", max_tokens=9, stop="h", temperature=0) + "\n"
    forks = s.fork(3)
    forks += lambda i: f"[{i}]" + pm.gen("v", max_tokens=limit, temperature=0)
    forks.join()
    s += "so " + pm.select("c", ["one", question, "tone"]) + pm.gen("m", n=2, max_tokens=3)
    s += pm.user("hi <eos>") + pm.assistant(pm.gen("d", regex="[0-9]{2}", temperature=0))
    s += pm.gen("l", max_tokens=2, return_logprob=True, logprob_start_len=3, top_logprobs_num=2)
    more = s.fork(2)
    more += lambda i: f"({i})" + pm.gen("w", max_tokens=2)
    more.join("concate_and_append")
    s["note"] = f"{s['c']}/{s['v'][1]}"
    return {"c": s["c"], "v": s["v"], "of": question}


NAMES = ["a", "v", "c", "m", "d", "l", "note"]


@pm.function
def asking(s: pm.ProgramState, question: str) -> None:
    s += question + pm.gen("answer", max_tokens=3)


def without_place(meta: Any) -> Any:
    if isinstance(meta, list):
        return [without_place(item) for item in meta]
    return {key: value for key, value in meta.items() if key not in ("id", "e2e_latency")}


def register(server: RunningServer, function: pm.Function) -> str:
    response = server.client.post("/v1/programs", content=function.compile().to_json())
    assert response.status_code == 200, response.text
    program_id: str = response.json()["id"]
    return program_id


def test_one_http_call_gives_what_the_local_run_gives(
    server: RunningServer, client: pm.RuntimeEndpoint, local: EngineClient
) -> None:
    assert client.flush_cache()
    program = everything.compile()
    client.info()
    program.run(question="zz", backend=client).sync()  # registers it
    paths: list[str] = []
    client._client.event_hooks["request"].append(_noting(paths))
    assert client.flush_cache()
    paths.clear()
    remote, here = (program.run(question="why?", backend=one) for one in (client, local))
    assert isinstance(remote._host.reading.sinks[0], ServedRun)
    assert remote.text() == here.text()
    assert paths == [f"/v1/programs/{program.id}/run"]
    assert (remote.token_ids(), remote.messages()) == (here.token_ids(), here.messages())
    assert [remote[name] for name in NAMES] == [here[name] for name in NAMES]
    assert remote.ret_value == here.ret_value
    for name in ("a", "v", "c", "m", "d", "l"):
        ours, theirs = (without_place(state.get_meta_info(name)) for state in (remote, here))
        assert ours == theirs
    rows, expected = pm.explain(remote).rows, pm.explain(here).rows
    assert [(row.name, row.cached_tokens, row.computed_tokens) for row in rows] == [
        (row.name, row.cached_tokens, row.computed_tokens) for row in expected
    ]


def _noting(paths: list[str]) -> Any:
    async def note(request: httpx.Request) -> None:
        paths.append(request.url.path)

    return note


def test_the_answer_over_plain_http(server: RunningServer) -> None:
    program_id = register(server, everything)
    body = {"arguments": {"question": "why?", "limit": 2}, "sampling": {"temperature": 0}}
    response = server.client.post(f"/v1/programs/{program_id}/run", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [len(text) for text in answer["variables"]["v"]] == [2, 2, 2]
    assert answer["ret_value"]["of"] == "why?"
    assert answer["text"].startswith("Q: why?")
    assert [message["role"] for message in answer["messages"]] == ["user", "assistant"]
    assert answer["errors"] == {}
    usage = answer["usage"]
    assert usage["requests"] == 1 + 3 + 3 + 2 + 1 + 1 + 2
    assert usage["prompt_tokens"] == usage["cached_tokens"] + usage["computed_tokens"]
    assert [call["branch"] for call in answer["calls"] if call["name"] == "v"] == [
        "fork 0/3", "fork 1/3", "fork 2/3",
    ]  # fmt: skip
    assert all(call["meta_info"] for call in answer["calls"])


def test_texts_stream_by_variable(server: RunningServer, client: pm.RuntimeEndpoint) -> None:
    program_id = register(server, asking)
    body = {"arguments": {"question": "hello"}, "stream": True}
    told = events(server.stream(f"/v1/programs/{program_id}/run", body))
    assert [one["event"] for one in told[-2:]] == ["call", "end"]
    grown = "".join(one["text"] for one in told if one["event"] == "text")
    assert told[-2]["text"].startswith(grown) and told[-1]["variables"] == {"answer": "fgh"}
    state = asking.compile().run(question="hello", backend=client, stream=True)
    assert "".join(state.text_iter("answer")) == "fgh"
    body["stream_text"] = False
    told = events(server.stream(f"/v1/programs/{program_id}/run", body))
    assert [one["event"] for one in told] == ["start", "call", "end"]


def test_who_waits_for_the_end_gets_longer_chunks_than_who_reads_along(
    start_server: StartServer,
) -> None:
    server = start_server(engine={"kv_tokens": 8192})

    @pm.function
    def documents(s: pm.ProgramState, word: str) -> None:
        for number, fork in enumerate(s.fork(6)):
            fork += f"{number}" + word + pm.gen("fact", max_tokens=20)

    path = f"/v1/programs/{register(server, documents)}/run"
    steps = {}
    for streams in (True, False):
        server.post("/flush_cache", {})
        before = server.stats()["steps"]
        body = {"arguments": {"word": "x" * 1200}, "stream": True, "stream_text": streams}
        facts = [one["text"] for one in events(server.stream(path, body)) if one["event"] == "call"]
        steps[streams] = server.stats()["steps"] - before
        assert facts == ["".join(chr(97 + (1201 + i) % 26) for i in range(20))] * 6
    assert steps[False] < steps[True] - 20


def test_the_constant_start_is_cached_there(client: pm.RuntimeEndpoint) -> None:
    @pm.function
    def long_start(s: pm.ProgramState, question: str) -> None:
        s += "All of this is known before: " * 4 + question + pm.gen("a", max_tokens=2)

    client.info()
    long_start.cache(client)
    meta = long_start.run("why?", backend=client).get_meta_info("a")
    assert isinstance(meta, dict) and meta["cached_tokens"] >= 96


def test_a_run_on_a_closed_client_says_so(server: RunningServer) -> None:
    client = pm.RuntimeEndpoint(server.url)
    client.info()
    program = asking.compile()
    program.run(question="x", backend=client).sync()
    client.close()
    with pytest.raises((pm.ProgramError, pm.BackendError), match="closed"):
        _ = program.run(question="x", backend=client)["answer"]


def test_choices_that_are_an_argument_are_chosen_there(
    server: RunningServer, client: pm.RuntimeEndpoint, local: EngineClient
) -> None:
    @pm.function
    def end_of(s: pm.ProgramState, start: str, endings: list[str]) -> None:
        s += start + pm.select("end", endings) + pm.gen("more", max_tokens=2)

    program = end_of.compile()
    client.info()
    given = {"start": "it is ", "endings": ["abc", "xyz", "q"]}
    remote, here = (program.run(**given, backend=one) for one in (client, local))
    assert isinstance(remote._host.reading.sinks[0], ServedRun)
    assert (remote["end"], remote.text()) == (here["end"], here.text())
    route = f"/v1/programs/{program.id}/run"
    for wrong in ("abc", [], [1], {"a": 1}):
        answer = server.client.post(route, json={"arguments": given | {"endings": wrong}})
        assert answer.status_code == 400, answer.text
    many = server.client.post(route, json={"arguments": given | {"endings": ["a"] * 5000}})
    assert many.status_code == 400 and "the limit is" in many.text


def test_a_batch_runs_there(client: pm.RuntimeEndpoint, local: EngineClient) -> None:
    entries = [{"question": f"nr {i}"} for i in range(12)]
    remote = everything.compile().run_batch(entries, backend=client)
    here = everything.compile().run_batch(entries, backend=local)
    assert [state.text() for state in remote] == [state.text() for state in here]


def test_registering_is_idempotent_and_can_be_undone(server: RunningServer) -> None:
    program_id = register(server, asking)
    assert register(server, asking) == program_id == asking.compile().id
    shown = server.client.get(f"/v1/programs/{program_id}").json()
    assert shown["parameters"] == [{"name": "question", "required": True}]
    assert shown["listing"] == str(asking.compile())
    assert pm.Program.from_json(json.dumps(shown["program"])).id == program_id
    assert server.client.delete(f"/v1/programs/{program_id}").json()["deleted"]
    for response in (
        server.client.get(f"/v1/programs/{program_id}"),
        server.client.delete(f"/v1/programs/{program_id}"),
        server.client.post(f"/v1/programs/{program_id}/run", json={}),
        server.client.get("/v1/programs/../etc"),
    ):
        assert response.status_code == 404


def test_a_client_registers_again_what_the_server_has_lost(
    server: RunningServer, client: pm.RuntimeEndpoint
) -> None:
    program = asking.compile()
    assert program.run(question="hello", backend=client)["answer"] == "fgh"
    server.client.delete(f"/v1/programs/{program.id}")
    assert program.run(question="hello", backend=client)["answer"] == "fgh"


def test_what_only_runs_here_runs_here(client: pm.RuntimeEndpoint) -> None:
    @pm.function
    def counting(s: pm.ProgramState, question: object) -> None:
        s += f"{question}" + pm.gen("answer", max_tokens=3)
        s.call("length", len, "answer")

    assert counting.compile().run(question="hello", backend=client)["length"] == 3
    state = asking.compile().run(question="hello", backend=client)
    assert isinstance(state._host.reading.sinks[0], ServedRun)
    state = counting.compile().run(question=("a", 1), backend=client)
    assert not isinstance(state._host.reading.sinks[0], ServedRun)
    assert state.text().startswith("('a', 1)")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, r"asking\(\) needs the argument 'question'"),
        ({"arguments": {"question": "x", "z": 1}}, 400, "has no argument 'z'"),
        ({"arguments": {"question": 3}}, 400, "'question' is appended to a state"),
        ({"arguments": {"question": ["x"]}}, 400, "'question' is appended to a state"),
        ({"arguments": {"question": {"x": 1}}}, 400, "arguments"),
        ({"arguments": {"question": "x"}, "sampling": {"temperature": -1}}, 400, "temperature: -1"),
        ({"arguments": {"question": "x"}, "sampling": {"heat": 1}}, 400, "sampling.heat"),
        ({"arguments": {"question": "x"}, "steam": True}, 400, "steam"),
    ],
)
def test_a_wrong_run_is_refused_with_the_field(
    server: RunningServer, body: dict[str, Any], status: int, message: str
) -> None:
    response = server.client.post(f"/v1/programs/{register(server, asking)}/run", json=body)
    assert response.status_code == status
    assert message.replace("\\", "") in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not a program"),
        (b'{"version":1,"name":"x","nodes":[{"op":"insert","source":0,"target":1,"value":0}]}',
         "nodes[0]: value 0: is not made before this place"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_refused_with_the_place(
    server: RunningServer, data: bytes, message: str
) -> None:
    response = server.client.post("/v1/programs", content=data)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "invalid_program"


def test_a_failed_call_is_told_beside_those_that_did_not_fail(
    server: RunningServer, client: pm.RuntimeEndpoint
) -> None:
    @pm.function
    def program(s: pm.ProgramState, question: str) -> None:
        bad, good = s.fork(2)
        bad += "x" * 3000 + pm.gen("bad", max_tokens=3)
        good += question + pm.gen("good", max_tokens=3)
        s += good["good"]

    program_id = register(server, program)
    body = {"arguments": {"question": "hello"}}
    answer = server.client.post(f"/v1/programs/{program_id}/run", json=body).json()
    [bad] = [call for call in answer["calls"] if call["name"] == "bad"]
    assert bad["error"]["code"] == "context_length_exceeded"
    assert answer["text"] == "fgh"
    state = program.compile().run(question="hello", backend=client)
    assert state.text() == "fgh"
    error = state.error()
    assert isinstance(error, pm.ProgramError) and error.code == "context_length_exceeded"
    assert "test_programs_api.py" in str(error)


def test_texts_that_double_end_with_an_error_and_not_with_the_memory(
    server: RunningServer,
) -> None:
    nodes: list[dict[str, Any]] = [{"op": "text", "source": 0, "target": 1, "text": "x" * 1000}]
    for state in range(1, 60):
        nodes.append(
            {"op": "splice", "source": state, "target": state + 1, "base": 0, "tip": state}
        )
    nodes.append({"op": "gen", "source": 60, "target": 61, "value": 0, "parameters": {}})
    whole = {"version": 1, "name": "bomb", "nodes": nodes, "tip": 60}
    registered = server.client.post("/v1/programs", content=json.dumps(whole)).json()
    answer = server.client.post(f"/v1/programs/{registered['id']}/run", json={}).json()
    assert answer["text"] is None
    assert answer["errors"][""]["code"] == "context_length_exceeded"


def test_too_many_calls_and_texts_are_refused(server: RunningServer) -> None:
    @pm.function
    def many(s: pm.ProgramState, word: str) -> None:
        for fork in s.fork(1100):
            fork += "x" + pm.gen("a", max_tokens=1)

    @pm.function
    def long(s: pm.ProgramState, word: str) -> None:
        for _ in range(2000):
            s += f"{word}"

    for function, word, message in ((many, "w", "limit is 1024"), (long, "w" * 9999, "exceed")):
        path = f"/v1/programs/{register(server, function)}/run"
        response = server.client.post(path, json={"arguments": {"word": word}})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_programs_belong_to_their_key(start_server: StartServer) -> None:
    server = start_server(api_keys=["one", "two"])
    program_id = register(server, asking)
    other = {"authorization": "Bearer two"}
    assert server.client.get(f"/v1/programs/{program_id}").status_code == 200
    assert server.client.get(f"/v1/programs/{program_id}", headers=other).status_code == 404
    body = {"arguments": {"question": "hello"}}
    path = f"/v1/programs/{program_id}/run"
    assert server.client.post(path, json=body, headers=other).status_code == 404
    assert httpx.post(server.url + path, json=body).status_code == 401


def test_the_least_used_program_goes_first(start_server: StartServer) -> None:
    program = asking.compile()
    size = len(program.to_json()) + 1024 * len(program.nodes)
    server = start_server(program_cache_bytes=3 * size)
    ids = []
    for letter in "abc":
        renamed = (
            asking.compile()
            .to_json()
            .replace(b'"name":"asking"', b'"name":"%s____"' % letter.encode())
        )
        ids.append(server.client.post("/v1/programs", content=renamed).json()["id"])
    server.client.get(f"/v1/programs/{ids[0]}")
    register(server, asking)
    found = [server.client.get(f"/v1/programs/{one}").status_code for one in ids]
    assert found == [200, 404, 200]


def test_a_client_that_goes_away_ends_the_run(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})

    @pm.function
    def slow(s: pm.ProgramState, question: str) -> None:
        s += question
        for fork in s.fork(3):
            fork += pm.gen("a", max_tokens=1500) + pm.gen("b", max_tokens=100)

    path = f"/v1/programs/{register(server, slow)}/run"
    body: dict[str, Any] = {"arguments": {"question": "hello"}}
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(path, json=body, timeout=0.5)
    server.wait_idle()
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.wait_for(lambda: server.stats()["running"] == 3)
    server.wait_idle()


@pm.function
def long_running(s: pm.ProgramState, question: str) -> None:
    s += question
    s["quick"] = pm.gen(max_tokens=2)
    for fork in s.fork(3):
        fork += pm.gen("a", max_tokens=1500) + pm.gen("b", max_tokens=100)
    s += "Behind" + pm.gen("c", max_tokens=1500)


def test_a_run_tells_its_id_and_is_stopped_by_it(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"}, api_keys=["one", "two"])
    path = f"/v1/programs/{register(server, long_running)}/run"
    body = {"arguments": {"question": "hello"}, "stream": True}
    with server.client.stream("POST", path, json=body) as response:
        run_id = response.headers["x-run-id"]
        data = (line for line in response.iter_lines() if line.startswith("data: {"))
        lines = (json.loads(line.removeprefix("data: ")) for line in data)
        assert next(lines) == {"event": "start", "id": run_id}
        assert next(lines)["event"] == "text"
        other = {"authorization": "Bearer two"}
        refused = server.client.delete(f"/v1/programs/runs/{run_id}", headers=other)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "run_not_found"
        server.wait_for(lambda: server.stats()["running"] == 4)
        stopped = server.client.delete(f"/v1/programs/runs/{run_id}")
        assert stopped.json() == {"id": run_id, "object": "program.run", "aborted": True}
        told = list(lines)
    server.wait_idle()
    calls = {one["name"]: one for one in told if one["event"] == "call"}
    assert calls["a"]["error"]["code"] == calls["c"]["error"]["code"] == "abort"
    assert told[-1]["event"] == "end" and told[-1]["id"] == run_id
    assert told[-1]["errors"][""]["code"] == "abort"
    assert server.client.delete(f"/v1/programs/runs/{run_id}").status_code == 404


def test_who_waits_for_the_whole_answer_chooses_the_id(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})
    path = f"/v1/programs/{register(server, long_running)}/run"
    body = {"arguments": {"question": "hello"}, "rid": "mine"}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.post, path, body)
        server.wait_for(lambda: server.stats()["running"] == 4)
        assert server.post(path, body).json()["error"]["code"] == "duplicate_id"
        assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": True}
        response = waiting.result()
    assert response.status_code == 200
    assert response.headers["x-run-id"] == response.json()["id"] == "mine"
    assert len(response.json()["variables"]["quick"]) == 2
    assert response.json()["errors"][""]["code"] == "abort"
    server.wait_idle()
    short = body | {"sampling": {"max_new_tokens": 1}, "rid": "x" * 200}
    assert "rid: must be" in server.post(path, short).json()["error"]["message"]


def test_a_run_that_waits_to_ask_again_neither_keeps_the_server_busy_nor_the_abort_waiting(
    start_server: StartServer,
) -> None:
    server = start_server(
        engine={"model": "script=letters&delay=0.05", "limits": {"max_waiting": 1}}
    )

    @pm.function
    def persistent(s: pm.ProgramState, question: str) -> None:
        for fork in s.fork(8):
            fork += question + pm.gen("a", max_tokens=3, retry=1000)

    server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    path = f"/v1/programs/{register(server, persistent)}/run"
    body = {"arguments": {"question": "hello"}, "rid": "mine"}
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.post, path, body)
        busy_before, start = processor_s(server.process.pid), time.monotonic()
        server.wait_for(lambda: time.monotonic() - start > 1.0)
        assert processor_s(server.process.pid) - busy_before < 0.7
        assert server.client.delete("/v1/programs/runs/mine").status_code == 200
        stopped = time.monotonic()
        errors = [one["error"]["code"] for one in waiting.result().json()["calls"]]
        assert time.monotonic() - stopped < 2.0
    assert errors == ["abort"] * 8


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_interrupted_program_ends_on_the_server(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})
    client = pm.RuntimeEndpoint(server.url)
    state = asking.compile().run(question="hello", backend=client, max_new_tokens=5)
    assert state["answer"] == "fgh"

    @pm.function
    def slow(s: pm.ProgramState, question: str) -> None:
        s += question + pm.gen("a", max_tokens=1500)

    state = slow.compile().run(question="hello", backend=client, stream=True)
    assert next(state.text_iter("a"))
    state._host.session.interrupt(state._host.watched)  # type: ignore[union-attr]
    with pytest.raises(pm.ProgramError, match="interrupted"):
        state["a"]
    server.wait_idle()
    client.close()


@pm.function
def random_program(s: pm.ProgramState, word: str, seed: int) -> object:
    draw = random.Random(seed)
    write(s, word, draw, depth=0)
    return [s.text(), word]


def write(s: pm.ProgramState, word: str, draw: random.Random, depth: int) -> None:
    for _ in range(draw.randint(1, 5)):
        match draw.randint(0, 7 if depth < 2 else 4):
            case 0:
                s += draw.choice([" text", "\n", word, f"<{word}>"])
            case 1:
                stop = draw.choice([None, "k", word])
                s += pm.gen(draw.choice("ab"), max_tokens=draw.randint(1, 6), stop=stop)
            case 2:
                s += pm.select("c", [word, "one", "two"])
            case 3:
                s += pm.user(word) + pm.assistant(pm.gen("d", n=draw.randint(1, 2), max_tokens=3))
            case 4:
                with s.var_scope("e"):
                    s += "(" + pm.gen(max_tokens=2) + ")"
                s += s["e"]
            case _:
                forks = s.fork(draw.randint(1, 3))
                for fork in forks:
                    write(fork, word, draw, depth + 1)
                if draw.random() < 0.7:
                    forks.join(draw.choice(["gather_variable", "concate_and_append"]))


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_give_the_same_there_and_here(
    seed: int, client: pm.RuntimeEndpoint, local: EngineClient
) -> None:
    program = random_program.compile(seed=seed)
    remote, here = (program.run(word="wo", backend=one) for one in (client, local))
    plain = random_program.run("wo", seed, backend=local, eager=True)
    assert remote.text() == here.text() == plain.text()
    assert remote.token_ids() == here.token_ids() == plain.token_ids()
    assert remote.messages() == here.messages() == plain.messages()
    names = [name for name in "abcde" if name in remote]
    assert [remote[name] for name in names] == [plain[name] for name in names]
    assert remote.ret_value == here.ret_value


def test_a_forecast_for_a_server(client: pm.RuntimeEndpoint) -> None:
    assert client.flush_cache()
    forecast = everything.compile().explain(question="why?", backend=client, analyze=True)
    assert forecast.is_exact
    assert forecast.cached_tokens > 0


def test_a_program_in_an_event_loop(client: pm.RuntimeEndpoint) -> None:
    async def main() -> list[pm.ProgramState]:
        program = asking.compile()
        runs = [program.run_async(question="hello", backend=client) for _ in range(3)]
        return await asyncio.gather(*runs)

    assert [state["answer"] for state in asyncio.run(main())] == ["fgh"] * 3


def test_a_server_that_dies_ends_the_wait(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})
    client = pm.RuntimeEndpoint(server.url)

    @pm.function
    def slow(s: pm.ProgramState, question: str) -> None:
        s += question + pm.gen("a", max_tokens=1500)

    state = slow.compile().run(question="hello", backend=client, stream=True)
    assert next(state.text_iter("a"))
    server.process.kill()
    with pytest.raises(pm.ProgramError) as caught:
        state["a"]
    assert caught.value.code == "unreachable"
    with pytest.raises(pm.ProgramError):
        slow.compile().run(question="again", backend=client)["a"]
    client.close()


def test_an_engine_that_dies_ends_the_run(start_server: StartServer) -> None:
    server = start_server(engine={"model": "script=letters&delay=0.01"})

    @pm.function
    def slow(s: pm.ProgramState, question: str) -> None:
        s += question + pm.gen("a", max_tokens=1500) + pm.gen("b", max_tokens=3)

    path = f"/v1/programs/{register(server, slow)}/run"
    body = {"arguments": {"question": "hello"}, "stream": True}
    with server.client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(server.engine_pid, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"code":"unavailable"' in "".join(rest)


def test_values_of_a_type_are_made_here(client: pm.RuntimeEndpoint, local: EngineClient) -> None:
    @pm.function
    def program(s: pm.ProgramState, question: str) -> object:
        s += question
        s["n"] = pm.gen(int, max_tokens=4)
        s["list"] = pm.gen(Literal["abc", "bcd"], n=2)
        s += " " + s.get_text("n")
        return s["n"]

    compiled = program.compile()
    remote, here = (
        compiled.run(question="hello", backend=one, temperature=0) for one in (client, local)
    )
    assert isinstance(remote._host.reading.sinks[0], ServedRun)
    assert not isinstance(here._host.reading.sinks[0], ServedRun)
    assert remote["n"] == here["n"] and type(remote["n"]) is int
    assert remote["list"] == here["list"]
    assert (remote.text(), remote.ret_value) == (here.text(), here.ret_value)


def test_a_value_that_its_type_refuses_is_told(client: pm.RuntimeEndpoint) -> None:
    @pm.function
    def program(s: pm.ProgramState, question: str) -> None:
        s += question
        s["items"] = pm.gen(Annotated[list[int], Refused()], max_tokens=60)

    state = program.compile().run(question="hello", backend=client)
    assert isinstance(state._host.reading.sinks[0], ServedRun)
    with pytest.raises(pm.ProgramError, match="never good enough") as caught:
        state["items"]
    assert caught.value.code == "validation"


def Refused() -> pydantic.AfterValidator:
    def refuse(value: list[int]) -> list[int]:
        raise ValueError("never good enough")

    return pydantic.AfterValidator(refuse)
