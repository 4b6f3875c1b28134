"""Detokenizer and StopMatcher: any cutting of a stream gives what the whole text gives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime.text import Detokenizer, StopMatcher, well_formed

SPECIAL = 256
SPACE_A = 257
PADDING = 258


def _vocabulary() -> Vocabulary:
    """One id per byte, then a special token, " a" and a padding id."""
    return Vocabulary(
        token_bytes=(*(bytes([value]) for value in range(256)), b"<end>", b" a", b""),
        special_ids=frozenset({SPECIAL}),
        stop_ids=(SPECIAL,),
        encode=lambda text: list(text.encode()),
    )


VOCABULARY = _vocabulary()


def _stream(ids: Sequence[int], cuts: Sequence[int], *, skip_special: bool = True) -> str:
    detokenizer = Detokenizer(VOCABULARY, skip_special=skip_special)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    shown = "".join(parts) + detokenizer.flush()
    assert "".join(map(detokenizer.push_one, ids)) + detokenizer.flush() == shown
    return shown


@given(st.binary(max_size=64), st.lists(st.integers(0, 64), max_size=64))
def test_stream_equals_decoding_all_bytes_at_once(data: bytes, cuts: list[int]) -> None:
    assert _stream(list(data), cuts) == data.decode("utf-8", "replace")


@given(st.text(max_size=32))
def test_no_character_is_ever_split(text: str) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    shown = ""
    for value in text.encode():
        shown += detokenizer.push([value])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_det_02_broken_tail_is_one_replacement_at_flush_only() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    assert [detokenizer.push([value]) for value in b"\xf0\x9f\x91"] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_det_02_space_token_after_a_broken_prefix_equals_the_whole() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    pushes = [[0xF0, 0x9F], [SPACE_A], [0x91, 0xA9]]
    shown = "".join(detokenizer.push(ids) for ids in pushes) + detokenizer.flush()
    assert shown == b"\xf0\x9f a\x91\xa9".decode("utf-8", "replace")


def test_det_02_valid_prefix_is_kept_across_pushes() -> None:
    detokenizer = Detokenizer(VOCABULARY)
    assert detokenizer.push([0x20, 0xF0, 0x9F]) == " "
    assert detokenizer.push([0x91, 0xA9]) == "\U0001f469"


def test_special_ids_are_skipped_or_spelled() -> None:
    ids = [0x68, SPECIAL, PADDING, 0x69]
    assert _stream(ids, []) == "hi"
    assert _stream(ids, [], skip_special=False) == "h<end>i"


def test_skipped_special_id_does_not_split_a_character() -> None:
    assert _stream([0xC3, SPECIAL, 0xA9], [1, 2]) == "\u00e9"


def test_id_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        Detokenizer(VOCABULARY).push([len(VOCABULARY.token_bytes)])


def test_txt_01_unpaired_surrogates_become_replacement_characters() -> None:
    assert well_formed("cut \ud83d") == "cut \ufffd"
    assert well_formed("\udcf0") == "\ufffd"
    assert well_formed("\ude00\ud83d") == "\ufffd\ufffd"


def test_txt_01_split_pairs_are_joined_and_good_text_is_untouched() -> None:
    assert well_formed("\ud83d\ude00") == "\U0001f600"
    assert well_formed("a\x00\u00e9\U0001f600") == "a\x00\u00e9\U0001f600"


def _first_completed(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition, character by character: the oracle of StopMatcher."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _match(text: str, cuts: Sequence[int], stops: Sequence[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, matched = "", None
    for a, b in itertools.pairwise(edges):
        emit, matched = matcher.push(text[a:b])
        shown += emit
    return shown + matcher.flush(), matched


@given(
    st.text("ab", max_size=24),
    st.lists(st.integers(0, 24), max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_any_chunking_finds_the_first_completed_stop(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    assert _match(text, cuts, stops) == _first_completed(text, stops)


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_held_back_text_is_the_longest_suffix_that_begins_a_stop(
    text: str, stops: list[str]
) -> None:
    whole, matched = _first_completed(text, stops)
    beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
    held = max((b for b in beginnings if text.endswith(b)), key=len, default="")
    emit, found = StopMatcher(stops).push(text)
    assert found == matched
    assert emit == (whole if matched is not None else text[: len(text) - len(held)])


def test_det_03_stop_that_spans_tokens_is_never_shown() -> None:
    matcher = StopMatcher(["EFGHIJ", " F G"])
    pushes = [matcher.push(text) for text in (" E", " F", " G", " H")]
    assert pushes == [(" ", None), ("E", None), ("", " F G"), ("", " F G")]
    assert matcher.flush() == ""


def test_held_text_comes_out_at_flush_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_first_completed_stop_wins_over_an_earlier_begun_one() -> None:
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["c", "abc"]).push("xabc") == ("x", "abc")


def test_no_stops_pass_text_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("text") == ("text", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["]", "^", "\\", "-", "[a-z]", "\n\n", "\x00"])
def test_stops_are_literal(stop: str) -> None:
    assert StopMatcher([stop, "^b-c"]).push(f"a{stop}b") == ("a", stop)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
