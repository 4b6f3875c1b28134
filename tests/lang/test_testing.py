"""FakeModel: scripts, constraints, assertions."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.lang.fake_text import satisfies, shortest, shortest_match
from palmette.lang.testing import FakeModel


@pm.function
def ask(s: pm.ProgramState, question: str) -> None:
    s += question + pm.gen("a")


def test_a_list_answers_in_order_and_says_when_it_is_over() -> None:
    model = FakeModel([" one", " two"])
    states = [ask.run("q", backend=model) for _ in range(3)]
    assert [states[0]["a"], states[1]["a"]] == [" one", " two"]
    with pytest.raises(pm.ProgramError, match="the script has 2 answers; one more was asked for"):
        states[2]["a"]


def test_the_key_found_last_in_the_prompt_wins() -> None:
    model = FakeModel({"France": " Paris", "Spain": " Madrid", re.compile(r"\d+"): " number"})
    assert ask.run("Not France but Spain", backend=model)["a"] == " Madrid"
    assert ask.run("Spain, year 1900?", backend=model)["a"] == " number"
    assert ask.run("Chile", backend=model)["a"] == " ok"


def test_a_list_in_a_dict_answers_one_after_the_other() -> None:
    model = FakeModel({"q": [" one", " two"]})
    assert [ask.run("q", backend=model)["a"] for _ in range(3)] == [" one", " two", " one"]


def test_functions_get_the_prompt() -> None:
    assert ask.run("abc", backend=FakeModel(str.upper))["a"] == "ABC"
    assert ask.run("abc", backend=FakeModel({"b": str.title}))["a"] == "Abc"


def test_calls_show_prompts_and_answers() -> None:
    model = FakeModel()
    ask.run("what", backend=model).sync()
    assert [(call.prompt, call.text) for call in model.calls] == [("what", " ok")]
    model.assert_calls(1)
    with pytest.raises(AssertionError, match="1 requests came, not 2"):
        model.assert_calls(2)
    with pytest.raises(AssertionError, match="fewer than 5"):
        model.assert_prefix_hits(min_tokens=5)


def test_prefix_hits_are_whole_pages_and_leave_one_token_to_compute() -> None:
    model = FakeModel(page_size=4)
    for _ in range(2):
        ask.run("12345678", backend=model).sync()
    assert [call.cached_tokens for call in model.calls] == [0, 4]
    assert model.computed_tokens == 8 + 4
    assert model.flush_cache()
    ask.run("12345678", backend=model).sync()
    assert model.calls[-1].cached_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "answer", "text", "reason"),
    [
        ({"max_tokens": 2}, " a b c", " a b", "length"),
        ({"stop": "."}, " a b. c", " a b", "stop"),
        ({"stop": ["x", " b"]}, " a b c", " a", "stop"),
        ({"min_tokens": 4}, " a", " a ok ok ok", "stop"),
        ({"max_tokens": 3, "ignore_eos": True}, " a", " a ok ok", "length"),
        ({"max_tokens": 0}, " a", "", "length"),
    ],
)
def test_limits_and_stops(
    arguments: dict[str, object], answer: str, text: str, reason: str
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", **arguments)  # type: ignore[arg-type]

    state = program.run(backend=FakeModel([answer] * 2))
    assert state["a"] == text
    meta = state.get_meta_info("a")
    assert isinstance(meta, dict) and isinstance(meta["finish_reason"], dict)
    assert meta["finish_reason"]["type"] == reason


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "x" + pm.gen("a", min_tokens=3, stop=" b")

    assert program.run(backend=FakeModel([" a b c d b e"]))["a"] == " a b c d"


PATTERNS = [
    r"[0-9]{3}-[a-f]+",
    r"(yes|no|maybe)",
    r"\d{4}-\d\d-\d\d( \w+)?",
    r"[^\"\n]{2,5}\"",
    r"[\u4e00-\u9fff]{2}",
    r"a*?b+.\s\S\W",
    r"(?P<name>x)(?:y|z){2}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_for_patterns_match(pattern: str) -> None:
    assert re.fullmatch(pattern, shortest_match(pattern))


def test_a_pattern_that_needs_more_than_this_can_is_refused() -> None:
    with pytest.raises(ValueError, match="script one"):
        shortest_match(r"(?=a)b")
    with pytest.raises(ValueError, match="script one"):
        shortest(GrammarSpec(kind=GrammarKind.LARK, source="start: /x/"))


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2},
    {"$defs": {"n": {"type": "number", "minimum": 3}}, "$ref": "#/$defs/n"},
    {"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]},
    {"allOf": [{"type": "object"}, {"required": ["k"], "properties": {"k": {"const": 5}}}]},
    {"type": "string", "pattern": "[A-Z]{2}"},
    {"type": ["boolean", "null"]},
    {"type": "integer", "maximum": -2},
    {"type": "string", "maxLength": 0},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_for_schemas_are_valid(schema: object) -> None:
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    text = shortest(spec)
    jsonschema.validate(json.loads(text), schema)  # type: ignore[arg-type]
    assert satisfies(spec, text)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 9}])
@pytest.mark.parametrize("constraint", [{"regex": "[0-9]{2}"}, {"json_schema": {"enum": ["x"]}}])
def test_a_constrained_text_that_is_whole_ends(
    constraint: dict[str, object], options: dict[str, int]
) -> None:
    @pm.function
    def program(s: pm.ProgramState) -> None:
        s += "q" + pm.gen("a", max_tokens=12, **options, **constraint)  # type: ignore[call-overload]

    state = program.run(backend=FakeModel())
    assert state["a"] in ("00", '"x"'), state["a"]


def test_what_breaks_a_constraint_is_seen() -> None:
    integer = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"type": "integer"}')
    assert not satisfies(integer, '"x"')
    assert not satisfies(integer, "{")
    assert not satisfies(GrammarSpec(kind=GrammarKind.CHOICE, source='["a"]'), "b")
    assert not satisfies(GrammarSpec(kind=GrammarKind.JSON_OBJECT), "[]")


@settings(deadline=None, derandomize=True)
@given(st.text(), st.booleans())
def test_the_tokenizer_keeps_every_text(text: str, parse_special: bool) -> None:
    model = FakeModel()
    assert model.decode(model.encode(text, parse_special=parse_special)) == text


def test_only_parsed_control_tokens_are_control_tokens() -> None:
    model = FakeModel()
    assert model.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in model.encode("<|im_end|>")


def test_an_abort_ends_a_request_in_one_output() -> None:
    model = FakeModel()
    request = pm.Request(request_id="r", prompt_ids=(1,))
    model.submit([request])
    model.abort(["r", "other"])
    [output] = model.poll()
    assert output.finish is not None and output.finish.reason == "abort"
    assert model.poll() == []


@pytest.mark.parametrize("give", [lambda f: f, lambda f: [f], lambda f: {"q": f}])
def test_what_a_function_gives_is_an_answer_as_any_other(give: object) -> None:
    assert callable(give)
    for answer, told in ((RuntimeError("no"), "no"), (3, "an answer of the script is no text: 3")):
        state = ask.run("q", backend=FakeModel(give(lambda prompt, answer=answer: answer)))
        with pytest.raises(pm.ProgramError, match=told) as caught:
            state.text()
        assert caught.value.code == "scripted"
