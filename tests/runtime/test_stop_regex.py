"""Stop patterns: any cutting of a stream gives what a search in the whole text gives."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from palmette.runtime.delivery import Delivery
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine
from palmette.runtime.request import (
    EngineInfo,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    check_request,
)
from palmette.runtime.stop_regex import MAX_MATCH, StopRegexMatcher

Found = tuple[str, str | None, str]  # text shown, pattern, its match


def whole_search(text: str, patterns: Sequence[str], stops: Sequence[str] = ()) -> Found:
    """The definition: the first end of a match, and the first beginning of one with that end."""
    all_patterns = [(stop, re.escape(stop)) for stop in stops] + [(p, p) for p in patterns]
    for end in range(1, len(text) + 1):
        for begin in range(end):
            for label, pattern in all_patterns:
                if re.compile(pattern, re.M).fullmatch(text, begin, end):
                    return text[:begin], label, text[begin:end]
    return text, None, ""


def stream(
    text: str, cuts: Sequence[int], patterns: Sequence[str], stops: Sequence[str] = ()
) -> Found:
    matcher = StopRegexMatcher(stops, patterns)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, matched = "", None
    for a, b in itertools.pairwise(edges):
        emit, matched = matcher.push(text[a:b])
        shown += emit
    if matched is None:
        emit, matched = matcher.end()
        shown += emit
    return shown, matched, matcher.matched_text


ATOMS = st.sampled_from(
    ["a", "b", "[ab]", "[^a]", ".", r"\w", "(?:ab)", "(?:a|bb)", r"\n", "(?i:A)"]
)
PATTERNS = st.lists(
    st.tuples(ATOMS, st.sampled_from(["", "", "+", "*", "?", "{2}", "{1,3}", "+?", "*?"])),
    min_size=1,
    max_size=4,
).map(lambda parts: "".join(atom + times for atom, times in parts))


@given(
    st.text("ab\n", max_size=14),
    st.lists(st.integers(0, 14), max_size=6),
    st.lists(PATTERNS.filter(lambda p: not re.fullmatch(p, "")), min_size=1, max_size=2),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
@example("aab", [1], ["a+b"], [])
@example("abab", [2], ["(?:ab)+b", "ba"], ["bab"])
def test_any_cutting_finds_what_a_search_in_the_whole_finds(
    text: str, cuts: list[int], patterns: list[str], stops: list[str]
) -> None:
    shown, label, match = stream(text, cuts, patterns, stops)
    wanted, _, wanted_match = whole_search(text, patterns, stops)
    assert (shown, match) == (wanted, wanted_match)
    assert (label is None) == (match == "")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("pattern", "text", "shown", "match"),
    [
        (r"^Q:", "aQ: b\nQ: c", "aQ: b\n", "Q:"),
        (r"\AQ:", "Q: b\nQ:", "", "Q:"),
        (r"\n\nQ\d+:", "a\n\nQ\n\nQ17: b", "a\n\nQ", "\n\nQ17:"),
        (r"END$", "ENDS END\nx", "ENDS ", "END"),
        (r"END$", "a END", "a ", "END"),
        (r"END\Z", "END\nEND", "END\n", "END"),
        (r"\bend\b", "endless bend end.", "endless bend ", "end"),
        (r"\bend\b", "the end", "the ", "end"),
        (r"\Bend", "end bend", "end b", "end"),
        (r"(?i)stop", "don't StOp", "don't ", "StOp"),
        (r"[.!?]", "One. Two.", "One", "."),
        (r"```\s*$", "x\n```  \ny", "x\n", "```  "),
        (r"\d{4}-\d{2}", "in 2026-11 or", "in ", "2026-11"),
        ("\u00e9+x", "a\u00e9\u00e9x", "a", "\u00e9\u00e9x"),
        (r"no such", "none of it", "none of it", ""),
    ],
)
def test_what_ends_where(pattern: str, text: str, shown: str, match: str, size: int) -> None:
    cuts = list(range(0, len(text), size))
    assert stream(text, cuts, [pattern]) == (shown, pattern if match else None, match)


def test_only_what_may_begin_a_match_is_held_back() -> None:
    matcher = StopRegexMatcher((), [r"\n+Q:"])
    pushes = [matcher.push(text) for text in ("a", "\n", "\nb", "\n", "Q", "A", "\nQ:x")]
    assert [emit for emit, _ in pushes] == ["a", "", "\n\nb", "", "", "\nQA", ""]
    assert pushes[-1][1] == r"\n+Q:"


def test_a_match_is_bounded_so_text_is_not_held_back_for_ever() -> None:
    matcher = StopRegexMatcher((), ["<.*>"])
    shown = "".join(matcher.push("<" + "x" * 99)[0] for _ in range(10))
    assert len(shown) >= 1000 - MAX_MATCH
    assert matcher.push("<y>")[1] == "<.*>"


def test_no_pattern_makes_a_text_slow() -> None:
    matcher = StopRegexMatcher((), ["(a*)*(a|aa)+b{3}"])
    start = time.process_time()
    assert matcher.push("a" * 20_000)[1] is None
    assert time.process_time() - start < 5.0  # a backtracking matcher would need 2**20000 steps


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is not a regular expression"),
        ("a*", "matches the empty text"),
        ("^$", "matches the empty text"),
        ("(a)\\1", "groupref is not supported"),
        ("a(?=b)", "assert is not supported"),
        ("(?>a)b", "atomic_group is not supported"),
        ("(?:a{100}){100}", "more than 1024 states"),
        ("a" * 1025, "1025 characters; the limit is 1024"),
        ("(" * 900 + "a" + ")" * 900, "the limit is 1024"),
        ("(" * 500 + "a" + ")" * 500, "nested too deep"),
        ("(" * 65 + "a" + ")" * 65, "nested too deep; the limit is 64"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_reason(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"stop_regex: .*{re.escape(message)}") as caught:
        SamplingParams(stop_regex=(pattern,))
    assert caught.value.field == "stop_regex"


def test_parentheses_that_are_characters_do_not_nest() -> None:
    for pattern in (
        "(" * 64 + "a" + ")" * 64,
        r"\(" * 100,
        "[(]" * 100,
        r"[\](]" * 100,
        "[](]" * 100,
    ):
        SamplingParams(stop_regex=(pattern,))


INFO = EngineInfo(
    model="m", vocab_size=300, context_length=200, page_size=1, num_pages=200,
    eos_token_ids=(), bos_token_id=None, chat_template=None,
)  # fmt: skip


@pytest.mark.parametrize("patterns", [("x",) * 17, ("x" * 257,)])
def test_their_number_and_length_are_limits_of_the_engine(patterns: tuple[str, ...]) -> None:
    sampling = SamplingParams(stop_regex=patterns)
    with pytest.raises(RequestError, match=r"stop_regex: .*the limit is"):
        check_request(Request(request_id="r", prompt_ids=(1,), sampling=sampling), INFO)


@pytest.mark.parametrize(
    ("keeps", "text", "ids"),
    [(False, "ab\u00e9", "ab\u00e9"), (True, "ab\u00e9 7.", "ab\u00e9 7.")],
)
def test_ids_leave_with_the_text_before_the_match(keeps: bool, text: str, ids: str) -> None:
    sampling = SamplingParams(stop_regex=(r" \d\.",), no_stop_trim=keeps, min_new_tokens=2)
    delivery = Delivery(sampling, vocabulary=ByteTokenizer().vocabulary(300))
    matched, got, delivered = None, "", b""
    for token_id in "ab\u00e9 7.c".encode():
        matched = delivery.push(token_id, None)
        new_ids, new_text, _ = delivery.take()
        got, delivered = got + new_text, delivered + bytes(new_ids)
        if matched is not None:
            break
    assert (got, delivered.decode(), matched) == (text, ids, r" \d\.")


def test_an_engine_stops_at_a_pattern() -> None:
    engine = fake_engine(lambda ids: ord("a") + len(ids) % 26)
    sampling = SamplingParams(max_new_tokens=50, temperature=0, stop_regex=("[x-z]b?", "gh+"))
    engine.submit([Request(request_id="r", prompt_ids=(97,), sampling=sampling)])
    text = ""
    while engine.has_work:
        for output in engine.step():
            text += output.text
    assert text == "bcdef" and output.finish is not None
    assert (output.finish.reason, output.finish.matched) == (FinishReason.STOP, "gh+")
