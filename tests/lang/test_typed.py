"""Typed results: values of Python types, their text in prompts, and asking again."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel, Field, field_validator

import palmette as pm
from palmette.lang.testing import FakeModel
from palmette.lang.typed import output_type
from palmette.runtime.client import LocalClient
from palmette.runtime.fake_runner import fake_engine


class Person(BaseModel):
    name: str
    age: int


class Even(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def is_even(cls, n: int) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n


@dataclass
class Point:
    x: int
    y: int = 0


class Row(TypedDict):
    key: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


ADA = '{"name": "Ada", "age": 36}'
PASSED: list[tuple[Any, str, object]] = [
    (Person, ADA, Person(name="Ada", age=36)),
    (Point, '{"x": 1, "y": 2}', Point(1, 2)),
    (Row, '{"key": "v"}', {"key": "v"}),
    (list[int], "[1, 2]", [1, 2]),
    (dict[str, bool], '{"a": true}', {"a": True}),
    (Person | None, "null", None),
    (Person | None, ADA, Person(name="Ada", age=36)),
    (Annotated[int, Field(ge=10, le=99)], "17", 17),
    (int, "-42", -42),
    (float, "2.5", 2.5),
    (bool, "False", False),
    (str, "any text", "any text"),
    (Literal["yes", "no"], "no", "no"),
    (Literal[1, "one", None], "null", None),
    (Colour, "blue", Colour.BLUE),
    (Level, "2", Level.HIGH),
]


@pytest.mark.parametrize(("annotation", "text", "value"), PASSED, ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_a_variable_is_a_value_of_its_type(
    annotation: Any, text: str, value: object, eager: bool
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x: "
        s["v"] = pm.gen(annotation)
        s += "." + pm.gen("w", type=annotation)

    state = program.run(backend=FakeModel([text, text]), eager=eager)
    assert state["v"] == value and type(state["v"]) is type(value)
    assert state["w"] == value
    assert state.get_text("v") == text
    assert state.text() == f"x: {text}.{text}"


@pytest.mark.parametrize("annotation", [passed[0] for passed in PASSED if passed[0] is not str])
def test_what_a_model_must_write_is_always_a_value(annotation: Any) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["v"] = pm.gen(annotation, max_tokens=60)

    for seed in range(3):
        engine = LocalClient(fake_engine(seed=seed))
        state = program.run(backend=engine)
        assert output_type(annotation).parse(state.get_text("v")) == state["v"]
    assert program.run(backend=FakeModel()).error() is None


def test_forks_joins_and_several_texts_hold_values() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        forks = s.fork(2)
        forks += lambda i: f"[{i}]"
        for fork in forks:
            fork["p"] = pm.gen(Person)
        forks.join()
        s["ages"] = pm.gen(int, n=3)
        s.call("sum", lambda ages: sum(ages), "ages")

    script = {"[0]": ADA, "[1]": '{"name": "Alan", "age": 41}', "": ["1", "2", "3"]}
    state = program.run(backend=FakeModel(script))
    assert [person.name for person in state["p"]] == ["Ada", "Alan"]
    assert state["ages"] == [1, 2, 3] and state["sum"] == 6


def test_a_value_appended_to_a_prompt_is_its_text() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person)
        s["n"] = pm.gen(int)
        s += f" again: {s.get_text('p')} "
        s += s["p"]
        s += f" {s['n']}"

    text = '{"name" : "Ada","age":36}'
    state = program.run(backend=FakeModel([text, "7"]))
    assert state.text() == f"{text}7 again: {text} {text} 7"


def test_what_is_not_the_value_of_a_variable_cannot_be_appended() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person)
        s += Person(name="Ada", age=36)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"not Person .*s\.get_text\(name\)"):
        program.run(backend=FakeModel([ADA])).sync()


def test_a_gen_assigned_to_a_variable_is_appended() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "a"
        s["x"] = pm.gen(max_tokens=5)
        s["y"] = pm.select(choices=[" b", " c"])
        s["z"] = 5

    state = program.run(backend=FakeModel([" one", " c"]))
    assert (state["x"], state["y"], state["z"]) == (" one", " c", 5)
    assert state.text() == "a one c"


@pytest.mark.parametrize("value", [pm.gen("other"), "text" + pm.gen()])
def test_only_one_gen_without_a_name_can_be_assigned(value: object) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["x"] = value  # assigned here

    with pytest.raises(ValueError, match="assigned here"):
        program.run(backend=FakeModel())


def test_types_are_told_apart_when_read() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person)
        s["v"] = pm.gen(Literal["a", "b"])

    state = program.run(backend=FakeModel([ADA, "a"]))
    assert state.get_var("p", Person).age == 36
    assert state.get_var("v", Literal["a", "b"]) == "a"
    assert state.get_var("p", Person | None) == state["p"]
    with pytest.raises(TypeError, match="'p' is a Person, not <class 'int'>"):
        state.get_var("p", int)


def test_a_gen_can_be_the_key_of_its_value() -> None:
    person = pm.gen("p", type=Person)

    @pm.function
    def program(s: pm.ProgramState) -> int:
        s += "Who? " + person
        return s[person].age

    assert program.run(backend=FakeModel([ADA])).ret_value == 36
    with pytest.raises(KeyError, match="no name"):
        program.run(backend=FakeModel([ADA]))[pm.gen(Person)]


def test_partial_values_stream() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person)

    steps = list(program.run(backend=FakeModel([ADA])).value_iter("p"))
    assert steps[-1] == Person(name="Ada", age=36)
    assert {"name": "Ada"} in steps and {"name": "Ada", "age": 36} in steps
    assert all(isinstance(step, dict) for step in steps[:-1])


# What is refused


def test_a_refused_value_is_an_error_with_the_validator_s_words() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "An even number: "
        s["e"] = pm.gen(Even)  # the line
        s += "after" + pm.gen("f")

    state = program.run(backend=FakeModel(['{"n": 3}', " ok"]))
    for name in ("e", "f"):
        with pytest.raises(pm.ProgramError) as caught:
            state[name]
        assert caught.value.code == "validation"
        assert "n: Value error, 3 is odd" in caught.value.reason
        assert "# the line" in str(caught.value)
        assert caught.value.excerpt == "An even number: "


def asked(model: FakeModel) -> list[int | None]:
    return [call.request.sampling.seed for call in model.calls]


@pytest.mark.parametrize("eager", [False, True])
def test_a_refused_value_is_asked_again_with_another_seed(eager: bool) -> None:
    @pm.function
    def program(s: pm.ProgramState, retry: int) -> None:
        s["e"] = pm.gen(Even, retry=retry, seed=7)
        s += "!" + pm.gen("f")

    answers = ['{"n": 3}', '{"n": 5}', '{"n": 6}', " ok"]
    first, second = FakeModel(answers), FakeModel(answers)
    state = program.run(2, backend=first, eager=eager)
    assert state["e"] == Even(n=6) and state.text() == '{"n": 6}! ok'
    assert program.run(2, backend=second, eager=eager)["f"] == " ok"
    assert asked(first) == asked(second)
    assert len(set(asked(first)[:3])) == 3 and asked(first)[0] == 7
    row = pm.explain(state).rows[0]
    num_tokens = sum(len(first.encode(call.text)) for call in first.calls[:3])
    assert (row.num_requests, row.generated_tokens) == (3, num_tokens)
    with pytest.raises(pm.ProgramError, match="5 is odd"):
        program.run(1, backend=FakeModel(answers), eager=eager)["e"]


def test_a_greedy_gen_is_not_asked_again_for_the_same_text() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["e"] = pm.gen(Even, retry=3, temperature=0)

    model = FakeModel(['{"n": 3}'])
    with pytest.raises(pm.ProgramError, match="3 is odd"):
        program.run(backend=model)["e"]
    model.assert_calls(1)


def test_of_several_texts_only_the_refused_are_asked_again() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["e"] = pm.gen(Even, n=3, retry=1, seed=1)

    model = FakeModel(['{"n": 2}', '{"n": 3}', '{"n": 4}', '{"n": 8}'])
    state = program.run(backend=model)
    assert [even.n for even in state["e"]] == [2, 8, 4]
    assert state.text() == '{"n": 2}'
    model.assert_calls(4)


def test_no_text_streams_that_may_not_stay() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["e"] = pm.gen(Even, retry=1)

    state = program.run(backend=FakeModel(['{"n": 3}', '{"n": 4}']))
    assert "".join(state.text_iter("e")) == '{"n": 4}'


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pm.gen(Person, type=int), "given twice"),
        (lambda: pm.gen("x", type=Person, regex="a"), "one constraint, not regex and type"),
        (lambda: pm.gen("x", type=Person, choices=["a"]), "one constraint, not choices and type"),
        (lambda: pm.gen(object()), "no JSON Schema"),
        (lambda: pm.gen(int, whitespace="compact"), "whitespace"),
    ],
)
def test_types_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_options_of_json_hold_for_types() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person, whitespace="compact", max_tokens=60)

    text = program.run(backend=LocalClient(fake_engine())).get_text("p")
    assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) == text


def test_a_negative_retry_is_refused() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += pm.gen("x", retry=-1)

    with pytest.raises(ValueError, match="retry: -1"):
        program.run(backend=FakeModel())


def test_a_compiled_program_gives_values_and_has_no_form_as_json() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s["p"] = pm.gen(Person)  # the line
        s += " again " + s["p"]  # a reference while it is recorded
        s["ages"] = pm.gen(int, n=2)

    compiled = program.compile()
    state = compiled.run(backend=FakeModel([ADA, "1", "2"]))
    assert state["p"] == Person(name="Ada", age=36) and state["ages"] == [1, 2]
    assert state.text() == f"{ADA} again {ADA}1"
    with pytest.raises(ValueError, match=r"(?s)type Person is Python code .*# the line"):
        compiled.to_json()
