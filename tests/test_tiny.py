"""The smallest proof that everything works together: program to kernels, in seconds.

A random two-layer model says nothing sensible, but a grammar is kept, prefixes are shared, tokens
are accounted for, and a second run gives the same text from the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import palmette as pm

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["s", "m", "l"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pm.function
def program(s, animal):
    s += pm.system("You know animals. " * 8)
    s += pm.user(f"Tell me about the {animal}.")
    branches = s.fork(4)
    for branch in branches:
        branch += pm.assistant("It is " + pm.gen("fact", max_tokens=6, temperature=0))
    branches.join()
    s += pm.assistant("Its size is " + pm.select("size", ["small", "large"]))
    s += pm.user("As JSON.")
    s += pm.assistant(pm.gen("json", max_tokens=120, temperature=0, json_schema=SCHEMA))


@pytest.fixture(scope="module")
def engine(tiny_files: Path) -> Iterator[pm.Engine]:
    engine = pm.Engine.load(pm.EngineConfig(model=str(tiny_files), device="cpu", kv_tokens=4096))
    yield engine
    engine.close()


def test_a_program_runs_through_every_layer(engine: pm.Engine) -> None:
    state = program.run("cat", backend=engine)
    facts = state["fact"]
    assert len(facts) == 4 and len(set(facts)) == 1, "greedy branches of one state agree"
    assert state["size"] in ("small", "large")
    value = json.loads(state["json"])
    assert set(value) == {"name", "size"} and value["size"] in ("s", "m", "l")
    engine.check()


def test_branches_share_their_prefix_and_every_token_is_booked(engine: pm.Engine) -> None:
    assert engine.flush_cache()
    explained = pm.explain(program.run("dog", backend=engine))
    assert explained.cached_tokens + explained.computed_tokens == explained.prompt_tokens
    facts = [row for row in explained.rows if row.name == "fact"]
    prompt = facts[0].prompt_tokens
    page = engine.info.page_size
    assert sum(row.cached_tokens for row in facts) == 3 * ((prompt - 1) // page * page)


def test_a_second_run_is_the_same_from_the_cache(engine: pm.Engine) -> None:
    assert engine.flush_cache()
    cold = program.run("owl", backend=engine)
    text, cold_cost = cold.text(), pm.explain(cold)
    warm = program.run("owl", backend=engine)
    assert warm.text() == text
    assert pm.explain(warm).computed_tokens < cold_cost.computed_tokens / 2
