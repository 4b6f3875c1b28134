"""Releases over HTTP: by fields of a request, by `/cache/release`, by programs here and there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import httpx
import pytest
from running_server import RunningServer, StartServer

import palmette as pm

HEAD = "This is how all of it begins, on every one of these calls.\n"


@pytest.fixture
def server(start_server: StartServer) -> RunningServer:
    """One of its own: all that its cache holds is looked at."""
    return start_server({"model": "script=letters&version=1"})


@pytest.fixture
def client(server: RunningServer) -> Iterator[pm.RuntimeEndpoint]:
    endpoint = pm.RuntimeEndpoint(server.url)
    yield endpoint
    endpoint.close()


@pm.function
def looping(s: pm.ProgramState, name: str = "a") -> None:
    s += HEAD + name  # what others come back to after a release is theirs, and is kept
    forks = s.fork(2)
    forks += lambda i: f"{i} branch of it:" + pm.gen("view", max_tokens=24, ignore_eos=True)
    forks.join()
    for view in s["view"]:
        s += view + pm.gen("x", max_tokens=8)
        assert s["x"]


def all_is_released(server: RunningServer) -> bool:
    stats = server.stats()
    return 0 < stats["released_pages"] == stats["cached_pages"]


def test_a_request_releases_all_but_what_it_keeps(server: RunningServer) -> None:
    params = {"max_new_tokens": 1}
    server.generate(text=HEAD, sampling_params=params, program="p", cache_keep_tokens=32)
    stats = server.stats()
    assert stats["cached_pages"] - stats["released_pages"] == 2
    answer = server.complete(
        model="default", prompt=HEAD, max_tokens=1, program="p", cache_program_ends=True
    )
    assert answer.status_code == 200
    assert all_is_released(server)
    page = server.client.get("/metrics").text
    assert f"palmette_cache_released_pages {stats['cached_pages']}" in page
    assert f"palmette_released_tokens_total {16 * (stats['cached_pages'] + 1)}" in page


def test_programs_are_released_by_a_message_within_their_key(start_server: StartServer) -> None:
    server = start_server(api_keys=["a", "b"])

    def ask(key: str, path: str, **body: object) -> httpx.Response:
        return server.post(path, body, headers={"authorization": f"Bearer {key}"})

    params = {"max_new_tokens": 1}
    ask("a", "/generate", text=HEAD, sampling_params=params, program="p")
    end = {"program": "p", "ends_program": True}
    assert ask("b", "/cache/release", releases=[end]).json() == {"releases": 1}
    assert server.stats()["released_pages"] == 0
    ids = list(HEAD.encode())
    path = {"program": "p", "input_ids": ids, "keep_tokens": 32}
    assert ask("a", "/cache/release", releases=[path]).status_code == 200
    assert server.stats()["released_pages"] == server.stats()["cached_pages"] - 2
    assert ask("a", "/cache/release", releases=[end]).status_code == 200
    assert all_is_released(server)


@pytest.mark.parametrize(
    ("release", "param"),
    [
        ({"program": ""}, "program"),
        ({"program": "x" * 1000}, "program"),
        ({"program": "p", "input_ids": [1], "keep_tokens": 2}, "keep_tokens"),
        ({"program": "p", "input_ids": [1], "keep_tokens": -1}, "keep_tokens"),
        ({"program": "p", "input_ids": [-1]}, "input_ids"),
        ({"program": "p", "input_ids": [1] * 100_000}, "input_ids"),
        ({"program": "p", "more": 1}, None),
    ],
)
def test_releases_out_of_range_are_400(
    server: RunningServer, release: dict[str, object], param: str | None
) -> None:
    answer = server.post("/cache/release", {"releases": [release]})
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param
    too_many = server.post("/cache/release", {"releases": [{"program": "p"}] * 1025})
    assert too_many.status_code == 400


def test_what_a_request_keeps_lies_in_its_prompt(server: RunningServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}, "cache_keep_tokens": 4}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_keep_tokens"


@pytest.mark.parametrize("how", ["called", "compiled", "batch", "closed"])
def test_programs_over_http_hold_nothing_at_their_end(
    server: RunningServer, client: pm.RuntimeEndpoint, how: str
) -> None:
    client.info()
    if how == "called":
        looping.run(backend=client).sync()
    elif how == "compiled":

        @pm.function
        def straight(s: pm.ProgramState) -> None:
            s += HEAD + pm.gen("a", max_tokens=24) + pm.gen("b", max_tokens=8)

        straight.compile().run(backend=client).sync()
    elif how == "batch":
        looping.run_batch([{"name": name} for name in "abcd"], backend=client)
    else:
        looping.run(backend=client).sync()
        client.close()
    gc.collect()
    server.wait_for(lambda: all_is_released(server))


def test_a_run_on_the_server_whose_client_goes_away_holds_nothing(
    start_server: StartServer,
) -> None:
    server = start_server({"model": "delay=0.02"})

    @pm.function
    def long(s: pm.ProgramState) -> None:
        s += HEAD + pm.gen("a", max_tokens=8, ignore_eos=True)
        s += pm.gen("b", max_tokens=400, ignore_eos=True) + pm.gen("c", max_tokens=400)

    program = long.compile()
    assert server.client.post("/v1/programs", content=program.to_json()).status_code == 200
    path = f"/v1/programs/{program.id}/run"
    body = {"stream": True, "stream_text": True}
    with server.client.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        while '"call"' not in next(lines):
            pass
    server.wait_for(lambda: all_is_released(server))
    server.wait_idle()
