"""/v1/programs: what a stranger sends is refused with the place, and harms no one else."""

from __future__ import annotations

import json
from pathlib import Path
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
        ("max_tokens", True, "max_tokens: True is no whole number"),
        ("max_tokens", "x", "max_tokens: 'x' is no whole number"),
        ("stop_token_ids", "x", "stop_token_ids: 'x' is no list of token ids"),
        ("priority", False, "priority: False is no whole number"),
        ("temperature", True, "temperature: True is no number"),
        ("ignore_eos", 1, "ignore_eos: 1 is no bool"),
        ("reasoning_end", 3, "reasoning_end: 3 is no text"),
        ("logit_bias", 3, "logit_bias: 3 is no list of token ids"),
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


def failing(**line: Any) -> dict[str, Any]:
    """A gen whose prompt is too long for the context."""
    text = {"op": "text", "source": 0, "target": 1, "text": "x" * 3000, **line}
    return document([text, gen() | line])


def test_an_error_names_the_node(server: RunningServer) -> None:
    answer = run(server, failing()).json()
    error = answer["errors"]["a"]
    assert error["node"] == 1
    assert error["message"].startswith("gen 'a' failed: ")
    assert error["message"].splitlines()[1] == "  nodes[1]"
    assert answer["calls"][0]["error"]["node"] == 1
    program = pm.Program.from_json(json.dumps(failing()))
    with pytest.raises(pm.ProgramError, match=r"nodes\[1\]\n") as caught:
        program.run(backend=LocalClient(fake_engine(context_length=2048)))["a"]
    assert caught.value.line.node == 1
    wrong = document([{"op": "text", "source": 0, "target": 1, "text": ""}, gen(temperature=P)])
    message = run(server, wrong, arguments={"p": -1.0}).json()["error"]["message"]
    assert message.startswith("gen 'a' failed: temperature: -1") and "nodes[1]" in message
    forecast = program.explain(backend=LocalClient(fake_engine(context_length=4096)))
    assert str(forecast).splitlines()[1].split()[:3] == ["gen", "a", "*"]
    assert "nodes[1]" in str(forecast) and "nodes[1]" in forecast.to_svg()
    good = pm.Program.from_json(json.dumps(document()))
    state = good.run(backend=LocalClient(fake_engine()))
    assert "nodes[1]" in str(pm.explain(state))
    assert ":0 in " not in json.dumps(answer) + message + str(caught.value)


def test_the_line_of_a_document_is_told_and_its_file_never_opened(
    server: RunningServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret\n")
    answer = run(server, failing(line=[str(secret), 1, "f"])).json()
    assert answer["errors"]["a"]["message"].splitlines()[1] == f"  nodes[1], {secret}:1 in f"
    assert "the secret" not in json.dumps(answer)
    huge = run(server, failing(line=["f" * 100_000, 1, "f"])).json()
    assert len(huge["errors"]["a"]["message"]) < 1000


@pytest.mark.parametrize("top_k", [2**63, 2**70])
def test_a_number_that_no_frame_holds_is_refused(server: RunningServer, top_k: int) -> None:
    spec = run(server, document([document()["nodes"][0], gen(num_api_spec_tokens=top_k)])).json()
    assert "num_api_spec_tokens" in spec["errors"]["a"]["message"]
    answer = run(server, document(), sampling={"top_k": top_k})
    assert answer.status_code == 400, answer.text
    assert f"top_k: {top_k} is out of range" in answer.json()["error"]["message"]


def test_a_select_has_as_many_choices_as_a_run_has_requests(server: RunningServer) -> None:
    @pm.function
    def program(s: pm.ProgramState, count: int) -> None:
        s += "x" + pm.select("x", [f"{i:03}" for i in range(count)])

    client = pm.RuntimeEndpoint(server.url)
    served = program.compile(count=200).run(backend=client)
    assert served["x"] == program.run(200, backend=client)["x"]
    refused = program.compile(count=1025).run(backend=client).error()
    assert refused is not None and "1025 requests in one run; the limit is 1024" in str(refused)
    client.close()
