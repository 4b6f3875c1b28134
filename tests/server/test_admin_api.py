from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer, StartServer
from starlette.routing import Route

from palmette.runtime.config import EngineConfig
from palmette.runtime.fake_runner import ByteTokenizer
from palmette.server.app import OPEN_PATHS, create_app
from palmette.server.config import ServerConfig
from palmette.server.forecasts import Forecaster
from palmette.server.remote_engine import RemoteEngine


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(server: RunningServer, prefix: str) -> None:
    answer = server.post(f"{prefix}/tokenize", {"prompt": "hé<eos>"}).json()
    assert answer == {"tokens": [104, 195, 169, 256], "count": 4, "max_model_len": 2048}
    plain = server.post(f"{prefix}/tokenize", {"prompt": "<eos>", "parse_special": False}).json()
    assert plain["tokens"] == list(b"<eos>")
    text = server.post(f"{prefix}/detokenize", {"tokens": answer["tokens"]}).json()
    assert text["text"] == text["prompt"] == "hé<eos>"
    text = server.post(
        f"{prefix}/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": True}
    ).json()
    assert text["text"] == "hé"


def test_tokenize_batches_and_chats(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"text": ["a", "bc"]}).json()
    assert (answer["tokens"], answer["count"]) == ([[97], [98, 99]], [1, 2])
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    used = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ).json()["usage"]
    assert chat["count"] == used["prompt_tokens"]
    assert server.post("/detokenize", {"tokens": [[97], [98]]}).json()["text"] == ["a", "b"]


@pytest.mark.parametrize("tokens", [[-1], [300], ["a"], [True], [1.5]])
def test_detokenize_refuses_what_is_no_token(server: RunningServer, tokens: Any) -> None:
    assert server.post("/detokenize", {"tokens": tokens}).status_code == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/flush_cache"),
        ("POST", "/flush_cache"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/concate_and_append_request"),
        ("GET", "/start_profile"),
        ("POST", "/stop_profile"),
        ("GET", "/get_model_info"),
        ("GET", "/model_info"),
        ("GET", "/get_server_info"),
        ("GET", "/server_info"),
        ("GET", "/health"),
        ("GET", "/health_generate"),
        ("GET", "/ready"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
    ],
)
def test_routes_that_frontends_and_routers_call(
    server: RunningServer, method: str, path: str
) -> None:
    body = {"src_rids": ["a"], "dst_rid": "b"} if method == "POST" else None
    assert server.client.request(method, path, json=body).status_code == 200


def test_flush_forgets_prefixes(server: RunningServer) -> None:
    body = {"text": "a text for the flush test, long enough", "sampling_params": {}}
    server.generate(**body)
    assert server.generate(**body)["meta_info"]["cached_tokens"] > 0
    server.wait_idle()
    assert server.client.get("/flush_cache").json()["success"] is True
    assert server.generate(**body)["meta_info"]["cached_tokens"] == 0


def test_load_has_the_fields_that_routers_add_up(server: RunningServer) -> None:
    [load] = server.client.get("/get_load").json()
    assert load == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    loads = server.client.get("/v1/loads").json()
    assert loads["loads"][0]["max_total_num_tokens"] == 4096
    assert loads["aggregate"]["total_reqs"] == 0


def test_flush_while_busy_is_400_and_forgets_nothing(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"})
    text = "what another client has in the cache" * 2
    server.generate(text=text, sampling_params={"max_new_tokens": 1})
    assert server.post("/cache/pin", {"text": text}).json()["pinned_tokens"] == 64
    body = {"prompt": "x" * 40, "max_tokens": 1000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.client.get("/flush_cache").status_code == 400
        [load] = server.client.get("/get_load").json()
        assert load["num_reqs"] == 1 and load["num_tokens"] > 0
    server.wait_for(lambda: server.stats()["running"] == 0)
    answer = server.generate(text=text, sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["cached_tokens"] == 64
    assert server.post("/cache/unpin", {}).json() == {"unpinned": 1}


def test_metrics_are_prometheus_text(server: RunningServer) -> None:
    server.complete(prompt="x", max_tokens=1)
    page = server.client.get("/metrics").text
    line = re.compile(r'[a-z_]+(\{[a-z]+="[^"\\]*"(,[a-z]+="[^"\\]*")*\})? -?[0-9.e+-]+')
    names = set()
    for text in page.splitlines():
        if text.startswith("# TYPE"):
            names.add(text.split()[2])
        elif not text.startswith("#"):
            assert line.fullmatch(text), text
    assert len(names) >= 25
    assert "palmette_generated_tokens_total" in names


def test_404_and_405_have_the_errors_shape(server: RunningServer) -> None:
    missing = server.client.get("/nope")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = server.client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    assert server.client.get("/v1/models/").status_code == 404


def test_request_ids_come_back(server: RunningServer) -> None:
    given = server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = server.client.get("/health", headers={"x-request-id": "a b<script>"})
    assert re.fullmatch("[0-9a-f]{24}", odd.headers["x-request-id"])


def app_routes() -> list[tuple[str, str]]:
    """Every method and path of the application, with something for its parameters."""
    forecaster = Forecaster(EngineConfig(), budget_s=1.0)
    app = create_app(RemoteEngine(), ServerConfig(), ByteTokenizer(), forecaster)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes)
    return [(m, re.sub(r"\{[^}]*\}", "x", r.path)) for r in routes for m in sorted(r.methods or ())]


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    """Two keys, and /metrics behind them."""
    running = RunningServer(server={"api_keys": ["one", "two"], "open_metrics": False}, engine={})
    yield running
    running.close()


def test_every_route_needs_the_key_but_the_open_ones(keyed: RunningServer) -> None:
    routes = app_routes()
    assert len(routes) > 30
    with httpx.Client(base_url=keyed.url) as anonymous:
        for method, path in routes:
            answer = anonymous.request(method, path)
            if path in OPEN_PATHS:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
    for method, path in routes:
        with_key = keyed.client.request(method, path, json={} if method != "GET" else None)
        assert with_key.status_code in (200, 400, 404), path


def test_metrics_are_open_unless_told_otherwise(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_two_keys_share_no_prefix(keyed: RunningServer) -> None:
    body = {"prompt": "the same prompt for both of the keys", "max_tokens": 1}
    cached = []
    for key in ("one", "two", "one", "two"):
        answer = keyed.post(
            "/v1/completions", body, headers={"authorization": f"Bearer {key}"}
        ).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32, 32]
