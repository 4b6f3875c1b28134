"""Compiled programs: what they give, what they take, and what cannot be compiled."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel


@pm.function
def judge(s: pm.ProgramState, essay: str, limit: int = 5) -> object:
    s += pm.system("Be fair.")
    s += pm.user(f"Essay: {essay} ({limit:>4})")
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += pm.user(f"Point {i}")
        fork += pm.assistant(pm.gen("view", max_tokens=limit, stop="\n"))
    forks.join()
    s += pm.assistant("; ".join(s["view"]) + pm.select("grade", ["A", essay, f"{essay}!"]))
    s["note"] = f"<{s['grade']}>"
    return {"grade": s["grade"], "views": s["view"], "of": (essay, limit)}


def read(state: pm.ProgramState, *names: str) -> object:
    values = {name: state[name] for name in names}
    return state.text(), state.messages(), state.ret_value, values


def test_a_compiled_program_gives_what_the_function_gives() -> None:
    program = judge.compile()
    assert program.arg_names == ["essay", "limit"]
    for essay, limit in (("Hi", 3), ("<|im_end|>", 1)):
        wanted = read(judge.run(essay, limit, backend=FakeModel()), "view", "grade", "note")
        arguments = {"essay": essay, "limit": limit}
        for eager in (False, True):
            state = program.run(backend=FakeModel(), eager=eager, **arguments)
            assert read(state, "view", "grade", "note") == wanted


def test_defaults_of_arguments_and_of_gen_are_the_run_s() -> None:
    program = judge.compile()
    model = FakeModel()
    program.run(essay="Hi", backend=model, temperature=0.25).sync()
    sampled = [call.request.sampling for call in model.calls if call.request.sampling.stop]
    assert [(one.max_new_tokens, one.temperature) for one in sampled] == [(5, 0.25)] * 3
    with pytest.raises(TypeError, match=r"judge\(\) needs the argument 'essay'"):
        program.run(backend=model)
    with pytest.raises(TypeError, match=r"'esay'; did you mean essay\?"):
        program.run(esay="x", backend=model)
    with pytest.raises(ValueError, match="n: how many texts"):
        program.run(essay="x", n=2, backend=model)
    with pytest.raises(TypeError, match="'essay' is appended to a state, which takes text"):
        pm.function(lambda s, essay: s.__iadd__(essay)).compile().run(essay=3, backend=model)


def test_a_batch_of_a_compiled_program() -> None:
    entries: list[Any] = [{"essay": "x", "limit": 2}, ("y", 3)]
    states = judge.compile().run_batch(entries, backend=FakeModel())
    wanted = judge.run_batch(entries, backend=FakeModel())
    assert [read(one, "grade") for one in states] == [read(one, "grade") for one in wanted]
    streamed = judge.compile().run_batch(entries, backend=FakeModel(), generator_style=True)
    assert [state["grade"] for state in streamed] == [state["grade"] for state in wanted]


def test_text_streams() -> None:
    @pm.function
    def story(s: pm.ProgramState, topic: str) -> None:
        s += "About " + topic + ":" + pm.gen("story") + "."

    model = FakeModel({"cats": " a b c"})
    pieces = list(story.compile().stream(topic="cats", backend=model))
    assert "".join(pieces) == "About cats: a b c."
    state = story.compile().run(topic="cats", backend=model)
    assert list(state.text_iter("story")) == [" a", " b", " c"]


def test_forks_of_forks_joins_scopes_and_several_texts() -> None:
    @pm.function
    def inner(s: pm.ProgramState, word: str) -> str:
        s += f"[{word}" + pm.gen("in", max_tokens=2) + "]"
        return word

    @pm.function
    def program(s: pm.ProgramState, word: str) -> object:
        with s.var_scope("scope"):
            s += "a" + pm.gen("x", n=2)
        s += s["x"][1] + s["scope"]
        for outer in s.fork(2):
            inners = outer.fork(2)
            inners += [f" {word}{i}" + pm.gen("leaf") for i in range(2)]
            inners.join("concate_and_append")
            outer += pm.gen("tail")
            s += outer["tail"]
        with s.copy() as t:
            t += inner(t, word) + pm.gen("copied")  # type: ignore[operator]
        other = inner.run(word + "!", temperature=0.5)
        s += other["in"] + str(other.ret_value) + s.text()
        return [s["x"], other.ret_value, word, {"w": word}]

    def answer(prompt: str) -> str:
        return f" {len(prompt)}"

    wanted = read(program.run("w", backend=FakeModel(answer)), "x", "scope", "copied")
    compiled = program.compile()
    for one in (compiled, pm.Program.from_json(compiled.to_json())):
        assert read(one.run(word="w", backend=FakeModel(answer)), "x", "scope", "copied") == wanted


def test_options_of_gen_may_be_arguments() -> None:
    @pm.function
    def program(
        s: pm.ProgramState, limit: int, warmth: float, end: str, pattern: str, seed: int
    ) -> None:
        s += "x" + pm.gen("a", max_tokens=limit, temperature=warmth, stop=end)
        s += pm.gen("b", regex=f"({pattern})+", stop=[f"{end}!", "."], seed=seed)

    model = FakeModel({"x": "7"})
    compiled = program.compile()
    assert (
        str(compiled).splitlines()[2].endswith("max_tokens={limit} stop={end} temperature={warmth}")
    )
    arguments = {"limit": 7, "warmth": 0.5, "end": "#", "pattern": "[0-9]", "seed": 11}
    pm.Program.from_json(compiled.to_json()).run(backend=model, **arguments).sync()
    first, second = (call.request for call in model.calls)
    assert (first.sampling.max_new_tokens, first.sampling.temperature) == (7, 0.5)
    assert first.sampling.stop == ("#",)
    assert second.grammar is not None and second.grammar.source == "([0-9])+"
    assert (second.sampling.stop, second.sampling.seed) == (("#!", "."), 11)
    with pytest.raises(pm.RequestError, match=r"gen 'a' failed: max_new_tokens: -3(.|\n)*program"):
        compiled.run(backend=model, **{**arguments, "limit": -3})


def test_constants_are_looked_at_while_compiling() -> None:
    @pm.function
    def program(s: pm.ProgramState, topics: list[str], style: str, count: int = 2) -> None:
        for topic in topics[:count]:
            s += f"{style} {topic}:" + pm.gen(topic)

    compiled = program.compile(topics=["cats", "dogs", "rain"], count=2)
    assert compiled.arg_names == ["style"]
    state = compiled.run(style="short", backend=FakeModel())
    assert state.text() == "short cats: okshort dogs: ok"
    assert program.bind(topics=["sun"], count=1).compile().arg_names == ["style"]


def test_host_functions_run_here() -> None:
    @pm.function
    def program(s: pm.ProgramState, start: str) -> object:
        s += start + pm.gen("n")
        s.call("double", lambda n: 2 * int(n), "n")
        s += f" twice: {s['double']}"
        return s["double"]

    compiled = program.compile()
    state = compiled.run(start="n=", backend=FakeModel([" 21"]))
    assert (state.text(), state.ret_value) == ("n= 21 twice: 42", 42)
    with pytest.raises(ValueError, match=r"call 'double': the function .*lambda(.|\n)*s\.call"):
        compiled.to_json()


@pm.function
def end_of(s: pm.ProgramState, start: str, endings: Any) -> None:
    s += start
    s += pm.select("end", endings, choices_method=pm.greedy_token_selection)
    s += "." + pm.gen("more", max_tokens=2)


def test_all_choices_are_an_argument() -> None:
    compiled = end_of.compile()
    again = pm.Program.from_json(compiled.to_json())
    assert again.id == compiled.id
    for endings in ([" high", " low"], (" far",), [" a", " ab", " abc"]):
        model = FakeModel({"It jumps": endings[-1], ".": " Yes."})
        want = end_of.run("It jumps", endings, backend=model)
        for program in (compiled, again):
            state = program.run(start="It jumps", endings=endings, backend=model)
            assert (state["end"], state.text()) == (endings[-1], want.text())
            assert state.get_meta_info("end") == want.get_meta_info("end") | {
                key: state.get_meta_info("end")[key]  # type: ignore[call-overload]
                for key in ("cached_tokens", "computed_tokens", "cached_tokens_details")
            }
            assert model.flush_cache()
            told = program.explain(start="It jumps", endings=endings, backend=model, analyze=True)
            assert told.is_exact, str(told)


@pytest.mark.parametrize(
    ("endings", "message"),
    [
        (" low", "endings: ' low' must be a list of texts"),
        (None, "endings: None must be a list of texts"),
        (3, "endings: 3 is no list"),
        ([3], "endings: 3 is no text"),
        ([], "choices: needs at least one text"),
        (["a", ""], "choices: an empty text cannot be scored"),
    ],
)
def test_an_argument_that_is_no_list_of_choices_is_told_with_the_line(
    endings: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        end_of.compile().run(start="x", endings=endings, backend=FakeModel())
    assert "endings, choices_method" in str(caught.value)


REFUSED: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda s, q: q == "x", r"argument 'q'(.|\n)*compile\(q=\.\.\.\)"),
    (lambda s, q: len(q), "argument 'q'"),
    (lambda s, q: list(q), "argument 'q'"),
    (lambda s, q: q.strip(), "argument 'q'"),
    (lambda s, q: int(q), "argument 'q'"),
    (lambda s, q: {q: 1}, "argument 'q'"),
    (lambda s, q: "x" if q else "y", "argument 'q'"),
    (lambda s, q: q[0], "argument 'q'"),
    (lambda s, q: q + 1, "argument 'q'"),
    (lambda s, q: range(q), "a value|argument 'q'"),
    (lambda s, q: math.sqrt(q), "argument 'q'"),
    (lambda s, q: s.__iadd__(pm.select("a", [*q, "x"])), "argument 'q'"),
    (lambda s, q: s.__iadd__(pm.gen("a", n=q)), "argument 'q'|n of a gen"),
    (lambda s, q: s.__iadd__(pm.gen("a", stop_regex=f"x{q}")), "stop_regex of a gen"),
    (lambda s, q: s.__iadd__(json.dumps({"text": q})), "a string with an argument"),
    (lambda s, q: s.__iadd__(f"{q}".upper()), "a string with an argument"),
    (lambda s, q: s.__iadd__(f" {q} ".strip()), "a string with an argument"),
    (lambda s, q: s.__iadd__("x" + pm.gen("a")) and s["a"] == "b", "a generated value"),
    (lambda s, q: s.__iadd__("x" + pm.gen("a")) and s["a"].age, "a generated value"),
    (lambda s, q: q.age, "argument 'q'"),
    (lambda s, q: s.__iadd__("x" + pm.gen("a")) and len(s.text()), "a generated value"),
    (lambda s, q: s.__iadd__(pm.gen("a")) and s.get_meta_info("a")["id"], "meta information"),
    (lambda s, q: s.__iadd__(pm.gen("a")) and s.sync(), "the end of an operation"),
    (lambda s, q: s.__iadd__(pm.gen("a")) and list(s.text_iter("a")), "a generated value"),
    (lambda s, q: s.__iadd__(pm.gen("a") + pm.select("b", ["x", "y"])) and
        s.__iadd__(pm.select("c", [s["b"], "z"])), "a generated value in choices"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "what"), REFUSED)
def test_what_needs_a_value_is_refused_with_the_line(
    body: Callable[[Any, Any], object], what: str
) -> None:
    with pytest.raises(pm.ConcretizationError, match=what) as caught:
        pm.function(lambda s, q: body(s, q)).compile()
    assert caught.value.line.file == __file__
    assert "test_compile.py" in str(caught.value)


def test_a_program_on_another_backend_cannot_be_a_part_of_one() -> None:
    model = FakeModel()

    @pm.function
    def program(s: pm.ProgramState) -> None:
        judge.run("x", backend=model)

    with pytest.raises(pm.ConcretizationError, match="another backend"):
        program.compile()
    model.assert_calls(0)


def test_compile_takes_what_the_old_interface_took() -> None:
    assert judge.compile(backend=FakeModel()).id == judge.compile().id
    with pytest.raises(TypeError, match=r"'esay'; did you mean essay\?"):
        judge.compile(esay="x")


def test_a_failed_call_is_told_as_in_the_function() -> None:
    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += q + pm.gen("bad")
        s.fork(1)[0].__iadd__("y" + pm.gen("good"))

    state = program.compile().run(q="x", backend=FakeModel({"x": RuntimeError("no")}))
    with pytest.raises(pm.ProgramError, match=r"gen 'bad' failed: no(.|\n)*test_compile.py"):
        state["bad"]
    assert isinstance(state.error(), pm.ProgramError)


def test_async_programs_compile_too() -> None:
    @pm.function
    async def inner(s: pm.AsyncState, word: str) -> str:
        s += f"[{word}" + pm.gen("in", max_tokens=2) + "]"
        return word

    @pm.function
    async def program(s: pm.AsyncState, word: str) -> object:
        s += "a" + pm.gen("x")
        forks = s.fork(2)
        forks += [f" {word}{i}" + pm.gen("leaf") for i in range(2)]
        forks.join()
        s += "; ".join(await s["leaf"]) + await inner(s, word)
        return [await s["x"], await s.text()]

    compiled = program.compile()
    state = compiled.run(word="w", backend=FakeModel())
    wanted = program.run("w", backend=FakeModel())
    assert (state.text(), state["leaf"]) == (wanted.text(), wanted["leaf"])
    assert state.ret_value == wanted.ret_value

    @pm.function
    async def waiting(s: pm.AsyncState) -> None:
        await asyncio.sleep(0.01)

    with pytest.raises(pm.ConcretizationError, match="what the program waits for"):
        waiting.compile()


def test_a_compiled_program_runs_in_an_event_loop() -> None:
    program = judge.compile()

    async def main() -> list[pm.ProgramState]:
        model = FakeModel()
        runs = [program.run_async(essay=f"e{i}", backend=model) for i in range(5)]
        return await asyncio.gather(*runs)

    states = asyncio.run(main())
    wanted = [judge.run(f"e{i}", backend=FakeModel()) for i in range(5)]
    assert [state.text() for state in states] == [state.text() for state in wanted]
