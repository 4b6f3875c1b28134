"""Each pass alone: what it changes, and what it must not."""

from __future__ import annotations

import palmette as pm
from palmette.lang.ir import Extend, Gen, StateId, Text, ValueId
from palmette.lang.passes import (
    constant_texts,
    critical_path,
    drop_dead,
    first_slot,
    last_uses,
    merge_texts,
    sibling_groups,
)
from palmette.lang.testing import FakeModel


def recorded(function: pm.Function, **constants: object) -> pm.Program:
    """Before any pass."""
    return function.trace(**constants)


def texts(program: pm.Program) -> list[str]:
    return [
        node.piece.text
        for node in program.nodes
        if isinstance(node, Extend) and isinstance(node.piece, Text)
    ]


def test_texts_in_a_row_become_one() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "a"
        s += "b" + pm.gen("x") + "c"
        s += "d"

    merged = merge_texts(recorded(program))
    assert texts(merged) == ["ab", "cd"]
    assert merged.run(backend=FakeModel()).text() == "ab okcd"


def test_texts_stay_apart_where_something_is_read_or_goes_on_between_them() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "a"
        with s.var_scope("scope"):
            s += "b"
            s += "c"
        s += "d"
        s.fork(1)[0].__iadd__("e" + pm.gen("x"))
        s += "f"
        with s.user():
            s += "g"

    whole = recorded(program)
    merged = merge_texts(whole)
    assert texts(merged) == ["a", "bc", "d", "e", "f", "g"]
    state, plain = (one.run(backend=FakeModel()) for one in (merged, whole))
    assert (state["scope"], state.text(), state.messages()) == (
        "bc", plain.text(), plain.messages(),
    )  # fmt: skip


def test_work_that_nothing_can_read_goes() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "a" + pm.gen("kept") + "b"
        lost, named, called = s.fork(3)
        lost += "c" + pm.gen() + "d" + pm.select(None, ["x", "y"])
        named += "e" + pm.gen() + pm.gen("also_kept") + "end"
        called += "f" + pm.gen("argument")
        called.call("host", len, "argument")

    alive = drop_dead(recorded(program))
    assert texts(alive) == ["a", "b", "e", "f"]
    assert [node.name for node in alive.calls] == ["kept", None, "also_kept", "argument"]
    state = alive.run(backend=(model := FakeModel()))
    state.sync()
    model.assert_calls(4)
    assert state.text() == "a okb"


def test_a_program_where_all_is_read_stays_as_it_is() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "a" + pm.gen() + pm.select(None, ["x", "y"])

    whole = recorded(program)
    assert drop_dead(whole) is whole


@pm.function
def forked(s: pm.ProgramState, q: str) -> None:
    s += "head" + pm.gen("plan", max_tokens=10)
    left, right = s.fork(2)
    left += "l" + pm.gen("short", max_tokens=2)
    right += "r" + pm.gen("long", max_tokens=20) + pm.gen("longer", max_tokens=5)
    s += f"{left['short']}{q}" + pm.select("end", ["x", "y"])


def test_facts_about_calls() -> None:
    nodes = forked.compile(q="?").nodes
    plan, short, long, longer, end = map(ValueId, range(5))
    assert sibling_groups(nodes) == [(plan,), (short, long), (longer,), (end,)]
    assert critical_path(nodes) == {plan: 35, short: 3, long: 25, longer: 5, end: 1}


def test_the_last_use_of_a_state_is_told() -> None:
    nodes = forked.compile(q="?").nodes
    uses = last_uses(nodes)
    after_plan = next(node.target for node in nodes if isinstance(node, Gen))
    [last] = [
        place for place, node in enumerate(nodes)
        if isinstance(node, Extend) and node.source == after_plan and place == uses[after_plan]
    ]  # fmt: skip
    assert last > 3  # not in the first fork, but where the parent goes on
    assert StateId(len(nodes)) not in uses  # nothing reads the last one


def test_constant_texts_are_those_that_a_tokenizer_is_asked_for() -> None:
    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += "a" + pm.gen("x") + "b" + "c"
        s += pm.gen("y") + "d" + q + "e" + pm.gen("z") + "f" + pm.select("w", [" g", " h"])

    nodes = program.compile().nodes
    assert [text for text, _ in constant_texts(nodes)] == ["a", "bc", "f g", "f h"]
    assert first_slot(nodes) == 5
    assert first_slot(program.compile(q="?").nodes) == len(program.compile(q="?").nodes)


def test_what_much_still_hangs_on_goes_out_first() -> None:
    model = FakeModel()
    forked.compile().run(q="?", backend=model).sync()
    names = [call.prompt[-1] for call in model.calls[1:3]]
    assert names == ["r", "l"]  # 25 tokens in a row before 3


def test_the_engine_is_told_of_siblings_and_of_the_last_use() -> None:
    model = FakeModel()
    forked.compile().run(q="?", backend=model).sync()
    hints = {call.prompt[-1]: call.request.hint for call in model.calls[:3]}
    # Before the fork: two branches with three calls begin with it, and the select's two choices.
    assert hints["d"].future_uses == 5
    assert hints["l"].group == hints["r"].group is not None
    assert hints["l"].future_uses == 0  # nothing goes on from the short branch
    assert hints["r"].future_uses == 1


def test_a_batch_knows_its_common_beginning_from_the_first_request_on() -> None:
    @pm.function
    def program(s: pm.ProgramState, q: str) -> None:
        s += "one two three four " + q + pm.gen("a")

    model = FakeModel()
    program.compile().run_batch([{"q": f"q{i}"} for i in range(3)], backend=model)
    told = [call.request.hint.prefixes for call in model.calls]
    num_common = len(model.encode("one two three four "))
    assert [prefixes[0][1] for prefixes in told[:2]] == [2, 1]
    assert {prefixes[0][0] for prefixes in told[:2]} <= {num_common, num_common - 1}


def test_constants_are_encoded_together_where_each_call_costs() -> None:
    class Counting(FakeModel):
        asked: list[list[str]]

        def encode_many(self, texts: list[str], *, parse_special: bool) -> list[list[int]]:
            self.asked.append(texts)
            return [self.encode(text, parse_special=parse_special) for text in texts]

        def decode_many(self, lists: list[list[int]]) -> list[str]:
            return [self.decode(ids) for ids in lists]

    model = Counting()
    model.asked = []
    forked.compile(q="?").run(backend=model).sync()
    assert model.asked[0] == ["head", "l", "r"]


def test_a_program_without_its_dead_calls_comes_back_from_json() -> None:
    @pm.function
    def all_dead(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks += pm.gen(max_tokens=2)

    @pm.function
    def last_dead(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks[0] += pm.gen("kept", max_tokens=2)
        forks[1] += pm.gen(max_tokens=2)

    @pm.function
    def first_dead(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks[0] += pm.gen(max_tokens=2)
        forks[1] += pm.gen("kept", max_tokens=2)

    wanted = {all_dead: {}, last_dead: {0: "fork 0/2"}, first_dead: {0: "fork 1/2"}}
    for function, branches in wanted.items():
        program = function.compile()
        again = pm.Program.from_json(program.to_json())
        assert program.branches == again.branches == branches
        assert again.id == program.id
        assert again.run(backend=FakeModel()).text() == ""
