"""The gate token by token: what it allows, where the grammar begins, how it is undone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.gate import Gate, GatedState, gated
from palmette.constrained.masks import is_allowed
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

ENDS = ("</tool>", "==", "aab", "é日", "</")


def brute_force(gate: Gate, text: bytes, token_id: int) -> bool:
    """Whether a token may come behind a free text: the end is not in it, but at its end."""
    vocabulary = gate.vocabulary
    data = vocabulary.token_bytes[token_id]
    if not data or token_id in vocabulary.stop_ids:
        return False
    found = (text + data).find(gate.end)
    return found < 0 or found + len(gate.end) == len(text + data)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("seed", range(5))
def test_mask_and_accept_follow_the_definition(end: str, seed: int, vocabulary: Vocabulary) -> None:
    gate, rng = Gate(end, vocabulary), random.Random(seed)
    state = GatedState(gate, None)  # type: ignore[arg-type]  # it is not reached
    row, text = np.zeros(vocabulary.mask_words, np.int32), b""
    likely = [i for i, data in enumerate(vocabulary.token_bytes) if data and data in gate.end]
    while state.is_open and len(text) < 60:
        state.fill(row)
        legal = [i for i in range(vocabulary.size) if brute_force(gate, text, i)]
        assert [i for i in range(vocabulary.size) if is_allowed(row, i)] == legal
        for token_id in set(range(vocabulary.size)) - set(legal):
            assert not state.accept(token_id)
        chosen = rng.choice([i for i in likely if i in legal] if rng.random() < 0.7 else legal)
        assert state.accept(chosen)
        text += vocabulary.token_bytes[chosen]
    assert state.is_open == (gate.end not in text)


@pytest.mark.parametrize("end", ENDS)
def test_the_way_to_the_end_closes_from_every_place(end: str, vocabulary: Vocabulary) -> None:
    gate = Gate(end, vocabulary)
    for place in range(len(gate.end)):
        at = place
        for token_id in gate.ids(place):
            at = gate.advance(at, vocabulary.token_bytes[token_id])
        assert at == len(gate.end)


def test_the_grammar_begins_at_the_next_token_and_rolls_back(compiler: GrammarCompiler) -> None:
    """Case rt-spec-reasoning-boundary: the boundary inside of what is accepted at once."""
    grammar = gated(compiler.get(GrammarSpec.choice(["yes", "no"])), "</tool>", compiler.vocabulary)
    encode = compiler.vocabulary.encode
    before = encode("because yes </tool>")
    state = grammar.start()
    assert all(map(state.accept, before))
    row = np.zeros(compiler.vocabulary.mask_words, np.int32)
    state.fill(row)
    assert is_allowed(row, ord("y")) and not is_allowed(row, ord("b"))
    [yes] = encode("yes")
    assert state.accept(yes) and state.is_done
    state.rollback(2)
    assert not state.may_end and not state.is_done
    state.fill(row)
    assert is_allowed(row, ord("b"))
    fork = state.fork()
    assert fork.accept(before[-1]) and fork.accept(yes) and fork.may_end
    assert not state.may_end
    state.rollback(len(before) - 1)
    with pytest.raises(ValueError, match="can't roll back 1 of 0"):
        state.rollback(1)
    assert grammar.shortest is not None
    assert all(map(state.accept, grammar.shortest)) and state.may_end
