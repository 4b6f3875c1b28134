"""Pins over HTTP: a key's owner keeps a prefix of its own, within its quota."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, StartServer


def cached(server: RunningServer, text: str) -> int:
    answer = server.generate(text=text, sampling_params={"max_new_tokens": 1})
    tokens: int = answer["meta_info"]["cached_tokens"]
    return tokens


def flood(server: RunningServer) -> None:
    for index in range(8):
        cached(server, f"{index}" * 200)


def test_pin_survives_a_flood_and_unpin_ends_it(start_server: StartServer) -> None:
    server = start_server(engine={"kv_tokens": 512})
    text = "a system prompt that is used by every call" * 2
    cached(server, text)
    answer = server.post("/cache/pin", {"text": text, "ttl_s": 600}).json()
    assert answer == {"pinned_tokens": len(text) // 16 * 16}
    flood(server)
    assert cached(server, text) == len(text) // 16 * 16
    assert server.post("/cache/unpin", {}).json() == {"unpinned": 1}
    flood(server)
    assert cached(server, text) == 0


def test_a_request_pins_within_its_quota(start_server: StartServer) -> None:
    server = start_server(engine={"kv_tokens": 512})
    body = {"model": "default", "max_tokens": 1, "cache_pin_s": 600}
    assert server.complete(prompt="p" * 64, **body).status_code == 200
    flood(server)
    assert cached(server, "p" * 65) == 64
    refused = server.complete(prompt="q" * 128, **body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("cache_pin_s", "pin_quota")
    assert "128 tokens to pin beside 64 exceed the quota of 128 tokens" in error["message"]


@pytest.mark.parametrize(
    "body", [{}, {"text": "a", "input_ids": [1]}, {"text": "a", "ttl_s": 0}, {"input_ids": [300]}]
)
def test_pins_out_of_range_are_400(server: RunningServer, body: dict[str, object]) -> None:
    assert server.post("/cache/pin", body).status_code == 400


def test_a_key_flushes_its_own_prefixes_and_an_admin_all(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"}, api_keys=["a", "b"], admin_api_keys=["root"])
    text, body = "a prompt of forty letters, all alike...." * 2, {"max_new_tokens": 1}

    def ask(key: str, path: str, **fields: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return server.client.post(path, json=fields, headers=headers)

    def cached_of(key: str) -> int:
        answer = ask(key, "/generate", text=text, sampling_params=body).json()
        tokens: int = answer["meta_info"]["cached_tokens"]
        return tokens

    for key in ("a", "b", "root"):
        assert (cached_of(key), cached_of(key)) == (0, 64)
    running = {"prompt": "x" * 40, "max_tokens": 1000, "stream": True}
    headers = {"authorization": "Bearer b"}
    with server.client.stream("POST", "/v1/completions", json=running, headers=headers) as stream:
        lines = stream.iter_lines()  # held: it closes the stream with itself
        next(lines)
        refused = ask("b", "/flush_cache")
        assert refused.status_code == 400 and "of this key" in refused.json()["error"]["message"]
        assert ask("root", "/flush_cache").status_code == 400
        answer = ask("a", "/flush_cache").json()
        assert answer == {"success": True, "message": "the prefixes of this key are forgotten"}
    assert [cached_of(key) for key in ("a", "b", "root")] == [0, 64, 64]
    server.wait_for(lambda: ask("root", "/flush_cache").status_code == 200)
    assert [cached_of(key) for key in ("a", "b", "root")] == [0, 0, 0]
    assert ask("c", "/flush_cache").status_code == 401


def test_a_killed_server_starts_warm(start_server: StartServer, tmp_path: Path) -> None:
    text, size = "a system prompt that is used by every call" * 4, 16
    options = {"kv_tokens": 512, "disk_cache_dir": str(tmp_path)}
    first = start_server(engine=options)
    answer = first.generate(text=text, sampling_params={"max_new_tokens": 8})
    first.wait_idle()
    first.wait_for(lambda: first.stats()["disk_pages"] >= len(text) // size)
    first.process.kill()
    first.process.wait()
    second = start_server(engine=options)
    again = second.generate(text=text, sampling_params={"max_new_tokens": 8})
    assert again["output_ids"] == answer["output_ids"]
    details = again["meta_info"]["cached_tokens_details"]
    assert details == {"device": 0, "host": 0, "disk": len(text) // size * size, "shared": 0}
    usage = second.complete(prompt=text, max_tokens=1).json()["usage"]
    tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert sum(tiers.values()) == usage["prompt_tokens_details"]["cached_tokens"] > 0
    page = second.client.get("/metrics").text
    assert f"palmette_disk_tokens_total {details['disk']}" in page
    assert 'palmette_cache_misses_total{reason="page_rounding"}' in page


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("cache_pin_s", 0, "0"),
        ("cache_ttl_s", -1.5, "-1.5"),
        ("cache_future_uses", -1, "-1"),
        ("cache_future_uses", 2**70, str(2**70)),
        ("cache_prefixes", [[1, -1]], "-1"),
        ("cache_prefixes", [[10**6, 1]], "1000000"),
        ("cache_prefixes", [[1]], "[1]"),
        ("cache_prefixes", [[1, 1]] * 17, "17"),
        ("cache_group", "not one word", "printable ASCII"),
    ],
)
def test_hints_out_of_range_are_400_by_their_name(
    server: RunningServer, field: str, value: object, told: str
) -> None:
    for answer in (
        server.complete(prompt="x", max_tokens=1, **{field: value}),
        server.post("/generate", {"text": "x", field: value}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert told in error["message"]


@pytest.mark.parametrize("value", [-1, -2, 2**31])
@pytest.mark.parametrize("name", ["cache_future_uses", "cache_prefixes"])
def test_what_is_added_for_other_choices_hides_no_hint_out_of_range(
    server: RunningServer, name: str, value: int
) -> None:
    hint = value if name == "cache_future_uses" else [[1, value]]
    for answer in (
        server.complete(prompt="x", n=2, max_tokens=1, **{name: hint}),
        server.post("/generate", {"text": "x", "sampling_params": {"n": 2}, name: hint}),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert f"{value} is out of range" in error["message"]


def test_hints_at_the_end_of_their_range_are_taken_for_several_choices(
    server: RunningServer,
) -> None:
    most = 2**31 - 1
    hints = {"cache_future_uses": most, "cache_prefixes": [[1, most]]}
    answer = server.complete(prompt=["x", "xy"], n=2, max_tokens=1, **hints)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 4)
