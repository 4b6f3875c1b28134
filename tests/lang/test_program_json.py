"""Programs as JSON: the same program comes back, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel


@pm.function
def everything(s: pm.ProgramState, q: str, style: str = "plain") -> object:
    s += pm.system(f"Be {style}") + pm.user(q)
    with s.assistant():
        s += pm.gen(
            "a",
            n=2,
            max_tokens=4,
            stop=["\n", f"{q}."],
            regex=f"{style}|[a-z ]+",
            seed=3,
            temperature=0,
        )
    with s.var_scope("b"):
        forks = s.fork(2)
        forks += lambda i: f"{i}" + pm.gen("c", json_schema={"type": "integer"}, priority=2)
        forks.join("concate_and_append")
    s += s["a"][1] + s["b"] + pm.select("d", ["x", q], choices_method=pm.greedy_token_selection)
    s["e"] = [1, 2.5, None, True, q, {"k": s["d"]}]
    s["f"] = f"{s['d']}!"
    return (s["a"][0], s.text())


def test_the_same_program_comes_back() -> None:
    program = everything.compile()
    data = program.to_json()
    again = pm.Program.from_json(data)
    assert again.to_json() == data
    assert (again.id, str(again)) == (program.id, str(program))
    texts: list[object] = []
    for one in (program, again):
        state = one.run(q="why", backend=FakeModel({"assistant\n": "abc", "0": "7", "1": "8"}))
        values = [state[name] for name in "abdef"]
        texts.append((state.text(), state.messages(), state.ret_value, values))
    assert texts[0] == texts[1]


def test_the_id_depends_on_the_content_alone() -> None:
    assert everything.compile().id == everything.compile().id
    assert everything.compile().id != everything.compile(style="x").id
    assert len(everything.compile().id) == 32
    assert everything.compile() == everything.compile()
    assert len({everything.compile(), everything.compile(), everything.compile(style="x")}) == 2


def test_no_folder_of_this_machine_is_told() -> None:
    assert b'"test_program_json.py"' in everything.compile().to_json()
    assert __file__.encode() not in everything.compile().to_json()


def test_what_has_no_form_is_named() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> object:
        s["thing"] = object()
        return {1: "x"}

    with pytest.raises(ValueError, match="variable 'thing': object"):
        program.compile().to_json()

    def mine(scores: Any) -> Any:
        return pm.token_length_normalized(scores)

    @pm.function
    def choosing(s: pm.ProgramState) -> None:
        s += pm.select("a", ["x", "y"], choices_method=mine)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"choices_method(.|\n)*test_program_json.py"):
        choosing.compile().to_json()


def changed(**changes: Any) -> bytes:
    whole = json.loads(everything.compile().to_json())
    return json.dumps({**whole, **changes}).encode()


def with_node(**fields: Any) -> bytes:
    return changed(nodes=[{"source": 0, "target": 1, **fields}], tip=0, turns=[], variables={},
                   result=None, branches={})  # fmt: skip


WRONG: list[tuple[bytes, str]] = [
    (b"{", "not a program"),
    (b"\xff", "not a program"),
    (b"[]", "not a program: Expected `object`, got `array`"),
    (changed(version=2), "version: 2 is not known; this release reads version 1"),
    (changed(extra=1), r"unknown field `extra`"),
    (changed(tip=99), "tip: state 99: is not made before this place"),
    (changed(variables={"a": {"kind": "value", "value": 99}}), r"variables\['a'\]: value 99"),
    (changed(result={"kind": "argument", "name": "z"}), "result: argument 'z': is none"),
    (changed(turns=[["boss", 0, 0]]), "turns: role 'boss'"),
    (with_node(op="dance"), r"Invalid value 'dance' - at `\$\.nodes\[0\]\.op`"),
    (with_node(op="text"), r"missing required field `text` - at `\$\.nodes\[0\]`"),
    (with_node(op="text", text="x", target=2), r"nodes\[0\]: target 2: must be 1"),
    (with_node(op="text", text="x", source=1), r"nodes\[0\]: state 1: is not made"),
    (with_node(op="insert", value=0), r"nodes\[0\]: value 0: is not made"),
    (with_node(op="splice", base=0, tip=1), r"nodes\[0\]: state 1: is not made"),
    (with_node(op="argument", name="q", form="9999999999d"), r"form '9999999999d'"),
    (with_node(op="argument", name="nobody"), "argument 'nobody': is none"),
    (with_node(op="mark", role="boss", is_opening=True), "role 'boss'"),
    (with_node(op="gen", value=1, parameters={}), "value 1: must be 0"),
    (with_node(op="gen", value=0, parameters={"max_tokens": "many"}), r"parameters\.max_tokens"),
    (with_node(op="gen", value=0, parameters={"temperature": -1}), r"nodes\[0\]: temperature: -1"),
    (with_node(op="gen", value=0, parameters={"heat": 1}), "unknown field `heat`"),
    (with_node(op="gen", value=0, parameters={"grammar": {"kind": "magic"}}), "grammar: .*magic"),
    (with_node(op="gen", value=0, parameters={"grammar": {"kind": "regex", "x": 1}}), "'x' is not"),
    (with_node(op="gen", value=0, parameters={"dtype": "date"}), r"nodes\[0\]: dtype: 'date'"),
    (changed(variables={"a": {"kind": "value", "value": 0, "which": 2}}), "which 2: value 0 is 2"),
    (changed(variables={"a": {"kind": "value", "value": 0, "which": -1}}), "which -1: value 0"),
    (changed(variables={"a": {"kind": "value", "value": 1, "which": 0}}), "which 0: value 1 is 1"),
    (with_node(op="gen", value=0, parameters={"n": {"kind": "argument", "name": "q"}}), "n: cann"),
    (with_node(op="select", value=0, choices=[]), "choices: at least one"),
    (with_node(op="select", value=0, choices=["x"], method="luck"), "method 'luck'"),
    (with_node(op="select", value=0, choices=[[{"kind": "text", "base": 0, "tip": 0}]]),
     "only arguments can decide this text"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_what_is_no_program_is_refused_with_the_place(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pm.Program.from_json(data)


def test_deep_json_is_no_crash() -> None:
    deep = '{"kind":"list","items":[' * 5000 + "]}" * 5000
    with pytest.raises(ValueError, match=r"not a program|at most 64 deep"):
        pm.Program.from_json(f'{{"version":1,"name":"x","nodes":[],"result":{deep}}}')
    for deep in (
        '{"kind":"list","items":[' * 100 + "]}" * 100,
        '{"kind":"constant","constant":' + "[" * 900 + "]" * 900 + "}",
    ):
        with pytest.raises(ValueError, match="result: lists and dicts in each other; at most 64"):
            pm.Program.from_json(f'{{"version":1,"name":"x","nodes":[],"result":{deep}}}')


def test_lists_that_are_too_deep_have_no_form() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["a"] = deep

    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="variable 'a': lists and dicts in each other"):
        program.compile().to_json()
