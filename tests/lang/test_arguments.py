"""What would be dropped is refused: arguments that exclude each other, bodies that never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import palmette as pm
from palmette.constrained.spec import GrammarSpec
from palmette.lang.testing import FakeModel
from palmette.lang.wire import batches_of

CHOICES = ["one", "two"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"choices": CHOICES, "regex": "a"}, "choices and regex"),
        ({"choices": CHOICES, "json_schema": {}}, "choices and json_schema"),
        ({"choices": CHOICES, "ebnf": "root ::= 'a'"}, "choices and ebnf"),
        ({"choices": CHOICES, "dtype": int}, "choices and dtype"),
        ({"dtype": int, "regex": "a"}, "regex and dtype"),
        ({"dtype": str, "json_schema": "{}"}, "json_schema and dtype"),
        ({"choices": CHOICES, "n": 2}, "choices and n:"),
        ({"choices": CHOICES, "repetition_penalty": 1.5}, "choices and repetition_penalty:"),
        ({"choices": CHOICES, "logit_bias": {1: 2.0}}, "choices and logit_bias:"),
        ({"choices_method": pm.greedy_token_selection}, "choices_method"),
        ({"choices": CHOICES, "order": "any"}, "choices and order:"),
        ({"whitespace": "compact"}, "whitespace: needs json_schema"),
        ({"dtype": int, "policy": "lenient"}, "policy: needs json_schema"),
        ({"regex": "a", "formats": "strict"}, "formats: .*no meaning for regex"),
        ({"json_schema": {}, "order": "x"}, "order: 'x' is not one of declared, any"),
        ({"json_schema": {}, "whitespace": "indent=99"}, "at most 16 blanks"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(
    arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        pm.gen("a", **arguments)  # type: ignore[arg-type]


def test_choices_take_arguments_at_their_defaults() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen(
            "a", 128, 0, 1, [], (), "", 0, 1.0, -1, 0, 0, 0, False, False, -1, 0, False, None,
            CHOICES, pm.greedy_token_selection, seed=4, logit_bias={}, repetition_penalty=1,
        )  # fmt: skip

    assert program.run(backend=FakeModel())["a"] in CHOICES


def test_choices_take_what_says_how_to_draw_and_where_to_end() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen(
            "a", choices=CHOICES, max_tokens=3, temperature=0.7, stop=".", return_logprob=True
        )

    assert program.run(backend=FakeModel())["a"] in CHOICES


def test_options_of_a_schema_reach_the_request_and_the_wire() -> None:
    options = {
        "whitespace": "indent=4",
        "order": "any",
        "additional": "forbid",
        "formats": "strict",
        "policy": "lenient",
    }

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", json_schema={"type": "object"}, **options)  # type: ignore[arg-type]

    model = FakeModel()
    assert program.run(backend=model)["a"] == "{}"
    [call] = model.calls
    assert call.request.grammar == GrammarSpec.json_schema('{"type": "object"}', **options)
    [batch] = batches_of([call.request])
    sampling = batch.body()["sampling_params"]
    assert isinstance(sampling, dict)
    assert {name: sampling[name] for name in options} == options


def test_bodies_whose_call_runs_nothing_are_refused() -> None:
    def generator(s: pm.ProgramState) -> Iterator[str]:
        yield "x"

    async def stream(s: pm.ProgramState) -> AsyncIterator[str]:
        yield "x"

    for body in (generator, stream):
        with pytest.raises(TypeError, match=f"{body.__name__}: .* does not yield"):
            pm.function(num_api_spec_tokens=3)(body)


def test_an_async_host_function_is_an_error_of_its_value() -> None:
    async def shorten(text: str) -> str:
        return text[:1]

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a")
        s.call("b", shorten, "a")

    state = program.run(backend=FakeModel())
    with pytest.raises(pm.ProgramError, match="async"):
        state["b"]


@pytest.mark.parametrize(
    ("whitespace", "text"), [("compact", '{"a":[1]}'), ("indent=1", '{\n "a": [\n  1\n ]\n}')]
)
def test_a_fake_model_keeps_to_the_layout(whitespace: str, text: str) -> None:
    schema = {
        "properties": {"a": {"type": "array", "items": {"const": 1}, "minItems": 1}},
        "required": ["a"],
    }

    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", json_schema=schema, whitespace=whitespace)

    assert program.run(backend=FakeModel())["a"] == text
