"""Stop ids, rollback, fork, forced ids."""

from __future__ import annotations

import random

import numpy as np
import pytest

from palmette.constrained import masks
from palmette.constrained.backend import GrammarState
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec

SCHEMA = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "value": {"type": "boolean"}},
        "required": ["name"],
        "additionalProperties": False,
    }
)


def mask_of(state: GrammarState, compiler: GrammarCompiler) -> list[int]:
    row = np.zeros(compiler.vocabulary.mask_words, dtype=np.int32)
    state.fill(row)
    return masks.allowed_ids(row).tolist()


def feed(state: GrammarState, text: str) -> None:
    for byte in text.encode():
        assert state.accept(byte)


def test_no_stop_id_before_the_text_is_complete(compiler: GrammarCompiler) -> None:
    """rt-stop-set"""
    stops = compiler.vocabulary.stop_ids
    state = compiler.get(SCHEMA).start()
    for byte in b'{"name":"a"':
        assert not state.may_end
        assert not set(stops) & set(mask_of(state, compiler))
        assert not any(state.accept(stop) for stop in stops)
        assert state.accept(byte)
    feed(state, "}")
    assert state.may_end
    assert state.is_done
    assert mask_of(state, compiler) == sorted(stops)
    assert not state.accept(ord(" "))


def test_done_as_soon_as_only_stop_is_legal(compiler: GrammarCompiler) -> None:
    state = compiler.get(GrammarSpec.regex("ab?")).start()
    feed(state, "a")
    assert (state.may_end, state.is_done) == (True, False)
    feed(state, "b")
    assert (state.may_end, state.is_done) == (True, True)


@pytest.mark.parametrize("stop_index", [0, 1])
def test_every_stop_id_ends_and_can_be_taken_back(
    compiler: GrammarCompiler, stop_index: int
) -> None:
    stop = compiler.vocabulary.stop_ids[stop_index]
    state = compiler.get(GrammarSpec.regex("[0-9]*")).start()
    feed(state, "12")
    before = mask_of(state, compiler)
    assert state.accept(stop)
    assert state.is_done
    assert not state.accept(ord("3"))
    assert set(mask_of(state, compiler)) <= set(compiler.vocabulary.stop_ids)
    assert list(state.forced()) == []
    state.rollback(1)
    assert not state.is_done
    assert mask_of(state, compiler) == before
    feed(state, "3")


def test_ids_outside_and_special_ids_are_refused_without_harm(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    state = compiler.get(GrammarSpec.regex("(?s:.)*")).start()
    specials = vocabulary.special_ids - set(vocabulary.stop_ids)
    for token_id in (*specials, vocabulary.size - 1, vocabulary.size, -1, 10**9):
        assert not state.accept(token_id)
    feed(state, "still fine")


def test_rollback_restores_every_earlier_state(compiler: GrammarCompiler) -> None:
    rng = random.Random(3)
    for spec in (SCHEMA, GrammarSpec.regex("(?:ab|a)*c?"), GrammarSpec.json_object()):
        state = compiler.get(spec).start()
        history = [mask_of(state, compiler)]
        for _ in range(40):
            if state.is_done:
                break
            choices = [i for i in history[-1] if i not in compiler.vocabulary.stop_ids]
            assert state.accept(rng.choice(choices))
            history.append(mask_of(state, compiler))
        while len(history) > 1:
            num_back = min(rng.randint(1, 4), len(history) - 1)
            state.rollback(num_back)
            del history[-num_back:]
            assert mask_of(state, compiler) == history[-1]
        with pytest.raises(ValueError, match="roll back"):
            state.rollback(1)


def test_forks_are_independent(compiler: GrammarCompiler) -> None:
    state = compiler.get(GrammarSpec.choice(["abc", "abd"])).start()
    feed(state, "ab")
    fork = state.fork()
    feed(state, "c")
    assert state.is_done
    assert not fork.is_done
    feed(fork, "d")
    fork.rollback(2)
    assert not fork.may_end
    assert state.is_done


def test_sequences_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiler.get(GrammarSpec.regex("[ab]{2}"))
    first, second = grammar.start(), grammar.start()
    feed(first, "ab")
    assert first.is_done
    assert not second.may_end


def test_forced_ids_are_canonical_and_lead_where_bytes_lead(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    state = compiler.get(GrammarSpec.regex('\\{"name": "(?:abc|x)"\\}')).start()
    text, num_forced = "", 0
    while not state.is_done:
        forced = list(state.forced())
        before = mask_of(state, compiler)
        assert list(state.forced()) == forced, "asking changes nothing"
        if forced:
            assert before == [forced[0]]
        ids = forced or [next(i for i in before if i not in vocabulary.stop_ids)]
        assert all(state.accept(token_id) for token_id in ids)
        num_forced += len(forced)
        text += b"".join(vocabulary.token_bytes[i] for i in ids).decode()
    assert text in ('{"name": "abc"}', '{"name": "x"}')
    assert num_forced >= 2
