"""Ids, text and logprobs leave together, and nothing that was delivered is taken back."""

from __future__ import annotations

import random

import pytest

from palmette.runtime.delivery import Delivery
from palmette.runtime.fake_runner import ByteTokenizer
from palmette.runtime.request import SamplingParams, TokenLogprob

VOCABULARY = ByteTokenizer().vocabulary(300)


def deliver(data: bytes, **sampling: object) -> tuple[list[int], str, str | None, list[str]]:
    """Ids, text, matched stop string, and the text of each step."""
    delivery = Delivery(SamplingParams(**sampling), vocabulary=VOCABULARY)  # type: ignore[arg-type]
    ids: list[int] = []
    texts: list[str] = []
    logprobs: list[int] = []
    matched = None

    def take() -> None:
        new_ids, text, new_logprobs = delivery.take()
        ids.extend(new_ids)
        texts.append(text)
        logprobs.extend(logprob.token_id for logprob in new_logprobs)

    for token_id in data:
        matched = delivery.push(token_id, TokenLogprob(token_id=token_id, logprob=0.0))
        take()
        if matched is not None:
            break
    matched = matched or delivery.end()
    assert delivery.end() is None or matched is not None
    take()
    assert logprobs == ids
    assert delivery.num_delivered == len(ids)
    return ids, "".join(texts), matched, texts


def test_without_stop_strings_every_id_leaves_at_once() -> None:
    ids, text, matched, texts = deliver(b"ab\xc3\xa9")
    assert (bytes(ids), text, matched) == (b"ab\xc3\xa9", "ab\u00e9", None)
    assert texts == ["a", "b", "", "\u00e9", ""]


def test_a_stop_string_of_many_bytes_leaves_no_id_of_its_character() -> None:
    ids, text, matched, _ = deliver("ab\u00e9c".encode(), stop=("\u00e9",))
    assert (bytes(ids), text, matched) == (b"ab", "ab", "\u00e9")


def test_a_stop_string_found_only_at_the_end() -> None:
    ids, text, matched, _ = deliver(b"ab\xf0\x9f", stop=("\ufffd",))
    assert (text, matched) == ("ab", "\ufffd")
    assert bytes(ids) == b"ab"


@pytest.mark.parametrize("seed", range(200))
def test_ids_decode_to_the_text_and_equal_a_search_in_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    data = bytes(rng.choice(b"aab ") for _ in range(rng.randrange(12)))
    stops = tuple("".join(rng.choice("ab ") for _ in range(rng.randrange(1, 4))) for _ in range(2))
    ids, text, matched, texts = deliver(data, stop=stops)
    whole = data.decode()
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert (text, matched) == (whole, None)
    else:
        longest = max(
            (s for s in stops if s in whole and whole.find(s) + len(s) == min(ends)), key=len
        )
        assert matched == longest
        assert text == whole[: min(ends) - len(longest)]
    assert bytes(ids).decode() == text
    assert "".join(texts) == text
