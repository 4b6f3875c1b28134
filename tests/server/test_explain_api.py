"""/v1/programs/{id}/explain: forecasts where the engine is, exact, bounded, one key's alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, StartServer
from tiny_files import write_tiny_model

import palmette as pm
from palmette.lang.forecast import Forecast

LONG = "One sentence that is long enough to fill a page or two of the cache, and then some. " * 2


@pm.function
def forked(s: pm.ProgramState, q: str) -> None:
    s += LONG + q + pm.gen("first", max_tokens=9, ignore_eos=True)
    forks = s.fork(3)
    forks += lambda i: f" Point {i}:" + pm.gen("p", max_tokens=6 + i, ignore_eos=True)
    forks.join("concate_and_append")
    s += " So" + pm.select("sure", [" yes", " noo", " huh"])
    s += " All:" + pm.gen("all", max_tokens=5, ignore_eos=True)


@pm.function
def constrained(s: pm.ProgramState, q: str) -> None:
    s += LONG + q + pm.gen("a", regex="[a-z]{3}( [a-z]{4})?-suffix-[0-9]", max_tokens=40)
    s += pm.user("Sure?") + pm.assistant(pm.gen("b", n=2, max_tokens=7, stop=["e", "the"]))
    s["n"] = pm.gen(int, max_tokens=4)


PROGRAMS = [forked, constrained]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server with a tiny model."""
    path = write_tiny_model(tmp_path_factory.mktemp("explain") / "tiny", context_length=2048)
    command = [sys.executable, "-m", "palmette.server", "serve", "--model", str(path)]
    with subprocess.Popen(
        [*command, "--port", "0", "--kv-tokens", "8192", "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.fixture
def endpoint(tiny: str) -> Iterator[pm.RuntimeEndpoint]:
    client = pm.RuntimeEndpoint(tiny)
    assert client.flush_cache()
    yield client
    client.close()


def counts(forecast: Forecast, which: str) -> list[tuple[Any, ...]]:
    found = [(call.run, call.title, call.branch, getattr(call, which)) for call in forecast.calls]
    return [
        (*place, one.prompt_tokens, one.cached_tokens, one.computed_tokens) for *place, one in found
    ]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda one: str(one.__name__))
@pytest.mark.parametrize("is_warm", [False, True])
def test_what_is_predicted_on_the_server_is_what_its_runs_measure(
    endpoint: pm.RuntimeEndpoint, function: pm.Function, is_warm: bool
) -> None:
    program = function.compile()
    arguments: dict[str, Any] = {"q": "Why is it so?", "temperature": 0, "is_warm": is_warm}
    if is_warm:
        program.run(q="Why is it so?", temperature=0, backend=endpoint).sync()
    before = program.explain(backend=endpoint, **arguments)
    after = program.explain(backend=endpoint, analyze=True, **arguments)
    assert after.is_exact
    assert counts(after, "predicted") == counts(after, "measured")
    assert after.cached_tokens > 0 and before.num_steps > 0
    assert after.calls[0].predicted.cached_tokens > 0 or not is_warm
    assert {call.line.file for call in after.calls} == {__file__}
    if function is forked:  # all run to their limit
        assert before.prompt_tokens == after.prompt_tokens
        if not is_warm:
            assert counts(before, "predicted") == counts(after, "measured")
    else:
        assert before.calls[0].predicted.forced_tokens > 0


def test_a_batch(endpoint: pm.RuntimeEndpoint) -> None:
    batch = [{"q": f"Question {i}?"} for i in range(5)]
    program = forked.compile()
    before = program.explain(backend=endpoint, batch=batch, temperature=0)
    after = program.explain(backend=endpoint, batch=batch, temperature=0, analyze=True)
    assert after.is_exact
    assert counts(before, "predicted") == counts(after, "measured")
    assert {call.run for call in after.calls} == set(range(5))


def test_times_pages_and_money_are_the_server_s(endpoint: pm.RuntimeEndpoint) -> None:
    program = forked.compile()
    for number in range(4):
        program.run(q=f"Why {number}?", backend=endpoint).sync()
    prices = pm.Prices(input=2.0, output=10.0, cached_input=0.5)
    forecast = program.explain(backend=endpoint, q="Why?", prices=prices, lengths={"first": 3})
    assert forecast.seconds is not None and forecast.seconds > 0
    assert forecast.calls[0].predicted.generated_tokens == 3
    assert (forecast.page_size, forecast.peak_pages > 0) == (16, True)
    assert forecast.cost == pytest.approx(
        (forecast.computed_tokens * 2 + forecast.cached_tokens / 2 + forecast.generated_tokens * 10)
        / 1e6
    )
    assert Forecast.from_json(forecast.to_json()) == forecast
    assert "test_explain_api.py" in str(forecast) and "=prompt" not in str(forecast)


@pm.function
def asking(s: pm.ProgramState, q: str) -> None:
    s += q + pm.gen("a", max_tokens=4)


def register(server: RunningServer, function: pm.Function, **headers: str) -> str:
    data = function.compile().to_json()
    answer = server.client.post("/v1/programs", content=data, headers=headers)
    return f"/v1/programs/{answer.json()['id']}"


def test_lengths_of_unknown_names_are_refused(server: RunningServer) -> None:
    answer = server.post(f"{register(server, asking)}/explain", {"lengths": {"b": 3}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lengths"
    assert "'b' is no gen of this program; it has a" in answer.json()["error"]["message"]


def test_one_key_is_not_told_what_another_keeps(start_server: StartServer) -> None:
    server = start_server(api_keys=["one", "two"])
    other = {"authorization": "Bearer two"}
    path = register(server, asking)
    assert register(server, asking, **other) == path
    prompt = {"arguments": {"q": "x" * 320}}
    assert server.post(f"{path}/run", prompt).status_code == 200
    body = {**prompt, "cache": "present"}

    def cached(**more: Any) -> int:
        answer = server.post(f"{path}/explain", {**body, **more})
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["forecast"]["cached_tokens"]
        return found

    assert cached() >= 304
    assert cached(cache="empty") == cached(cache_salt="elsewhere") == 0
    theirs = server.post(f"{path}/explain", body, headers=other).json()["forecast"]
    assert theirs["cached_tokens"] == 0
    assert server.stats()["used_pages"] == 0


@pm.function
def heavy(s: pm.ProgramState, q: str) -> None:
    for fork in s.fork(100):
        fork += q + pm.gen("a", max_tokens=1800)


def test_a_forecast_ends_with_its_budget_and_the_server_goes_on(start_server: StartServer) -> None:
    server = start_server(explain_budget_s=0.2)
    path = register(server, heavy)
    answer = server.post(f"{path}/explain", {"arguments": {"q": "x"}})
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline"
    assert "0.2 s of processor time" in answer.json()["error"]["message"]
    light = server.post(f"{register(server, asking)}/explain", {"arguments": {"q": "x"}})
    assert light.json()["forecast"]["generated_tokens"] == 4


def test_a_forecast_is_aborted_and_only_few_wait(start_server: StartServer) -> None:
    server = start_server(explain_budget_s=60.0)
    path = register(server, heavy)
    body: dict[str, Any] = {"batch": [{"q": f"{i}"} for i in range(10)]}
    with ThreadPoolExecutor() as threads:
        asked = {
            rid: threads.submit(server.post, f"{path}/explain", {**body, "rid": rid})
            for rid in ("first", "second", "third")
        }
        server.wait_for(lambda: any(one.done() for one in asked.values()))
        [refused] = [rid for rid, one in asked.items() if one.done()]
        assert asked.pop(refused).result().json()["error"]["code"] == "overloaded"
        assert server.client.get("/health_generate").status_code == 200
        for rid, waiting in reversed(asked.items()):
            assert server.post("/abort_request", {"rid": rid}).json() == {"aborted": True}
            assert waiting.result().status_code == 409
            assert waiting.result().json()["error"]["code"] == "abort"
    server.wait_for(lambda: len(children(server)) == 1)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(f"{path}/explain", json=body, timeout=0.5)
    server.wait_for(lambda: server.stats()["running"] == 0 and len(children(server)) == 1)
    light = server.post(f"{register(server, asking)}/explain", {"arguments": {"q": "x"}})
    assert light.status_code == 200


def children(server: RunningServer) -> list[str]:
    pid = server.process.pid
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "asking() needs the argument 'q'"),
        ({"arguments": {"q": 3}}, "'q' is appended to a state"),
        ({"batch": [], "arguments": {"q": "x"}}, "batch: must have 1 to 64 entries"),
        ({"batch": [{"q": "x"}] * 65}, "batch: must have 1 to 64 entries"),
        ({"arguments": {"q": "x"}, "cache": "warm"}, "cache"),
        ({"arguments": {"q": "x"}, "lengths": {"a": -5}}, "max_new_tokens: -5 is out of range"),
        ({"arguments": {"q": "x"}, "lengths": {"a": 10**12}}, "exceed the context"),
        ({"arguments": {"q": "x"}, "prices": {"input": 1}}, "prices"),
        ({"arguments": {"q": "x"}, "more": 1}, "more"),
        ({"arguments": {"q": "x" * 9000}}, "gen 'a' failed: prompt: 9000 prompt tokens + 4 new"),
    ],
)
def test_what_cannot_be_foreseen_is_refused(
    server: RunningServer, body: dict[str, Any], message: str
) -> None:
    answer = server.post(f"{register(server, asking)}/explain", body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_all_settings_of_a_run_reach_the_forecast(server: RunningServer) -> None:
    @pm.function
    def free(s: pm.ProgramState, q: str) -> None:
        s += q + pm.gen("a")

    path = register(server, free)
    sampling = {"max_new_tokens": None, "stop": ["x", "y"], "stop_regex": "z+", "top_k": 5}
    sampling |= {"stop_token_ids": [3, 4], "return_logprob": True, "temperature": 0.5}
    body = {"arguments": {"q": "x" * 100}, "sampling": sampling}
    answer = server.post(f"{path}/explain", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["forecast"]["generated_tokens"] == 2048 - 100


@pytest.mark.parametrize("number", [2**64, -(2**70)])
@pytest.mark.parametrize("field", ["lengths", "sampling", "arguments"])
def test_a_number_that_has_no_place_in_a_question(
    server: RunningServer, field: str, number: int
) -> None:
    body: dict[str, dict[str, object]] = {"arguments": {"q": "x"}}
    name = {"lengths": "a", "sampling": "logprob_start_len", "arguments": "q"}[field]
    body.setdefault(field, {})[name] = number

    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += f"{q}" + pm.gen("a", max_tokens=4)

    answer = server.post(f"{register(server, program)}/explain", body)
    assert answer.status_code == 400, answer.text
    assert "more than 64 bits" in answer.json()["error"]["message"]
    good = server.post(f"{register(server, program)}/explain", {"arguments": {"q": "x"}})
    assert good.status_code == 200, good.text


def test_too_many_requests_in_all(server: RunningServer) -> None:
    body = {"batch": [{"q": "x"}] * 11}
    answer = server.post(f"{register(server, heavy)}/explain", body)
    assert "1100 requests in all; the limit is 1024" in answer.json()["error"]["message"]

    @pm.function
    def long(s: pm.ProgramState, q: str) -> None:
        for _ in range(1000):
            s += f"{q}"
            s += "."
        s += pm.gen("a", max_tokens=1)

    answer = server.post(f"{register(server, long)}/explain", {"batch": [{"q": "x"}] * 40})
    assert "80040 nodes in all; the limit is 65536" in answer.json()["error"]["message"]


def test_a_run_that_fails_names_the_operation(server: RunningServer) -> None:
    client = pm.RuntimeEndpoint(server.url)
    for analyze in (True, False):
        with pytest.raises(pm.ProgramError, match="context") as caught:
            asking.compile().explain(q="x" * 2500, backend=client, analyze=analyze)
        assert caught.value.line.file == __file__ and caught.value.variable == "a"
    client.close()


def test_a_forecast_in_another_namespace_of_a_program_that_is_lost(server: RunningServer) -> None:
    client = pm.RuntimeEndpoint(server.url)
    program = asking.compile()
    assert program.explain(q="x", backend=client).prompt_tokens == 1
    assert server.client.delete(f"/v1/programs/{program.id}").status_code == 200
    assert program.explain(q="x", backend=client).prompt_tokens == 1
    client.close()
