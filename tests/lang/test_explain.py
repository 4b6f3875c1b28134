"""What a finished run cost, as a table; prefixes as a tree."""

from __future__ import annotations

import palmette as pm
from palmette.lang.explain import format_tree
from palmette.lang.testing import FakeModel
from palmette.runtime.fake_runner import fake_engine


@pm.function
def program(s: pm.ProgramState) -> None:
    s += "one two three four" + pm.gen("a", max_tokens=2)
    forks = s.fork(2)
    forks += lambda i: f" nr {i}" + pm.gen("b", max_tokens=1)
    s += pm.select("c", [" x", " y"])


def test_every_call_has_a_row_and_the_sums_are_those_of_the_backend() -> None:
    model = FakeModel()
    explained = pm.explain(program.run(backend=model))
    assert [(row.kind, row.name, row.branch) for row in explained.rows] == [
        ("gen", "a", ""),
        ("gen", "b", "fork 0/2"),
        ("gen", "b", "fork 1/2"),
        ("select", "c", ""),
    ]
    assert explained.cached_tokens == model.cached_tokens
    assert explained.computed_tokens == model.computed_tokens
    assert explained.prompt_tokens == model.cached_tokens + model.computed_tokens
    assert explained.generated_tokens == 3  # " ok" and the end, for each gen but the select


def test_calls_stand_in_the_order_of_the_program_whatever_finishes_first() -> None:
    @pm.function
    def nested(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("long", max_tokens=9, ignore_eos=True)
        for outer in s.fork(2):
            outer += pm.gen("o", max_tokens=5, ignore_eos=True)
            for inner in outer.fork(1):
                inner += pm.gen("i", max_tokens=1)
        s += pm.gen("last", max_tokens=1)

    wanted = [
        ("long", ""),
        ("o", "fork 0/2"),
        ("i", "fork 0/2, fork 0/1"),
        ("o", "fork 1/2"),
        ("i", "fork 1/2, fork 0/1"),
        ("last", ""),
    ]
    for eager in (False, True):
        explained = pm.explain(nested.run(backend=FakeModel(), eager=eager))
        assert [(row.name, row.branch) for row in explained.rows] == wanted


def test_the_table_names_lines_and_totals() -> None:
    lines = str(pm.explain([program.run(backend=FakeModel()) for _ in range(2)])).splitlines()
    assert len(lines) == 1 + 2 * 4 + 1
    assert lines[0].split() == [
        "call", "branch", "line", "requests", "prompt", "cached", "computed", "generated", "ms",
    ]  # fmt: skip
    assert "test_explain.py:13" in lines[1]
    assert lines[-1].startswith("total")


def test_the_tree_shows_what_an_engine_holds() -> None:
    engine = fake_engine(page_size=4)
    program.run(backend=engine, temperature=0).sync()
    text = format_tree(engine.snapshot(), engine.tokenizer.decode)
    lines = text.splitlines()
    assert lines[0].strip() == "16 tokens  'one two three fo'"  # whole pages of 4 bytes
    assert any(line.startswith("    ") and "nr" in line for line in lines)
    engine.flush_cache()
    assert format_tree(engine.snapshot(), engine.tokenizer.decode) == "(no prefixes)"
