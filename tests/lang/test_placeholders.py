"""What a compiled program makes of its placeholders is what the function makes, or is refused."""

from __future__ import annotations

import html
import json
import re
import shlex
import textwrap
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import palmette as pm
from palmette.lang.testing import FakeModel


class Pet(BaseModel):
    age: int


def asked(s: pm.ProgramState, **options: Any) -> Any:
    """A generated value."""
    s += pm.gen("g", max_tokens=2, **options)
    return s["g"]


def typed(s: pm.ProgramState, kind: Any) -> Any:
    s["g"] = pm.gen(kind, max_tokens=24)
    return s["g"]


def called(s: pm.ProgramState) -> Any:
    s += pm.gen("g", max_tokens=2)
    s.call("n", len, "g")
    return s["n"]


Body = Callable[[Any, Any], Any]

SAME: list[Body] = [
    lambda s, a: a,
    lambda s, a: f"{a}",
    lambda s, a: str(a),
    lambda s, a: f"{a!r}|{a!s}|{a:>7}|{a!r:>9}|{a!s:<5}|",
    lambda s, a: repr(a),
    lambda s, a: f"{dict(k=a)} {[a]}",
    lambda s, a: f"{f'{a}':>5}",
    lambda s, a: "Q: " + a + "?" + f"{a}",
    lambda s, a: "Q: {} {:>5} {!r}".format(a, a, a),  # noqa: UP032
    lambda s, a: "Q: %s %r" % (a, a),  # noqa: UP031
    lambda s, a: "Q: {q} {r}".replace("{q}", a).replace("{r}", f"<{a}>"),
    lambda s, a: f"\n Q: {a}\nA: ".strip(),
    lambda s, a: f"Q{a}"[1:],
    lambda s, a: "; ".join([a, f"{a}", "z"]),
    lambda s, a: f"{asked(s)}",
    lambda s, a: "so" + asked(s) + f"{a}",
    lambda s, a: " and".join(asked(s, n=2)),
    lambda s, a: asked(s, dtype=int) + "!",
    lambda s, a: f"{typed(s, Literal['x', 'y'])}!",
    lambda s, a: f"{typed(s, str)}!",
    lambda s, a: f"{typed(s, int)}!",
    lambda s, a: f"{typed(s, Pet)}!",
    lambda s, a: str(typed(s, Literal[1, 2])),
    lambda s, a: " and ".join(f"{one}" for one in asked(s, n=2, type=int)),
    lambda s, a: f"{called(s)}!",
    lambda s, a: f"{s.text()}!",
    lambda s, a: "a\x1cb",
]
REFUSED: list[Body] = [
    lambda s, a: "y" if f"{a}" == "x" else "n",
    lambda s, a: "y" if f"{a}" in ("x", "y") else "n",
    lambda s, a: "y" if "x" in f"{a}" else "n",
    lambda s, a: {"x": "found"}.get(f"{a}", "none"),
    lambda s, a: str(len(f"{a}")) + str(len("q" + a)),
    lambda s, a: str(int(f"{a}", 16)) if a else "",
    lambda s, a: "".join(sorted(f"{a}")),
    lambda s, a: f"{a}"[::-1],
    lambda s, a: f"q{a}"[::-1],
    lambda s, a: f"q{a}"[:2],
    lambda s, a: f"q{a}"[:9],
    lambda s, a: f"q{a}"[2:],
    lambda s, a: f"q{a}"[-1],
    lambda s, a: f"{a}".zfill(9),
    lambda s, a: ("q" + a).ljust(9),
    lambda s, a: f"{a}q".upper(),
    lambda s, a: f"{a}q".lower(),
    lambda s, a: f"{a}q".title(),
    lambda s, a: f"{a}q".capitalize(),
    lambda s, a: f"{a}q".casefold(),
    lambda s, a: f"q {a}".strip(),
    lambda s, a: f"q{a}".expandtabs(),
    lambda s, a: " ".join(f"q{a}".split()),
    lambda s, a: f"q{a}".splitlines()[0],
    lambda s, a: f"q{a}".replace("\n", " "),
    lambda s, a: f"q{a}".replace("x", "y"),
    lambda s, a: f"q{a}".translate({ord("'"): '"'}),
    lambda s, a: re.sub("x", "y", f"q{a}"),
    lambda s, a: re.sub("x", "y", a),
    lambda s, a: re.sub(r"\s+", " ", f"q{a}"),
    lambda s, a: textwrap.dedent(f"\n  Q: {a}\n  A:"),
    lambda s, a: json.dumps({"q": f"q{a}"}),
    lambda s, a: json.dumps({"q": a}, ensure_ascii=False),
    lambda s, a: repr(f"q{a}"),
    lambda s, a: f"{a!a}",
    lambda s, a: html.escape(f"q{a}"),
    lambda s, a: shlex.quote(f"q{a}"),
    lambda s, a: unicodedata.normalize("NFC", f"q{a}"),
    lambda s, a: unicodedata.normalize("NFD", f"q{a}"),
    lambda s, a: unicodedata.normalize("NFKC", f"q{a}"),
    lambda s, a: f"q{a}".encode("ascii", "ignore").decode(),
    lambda s, a: "y" if f"{asked(s)}" == " ok" else "n",
    lambda s, a: f"{asked(s)!r}",
    lambda s, a: f"{asked(s):>9}",
    lambda s, a: repr(asked(s)),
    lambda s, a: f"{asked(s, n=2)}",
    lambda s, a: str(asked(s, n=2)),
    lambda s, a: f"{ {'k': asked(s)} }",
    lambda s, a: f"{typed(s, int):>4}",
    lambda s, a: repr(typed(s, Pet)),
    lambda s, a: f"{called(s)!r}",
    lambda s, a: (asked(s), f"{s.get_meta_info('g')}")[1],
    lambda s, a: asked(s).replace("o", a),
    lambda s, a: ("q" + asked(s)).strip(),
]


def program_of(body: Body) -> pm.Function:
    @pm.function
    def program(s: pm.ProgramState, a: str) -> object:
        text = body(s, a)
        s += text
        return text

    return program


@pytest.mark.parametrize("body", SAME)
@pytest.mark.parametrize("given", ["x", " a'b\n", "'\" é", ""])
def test_what_is_compiled_is_what_the_function_writes(body: Body, given: str) -> None:
    program = program_of(body)
    wanted = program.run(given, backend=FakeModel())
    state = program.compile().run(a=given, backend=FakeModel())
    assert state.text() == wanted.text()
    assert state.ret_value == wanted.ret_value


@pytest.mark.parametrize("body", REFUSED)
def test_what_works_on_a_text_that_is_not_known_is_refused(body: Body) -> None:
    with pytest.raises(pm.ConcretizationError, match="is not known while") as caught:
        program_of(body).compile()
    assert caught.value.line.file == __file__


def test_a_conversion_travels_as_json() -> None:
    program = program_of(lambda s, a: f"{a!r:>6}").compile()
    assert "{a!r>6}" in str(program)
    assert pm.Program.from_json(program.to_json()).id == program.id
    assert program.run(a="x", backend=FakeModel()).text() == "   'x'"
    assert program.run(a=3, backend=FakeModel()).text() == "     3"


OPTIONS: list[tuple[Callable[[Any], dict[str, Any]], list[object]]] = [
    (lambda a: {"stop": ["b", a]}, ["k"]),
    (lambda a: {"stop": ("b", f"{a}", "q" + a, f"q{a}")}, ["k"]),
    (lambda a: {"stop": a}, ["k", ["k", "o"], None]),
    (lambda a: {"stop": "o" + a}, ["k"]),
    (lambda a: {"stop_regex": a}, ["k", ["k", "b"], None]),
    (lambda a: {"regex": a}, ["[0-9]{2}", None]),
    (lambda a: {"regex": f"({a}|b)"}, ["[0-9]{2}"]),
    (lambda a: {"regex": "(" + a + "|b)"}, ["[0-9]{2}"]),
    (lambda a: {"json_schema": a}, ['{"type": "integer"}', {"type": "integer"}, None]),
    (lambda a: {"json_schema": '{"type": "' + a + '"}'}, ["integer"]),
    (lambda a: {"choices": [a, f"{a}!", "q" + a]}, ["k"]),
]


@pytest.mark.parametrize(("options", "values"), OPTIONS)
def test_arguments_stand_in_stop_strings_constraints_and_choices(
    options: Callable[[Any], dict[str, Any]], values: list[object]
) -> None:
    @pm.function
    def program(s: pm.ProgramState, a: Any) -> None:
        s += "x" + pm.gen("g", max_tokens=8, **options(a))

    compiled = program.compile()
    again = pm.Program.from_json(compiled.to_json())
    assert again.id == compiled.id
    for value in values:
        wanted = program.run(value, backend=FakeModel()).text()
        assert compiled.run(a=value, backend=FakeModel()).text() == wanted
        assert again.run(a=value, backend=FakeModel()).text() == wanted


@pytest.mark.parametrize("name", ["stop", "regex"])
@pytest.mark.parametrize("read", [lambda text: text, lambda text: f"{text}!"])
def test_a_generated_text_is_no_stop_string_and_no_constraint(
    name: str, read: Callable[[str], str]
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", max_tokens=1)
        s += pm.gen("b", **{name: read(s["a"])})  # type: ignore[arg-type]

    with pytest.raises(pm.ConcretizationError, match="a generated value"):
        program.compile()


class Plain:
    def __init__(self, text: object) -> None:
        self.text = text


@dataclass(slots=True)
class Slotted:
    text: object


HOLDERS: list[Callable[[Any], object]] = [
    lambda text: Plain(text),
    lambda text: Slotted(f"q{text}"),
    lambda text: Slotted([{"k": text}]),
    lambda text: {f"q{text}"} if isinstance(text, str) else None,
    lambda text: Named.model_construct(name=text),
    lambda text: [Plain(text)],
]


class Named(BaseModel):
    name: str


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("is_generated", [False, True])
def test_objects_that_hold_a_placeholder_are_refused(
    holder: Callable[[Any], object], is_generated: bool
) -> None:
    @pm.function
    def returning(s: pm.ProgramState, a: str) -> object:
        return holder(asked(s) if is_generated else a)

    @pm.function
    def setting(s: pm.ProgramState, a: str) -> None:
        s["kept"] = holder(asked(s) if is_generated else a)

    with pytest.raises(pm.ConcretizationError, match="the result holds a"):
        returning.compile()
    with pytest.raises(pm.ConcretizationError, match="variable 'kept' holds a"):
        setting.compile()


def test_objects_of_constants_are_kept_as_they_are() -> None:
    value = Plain("x")
    program = pm.function(lambda s: value).compile()
    assert program.run(backend=FakeModel()).ret_value is value
