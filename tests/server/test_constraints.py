"""What each field of the routes asks for, as a constraint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from running_server import RunningServer, events

import palmette as pm
from palmette.constrained.spec import (
    Additional,
    Formats,
    GrammarKind,
    GrammarSpec,
    KeyOrder,
    Policy,
    Whitespace,
)
from palmette.runtime.request import Limits
from palmette.server import schemas
from palmette.server.constraints import generate_constraint, only, openai_constraints
from palmette.server.errors import ApiError

LIMITS = Limits()
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def openai_spec(**fields: Any) -> tuple[GrammarSpec, str]:
    body = schemas.to_struct({"messages": [], **fields}, schemas.ChatBody, strict_fields=True)
    constraint = only(openai_constraints(body), LIMITS)
    assert constraint is not None
    return constraint.spec, constraint.field


def described(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a", "é"]}, GrammarKind.CHOICE, '["a","é"]'),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.EBNF, 'root ::= "a"'),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"choice": ["a"]}, GrammarKind.CHOICE, '["a"]'),
        ({"lark": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"regex": "a"}}, GrammarKind.REGEX, "a"),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarKind.EBNF, 'root ::= "a"'),
        (
            {"structured_outputs": {"structural_tag": '{"triggers":[]}'}},
            GrammarKind.STRUCTURAL_TAG,
            '{"triggers":[]}',
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": [], "order": "any"}},
            GrammarKind.STRUCTURAL_TAG,
            '{"type": "structural_tag", "triggers": []}',
        ),
    ],
)
def test_each_field_is_one_constraint(
    fields: dict[str, Any], kind: GrammarKind, source: str
) -> None:
    spec, name = openai_spec(**fields)
    assert (spec.kind, spec.source) == (kind, source)
    assert name.partition(".")[0] in fields


def test_options_stand_beside_the_schema() -> None:
    options = {"whitespace": "indent=4", "order": "any", "additional": "forbid"}
    spec, _ = openai_spec(response_format=described(**options, formats="strict"))
    assert (spec.whitespace, spec.indent) == (Whitespace.INDENT, 4)
    assert (spec.order, spec.additional) == (KeyOrder.ANY, Additional.FORBID)
    assert (spec.formats, spec.policy) == (Formats.STRICT, Policy.STRICT)
    spec, _ = openai_spec(structured_outputs={"json": SCHEMA, "policy": "lenient"})
    assert spec.policy is Policy.LENIENT
    spec, _ = openai_spec(response_format={"type": "json_object", "whitespace": "compact"})
    assert (spec.kind, spec.whitespace) == (GrammarKind.JSON_OBJECT, Whitespace.COMPACT)


def test_vllm_switches_are_our_options() -> None:
    asked = {"json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True}
    spec, _ = openai_spec(structured_outputs=asked)
    assert (spec.whitespace, spec.additional) == (Whitespace.COMPACT, Additional.FORBID)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({"strict": True}, Policy.STRICT),
        ({"strict": False}, Policy.LENIENT),
        ({"strict": None}, Policy.STRICT),
        ({}, Policy.STRICT),
        ({"strict": False, "policy": "strict"}, Policy.STRICT),
    ],
)
def test_strict_means_what_openai_means(fields: dict[str, Any], policy: Policy) -> None:
    spec, _ = openai_spec(response_format=described(**fields))
    assert spec.policy is policy


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        (
            {"response_format": described(order="sorted")},
            "response_format.json_schema.order",
            "'sorted' is not one of declared, any",
        ),
        (
            {"response_format": described(strict=True, policy="lenient")},
            "response_format.json_schema.policy",
            "contradicts strict",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace": "tabs"}},
            "structured_outputs.whitespace",
            "bounded, compact, flexible, indent=n",
        ),
        (
            {"structured_outputs": {"regex": "a", "order": "any"}},
            "structured_outputs.order",
            "no meaning for regex",
        ),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend", "known field"),
        ({"structured_outputs": {"order": "any"}}, "structured_outputs", "expected one of json"),
        ({"guided_json": {}, "regex": "a"}, "regex", "regex and guided_json: only one"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.regex",
            "structured_outputs.regex and structured_outputs.choice: only one",
        ),
        (
            {"response_format": described(), "guided_choice": ["a"]},
            "response_format",
            "response_format and guided_choice: only one",
        ),
    ],
)
def test_what_is_not_understood_is_named(fields: dict[str, Any], param: str, part: str) -> None:
    with pytest.raises(ApiError) as caught:
        openai_spec(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert part in caught.value.message


def test_options_of_generate() -> None:
    body = schemas.SamplingBody(json_schema=SCHEMA, whitespace="compact", policy="lenient")
    constraint = generate_constraint(body, LIMITS)
    assert constraint is not None
    assert constraint.spec.whitespace is Whitespace.COMPACT
    assert constraint.spec.policy is Policy.LENIENT
    for wrong in ({"order": "x"}, {"regex": "a", "formats": "strict"}):
        with pytest.raises(ApiError) as caught:
            generate_constraint(schemas.SamplingBody(**wrong), LIMITS)  # type: ignore[arg-type]
        assert caught.value.param in ("order", "formats")


def test_a_refused_schema_is_data(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        },
        "/v1/completions": {"prompt": "x", "guided_json": schema},
        "/generate": {"text": "x", "sampling_params": {"json_schema": schema}},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            response = server.client.post(path, json={**body, "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "grammar")
            assert (error["pointer"], error["keyword"]) == ("/properties/a/$ref", "$ref")
            assert "never fetched" in error["reason"]
            assert "lenient" in error["suggestion"]


WEAK: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "https://example.com/a"}, "b": {"const": 7}},
    "required": ["b"],
    "additionalProperties": False,
}
REASON = "$ref 'https://example.com/a' is not in the schema; remote schemas are never fetched"
WARNINGS = [{"pointer": "/properties/a/$ref", "keyword": "$ref", "reason": REASON}]
LENIENT: dict[str, Any] = {"json": WEAK, "policy": "lenient"}
OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 100}),
]


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_what_was_weakened_is_told_next_to_usage(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, {**body, "n": 2, "structured_outputs": LENIENT}).json()
    assert answer["constraint_warnings"] == WARNINGS
    assert answer["usage"]["completion_tokens"] > 0
    strict = {**body, "structured_outputs": {"json": {"const": 7}, "policy": "lenient"}}
    assert "constraint_warnings" not in server.post(path, strict).json()


@pytest.mark.parametrize(("path", "body"), OPENAI)
@pytest.mark.parametrize("with_usage", [False, True])
def test_what_was_weakened_is_told_in_the_last_chunk(
    server: RunningServer, path: str, body: dict[str, Any], with_usage: bool
) -> None:
    body = {**body, "structured_outputs": LENIENT, "stream": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    chunks = events(server.stream(path, body))
    assert chunks[-1]["constraint_warnings"] == WARNINGS
    assert bool(chunks[-1].get("usage")) == with_usage
    told = [chunk for chunk in chunks if "constraint_warnings" in chunk]
    assert len(told) == 1 + with_usage


def test_what_was_weakened_is_in_the_meta_information(server: RunningServer) -> None:
    sampling = {"json_schema": WEAK, "policy": "lenient", "max_new_tokens": 100}
    meta = server.generate(text="x", sampling_params=sampling)["meta_info"]
    assert meta["constraint_warnings"] == WARNINGS
    batch = server.generate(
        text=["x", "y"], sampling_params=[sampling, {"max_new_tokens": 2, "regex": "a"}]
    )
    told = [answer["meta_info"].get("constraint_warnings") for answer in batch]
    assert told == [WARNINGS, None]
    body = {"text": "x", "sampling_params": sampling, "stream": True}
    last = events(server.stream("/generate", body))[-1]
    assert last["meta_info"]["constraint_warnings"] == WARNINGS


def test_programs_are_told_too(server: RunningServer) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", json_schema=WEAK, policy="lenient", max_tokens=100)

    @pm.function
    def refused(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", json_schema=WEAK, max_tokens=100)

    backend = pm.RuntimeEndpoint(server.url)
    try:
        meta = program.run(backend=backend).get_meta_info("a")
        assert meta["constraint_warnings"] == WARNINGS
        state = refused.run(backend=backend)
        with pytest.raises(pm.ProgramError) as caught:
            state["a"]
        issue = caught.value.issue
        assert issue is not None
        assert (issue.pointer, issue.keyword, issue.reason) == (
            "/properties/a/$ref",
            "$ref",
            REASON,
        )
        assert issue.suggestion is not None and "$defs" in issue.suggestion
    finally:
        backend.close()
