"""Workloads are the same for the same seed, and have the counts that their table says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from palmette.runtime.load import open_tokenizer
from palmette.server.bench_schemas import SCHEMAS
from palmette.server.bench_workloads import WORKLOADS, Scale, TextSource, build, select


@pytest.mark.parametrize("workload_id", WORKLOADS)
@pytest.mark.parametrize("scale", list(Scale))
def test_a_seed_gives_one_workload(workload_id: str, scale: Scale) -> None:
    first = build(workload_id, seed="1", scale=scale)
    assert build(workload_id, seed="1", scale=scale) == first


@pytest.mark.parametrize("workload_id", WORKLOADS)
def test_another_seed_has_other_prompts(workload_id: str) -> None:
    first = build(workload_id, seed="1")
    second = build(workload_id, seed="2")
    assert not {c.text for c in first.calls} & {c.text for c in second.calls}


def test_a_prompt_stays_as_it_is_across_versions() -> None:
    assert TextSource("0/0/W1").text(5) == "just grand bed engine blood"


@pytest.mark.parametrize(
    ("workload_id", "calls", "concurrency", "max_tokens"),
    [
        ("W1", 1, 1, 128),
        ("W2-8", 32, 8, 128),
        ("W2-16", 32, 16, 128),
        ("W3", 64, 8, 16),
        ("W3-own", 64, 8, 16),
        ("W4", 8 * 6, 8, 48),
        ("W5", 1 + 4 + 16 + 64, 16, 32),
        ("W6", 32, 8, 160),
    ],
)
def test_the_table_of_workloads(
    workload_id: str, calls: int, concurrency: int, max_tokens: int
) -> None:
    workload = build(workload_id, seed="0")
    assert len(workload.calls) == calls
    assert workload.concurrency == concurrency
    assert {call.max_tokens for call in workload.calls} == {max_tokens}


@pytest.mark.parametrize(
    ("workload_id", "calls"),
    [("W1", 1), ("W2-8", 8), ("W2-16", 16), ("W3", 16), ("W4", 6), ("W5", 21), ("W6", 8)],
)
def test_the_small_scale_has_about_a_quarter(workload_id: str, calls: int) -> None:
    assert len(build(workload_id, seed="0", scale=Scale.SMALL).calls) == calls


def test_prompts_have_their_lengths() -> None:
    def lengths(workload_id: str) -> Counter[int]:
        return Counter(len(c.text.split()) for c in build(workload_id, seed="0").calls)

    assert lengths("W1") == {128: 1}
    assert lengths("W2-8") == {256: 32}
    assert lengths("W3") == {1040: 64}
    assert lengths("W4") == {32: 48}
    assert lengths("W5") == {600: 1, 8: 84}
    assert lengths("W7") == {64: 4, 4000: 1}


def test_w3_shares_what_it_says_and_w3_own_nothing() -> None:
    shared = [c.text.split() for c in build("W3", seed="0").calls]
    own = [c.text.split() for c in build("W3-own", seed="0").calls]
    assert len({tuple(words[:1000]) for words in shared}) == 1
    assert len({tuple(words[1000:]) for words in shared}) == 64
    assert len({tuple(words[:8]) for words in own}) == 64


def test_w4_is_chains_with_one_system_message() -> None:
    calls = build("W4", seed="0").calls
    assert [call.parent for call in calls[:7]] == [None, 0, 1, 2, 3, 4, None]
    assert len({call.system for call in calls if call.parent is None}) == 1
    assert all(call.is_chat for call in calls)


def test_w5_is_a_tree_of_branch_four() -> None:
    calls = build("W5", seed="0").calls
    children = Counter(call.parent for call in calls)
    assert children.pop(None) == 1
    assert set(children.values()) == {4}
    assert len(children) == 1 + 4 + 16
    assert all(call.parent is None or call.parent < i for i, call in enumerate(calls))


def test_w6_uses_four_schemas_that_are_schemas() -> None:
    calls = build("W6", seed="0").calls
    assert Counter(call.call_id.split(".")[1] for call in calls) == {name: 8 for name, _ in SCHEMAS}
    for _, schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


def test_w7_has_one_arrival() -> None:
    assert [call.is_arrival for call in build("W7", seed="0").calls] == [False] * 4 + [True]


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 333])
def test_counted_texts_are_exact_where_a_word_fits(num_tokens: int) -> None:
    def count(text: str) -> int:
        return 1 + (len(text) > 6)  # long words are two tokens

    words = TextSource("0", count)
    first, second = words.text(num_tokens), words.text(num_tokens, continues=True)
    assert sum(count(f" {w}" if i else w) for i, w in enumerate(first.split())) == num_tokens
    assert second.startswith(" ")
    assert sum(count(f" {w}") for w in second.split()) == num_tokens


def test_counted_texts_are_never_longer() -> None:
    text = TextSource("0", lambda text: len(text.encode())).text(100)
    assert 95 <= len(text.encode()) <= 100


@pytest.mark.model
def test_prompts_are_exact_for_the_default_model(default_model: Path) -> None:
    tokenizer = open_tokenizer(default_model)
    workload = build("W3", seed="0", count=lambda text: len(tokenizer.encode(text)))
    assert {len(tokenizer.encode(call.text)) for call in workload.calls} == {1040}


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["W2"], ("W2-8", "W2-16")),
        (["w7", "W1"], ("W1", "W7")),
        (["W3-own"], ("W3-own",)),
        (["W3"], ("W3", "W3-own")),
    ],
)
def test_select(names: list[str], ids: tuple[str, ...]) -> None:
    assert select(names) == ids


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="W9 is not known"):
        select(["W1", "W9"])
    with pytest.raises(ValueError, match="W9 is not known"):
        build("W9", seed="0")
