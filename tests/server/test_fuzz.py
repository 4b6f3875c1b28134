"""Whatever is sent: never a 5xx, always the errors' shape, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer

from palmette.server import schemas

SETTINGS = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (schemas.CompletionBody, {"prompt": "x"}),
    "/v1/chat/completions": (
        schemas.ChatBody,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "/generate": (schemas.GenerateBody, {"text": "x"}),
    "/tokenize": (schemas.TokenizeBody, {"prompt": "x"}),
    "/detokenize": (schemas.DetokenizeBody, {"tokens": [1]}),
    "/abort_request": (schemas.AbortBody, {"rid": "x"}),
}

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 255, 256, 299, 300, 2**31 - 1, 2**31, 2**63, 2**64]),
    st.floats(allow_nan=False, allow_infinity=False),
)
words = st.one_of(
    st.text(max_size=8), st.sampled_from(["", "user", "assistant", "json_object", "\0", "é", "a/b"])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "function", "schema", "n"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)


def check(server: RunningServer, path: str, content: bytes) -> None:
    answer = server.client.post(path, content=content)
    assert answer.status_code < 500, (content, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["code"]
        assert "Traceback" not in error["message"]


@pytest.mark.parametrize("path", ROUTES)
def test_fields_with_any_value(server: RunningServer, path: str) -> None:
    kind, base = ROUTES[path]
    fields = [*kind.__struct_fields__, "sampling_params", "unknown"]

    @SETTINGS
    @given(st.dictionaries(st.sampled_from(fields), values, max_size=4))
    def run(changes: dict[str, Any]) -> None:
        small = {"max_tokens": 1} if "max_tokens" in fields else {}
        if path == "/generate":
            small = {"sampling_params": {"max_new_tokens": 1}}
        check(server, path, json.dumps({**base, **small, **changes}).encode())

    run()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_any_bytes(server: RunningServer, path: str) -> None:
    @settings(SETTINGS, max_examples=25)
    @given(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)))
    def run(content: bytes) -> None:
        check(server, path, content)

    run()


def test_any_sampling_params(server: RunningServer) -> None:
    names = st.sampled_from(schemas.SamplingBody.__struct_fields__)

    @SETTINGS
    @given(st.dictionaries(names, values, max_size=4))
    def run(sampling: dict[str, Any]) -> None:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1, **sampling}}
        check(server, "/generate", json.dumps(body).encode())

    run()


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("path", ROUTES)
def test_deep_bodies(server: RunningServer, path: str, depth: int) -> None:
    check(server, path, b'{"x":' + b"[" * depth + b"]" * depth + b"}")
    check(server, path, b'{"response_format":' + b'{"type":' * depth + b"1" + b"}" * depth + b"}")
