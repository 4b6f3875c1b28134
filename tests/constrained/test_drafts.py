"""Draft masks against the masks of the same tokens taken one by one (case rt-spec-decode)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from palmette.constrained.backend import CompiledGrammar, GrammarState, select_backend
from palmette.constrained.drafts import accept_drafts, fill_drafts
from palmette.constrained.gate import gated
from palmette.constrained.masks import MaskRows, allocate, allowed_ids, is_allowed, mask_words
from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.constrained.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["abc", "xyz"]}, "items": {"type": "array"}},
    "required": ["name", "items"],
    "additionalProperties": False,
}
SPECS = {
    "json": ("llguidance", GrammarSpec.json_schema(SCHEMA, whitespace=Whitespace.COMPACT)),
    "regex": ("llguidance", GrammarSpec.regex("(ab|abc)*x?")),
    "choice": ("pure", GrammarSpec.choice(["the name", "the end", "then"])),
    "pure regex": ("pure", GrammarSpec.regex("(ab|abc)*x?")),
}


@pytest.fixture(scope="module", params=[*SPECS, "gate"])
def grammar(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> CompiledGrammar:
    backend, spec = SPECS["json" if request.param == "gate" else request.param]
    compiled = select_backend(backend).compile(spec, vocabulary)
    return gated(compiled, "</tool>", vocabulary) if request.param == "gate" else compiled


def row_of(state: GrammarState, vocabulary: Vocabulary) -> list[int]:
    row = np.zeros(mask_words(vocabulary.size), np.int32)
    state.fill(row)
    return row.tolist()


def behind(
    grammar: CompiledGrammar, ids: Sequence[int], vocabulary: Vocabulary
) -> GrammarState | None:
    """The state behind `ids`, each taken under its mask; None: one is not legal."""
    state = grammar.start()
    for token_id in ids:
        row = np.array(row_of(state, vocabulary), np.int32)
        if token_id in vocabulary.stop_ids or not is_allowed(row, token_id):
            return None
        assert state.accept(token_id)
    return state


def draft(rng: random.Random, start: GrammarState, size: int) -> list[int]:
    """Mostly legal ids from `start` on."""
    state, ids = start.fork(), list[int]()
    row = np.zeros(mask_words(352), np.int32)
    while len(ids) < size:
        state.fill(row)
        legal = allowed_ids(row).tolist()
        forced = state.forced()
        token_id = forced[0] if forced else rng.choice(legal)
        if rng.random() < 0.15:
            token_id = rng.randrange(320)
        ids.append(token_id)
        if not state.accept(token_id):
            break
    return ids


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_a_chain_are_those_of_single_steps(
    grammar: CompiledGrammar, seed: int, vocabulary: Vocabulary
) -> None:
    rng, stops = random.Random(seed), frozenset(vocabulary.stop_ids)
    before = draft(rng, grammar.start(), 3)
    while (state := behind(grammar, before, vocabulary)) is None:
        before.pop()
    ids = draft(rng, state, 6)
    rows, first = allocate(len(ids) + 1, vocabulary.size), row_of(state, vocabulary)
    legal = fill_drafts(state, ids, rows, stop_ids=stops)
    assert row_of(state, vocabulary) == first == rows[0].tolist()
    for i, is_legal in enumerate(legal):
        single = behind(grammar, [*before, *ids[: i + 1]], vocabulary)
        if ids[i] in stops:
            continue
        assert is_legal == (single is not None)
        if single is not None:
            assert rows[i + 1].tolist() == row_of(single, vocabulary)


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_a_tree_are_those_of_its_branches(
    grammar: CompiledGrammar, seed: int, vocabulary: Vocabulary
) -> None:
    rng, stops = random.Random(seed), frozenset(vocabulary.stop_ids)
    state = grammar.start()
    ids: list[int] = []
    parents: list[int] = []
    for _ in range(3):  # three branches that may share their beginning
        parent, above = -1, list[int]()
        for token_id in draft(rng, state, 4):
            ids.append(token_id)
            parents.append(parent)
            parent = len(ids) - 1
            above.append(token_id)
    rows = allocate(len(ids) + 1, vocabulary.size)
    legal = fill_drafts(state, ids, rows, stop_ids=stops, parents=parents)
    for i in range(len(ids)):
        path, at = list[int](), i
        while at >= 0:
            path.insert(0, ids[at])
            at = parents[at]
        if stops.intersection(path):
            continue
        single = behind(grammar, path, vocabulary)
        assert legal[i] == (single is not None)
        if single is not None:
            assert rows[i + 1].tolist() == row_of(single, vocabulary)


def greedy(
    grammar: CompiledGrammar, vocabulary: Vocabulary, *, drafted: int, seed: int
) -> list[int]:
    """The text of a made-up model that likes some ids more than others, with drafts or without."""
    stops = frozenset(vocabulary.stop_ids)
    rng = random.Random(seed)

    def choose(ids: list[int], row: MaskRows, may_end: bool) -> int:
        wants = random.Random(str((seed, ids[-3:])))
        legal = [i for i in allowed_ids(row).tolist() if i not in stops]
        legal += list(stops) if may_end else []
        return max(sorted(legal), key=lambda i: wants.random() + (i in stops) * 0.2)

    state, text = grammar.start(), list[int]()
    while len(text) < 40 and not state.is_done:
        ids = draft(rng, state, drafted)
        rows = allocate(len(ids) + 1, vocabulary.size)
        fill_drafts(state, ids, rows, stop_ids=stops)
        chosen, fork = list[int](), state.fork()
        for i in range(len(ids) + 1):
            chosen.append(choose([*text, *ids[:i]], rows[i], fork.may_end))
            if i == len(ids) or chosen[i] != ids[i] or not fork.accept(ids[i]):
                break
        count = accept_drafts(state, ids, chosen, stop_ids=stops)
        text += ids[:count]
        if chosen[count] in stops:
            break
        assert state.accept(chosen[count])
        text.append(chosen[count])
    return text[:40]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_do_not_change_the_text(
    grammar: CompiledGrammar, seed: int, vocabulary: Vocabulary
) -> None:
    alone = greedy(grammar, vocabulary, drafted=0, seed=seed)
    assert greedy(grammar, vocabulary, drafted=4, seed=seed) == alone


def test_nothing_is_legal_behind_the_end(vocabulary: Vocabulary) -> None:
    state = select_backend().compile(GrammarSpec.choice(["yes"]), vocabulary).start()
    [yes] = vocabulary.encode("yes")
    stop, other = vocabulary.stop_ids
    rows = allocate(5, vocabulary.size)
    legal = fill_drafts(
        state, [yes, stop, other, ord("a")], rows, stop_ids=frozenset(vocabulary.stop_ids)
    )
    assert legal == [True, True, False, False]
    assert not state.may_end


def test_drafts_that_are_no_tree_are_refused(vocabulary: Vocabulary) -> None:
    state = select_backend("pure").compile(GrammarSpec.choice(["yes"]), vocabulary).start()
    with pytest.raises(ValueError, match=r"parents\[1\]: 1 does not come before 1"):
        fill_drafts(state, [1, 2], allocate(3, vocabulary.size), parents=[-1, 1])
    with pytest.raises(ValueError, match="2 rows; 2 drafts need 3"):
        fill_drafts(state, [1, 2], allocate(2, vocabulary.size))
