"""The mask against its definition: an id is set when a copy of the state accepts it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from palmette.constrained import masks
from palmette.constrained.backend import GrammarState, select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.limits import GrammarLimits
from palmette.constrained.llguidance_backend import LLGuidanceBackend
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

SPECS = [
    GrammarSpec.json_object(),
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "score": {"type": "number", "minimum": 0, "maximum": 12},
                "items": {"type": "array", "items": {"enum": ["abc", "xyz", None, 10]}},
            },
            "required": ["score"],
        }
    ),
    GrammarSpec.regex(r"(?:yes|no)(?: 日本|\n){0,2}[0-9]*"),
    GrammarSpec.choice(["a", "ab", "abc", "日本", "<tool>", "<|end|>"]),
    GrammarSpec.ebnf('root ::= [0-9]+ ("+" root)?'),
    GrammarSpec.lark('start: "(" start ")" | /[a-c]+/'),
    GrammarSpec.structural_tag(
        {"triggers": ["<tool>"], "tags": [{"begin": "<tool>", "schema": {}, "end": "</tool>"}]}
    ),
]


def ids_by_definition(state: GrammarState, vocabulary: Vocabulary) -> list[int]:
    return [i for i in range(vocabulary.size) if state.fork().accept(i)]


def ids_of_mask(state: GrammarState, vocabulary: Vocabulary) -> list[int]:
    row = masks.allocate(1, vocabulary.size)[0]
    state.fill(row)
    assert masks.count(row) == len(masks.allowed_ids(row))
    return masks.allowed_ids(row).tolist()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_mask_equals_what_accept_takes(compiler: GrammarCompiler, spec: GrammarSpec) -> None:
    """rt-padded-vocab"""
    vocabulary = compiler.vocabulary
    rng = random.Random(7)
    for _ in range(6):
        state = compiler.get(spec).start()
        for _ in range(25):
            allowed = ids_of_mask(state, vocabulary)
            by_definition = ids_by_definition(state, vocabulary)
            forced = state.forced()
            if forced:  # only the canonical spelling is offered, every spelling is taken
                assert allowed == [forced[0]]
                assert forced[0] in by_definition
            else:
                assert allowed == by_definition
            assert allowed, "a state must offer something"
            assert state.may_end == (set(vocabulary.stop_ids) <= set(allowed))
            assert state.is_done == (set(allowed) <= set(vocabulary.stop_ids))
            forbidden = vocabulary.special_ids - set(vocabulary.stop_ids)
            assert not forbidden & set(allowed)
            assert all(vocabulary.token_bytes[i] for i in allowed)
            if state.is_done:
                break
            assert state.accept(rng.choice([i for i in allowed if i not in vocabulary.stop_ids]))


def test_the_reference_engine_agrees_on_choices(vocabulary: Vocabulary) -> None:
    spec = GrammarSpec.choice(["a", "ab", "the", "then", "日本", '"q"', "back\\slash"])
    ours = select_backend("pure").compile(spec, vocabulary).start()
    engine = select_backend().compile(spec, vocabulary).start()
    for text in ("", "t", "th", "the"):
        fork, other = ours.fork(), engine.fork()
        for byte in text.encode():
            assert fork.accept(byte)
            assert other.accept(byte)
        if not other.forced():
            assert ids_of_mask(fork, vocabulary) == ids_of_mask(other, vocabulary)
        assert fork.may_end == other.may_end
        assert fork.is_done == other.is_done
    assert ids_of_mask(ours, vocabulary) == ids_by_definition(ours, vocabulary)


def test_rows_are_filled_together_and_others_stay(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    states = [compiler.get(spec).start() for spec in SPECS]
    buffer = masks.allocate(len(states) + 2, vocabulary.size)
    rows = list(range(1, len(states) + 1))
    assert masks.fill_rows(buffer, states, rows) == {}
    for row, state in zip(rows, states, strict=True):
        assert masks.allowed_ids(buffer[row]).tolist() == ids_of_mask(state, vocabulary)
    assert (buffer[0] == -1).all()
    assert (buffer[-1] == -1).all()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_rows_on_several_threads_are_those_of_one(
    vocabulary: Vocabulary, num_threads: int
) -> None:
    backend = LLGuidanceBackend(num_threads=num_threads)
    grammar = backend.compile(GrammarSpec.json_schema({"type": "array"}), vocabulary)
    states = [grammar.start() for _ in range(24)]
    for i, state in enumerate(states):
        assert all(state.accept(ord("[")) for _ in range(i % 5 + 1))
    assert states[0].accept(ord("]"))
    assert states[0].accept(vocabulary.stop_ids[0])  # it has ended
    buffer = masks.allocate(len(states), vocabulary.size)
    assert masks.fill_rows(buffer, states, range(len(states))) == {}
    for row, state in zip(buffer, states, strict=True):
        assert masks.allowed_ids(row).tolist() == ids_of_mask(state, vocabulary)


def test_a_row_that_hits_a_limit_fails_alone(vocabulary: Vocabulary) -> None:
    """The repeats explode some way behind the digits, further than compiling looks ahead."""
    backend = LLGuidanceBackend(GrammarLimits(regex_size=10**9))
    spec = GrammarSpec.regex("0{20}(?:.{1,1000}){1,1000}")
    exploding = backend.compile(spec, vocabulary).start()
    good = backend.compile(GrammarSpec.regex("[0-9]+"), vocabulary).start()
    buffer = masks.allocate(2, vocabulary.size)
    errors: dict[int, GrammarError] = {}
    num_steps = 0
    while not errors and num_steps < 300:
        assert exploding.accept(ord("0"))
        errors = masks.fill_rows(buffer, [exploding, good], [1, 0])
        num_steps += 1
    assert list(errors) == [1]
    assert num_steps > 20
    assert "too complex" in str(errors[1])
    assert ids_of_mask(good, vocabulary) == masks.allowed_ids(buffer[0]).tolist()
    with pytest.raises(GrammarError, match="too complex"):
        exploding.accept(ord("0"))


def test_helpers() -> None:
    row = masks.allocate(1, 70)[0]
    assert row.shape == (masks.mask_words(70),) == (3,)
    row[:] = 0
    row[0], row[2] = np.int32(-(2**31)), 5
    assert masks.allowed_ids(row).tolist() == [31, 64, 66]
    assert masks.count(row) == 3
    assert masks.is_allowed(row, 31)
    assert not masks.is_allowed(row, 65)
    masks.allow_all(row[None])
    assert masks.count(row) == 96
