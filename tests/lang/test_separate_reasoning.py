"""separate_reasoning(): the answer in the variable and in the prompt, the thinking beside it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from running_server import RunningServer

import palmette as pm
from palmette.lang.program import Program
from palmette.lang.testing import FakeModel

THOUGHT = "<think>\nTwo and two.\n</think>\n\n"


@pm.function
def ask(s: pm.ProgramState, model_type: str = "qwen3", **options: Any) -> None:
    s += "Q: 2+2? A:"
    s += pm.separate_reasoning(pm.gen("x", **options), model_type=model_type)
    s += " Sure?" + pm.gen("sure")


def thinker() -> FakeModel:
    return FakeModel({"A:": THOUGHT + "4", "Sure?": " yes"})


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_answer_goes_on_and_the_thinking_has_a_name(is_eager: bool) -> None:
    model = thinker()
    state = ask.run(backend=model, eager=is_eager)
    assert (state["x"], state["x_reasoning_content"]) == ("4", "Two and two.")
    assert state.text() == "Q: 2+2? A:4 Sure? yes"
    assert [call.prompt for call in model.calls] == ["Q: 2+2? A:", "Q: 2+2? A:4 Sure?"]
    assert state.get_meta_info("x")["reasoning_content"] == "Two and two."


@pytest.mark.parametrize(
    ("model_type", "text", "thinking"),
    [
        ("deepseek-r1", "hm</think>4", "hm"),
        ("step3", "<think>hm</think>4", "hm"),
        ("qwen3", "4", ""),
        ("QWEN3", "<think>hm</think>4", "hm"),
        ("qwen3-thinking", "hm</think>\n4", "hm"),
        ("glm45", "<think>hm</think>4", "hm"),
        ("kimi", "\u25c1think\u25b7hm\u25c1/think\u25b74", "hm"),
        ("mistral", "[THINK]hm[/THINK]4", "hm"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4",
            "hm",
        ),
    ],
)
def test_each_kind_of_models(model_type: str, text: str, thinking: str) -> None:
    state = ask.run(model_type, backend=FakeModel({"A:": text, "Sure?": " yes"}))
    assert (state["x"], state["x_reasoning_content"]) == ("4", thinking)


def test_it_streams_the_answer_and_the_thinking() -> None:
    state = ask.run(backend=thinker())
    assert "".join(state.text_iter("x")) == "4"
    state = ask.run(backend=thinker())
    assert "".join(state.text_iter("x_reasoning_content")) == "Two and two."
    state = ask.run(backend=thinker())
    assert "".join(state.text_iter()) == "Q: 2+2? A:4 Sure? yes"


def test_forks_gather_both() -> None:
    @pm.function
    def forked(s: pm.ProgramState) -> None:
        s += "Q"
        forks = s.fork(2)
        forks += lambda i: f"{i}:" + pm.separate_reasoning(pm.gen("x"), "deepseek-r1")
        forks.join()

    state = forked.run(backend=FakeModel({"0:": "a</think>A", "1:": "b</think>B"}))
    assert state["x"] == ["A", "B"]
    assert state["x_reasoning_content"] == ["a", "b"]


def test_several_texts_have_several_thoughts() -> None:
    model = FakeModel({"A:": ["a</think>A", "b</think>B"], "Sure?": "."})
    state = ask.run("step3", backend=model, n=2)
    assert state["x"] == ["A", "B"]
    assert state["x_reasoning_content"] == ["a", "b"]
    assert state.text().startswith("Q: 2+2? A:A Sure?")


def test_a_sum_a_typed_value_and_a_select() -> None:
    @pm.function
    def mixed(s: pm.ProgramState) -> None:
        s += pm.separate_reasoning("A:" + pm.gen("x") + " B:" + pm.gen("y"), "qwen3")
        s["age"] = pm.separate_reasoning(pm.gen(int), "deepseek-r1")
        s += pm.separate_reasoning(pm.select("z", ["1", "2"]), "qwen3")

    model = FakeModel({"A:": "<think>a</think>1", "B:": "2", "B:2": "old</think>36"})
    state = mixed.run(backend=model)
    assert (state["x"], state["y"], state["age"]) == ("1", "2", 36)
    assert state["x_reasoning_content"] == "a"
    assert state["age_reasoning_content"] == "old"


def test_compiled_and_as_json() -> None:
    program = Program.from_json(ask.compile(model_type="qwen3").to_json())
    state = program.run(backend=thinker())
    assert (state["x"], state["x_reasoning_content"]) == ("4", "Two and two.")
    assert state.text() == "Q: 2+2? A:4 Sure? yes"

    @pm.function
    def reads(s: pm.ProgramState) -> None:
        s += pm.separate_reasoning(pm.gen("x"), "qwen3")
        s += s["x_reasoning_content"]

    with pytest.raises(pm.ConcretizationError, match="the meta information"):
        reads.compile()
    data = json.loads(ask.compile(model_type="qwen3").to_json())
    data["nodes"][1]["parameters"]["reasoning_model"] = "nobody"
    with pytest.raises(ValueError, match=r"model_type: 'nobody' is not known; use one of deepseek"):
        Program.from_json(json.dumps(data))


def test_async() -> None:
    @pm.function
    async def run(s: pm.AsyncState) -> tuple[str, str]:
        s += "A:" + pm.separate_reasoning(pm.gen("x"), "qwen3")
        return await s["x"], await s["x_reasoning_content"]

    state = asyncio.run(run.run_async(backend=thinker()))
    assert state.ret_value == ("4", "Two and two.")


def test_over_http(server: RunningServer) -> None:
    """A model that does not think is certain to have done nothing else."""
    endpoint = pm.RuntimeEndpoint(server.url)
    for run in (ask.run, ask.compile(model_type="deepseek-r1").run):
        arguments = {"model_type": "deepseek-r1"} if run == ask.run else {}
        state = run(backend=endpoint, max_new_tokens=4, temperature=0, **arguments)
        assert state["x"] == "" and state["x_reasoning_content"] != ""
        assert state.text().startswith("Q: 2+2? A: Sure?")
    endpoint.close()


def hosted(*deltas: dict[str, str]) -> pm.OpenAI:
    def answer(request: httpx.Request) -> httpx.Response:
        events = [{"choices": [{"delta": delta}]} for delta in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        return httpx.Response(200, text="".join(f"data: {json.dumps(e)}\n\n" for e in events))

    return pm.OpenAI("m", api_key="k", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek-r1", "gpt-oss"])
@pytest.mark.parametrize(
    ("deltas", "thinking"),
    [
        ([{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "4"}], "hm"),
        ([{"reasoning": "hm"}, {"content": "4"}], "hm"),
        ([{"content": "4"}], ""),
    ],
)
def test_what_an_api_tells_apart(model_type: str, deltas: Any, thinking: str) -> None:
    @pm.function
    def run(s: pm.ProgramState) -> None:
        s += pm.user("2+2?")
        s += pm.assistant(pm.separate_reasoning(pm.gen("x"), model_type))

    client = hosted(*deltas)
    state = run.run(backend=client)
    assert (state["x"], state["x_reasoning_content"]) == ("4", thinking)
    assert state.messages()[-1]["content"] == "4"
    assert "reasoning_tokens" not in state.get_meta_info("x")  # the API's tokens are not known
    client.close()


def test_marks_in_an_api_s_text_are_found() -> None:
    @pm.function
    def run(s: pm.ProgramState) -> None:
        s += pm.user("2+2?") + pm.assistant(pm.separate_reasoning(pm.gen("x"), "deepseek-r1"))

    client = hosted({"content": "hm</th"}, {"content": "ink>"}, {"content": "4"})
    state = run.run(backend=client)
    assert (state["x"], state["x_reasoning_content"]) == ("4", "hm")
    client.close()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model_type: 'gpt-2' is not known; use one of .*qwen3"):
        pm.separate_reasoning(pm.gen("x"), "gpt-2")
    with pytest.raises(ValueError, match="separate_reasoning and reasoning_end"):
        pm.separate_reasoning(pm.gen("x", reasoning_end="</think>"), "qwen3")

    @pm.function
    def unnamed(s: pm.ProgramState) -> None:
        s += pm.separate_reasoning(pm.gen(), "qwen3")

    with pytest.raises(ValueError, match=r"the gen needs a name\n.*unnamed"):
        unnamed.run(backend=FakeModel())
