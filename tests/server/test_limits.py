"""Every limit at one below, at, and one above; and every range."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from palmette.constrained.spec import GrammarKind
from palmette.runtime.request import EngineInfo, Limits
from palmette.runtime.tokenizer import Tokenizer
from palmette.server import constraints, limits, schemas
from palmette.server.errors import ApiError
from palmette.server.text_service import TextService

INFO = EngineInfo(
    model="m",
    vocab_size=300,
    context_length=2048,
    page_size=16,
    num_pages=256,
    eos_token_ids=(256,),
    bos_token_id=None,
    chat_template=None,
)


def strings(count: int, length: int = 1) -> list[str]:
    return ["x" * length] * count


# (field, value at the limit, value above it); one below is covered by the smaller of the two
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "n": ({"n": 127}, {"n": 128}, {"n": 129}, "n"),
    "prompts x n": (
        {"prompt": strings(63), "n": 2},
        {"prompt": strings(64), "n": 2},
        {"prompt": strings(65), "n": 2},
        "n",
    ),
    "stop": ({"stop": strings(15)}, {"stop": strings(16)}, {"stop": strings(17)}, "stop"),
    "stop length": (
        {"stop": strings(1, 255)},
        {"stop": strings(1, 256)},
        {"stop": strings(1, 257)},
        "stop",
    ),
    "stop_token_ids": (
        {"stop_token_ids": [299] * 127},
        {"stop_token_ids": [299] * 128},
        {"stop_token_ids": [299] * 129},
        "stop_token_ids",
    ),
    "stop id": (
        {"stop_token_ids": [298]},
        {"stop_token_ids": [299]},
        {"stop_token_ids": [300]},
        "stop_token_ids",
    ),
    "logprobs": ({"logprobs": 19}, {"logprobs": 20}, {"logprobs": 21}, "logprobs"),
    "logit_bias": (
        {"logit_bias": {str(i): 1 for i in range(299)}},
        {"logit_bias": {str(i): 1 for i in range(300)}},
        {"logit_bias": {str(i): 1 for i in range(301)}},
        "logit_bias",
    ),
    "bias": (
        {"logit_bias": {"1": 99.9}},
        {"logit_bias": {"1": 100}},
        {"logit_bias": {"1": 100.1}},
        "logit_bias[1]",
    ),
    "context": (
        {"prompt": "x" * 2046},
        {"prompt": "x" * 2047},
        {"prompt": "x" * 2048},
        "prompt",
    ),
    "prompt id": ({"prompt": [298]}, {"prompt": [299]}, {"prompt": [300]}, "prompt"),
    "top_p": ({"top_p": 0.9}, {"top_p": 1}, {"top_p": 1.01}, "top_p"),
    "min_p": ({"min_p": 0.9}, {"min_p": 1}, {"min_p": 1.01}, "min_p"),
    "temperature": ({"temperature": 0.1}, {"temperature": 0}, {"temperature": -0.1}, "temperature"),
    "presence": (
        {"presence_penalty": 1.9},
        {"presence_penalty": 2},
        {"presence_penalty": 2.1},
        "presence_penalty",
    ),
    "frequency": (
        {"frequency_penalty": -1.9},
        {"frequency_penalty": -2},
        {"frequency_penalty": -2.1},
        "frequency_penalty",
    ),
    "repetition": (
        {"repetition_penalty": 1.9},
        {"repetition_penalty": 2},
        {"repetition_penalty": 2.1},
        "repetition_penalty",
    ),
    "min_tokens": ({"min_tokens": 0}, {"min_tokens": 1}, {"min_tokens": 2}, "min_tokens"),
    "seed": ({"seed": 2**64 - 2}, {"seed": 2**64 - 1}, {"seed": 2**64}, "seed"),
    "priority": (
        {"priority": 2**31 - 2},
        {"priority": 2**31 - 1},
        {"priority": 2**31},
        "priority",
    ),
    "salt": (
        {"cache_salt": "x" * 127},
        {"cache_salt": "x" * 128},
        {"cache_salt": "x" * 129},
        "cache_salt",
    ),
    "program": (
        {"program": "x" * 127},
        {"program": "x" * 128},
        {"program": "x" * 129},
        "program",
    ),
    "rid": ({"rid": "x" * 127}, {"rid": "x" * 128}, {"rid": "x" * 129}, "rid"),
}


@pytest.mark.parametrize("name", TABLE)
def test_below_at_and_above_a_limit(server: RunningServer, name: str) -> None:
    below, at, above, param = TABLE[name]
    for body in (below, at):
        answer = server.complete(**({"prompt": "x", "max_tokens": 1} | body))
        assert answer.status_code == 200, answer.text
    answer = server.complete(**({"prompt": "x", "max_tokens": 1} | above))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param.split("[")[0])
    assert error["type"] == "invalid_request_error"


def test_tools_at_their_limit(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for count, status in ((127, 200), (128, 200), (129, 400)):
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool] * count}
        answer = server.post("/v1/chat/completions", body | {"max_tokens": 1})
        assert answer.status_code == status, answer.text


def test_messages_at_their_limit(server: RunningServer) -> None:
    """The context is far smaller than 4096 messages: what is told shows which limit was met."""
    for count, code in ((4095, "context_length_exceeded"), (4096, "context_length_exceeded")):
        assert messages_error(server, count)["code"] == code
    error = messages_error(server, 4097)
    assert (error["code"], error["param"]) == ("invalid_value", "messages")
    assert error["message"] == "messages: 4097 entries; the limit is 4096"


def messages_error(server: RunningServer, count: int) -> Any:
    body = {"messages": [{"role": "user", "content": ""}] * count}
    return server.post("/v1/chat/completions", body).json()["error"]


def test_messages_speak_the_routes_language(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 5, "max_tokens": 4}
    message = server.post("/v1/chat/completions", chat).json()["error"]["message"]
    assert message.startswith("min_tokens: 5") and "max_tokens (4)" in message
    chat = {"messages": [{"role": "user", "content": "x" * 3000}]}
    message = server.post("/v1/chat/completions", chat).json()["error"]["message"]
    assert message.startswith("messages: ") and "prompt tokens" in message


@pytest.mark.parametrize("chunked", [False, True])
def test_body_at_its_limit(server: RunningServer, chunked: bool) -> None:
    limit = 4 * 1024 * 1024
    empty = len(json.dumps({"prompt": "", "max_tokens": 1}))
    for size, status in ((limit - 1, 400), (limit, 400), (limit + 1, 413)):
        data = json.dumps({"prompt": "x" * (size - empty), "max_tokens": 1}).encode()
        assert len(data) == size
        content = iter([data[:1000], data[1000:]]) if chunked else data
        answer = server.client.post("/v1/completions", content=content)
        assert answer.status_code == status
        code = answer.json()["error"]["code"]
        assert code == ("body_too_large" if status == 413 else "context_length_exceeded")


@pytest.mark.parametrize("value", [-1, 0, 1, 299, 300, 2**31, 2**62])
def test_top_k_is_off_or_clamped(server: RunningServer, value: int) -> None:
    answer = server.complete(prompt="x", max_tokens=1, top_k=value)
    assert answer.status_code == 200, answer.text


def test_grammar_size() -> None:
    small = Limits(max_grammar_bytes=10)
    for size in (9, 10):
        body = schemas.SamplingBody(regex="x" * size)
        constraint = constraints.generate_constraint(body, small)
        assert constraint is not None and constraint.spec.kind is GrammarKind.REGEX
    with pytest.raises(ApiError, match="the limit is 10"):
        constraints.generate_constraint(schemas.SamplingBody(regex="x" * 11), small)


def test_requests_of_a_call_differ_in_their_choice_only() -> None:
    plan = limits.Plan(sampling=limits.generate_sampling(schemas.SamplingBody(), INFO), n=2)
    requests = limits.make_requests("c", [(1, 2), (3,)], [plan, plan], INFO, {})
    assert [r.request_id for r in requests] == ["c-0", "c-1", "c-2", "c-3"]
    assert [(r.prompt_ids, r.choice_index) for r in requests] == [
        ((1, 2), 0),
        ((1, 2), 1),
        ((3,), 0),
        ((3,), 1),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, GrammarKind.JSON_OBJECT),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, GrammarKind.JSON_SCHEMA),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": False, "strict": True}},
            GrammarKind.JSON_SCHEMA,
        ),
    ],
)
def test_response_format(value: Any, expected: GrammarKind | None) -> None:
    spec = constraints.response_format(value)
    assert (None if spec is None else spec.kind) == expected


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"schema": {}}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "shema": {}}},
            "response_format.json_schema.shema",
        ),
    ],
)
def test_a_response_format_is_never_dropped(value: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraints.response_format(value)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_salts_of_different_kinds_cannot_meet() -> None:
    assert limits.salt("a", "cache_salt", 9) != limits.salt("a", "extra_key", 9)
    assert limits.salt("", "cache_salt", 9) == ()


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": "a" * 30001, "max_tokens": 1}),
        ("/v1/completions", "prompt", {"prompt": ["a", "a" * 30001], "max_tokens": 1}),
        ("/generate", "text", {"text": "a" * 30001}),
        ("/v1/chat/completions", "messages", {"messages": [said("a" * 15001), said("a" * 15000)]}),
        (
            "/v1/chat/completions",
            "messages",
            {"messages": [said([{"type": "text", "text": "a" * 30001}])]},
        ),
    ],
    ids=["text", "texts", "generate", "chat", "parts"],
)
def test_what_no_tokens_could_make_short_enough_is_refused_by_its_length(
    server: RunningServer, path: str, param: str, body: dict[str, Any]
) -> None:
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["code"] == "context_length_exceeded"
    assert "30001 characters" in error["message"] and "2048 tokens" in error["message"]


def test_long_texts_can_be_counted(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"prompt": "a" * 40000}).json()
    assert answer["count"] == 40000


def test_the_length_limit_is_the_context_in_the_longest_tokens(tiny_files: Path) -> None:
    tokenizer = Tokenizer.from_directory(tiny_files)
    info = dataclasses.replace(INFO, vocab_size=tokenizer.size, context_length=10)
    tokens = tokenizer.vocabulary(tokenizer.size).token_bytes
    longest = max(len(data.decode("utf-8", "replace")) for data in tokens)
    service = TextService(tokenizer)
    try:
        service.check_length(10 * longest, info, "prompt")
        with pytest.raises(ApiError, match=f"{10 * longest + 1} characters .* 10 tokens"):
            service.check_length(10 * longest + 1, info, "prompt")
    finally:
        service.close()
