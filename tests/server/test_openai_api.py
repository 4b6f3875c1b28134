from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from running_server import RunningServer, events

from palmette.server.tools import ToolMode, forced_call, is_complete


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def letters(start: int, count: int) -> str:
    """What the scripted model writes after `start` tokens."""
    return "".join(chr(ord("a") + (start + i) % 26) for i in range(count))


def test_completion_and_usage(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=7)
    assert answer.choices[0].text == letters(5, 7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 7)


def test_completion_default_is_16_tokens(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt="x").choices[0].text == letters(1, 16)


@pytest.mark.parametrize(
    "prompt",
    ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_completion_prompt_forms(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [letters(3, 4)]


def test_completion_batch_keeps_the_order(client: openai.OpenAI) -> None:
    prompts = ["a" * n for n in range(1, 9)]
    answer = client.completions.create(model="fake", prompt=prompts, max_tokens=3, n=2)
    assert [c.index for c in answer.choices] == list(range(16))
    assert [c.text for c in answer.choices] == [letters(n, 3) for n in range(1, 9) for _ in "ab"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(range(1, 9))
    assert answer.usage.completion_tokens == 48


def test_completion_echo_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="hey", max_tokens=2, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text == "hey" + letters(3, 2)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["h", "e", "y", "d", "e"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[3] == pytest.approx(0.0)
    assert choice.logprobs.top_logprobs is not None
    assert [list(top) if top else None for top in choice.logprobs.top_logprobs] == [
        None,
        ["b"],
        ["c"],
        ["d"],
        ["e"],
    ]


def test_completion_stream_equals_the_whole(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="hello", max_tokens=20, echo=True)
    chunks = list(
        client.completions.create(
            model="fake", prompt="hello", max_tokens=20, echo=True, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=user("hi"), max_tokens=5)
    message = answer.choices[0].message
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert message.role == "assistant"
    assert message.content == letters(answer.usage.prompt_tokens, 5)


def test_chat_without_max_tokens_ends_at_the_servers_default(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=user("hi"))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_chat_without_max_tokens_ends_at_the_context_when_that_is_nearer(
    client: openai.OpenAI,
) -> None:
    answer = client.chat.completions.create(model="fake", messages=user("x" * 1200))
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_chat_stream_has_role_then_text_then_reason(server: RunningServer) -> None:
    body = {"model": "fake", "messages": user("hi"), "max_tokens": 4, "stream": True}
    chunks = events(server.stream("/v1/chat/completions", body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(list(delta) == ["content"] for delta in deltas[1:-1])
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_chat_stream_of_two_choices(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    stream = client.chat.completions.create(
        model="fake", messages=user("hi"), max_tokens=6, n=2, stream=True
    )
    reasons = []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts[0] == texts[1] and len(texts[0]) == 6
    assert reasons == ["length", "length"]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=user("hi"), max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(item.token for item in logprobs.content) == answer.choices[0].message.content
    for item in logprobs.content:
        assert item.bytes == list(item.token.encode())
        assert len(item.top_logprobs) == 2
        assert item.top_logprobs[0].token == item.token


def test_streamed_logprobs_equal_the_whole(client: openai.OpenAI) -> None:
    def ask(stream: bool) -> Any:
        return client.chat.completions.create(
            model="fake",
            messages=user("hi"),
            max_tokens=9,
            logprobs=True,
            top_logprobs=1,
            stream=stream,
        )

    whole = ask(False).choices[0].logprobs.content
    streamed: list[Any] = []
    for chunk in ask(True):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content if logprobs else []
    assert streamed == whole


def test_stop_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", max_tokens=50, stop=["fg", "zz"])
    assert answer.choices[0].text == "bcde"
    assert answer.choices[0].finish_reason == "stop"


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "a prefix that no other test uses " * 3
    cached = []
    for _ in range(2):
        usage = client.completions.create(model="fake", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, (len(prompt) - 1) // 16 * 16]


class Answer(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    fed: bool


def test_json_schema_of_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="fake", messages=user("which?"), response_format=Answer, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_an_impossible_schema_is_400_before_any_event(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="fake",
            messages=user("x"),
            stream=stream,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["code"] == "grammar"
    assert "/properties/a/type" in body["message"]


def test_regex(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="x", max_tokens=20, extra_body={"regex": "(yes|no)!"}
    )
    assert answer.choices[0].text in ("yes!", "no!")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "feed",
            "parameters": {
                "type": "object",
                "properties": {"animal": {"enum": ["cat", "dog"]}},
                "required": ["animal"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "pet", "parameters": {"const": {"hard": True}}}},
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "function", "function": {"name": "feed"}}, ["feed"]), ("required", ["feed", "pet"])],
    ids=["named", "required"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_tool_call_is_always_valid(
    client: openai.OpenAI, choice: Any, names: list[str], stream: bool
) -> None:
    answer: Any = client.chat.completions.create(
        model="fake",
        messages=user("feed it"),
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice=choice,
        stream=stream,
        max_tokens=200,
    )
    if stream:
        chunks = list(answer)
        calls = [c for x in chunks for c in x.choices[0].delta.tool_calls or ()]
        name = "".join(c.function.name or "" for c in calls)
        arguments = "".join(c.function.arguments or "" for c in calls)
        reason = chunks[-1].choices[0].finish_reason
    else:
        [call] = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        reason = answer.choices[0].finish_reason
    assert name in names
    assert json.loads(arguments) in ({"animal": "cat"}, {"animal": "dog"}, {"hard": True})
    assert reason == "tool_calls"


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "feed"}}


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_not_cut_but_refused_with_the_tokens_it_needs(
    server: RunningServer, choice: Any, stream: bool
) -> None:
    body = {"messages": user("feed it"), "tools": TOOLS, "tool_choice": choice, "seed": 1}
    refused = server.post("/v1/chat/completions", body | {"max_tokens": 4, "stream": stream})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_value"
    shortest = int(error["message"].rpartition(" ")[2])
    [whole] = server.post("/v1/chat/completions", body | {"max_tokens": shortest}).json()["choices"]
    [call] = whole["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_stop_strings_and_a_forced_tool_call_are_400(client: openai.OpenAI, choice: Any) -> None:
    arguments: dict[str, Any] = {"model": "fake", "messages": user("x"), "tools": TOOLS}
    with pytest.raises(openai.BadRequestError, match="stop: cannot be combined") as caught:
        client.chat.completions.create(**arguments, tool_choice=choice, stop=["a"])
    assert caught.value.param == "stop"
    client.chat.completions.create(**arguments, tool_choice="auto", stop=["a"], max_tokens=1)


@pytest.mark.parametrize(
    ("text", "is_whole", "arguments"),
    [
        ('{"name":"a","arguments":{"x":1e999}}', True, '{"x":1e999}'),
        ('{"name":"a","arguments":{"x":1,"s":"\\ud800"}}', True, '{"x": 1, "s": "\\ud800"}'),
        ('{"name":"a","arguments":{"x":1}', False, None),
        ('{"name":"a"}', False, None),
        ("", False, None),
    ],
)
def test_a_call_keeps_its_arguments_as_written(
    text: str, is_whole: bool, arguments: str | None
) -> None:
    mode = ToolMode()
    assert is_complete(text, mode) is is_whole
    call = forced_call(text, mode)
    assert (call and call["function"]["arguments"]) == arguments


@pytest.mark.parametrize(
    "choice",
    ["maybe", {"type": "function", "function": {"name": "missing"}}, {"type": "custom"}],
)
def test_a_tool_choice_that_cannot_be_obeyed_is_400(client: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(
            model="fake",
            messages=user("x"),
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice=choice,
        )


def test_unknown_model_is_openais_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("best_of", 3),
        ("functions", []),
        ("guided_whitespace_pattern", "[ ]"),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_what_would_be_ignored_is_refused(server: RunningServer, field: str, value: Any) -> None:
    answer = server.complete(prompt="x", **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_nulls_are_absent_fields(server: RunningServer) -> None:
    nulls = dict.fromkeys(("stop", "seed", "logprobs", "n", "regex", "suffix", "unknown"))
    answer = server.complete(prompt="x", max_tokens=2, **nulls)
    assert answer.status_code == 200, answer.text


def test_errors_name_field_and_limit(server: RunningServer) -> None:
    error = server.complete(prompt="x", max_tokens=4000).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    error = server.complete(prompt="x", top_p=1.5).json()["error"]
    assert error["param"] == "top_p" and "1.5" in error["message"]
    error = server.complete(prompt="x", max_tokens=-1).json()["error"]
    assert error["param"] == "max_tokens" and error["message"].startswith("max_tokens: -1")


SCHEMA_WITH_A_FLAW = {"type": "object", "properties": {"a": {"type": "nothing"}}}
ONE_CHAT = {"messages": [{"role": "user", "content": "x"}]}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": SCHEMA_WITH_A_FLAW},
}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {**ONE_CHAT, "response_format": RESPONSE_FORMAT},
            "response_format",
        ),
        ("/v1/chat/completions", {**ONE_CHAT, "regex": "[a-"}, "regex"),
        ("/v1/completions", {"prompt": "x", "regex": "[a-"}, "regex"),
        ("/v1/completions", {"prompt": "x", "ebnf": "root ::= ("}, "ebnf"),
        ("/generate", {"text": "x", "sampling_params": {"regex": "[a-"}}, "regex"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"json_schema": SCHEMA_WITH_A_FLAW}},
            "json_schema",
        ),
    ],
)
def test_an_error_of_a_grammar_names_the_field_it_came_in(
    server: RunningServer, path: str, body: dict[str, object], param: str
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == "grammar"
