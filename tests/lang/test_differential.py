"""The lazy and the eager reading of a program give the same texts, ids, values and requests."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.lang.ir import Call
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine

Op = tuple[Any, ...]

TEXTS = st.sampled_from(["a ", " b", "word", "\n", "", "x y\nz", "<|im_end|>", "\u00e9\u4e2d"])
LEAVES = st.one_of(
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.just("gen"), st.sampled_from(["p", "q"]), st.sampled_from([None, "\n", "e"])),
    st.tuples(st.just("many"), st.integers(2, 3)),
    st.tuples(st.just("select"), st.sampled_from([("a", " b"), ("x", "xy"), (" long one", "s")])),
    st.tuples(st.just("read"), st.sampled_from(["p", "q"])),
    st.tuples(st.just("role"), st.sampled_from(["user", "assistant"])),
    st.tuples(st.just("scope"), TEXTS),
    st.tuples(st.just("call")),
    st.tuples(st.just("fail")),
)
OPS = st.recursive(
    st.lists(LEAVES, max_size=5),
    lambda ops: st.lists(
        st.one_of(
            LEAVES,
            st.tuples(
                st.just("fork"),
                st.lists(ops, max_size=3),
                st.sampled_from(["gather_variable", "concate_and_append", None]),
            ),
        ),
        max_size=6,
    ),
    max_leaves=20,
)


def apply(s: pm.ProgramState, ops: list[Op], in_role: bool = False) -> None:
    for op in ops:
        match op:
            case ("text", text):
                s += text
            case ("gen", name, stop):
                s += pm.gen(name, max_tokens=5, stop=stop, temperature=0)
            case ("many", n):
                s += pm.gen("many", max_tokens=3, n=n, seed=11)
            case ("select", choices):
                s += pm.select("choice", choices)
            case ("read", name) if name in s and isinstance(s[name], str):
                s += "<" + s[name] + ">"
            case ("role", role) if not in_role:
                s += getattr(pm, role)("hi " + pm.gen("p", max_tokens=3, temperature=0))
            case ("scope", text):
                with s.var_scope("scope"):
                    s += text + pm.gen("q", max_tokens=2, temperature=0)
            case ("call",) if "p" in s and isinstance(s["p"], str):
                s.call("length", len, "p")
            case ("fail",):
                s.fork(1)[0].__iadd__("FAIL" + pm.gen("never"))
            case ("fork", branches, mode):
                forks = s.fork(len(branches))
                for fork, branch in zip(forks, branches, strict=True):
                    apply(fork, branch, in_role)
                if mode is not None:
                    forks.join(mode)


@pm.function
def program(s: pm.ProgramState, ops: list[Op]) -> None:
    apply(s, ops)


def answer(prompt: str) -> str:
    """A text that depends on every character of the prompt."""
    if prompt.endswith("FAIL"):
        raise RuntimeError("scripted")
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()
    return " ".join(digest[i : i + 2] for i in range(0, 16, 2)).replace("f", "\n")


def observed(state: pm.ProgramState, *, decode: FakeModel | None = None) -> dict[str, object]:
    state.sync()
    ids = state.token_ids()
    names = [name for name in ("p", "q", "many", "choice", "scope", "length") if name in state]
    return {
        "text": state.text(),
        "ids": ids if decode is None else [decode.decode([i]) for i in ids],
        "messages": state.messages(),
        "values": {name: state[name] for name in names},
        "failed": state.error() is not None,
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(OPS)
def test_lazy_and_eager_agree_on_the_fake_model(ops: list[Op]) -> None:
    lazy, eager = FakeModel(answer), FakeModel(answer)
    got = observed(program.run(ops, backend=lazy), decode=lazy)
    assert got == observed(program.run(ops, backend=eager, eager=True), decode=eager)
    compiled = program.compile(ops=ops)
    assert got == observed(compiled.run(backend=(other := FakeModel(answer))), decode=other)
    assert got == observed(
        compiled.run(backend=(other := FakeModel(answer)), eager=True), decode=other
    )
    if not any(isinstance(node, Call) for node in compiled.nodes):
        again = pm.Program.from_json(compiled.to_json())
        assert again.id == compiled.id
        assert got == observed(again.run(backend=(other := FakeModel(answer))), decode=other)
    # Ids are given out as pieces appear, so requests are compared as texts.
    assert sorted(call.prompt for call in lazy.calls) == sorted(call.prompt for call in eager.calls)


@pytest.fixture(scope="module")
def engines() -> tuple[EngineClient, EngineClient]:
    return LocalClient(fake_engine()), LocalClient(fake_engine())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ops=OPS)
def test_lazy_and_eager_agree_on_an_engine(
    engines: tuple[EngineClient, EngineClient], ops: list[Op]
) -> None:
    lazy, eager = engines
    got = observed(program.run(ops, backend=lazy))
    assert got == observed(program.run(ops, backend=eager, eager=True))
    assert got == observed(program.compile(ops=ops).run(backend=eager))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(OPS, min_size=2, max_size=6))
def test_a_batch_gives_what_single_runs_give(programs: list[list[Op]]) -> None:
    states = program.run_batch([{"ops": ops} for ops in programs], backend=FakeModel(answer))
    single = [program.run(ops, backend=FakeModel(answer), eager=True) for ops in programs]
    texts = [observed(state) | {"ids": None} for state in states]
    assert texts == [observed(state) | {"ids": None} for state in single]
