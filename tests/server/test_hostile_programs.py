"""/v1/programs: what a stranger sends is refused with the place, and harms no one else."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from running_server import RunningServer

import palmette as pm
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine

P = {"kind": "argument", "name": "p"}


def document(nodes: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """A program with one text and one gen, `a`, and perhaps an argument `p`."""
    return {
        "version": 1,
        "name": "x",
        "nodes": nodes or [{"op": "text", "source": 0, "target": 1, "text": "hi"}, gen()],
        "parameters": [{"name": "p", "required": False}],
        "tip": 1,
        "variables": {"a": {"kind": "value", "value": 0}},
        **changes,
    }


def gen(**parameters: Any) -> dict[str, Any]:
    given = {"max_tokens": 4, **parameters}
    return {"op": "gen", "source": 1, "target": 2, "value": 0, "name": "a", "parameters": given}


def run(server: RunningServer, whole: dict[str, Any], **body: Any) -> httpx.Response:
    registered = server.client.post("/v1/programs", content=json.dumps(whole))
    assert registered.status_code == 200, registered.text
    return server.client.post(f"/v1/programs/{registered.json()['id']}/run", json=body)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", True, "max_tokens: expected `int | null`, got `bool`"),
        ("max_tokens", "x", "max_tokens: expected `int | null`, got `str`"),
        ("stop_token_ids", "x", "stop_token_ids: expected `array | null`, got `str`"),
        ("priority", False, "priority: expected `int`, got `bool`"),
        ("temperature", True, "temperature: expected `float | null`, got `bool`"),
        ("ignore_eos", 1, "ignore_eos: expected `bool | null`, got `int`"),
        ("reasoning_end", 3, "reasoning_end: expected `str | null`, got `int`"),
        ("logit_bias", 3, "logit_bias: expected `array`, got `int`"),
        ("dtype", "date", "dtype: 'date' is not supported"),
    ],
)
def test_an_argument_of_another_type_is_refused_and_the_engine_goes_on(
    server: RunningServer, name: str, value: object, message: str
) -> None:
    text = {"op": "text", "source": 0, "target": 1, "text": "hi"}
    whole = document([text, gen(**{name: P})])
    response = run(server, whole, arguments={"p": value})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    answer = run(server, whole, arguments={"p": None}).json()
    assert len(answer["variables"]["a"]) == 4 or name == "max_tokens"
    assert answer["errors"] == {}


def test_a_format_that_makes_no_character(server: RunningServer) -> None:
    written = {**P, "form": "c"}
    whole = document(variables={"w": {"kind": "template", "parts": [written]}})
    response = run(server, whole, arguments={"p": 10**20})
    assert response.status_code == 400
    assert "the argument 'p'" in response.json()["error"]["message"]
    answer = run(server, whole, arguments={"p": 0xD800}).json()  # half of a pair
    assert answer["variables"] == {"w": "\ufffd"}


@pytest.mark.parametrize(
    ("variables", "argument"),
    [
        ({f"v{i}": {"kind": "value", "value": 0} for i in range(20000)}, ""),
        ({"v": {"kind": "template", "parts": [{"kind": "value", "value": 0}] * 20000}}, ""),
        ({f"v{i}": P for i in range(20000)}, "long " * 1000),
    ],
    ids=["variables", "parts", "arguments"],
)
def test_texts_named_without_end_are_refused(
    server: RunningServer, variables: dict[str, Any], argument: str
) -> None:
    response = run(server, document(variables=variables), arguments={"p": argument})
    assert response.status_code == 400
    assert "exceed" in response.json()["error"]["message"]


def test_a_stop_pattern_of_the_run(server: RunningServer) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", max_tokens=20)

    def letters(ids: Any) -> int:
        return ord("a") + len(ids) % 26

    client = pm.RuntimeEndpoint(server.url)
    local = LocalClient(fake_engine(letters, num_pages=256, context_length=2048))
    for pattern in ("[e-g]", ["zz", "d|f"]):
        there = program.compile().run(backend=client, stop_regex=pattern)
        here = program.compile().run(backend=local, stop_regex=pattern)
        assert there["a"] == here["a"]
        assert len(here["a"]) < 20
    client.close()
