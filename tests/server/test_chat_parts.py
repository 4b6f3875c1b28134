"""Thinking and tool calls over HTTP: a model that says what it is told, and templates of each kind.

The texts that the model "wants" are the user's; a constraint changes what it must.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_server import RunningServer, events

UNIQUE = {"type": "array", "items": {"enum": [0, 1, 22]}, "minItems": 3, "uniqueItems": True}
LIST = {"type": "json_schema", "json_schema": {"schema": UNIQUE}}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], RunningServer]]:
    """By the name of a template."""
    running: dict[str, RunningServer] = {}

    def get(template: str) -> RunningServer:
        if template not in running:
            engine = {"model": f"script=echo&template={template}", "page_size": 4}
            running[template] = RunningServer(server={}, engine=engine)
        return running[template]

    yield get
    for server in running.values():
        server.close()


def chat(server: RunningServer, says: str, **body: Any) -> dict[str, Any]:
    """The answer of a model that wants to say `says`; streamed and whole must agree."""
    body = {
        "messages": [{"role": "user", "content": says}],
        "temperature": 0,
        "max_tokens": 200,
        **body,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    whole = answer["choices"][0]["message"]
    streamed: dict[str, Any] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for event in events(server.stream("/v1/chat/completions", body | options)):
        if event["usage"] is not None:
            name = "completion_tokens_details"
            assert event["usage"][name] == answer["usage"][name]
        for choice in event["choices"]:
            add(streamed, choice["delta"])
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] == answer["choices"][0]["finish_reason"]
    for name in ("reasoning_content", "content"):
        if not (name == "content" and whole[name] is None):
            assert streamed.get(name, "") == whole.get(name, "")
    calls = streamed.get("calls", {})
    for index, call in enumerate(whole.get("tool_calls", [])):
        assert calls[index]["function"] == call["function"]
        assert calls[index]["type"] == "function"
    assert len(calls) == len(whole.get("tool_calls", []))
    return answer


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("reasoning_content", "content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("calls", {})
        if "id" in part:
            calls[part["index"]] = json.loads(json.dumps(part))
        else:
            arguments = part["function"]["arguments"]
            calls[part["index"]]["function"]["arguments"] += arguments


def parts(answer: dict[str, Any]) -> tuple[Any, Any, str]:
    choice = answer["choices"][0]
    message = choice["message"]
    return message.get("reasoning_content"), message["content"], choice["finish_reason"]


def test_thinking_is_told_apart(servers: Any) -> None:
    server = servers("thinks")
    answer = chat(server, "<think>\nI see.\n</think>\n\nHello")
    assert parts(answer) == ("I see.", "Hello", "stop")
    thought = len("I see.\n</think>")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    raw = chat(server, "<think>\nI see.\n</think>\n\nHello", separate_reasoning=False)
    assert parts(raw) == (None, "I see.\n</think>\n\nHello", "stop")
    cut = chat(server, "<think>\nI see.\n</think>\n\nHello", max_tokens=4)
    assert parts(cut) == ("I se", "", "length")


def test_the_schema_holds_behind_thinking(servers: Any) -> None:
    answer = chat(servers("thinks"), "<think>\n[0,0]</think>[0, 0, 1", response_format=LIST)
    reasoning, content, reason = parts(answer)
    assert (reasoning, reason) == ("[0,0]", "stop")
    assert sorted(json.loads(content)) == [0, 1, 22]


@pytest.mark.parametrize("how", ["enable_thinking", "chat_template_kwargs"])
def test_rt_think_off(servers: Any, how: str) -> None:
    """Case rt-think-off: constrained from the first token, and the JSON is content."""
    server = servers("may think")
    off = {"enable_thinking": False}
    options = off if how == "enable_thinking" else {"chat_template_kwargs": off}
    answer = chat(server, "<think>x</think>[", response_format=LIST, **options)
    reasoning, content, _ = parts(answer)
    assert reasoning is None
    assert sorted(json.loads(content)) == [0, 1, 22]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_model_that_may_think(servers: Any) -> None:
    server = servers("may think")
    assert parts(chat(server, "<think>hm</think>so")) == ("hm", "so", "stop")
    assert parts(chat(server, "so it is </think>")) == (None, "so it is </think>", "stop")
    answer = chat(server, "<think>hm</think>[", response_format=LIST)
    assert parts(answer)[0] == "hm"
    assert sorted(json.loads(parts(answer)[1])) == [0, 1, 22]


def test_any_model_with_a_named_end(servers: Any) -> None:
    server = servers("plain")
    answer = chat(server, "step one. DONE [", response_format=LIST, reasoning_end="DONE ")
    assert parts(answer)[0] == "step one."
    assert sorted(json.loads(parts(answer)[1])) == [0, 1, 22]
    refused = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "reasoning_end": ""},
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "reasoning_end"
    meta = server.generate(
        text="<user>a. DONE 12</user><assistant>",
        sampling_params={"regex": "[0-9]+", "reasoning_end": "DONE ", "temperature": 0},
    )
    assert meta["text"] == "a. DONE 12"
    assert meta["meta_info"]["reasoning_tokens"] == len("a. DONE ")


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def test_auto_may_answer_in_text(servers: Any) -> None:
    answer = chat(servers("hermes"), "It is <b>warm</b>.", tools=TOOLS)
    assert parts(answer) == (None, "It is <b>warm</b>.", "stop")
    assert calls_of(answer) == []


def test_auto_calls_are_read(servers: Any) -> None:
    answer = chat(servers("hermes"), HERMES, tools=TOOLS)
    assert parts(answer) == (None, None, "tool_calls")
    assert calls_of(answer) == [("weather", {"city": "Rome"})]
    both = chat(servers("hermes"), f"Let me see.\n{HERMES}\n{HERMES}", tools=TOOLS)
    assert parts(both)[1:] == ("Let me see.\n\n", "tool_calls")
    assert calls_of(both) == [("weather", {"city": "Rome"})] * 2
    one = chat(servers("hermes"), HERMES + HERMES, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(one) == [("weather", {"city": "Rome"})]


def test_a_call_that_begins_is_valid(servers: Any) -> None:
    wrong = '<tool_call>\n{"name": "weather", "arguments": {"town": 1}}</tool_call>'
    [(name, arguments)] = calls_of(chat(servers("hermes"), wrong, tools=TOOLS))
    assert name == "weather" and set(arguments) >= {"city"}
    unknown = '<tool_call>\n{"name": "walk", "arguments": {}}'
    [(name, _)] = calls_of(chat(servers("hermes"), unknown, tools=TOOLS))
    assert name == "weather"
    for max_tokens in (70, 75, 90):
        long = HERMES.replace("Rome", "R" * 100)
        answer = chat(servers("hermes"), long, tools=TOOLS, max_tokens=max_tokens)
        [(_, arguments)] = calls_of(answer)
        assert set(arguments["city"]) <= {"R"}


def test_auto_calls_in_xml(servers: Any) -> None:
    answer = chat(servers("qwen_coder"), CODER, tools=TOOLS)
    assert calls_of(answer) == [("weather", {"city": "Rome", "days": 2})]
    assert parts(answer)[2] == "tool_calls"


def test_an_answer_in_json_or_a_call(servers: Any) -> None:
    server = servers("hermes")
    answer = chat(server, "[0, 0", tools=TOOLS, response_format=LIST)
    assert sorted(json.loads(parts(answer)[1])) == [0, 1, 22]
    answer = chat(server, HERMES, tools=TOOLS, response_format=LIST)
    assert calls_of(answer) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize("template", ["plain", "hermes", "qwen_coder"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_forced_call_behind_thinking(servers: Any, template: str, choice: Any) -> None:
    answer = chat(
        servers(template),
        "hm</think>{",
        tools=TOOLS,
        tool_choice=choice,
        reasoning_end="</think>",
    )
    assert parts(answer) == ("hm", None, "tool_calls")
    [(name, _)] = calls_of(answer)
    assert name in (("weather", "time") if choice == "required" else ("time",))


@pytest.mark.parametrize("template", ["hermes", "plain"])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_refused_is_named(
    servers: Any, template: str, choice: str, stream: bool
) -> None:
    if template == "plain" and choice == "auto":
        return  # its format is not known: nothing is constrained
    remote = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}}
    tools = [TOOLS[1], {"type": "function", "function": {"name": "bad", "parameters": remote}}]
    named = {"type": "function", "function": {"name": "bad"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "tool_choice": named if choice == "named" else choice,
        "stream": stream,
    }
    response = servers(template).post("/v1/chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "bad" in error["message"]
    assert error["pointer"] == "/tools/1/function/parameters/properties/a/$ref"
    if choice == "auto":
        tools[1]["function"]["strict"] = False
        assert servers(template).post("/v1/chat/completions", body).status_code == 200


def test_a_structural_tag_in_the_tree_form(servers: Any) -> None:
    """Case tag-two-tools, over HTTP."""
    tags = [
        {
            "type": "tag",
            "begin": f"<tool={tool['function']['name']}>",
            "content": {"type": "json_schema", "json_schema": tool["function"]["parameters"]},
            "end": "</tool>",
        }
        for tool in TOOLS
    ]
    form = {"type": "triggered_tags", "triggers": ["<tool="], "tags": tags}
    asked = {"type": "structural_tag", "format": form}
    says = 'Hi <tool=weather>{"city":"Rome"}</tool>, <tool=walk>{}'
    content = parts(chat(servers("plain"), says, response_format=asked))[1]
    assert content.startswith('Hi <tool=weather>{"city":"Rome"}</tool>, <tool=weather>{')
    assert content.count("</tool>") == 2
    wrong = {"type": "structural_tag", "format": {"type": "token", "token": 3}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": wrong}
    error = servers("plain").post("/v1/chat/completions", body).json()["error"]
    assert (error["param"], error["pointer"]) == ("response_format", "/format/type")
