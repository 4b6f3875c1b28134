"""Values that have no end, or lie too deep, wherever a program can hold one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel

ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
ENDLESS_DICT: dict[str, Any] = {}
ENDLESS_DICT["properties"] = ENDLESS_DICT
DEEP: list[Any] = []
DEEP_DICT: dict[str, Any] = {}
for _ in range(50_000):
    DEEP, DEEP_DICT = [DEEP], {"properties": DEEP_DICT}
VALUES = [ENDLESS, ENDLESS_DICT, DEEP, DEEP_DICT, (ENDLESS,)]
NAMES = ["endless", "endless dict", "deep", "deep dict", "endless in a tuple"]


@pm.function
def holds(s: pm.ProgramState, value: Any) -> None:
    s += "x" + pm.gen("a")
    s["held"] = value


@pm.function
def gives(s: pm.ProgramState, value: Any) -> Any:
    s += "x" + pm.gen("a")
    return value


@pm.function
def starts(s: pm.ProgramState, value: Any) -> Any:
    return holds.run(value)["held"]


@pytest.mark.parametrize("value", VALUES, ids=NAMES)
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda value: holds.compile(value=value), "variable 'held'"),
        (lambda value: holds.trace(value), "variable 'held'"),
        (lambda value: gives.compile(value=value), "the result"),
        (lambda value: starts.compile(value=value), "the result"),
        (lambda value: with_default(value).compile().to_json(), "argument 'value'"),
    ],
)
def test_it_cannot_be_compiled(make: Callable[[Any], object], place: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        make(value)
    told = str(caught.value)
    if "has no form as JSON" in told:
        assert isinstance(value, tuple) and told.startswith(place)
    else:
        assert told.startswith(f"{place}: lists and dicts in each other; at most 64 deep, and one")


def with_default(value: Any) -> pm.Function:
    @pm.function
    def program(s: pm.ProgramState, value: Any = value) -> Any:
        s += "x" + pm.gen("a")
        return value

    return program


@pytest.mark.parametrize("value", VALUES, ids=NAMES)
def test_as_an_argument_it_is_what_it_was(value: Any) -> None:
    for program in (holds.compile(), gives.compile()):
        state = program.run(value=value, backend=FakeModel())
        assert state["a"] == " ok"
    assert state.ret_value is value
    assert with_default(value).compile().run(backend=FakeModel()).ret_value is value
    assert holds.run(value, backend=FakeModel())["held"] is value


@pytest.mark.parametrize("value", [DEEP, DEEP_DICT], ids=["list", "dict"])
def test_it_is_no_text_and_no_option(value: Any) -> None:
    @pm.function
    def text(s: pm.ProgramState, value: Any) -> None:
        s += f"{value}" + pm.gen("a")

    @pm.function
    def appended(s: pm.ProgramState, value: Any) -> None:
        s += value

    @pm.function
    def option(s: pm.ProgramState, value: Any) -> None:
        s += "x" + pm.gen("a", stop=value)

    with pytest.raises(ValueError, match="the argument 'value' is nested too deeply"):
        text.compile().run(value=value, backend=FakeModel())
    with pytest.raises(ValueError, match=r"stop: .*"):
        option.compile().run(value=value, backend=FakeModel())
    for run in (appended.compile().run, appended.run):
        with pytest.raises(TypeError, match="nested too deeply to be shown"):
            run(value=value, backend=FakeModel())


def test_it_is_no_schema() -> None:
    with pytest.raises(ValueError, match=r"json_schema: .* Circular reference detected; refer to"):
        pm.gen("x", json_schema=ENDLESS_DICT)
    with pytest.raises(ValueError, match="json_schema: is nested too deeply"):
        pm.gen("x", json_schema=DEEP_DICT)
    with pytest.raises(ValueError, match="structural_tag: not JSON: Circular"):
        pm.gen("x", structural_tag=ENDLESS_DICT)
    with pytest.raises(ValueError, match="structural_tag: nested too deeply"):
        pm.gen("x", structural_tag=DEEP_DICT)


@pytest.mark.parametrize(
    "document",
    [
        '{"version":1,"name":"x","nodes":[],"parameters":[{"name":"a","default":VALUE}]}',
        '{"version":1,"name":"x","nodes":[],"result":{"kind":"constant","constant":VALUE}}',
        '{"version":1,"name":"x","nodes":[],"variables":{"v":{"kind":"constant","constant":VALUE}}}',
        '{"version":1,"name":"x","nodes":[{"op":"gen","source":0,"target":1,"value":0,'
        '"parameters":{"grammar":{"source":VALUE}}}]}',
        "VALUE",
    ],
)
def test_a_document_with_it_is_no_program(document: str) -> None:
    for depth in (100, 100_000):
        for start, end in (("[", "]"), ('{"a":', "}")):
            value = start * depth + "1" + end * depth
            with pytest.raises(
                ValueError, match=r"not a program|at most 64 deep|nodes\[0\]|Expected"
            ):
                pm.Program.from_json(document.replace("VALUE", value))
