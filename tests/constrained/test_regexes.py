"""Engines that read regexes, against one another: the masks of one text are the same, id by id."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from palmette.constrained import masks
from palmette.constrained.backend import GrammarState, select_backend
from palmette.constrained.outlines_core_backend import OutlinesCoreBackend
from palmette.constrained.regex_syntax import byte_ranges, complement, parse, union, written
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

PATTERNS = [
    *(
        r"^abc$ ^a|b$ [a-z]{2,4}x? (?i)strase (?i:k)\w (?i)\W \s\S \D\d [^a] . (?s). a*b+? "
        r"(?:a|ab)*?z (a|ab)(c|bcd) (?P<n>a) "
        r"(?<n>a)? 日本|[一-龥]+ \x{e9}+ [\d-x] []a] [^]a] [+-] [a-c-e] \% "
        r"(?s:.)*?z (?:a{0,2}){0,3}b x(?i)a|b [\w&] (?i)[k-s] a{2,} [\x00-\x{10FFFF}] \u00e9 [é-ü] "
        r"(?-i)a (?i-s:A). \/ -?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)? \"[^\"\\]*\" \~ "
        r"[^\x00-\x7f]{1,2} (?:yes|no)(?:日本|\n){0,2}[0-9]* "
        r"\x7f a** [\n\t] \U0001F600 the(?:n|re)? (?i)[^a] \Aab\z"
    ).split(" "),
    " ",
    "a\nb",
    "a {2}",
    "\\ a",
]
REFUSED = {
    r"\p{L}": r"\p is not supported",
    "[[:alpha:]]": "classes in classes",
    "[a&&b]": "set operations",
    r"a\b": r"\b is not supported",
    "(a$|b)": "anchors inside",
    "(^a|b)": "anchors inside",
    "a^b": "anchors inside",
    "(?=a)b": "look-around",
    "(?m)a": "flag 'm'",
    "(?i)é": "ASCII only",
    "a)": "unopened group",
    "(a": "unclosed group",
    "a)|(b": "unopened group",
    "*a": "nothing to repeat",
    "(?)a": "nothing to repeat",
    "a{2,1}": "2 to 1 times",
    "a{x}": "a repeat is",
    "[b-a]": "range is empty",
    "[a": "ends too early",
    r"\ud800": "no character",
    r"\x4": "not complete",
    "(" * 200 + "a" + ")" * 200: "nested deeper",
    "a{30000}": "more than 20000 places",
    r"[^\x00-\x{10ffff}]": "no text matches",
    "a\ud800": "half a surrogate pair",
    "a{9}{9}{9}{9}{9}{9}": "repeats add up",
}


@pytest.fixture(scope="module")
def outlines() -> Iterator[OutlinesCoreBackend]:
    pytest.importorskip("outlines_core")
    backend = OutlinesCoreBackend()
    yield backend
    backend.close()


def ids_of_mask(state: GrammarState, vocabulary: Vocabulary) -> list[int]:
    row = masks.allocate(1, vocabulary.size)[0]
    state.fill(row)
    return masks.allowed_ids(row).tolist()


def walk_together(
    ours: GrammarState, engine: GrammarState, vocabulary: Vocabulary, rng: random.Random
) -> None:
    for _ in range(12):
        allowed = ids_of_mask(ours, vocabulary)
        assert ours.may_end == engine.may_end
        forced = engine.forced()
        if forced:  # only the canonical spelling is offered
            assert forced[0] in allowed
        else:
            assert ids_of_mask(engine, vocabulary) == allowed
        for token_id in rng.sample(range(vocabulary.size), 20):
            assert ours.fork().accept(token_id) == (token_id in allowed)
            assert engine.fork().accept(token_id) == (token_id in allowed)
        longer = [i for i in allowed if i not in vocabulary.stop_ids]
        assert ours.is_done == (not longer)
        if not longer:
            return
        token_id = rng.choice(longer)
        assert ours.accept(token_id)
        assert engine.accept(token_id)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_the_same_id_by_id(
    vocabulary: Vocabulary, outlines: OutlinesCoreBackend, pattern: str
) -> None:
    spec = GrammarSpec.regex(pattern)
    ours = select_backend("pure").compile(spec, vocabulary)
    rng = random.Random(pattern)
    for backend in (select_backend("llguidance"), outlines):
        engine = backend.compile(spec, vocabulary)
        for _ in range(6):
            walk_together(ours.start(), engine.start(), vocabulary, rng)
    shortest = ours.shortest
    assert shortest is not None
    state = ours.start()
    assert all(state.accept(token_id) for token_id in shortest)
    assert state.may_end


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_read_is_refused_by_name(vocabulary: Vocabulary, pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        select_backend("pure").compile(GrammarSpec.regex(pattern), vocabulary)
    assert REFUSED[pattern] in str(caught.value)


def test_written_patterns_mean_the_same(vocabulary: Vocabulary) -> None:
    for pattern in PATTERNS:
        tree = parse(pattern)
        again = select_backend("llguidance").compile(GrammarSpec.regex(written(tree)), vocabulary)
        ours = select_backend("pure").compile(GrammarSpec.regex(written(tree)), vocabulary)
        walk_together(ours.start(), again.start(), vocabulary, random.Random(pattern))


def test_characters_as_bytes() -> None:
    for low, high in (
        (0, 0x10FFFF),
        (0x7E, 0x801),
        (0xE9, 0xE9),
        (0xD7FE, 0xE001),
        (0x10, 0x20000),
    ):
        found: set[str] = set()
        for sequence in byte_ranges(low, high):
            texts = [b""]
            for first, last in sequence[:-1]:
                texts = [t + bytes([b]) for t in texts for b in range(first, last + 1)]
            for text in texts:
                first, last = (ord((text + bytes([end])).decode()) for end in sequence[-1])
                found.update(map(chr, range(first, last + 1)))
        wanted = {chr(c) for c in range(low, high + 1) if not 0xD800 <= c <= 0xDFFF}
        assert found == wanted
    assert complement(((65, 70), (68, 80))) == ((0, 64), (81, 0xD7FF), (0xE000, 0x10FFFF))
    assert union([(5, 6), (1, 2), (3, 3)]) == ((1, 3), (5, 6))


def test_states_go_back_and_fork(vocabulary: Vocabulary, outlines: OutlinesCoreBackend) -> None:
    """rt-outlines-eos: every stop id that a mask allows is accepted, and nothing after it."""
    for backend in (outlines, select_backend("pure")):
        state = backend.compile(GrammarSpec.regex("ab*"), vocabulary).start()
        assert not any(state.accept(stop) for stop in vocabulary.stop_ids)
        assert [state.accept(byte) for byte in b"abb"] == [True] * 3
        for stop in vocabulary.stop_ids:
            assert stop in ids_of_mask(state, vocabulary)
            fork = state.fork()
            assert fork.accept(stop)
            assert fork.is_done
            assert ids_of_mask(fork, vocabulary) == sorted(vocabulary.stop_ids)
            assert not fork.accept(ord("b"))
            fork.rollback(3)
            assert fork.accept(ord("b"))
        state.rollback(3)
        assert not state.may_end
        assert state.accept(ord("a"))
        with pytest.raises(ValueError, match="can't roll back 2 of 1"):
            state.rollback(2)


def test_choices_are_exact_in_every_engine(
    vocabulary: Vocabulary, outlines: OutlinesCoreBackend
) -> None:
    spec = GrammarSpec.choice(["a", "ab", "the", "then", "日本", '"q"', "back\\slash", "a.b", "^"])
    ours = select_backend("pure").compile(spec, vocabulary)
    for backend in (outlines, select_backend()):
        walk_together(
            ours.start(), backend.compile(spec, vocabulary).start(), vocabulary, random.Random(1)
        )


@pytest.mark.parametrize("name", ["pure", "outlines_core"])
def test_what_a_backend_does_not_serve_is_refused_with_what_does(
    vocabulary: Vocabulary, name: str
) -> None:
    backend = select_backend(name)
    assert backend.kinds == (GrammarKind.CHOICE, GrammarKind.REGEX)[:: 1 if name == "pure" else -1]
    with pytest.raises(GrammarError, match=rf"json_object: .*'{name}' serves .*use .*'auto'"):
        backend.compile(GrammarSpec.json_object(), vocabulary)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(GrammarError, match="unknown grammar backend 'x'; known are: auto, llg"):
        select_backend("x")
