"""What a program will take: predicted on an engine without a model, measured on a real one."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_files import write_tiny_model

import palmette as pm
from palmette.lang.forecast import Forecast
from palmette.lang.testing import FakeModel


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("forecast") / "tiny", context_length=2048)


@pytest.fixture
def engine(model_path: Path, request: pytest.FixtureRequest) -> Iterator[pm.Engine]:
    page_size = getattr(request, "param", 16)
    loaded = pm.Engine.load(
        pm.EngineConfig(model=str(model_path), kv_tokens=8192, page_size=page_size, threads=1)
    )
    yield loaded
    loaded.close()


LONG = "One sentence that is long enough to fill a page or two of the cache, and then some. " * 2


@pm.function
def chain(s: pm.ProgramState, q: str) -> None:
    s += LONG + q + pm.gen("a", max_tokens=21, ignore_eos=True)
    s += " And then? " + pm.gen("b", max_tokens=9, ignore_eos=True)
    s += pm.gen("c", max_tokens=1, ignore_eos=True)


@pm.function
def forked(s: pm.ProgramState, q: str) -> None:
    s += LONG + q
    forks = s.fork(4)
    forks += lambda i: f" Point {i}:" + pm.gen("p", max_tokens=6 + i, ignore_eos=True)
    forks.join("concate_and_append")
    s += " All:" + pm.gen("all", max_tokens=5, ignore_eos=True)


@pm.function
def nested(s: pm.ProgramState, q: str) -> None:
    s += LONG + q
    for outer in s.fork(3):
        outer += " Plan:" + pm.gen("plan", max_tokens=17, ignore_eos=True)
        for inner in outer.fork(2):
            inner += " Do:" + pm.gen("do", max_tokens=5, ignore_eos=True)
            inner += " Score:" + pm.gen("score", max_tokens=2, ignore_eos=True)


@pm.function
def selecting(s: pm.ProgramState, q: str) -> None:
    s += LONG + q + pm.select("a", [" yes", " noo", " huh"])
    s += LONG + pm.select("b", ["x", "y"], choices_method=pm.greedy_token_selection)
    method = pm.unconditional_likelihood_normalized
    s += " then" + pm.select("c", [" 1", " 2"], choices_method=method)
    s += pm.gen("d", max_tokens=4, ignore_eos=True)


@pm.function
def roles(s: pm.ProgramState, q: str) -> None:
    s += pm.system(LONG) + pm.user(q)
    s += pm.assistant(pm.gen("a", max_tokens=12, ignore_eos=True))
    s += pm.user("Sure?") + pm.assistant(pm.gen("b", n=3, max_tokens=7, ignore_eos=True))


PROGRAMS = [chain, forked, nested, selecting, roles]


def counts(forecast: Forecast, which: str) -> list[tuple[Any, ...]]:
    found = [(call.run, call.title, call.branch, getattr(call, which)) for call in forecast.calls]
    return [
        (*place, one.prompt_tokens, one.cached_tokens, one.computed_tokens) for *place, one in found
    ]


@pytest.mark.parametrize("engine", [1, 16], indirect=True)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda one: str(one.__name__))
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_is_predicted_before_the_run_is_what_the_run_measures(
    engine: pm.Engine, function: pm.Function, temperature: float
) -> None:
    program = function.compile()
    arguments = {"q": "Why is it so?", "temperature": temperature}
    before = program.explain(backend=engine, **arguments)
    assert engine.flush_cache()
    after = program.explain(backend=engine, analyze=True, **arguments)
    assert counts(before, "predicted") == counts(after, "measured")
    assert after.is_exact
    assert before.cached_tokens > 0
    assert counts(after, "predicted") == counts(after, "measured")


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda one: str(one.__name__))
def test_a_batch(engine: pm.Engine, function: pm.Function) -> None:
    program = function.compile()
    batch = [{"q": f"Question {i}?"} for i in range(5)]
    before = program.explain(backend=engine, batch=batch, temperature=0)
    assert engine.flush_cache()
    after = program.explain(backend=engine, batch=batch, temperature=0, analyze=True)
    assert after.is_exact
    assert counts(before, "predicted") == counts(after, "measured")


def test_a_warm_cache(engine: pm.Engine) -> None:
    program = forked.compile()
    program.run(q="Why?", backend=engine, temperature=0).sync()
    before = program.explain(backend=engine, is_warm=True, q="Why?", temperature=0)
    after = program.explain(backend=engine, is_warm=True, analyze=True, q="Why?", temperature=0)
    assert after.is_exact
    assert after.cached_tokens > program.explain(backend=engine, q="Why?").cached_tokens
    # The run's own texts differ from those assumed, but for their lengths.
    assert before.prompt_tokens == after.prompt_tokens


def test_texts_that_end_early_are_exact_for_the_run_that_was_made(engine: pm.Engine) -> None:
    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += LONG + q + pm.gen("a", max_tokens=40, stop=["e", "the"])
        s += LONG + pm.gen("b", max_tokens=40, stop_regex="[aeiou] ?[a-z]")
        forks = s.fork(3)
        forks += lambda i: f"{i}" + pm.gen("c", regex="[a-z]{3}( [a-z]{4})?-suffix-[0-9]")
        forks += pm.gen(
            "d",
            json_schema={
                "type": "object",
                "properties": {"name": {"enum": ["x"]}},
                "required": ["name"],
                "additionalProperties": False,
            },
            max_tokens=30,
        )
        forks += pm.gen("e", max_tokens=7)
        s += "; ".join(fork["c"] for fork in forks) + pm.gen("f", max_tokens=7)
        s += forks[0]["d"] + pm.gen("g", max_tokens=3)

    for seed in range(3):
        assert engine.flush_cache()
        after = program.compile().explain(
            backend=engine, analyze=True, q=f"Why {seed}?", temperature=seed
        )
        assert counts(after, "predicted") == counts(after, "measured")
        assert after.is_exact
        forced = [call.predicted.forced_tokens for call in after.calls if call.name in ("c", "d")]
        assert min(forced) > 0
        measured = [call.measured.forced_tokens for call in after.calls if call.measured]
        assert [call.predicted.forced_tokens for call in after.calls] == measured


@pytest.mark.parametrize("method", [pm.constrained_likelihood, pm.greedy_token_selection])
@pytest.mark.parametrize("choices", [["the cat", "the dog", "the"], [" long one", "s"]])
def test_the_choice_that_was_made_is_the_one_that_is_forecast(
    engine: pm.Engine, choices: list[str], method: Any
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "abc def" + pm.select("a", choices, choices_method=method)
        s += pm.select("b", ["é", "中", "e"], choices_method=method)
        s += pm.gen("c", max_tokens=3)

    forecast = program.compile().explain(backend=engine, analyze=True)
    assert forecast.is_exact, str(forecast)
    assert counts(forecast, "predicted") == counts(forecast, "measured")


@pytest.mark.parametrize(
    "options",
    [
        {"ebnf": 'root ::= "a" [0-9] ("b"|"cc")', "stop_regex": "[0-9]"},
        {"dtype": str, "stop_regex": "[A-Za-z0-9]"},
        {"regex": "[a-z]{4}", "stop": ["b", "cd", "z"]},
        {"dtype": int},
    ],
)
def test_a_stop_inside_of_a_constraint_is_forecast_exactly(
    engine: pm.Engine, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "abc" + pm.gen("a", max_tokens=12, temperature=0, **options)
        s += " and then" + pm.gen("b", max_tokens=2)

    forecast = program.compile().explain(backend=engine, analyze=True)
    assert forecast.is_exact, str(forecast)
    assert counts(forecast, "predicted") == counts(forecast, "measured")
    assert not caplog.records


def test_steps_pages_chain_and_money(engine: pm.Engine) -> None:
    prices = pm.Prices(input=2.0, output=10.0, cached_input=0.5)
    forecast = forked.compile().explain(backend=engine, q="Why?", prices=prices)
    assert forecast.num_steps >= forecast.critical_tokens == 9 + 5
    assert forecast.peak_pages * 16 >= max(c.predicted.prompt_tokens for c in forecast.calls)
    assert forecast.cost == pytest.approx(
        (forecast.computed_tokens * 2 + forecast.cached_tokens * 0.5 + (6 + 7 + 8 + 9 + 5) * 10)
        / 1e6
    )
    critical = [(call.name, call.branch) for call in forecast.calls if call.is_critical]
    assert critical == [("p", "fork 3/4"), ("all", "")]
    assert [call.waits_for for call in forecast.calls] == [(), (), (), (), (0, 1, 2, 3)]
    stats = engine.stats()
    assert (stats.steps, stats.used_pages) == (0, 0)  # nothing ran


def test_seconds_come_from_the_step_times_that_the_engine_has_learnt(engine: pm.Engine) -> None:
    program = chain.compile()
    assert program.explain(backend=engine, q="Why?").seconds is None
    program.run(q="Why?", backend=engine, temperature=0).sync()
    forecast = program.explain(backend=engine, q="Why?", analyze=True, temperature=0)
    assert forecast.seconds is not None and forecast.seconds > 0
    assert forecast.measured_seconds is not None and forecast.measured_seconds > 0
    assert "seconds:" in str(forecast) and "measured" in str(forecast)


def test_lengths_replace_max_tokens(engine: pm.Engine) -> None:
    program = chain.compile()
    assert program.explain(backend=engine, q="x").generated_tokens == 31
    assert program.explain(backend=engine, q="x", lengths={"a": 3}).generated_tokens == 13
    with pytest.raises(ValueError, match="'d' is no gen of this program; it has a, b, c"):
        program.explain(backend=engine, q="x", lengths={"a": 3, "d": 3})


def test_host_functions_are_not_run_for_a_forecast(engine: pm.Engine) -> None:
    called: list[str] = []

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += LONG + pm.gen("a", max_tokens=3)
        s.call("note", lambda text: called.append(text) or "x", "a")
        s += s["note"] + pm.gen("b", max_tokens=3)

    program.compile().explain(backend=engine)
    assert called == []
    assert program.compile().explain(backend=engine, analyze=True).calls[1].measured is not None
    assert len(called) >= 1


def test_other_backends_are_forecast_with_what_is_known_of_them() -> None:
    forecast = forked.compile().explain(backend=FakeModel(), q="Why?")
    assert [call.predicted.generated_tokens for call in forecast.calls] == [6, 7, 8, 9, 5]
    assert forecast.prompt_tokens == forecast.cached_tokens + forecast.computed_tokens
    with pytest.raises(ValueError, match="is_warm: the cache of this backend cannot be looked at"):
        forked.compile().explain(backend=FakeModel(), q="Why?", is_warm=True)


def test_a_failed_run_is_told(engine: pm.Engine) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" * 5000 + pm.gen("a")

    with pytest.raises(pm.ProgramError, match="gen 'a' failed"):
        program.compile().explain(backend=engine, analyze=True)


def test_text_json_and_pictures(engine: pm.Engine) -> None:
    forecast = nested.compile().explain(backend=engine, q='<"&>', analyze=True, temperature=0)
    lines = str(forecast).splitlines()
    assert lines[0].split() == [
        "call", "branch", "line", "requests", "prompt", "cached", "computed", "generated",
        "forced", "=prompt", "=cached", "=computed", "=generated",
    ]  # fmt: skip
    assert "test_forecast.py:" in lines[1] and lines[-1].startswith("assumed: the texts of the run")
    whole = json.loads(forecast.to_json())
    assert len(whole["calls"]) == 15 and whole["calls"][1]["waits_for"] == [0]
    assert whole["cached_tokens"] == forecast.cached_tokens
    graph = forecast.to_dot()
    assert graph.startswith('digraph "nested" {') and graph.count("->") == 12
    root = ElementTree.fromstring(forecast.to_svg())
    boxes = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 15
    page = forecast.to_html()
    assert (
        page.count("<svg") == 1
        and "<script" not in page
        and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    )


def test_hits_stand_at_the_edge_along_which_the_prompt_goes_on(engine: pm.Engine) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += LONG
        forks = s.fork(2)
        forks += pm.gen("p", max_tokens=4, ignore_eos=True)
        forks[0] += " and " + forks[1]["p"] + pm.gen("q", max_tokens=4, ignore_eos=True)

    forecast = program.compile().explain(backend=engine)
    first, second, last = forecast.calls
    assert last.waits_for == (first.value, second.value)
    assert [call.continues for call in forecast.calls] == [None, None, first.value]
    assert last.predicted.cached_tokens > 0
    graph = forecast.to_dot()
    assert f'c0_0 -> c0_2 [label="{last.predicted.cached_tokens} cached"];' in graph
    assert "c0_1 -> c0_2 [style=dotted];" in graph
    picture = forecast.to_svg()
    assert picture.count("stroke-dasharray") == 1 and picture.count(" cached</text>") == 1


@pytest.mark.model
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda one: str(one.__name__))
def test_the_default_model_measures_what_is_predicted(
    default_model: Path, function: pm.Function
) -> None:
    engine = pm.Engine.load(pm.EngineConfig(model=str(default_model), kv_tokens=8192))
    program = function.compile()
    before = program.explain(backend=engine, q="Why is it so?", temperature=0)
    after = program.explain(backend=engine, q="Why is it so?", temperature=0, analyze=True)
    assert after.is_exact
    assert counts(before, "predicted") == counts(after, "measured")
    engine.close()


def test_a_call_that_would_fail_is_told(engine: pm.Engine) -> None:
    with pytest.raises(pm.ProgramError, match="exceed the context") as caught:
        chain.compile().explain(backend=engine, q="word " * 3000)
    assert caught.value.variable == "a" and "test_forecast.py" in str(caught.value)
