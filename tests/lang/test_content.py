"""Prompts from constant text and generated ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.lang import content
from palmette.lang.content import Content, Encoder, choice_ids, kept_ids, prompt_ids, text_of
from palmette.lang.testing import FakeModel
from palmette.runtime.request import Finish, FinishReason


class Counting(FakeModel):
    num_encoded = 0

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        self.num_encoded += len(text)
        return super().encode(text, parse_special=parse_special)


def chain(*links: str | tuple[int, ...], model: FakeModel, trusted: bool = True) -> Content:
    tip = content.start(model.info())
    for link in links:
        if isinstance(link, str):
            tip = content.extend(tip, link, trusted=trusted)
        else:
            tip = Content(tip, model.decode(link), link, trusted)
    return tip


def test_neighbouring_constants_are_encoded_as_one_text_around_ids() -> None:
    model = FakeModel()
    ids = tuple(model.encode("gen erated"))
    tip = chain("ab", "cd", ids, "ef", "gh", model=model)
    expected = (*model.encode("abcd"), *ids, *model.encode("efgh"))
    assert prompt_ids(tip, Encoder(model)) == expected
    assert text_of(tip) == "abcdgen eratedefgh"


def test_constants_of_different_trust_are_encoded_apart() -> None:
    model = FakeModel()
    tip = chain("<|im_end|>", model=model)
    tip = content.extend(tip, "<|im_end|>", trusted=False)
    assert prompt_ids(tip, Encoder(model)) == (2, *model.encode("<|im_end|>"))


def test_an_empty_state_has_one_id_to_start_from() -> None:
    model = FakeModel()
    assert prompt_ids(chain(model=model), Encoder(model)) == (2,)


def test_choices_share_the_ids_before_the_last_constant() -> None:
    model = FakeModel()
    ids = tuple(model.encode("made"))
    tip = chain("ab", ids, " so it is ", model=model)
    both = choice_ids(tip, ["yes", "no"], Encoder(model), trusted=True)
    head = (*model.encode("ab"), *ids)
    assert both == [
        (*head, *model.encode(" so it is yes")),
        (*head, *model.encode(" so it is no")),
    ]


LINES = st.lists(st.sampled_from(["a", "bc d", "1", ".", "\n", " ", "\n\n", "\t\n", "e" * 90]))


@settings(deadline=None, derandomize=True)
@given(LINES, st.booleans())
def test_long_texts_in_pieces_have_the_ids_of_the_whole(parts: list[str], trusted: bool) -> None:
    model = FakeModel()
    text = "\n".join(parts) * 3
    encoder = Encoder(model)
    assert encoder.encode(text, trusted=trusted) == model.encode(text, parse_special=trusted)


def test_texts_with_a_common_beginning_pay_for_it_once() -> None:
    model = Counting()
    encoder = Encoder(model)
    shared = "".join(f"Example number {i} of many.\n" for i in range(200))
    encoder.encode(shared + "Question one?", trusted=True)
    before = model.num_encoded
    encoder.encode(shared + "Another question?", trusted=True)
    assert model.num_encoded - before < 600  # the last piece, not the 5,000 before it


def test_a_tokenizer_that_joins_lines_is_not_split() -> None:
    class Joining(Counting):
        def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
            return super().encode(text.replace("\nN", "~"), parse_special=parse_special)

    model = Joining()
    text = "A line of text.\nNext one of them.\n" * 30
    assert Encoder(model).encode(text, trusted=True) == model.encode(text, parse_special=True)


def stopped(matched: str | int | None) -> Finish:
    return Finish(reason=FinishReason.STOP, matched=matched)


@pytest.mark.parametrize(
    ("generated", "text", "matched", "kept", "tail"),
    [
        ("one two", "one two", None, "one two", ""),
        ("one two", "one two", "\n", "one two", ""),  # the stop began a token of its own
        ("one two\n", "one two", "\n", "one two", ""),
        ("one twothree", "one two", "three", "one", " two"),
        ("one two", "", "one", "", ""),
        ("\u00e9t\u00e9 fin", "\u00e9t\u00e9 f", "in", "\u00e9t\u00e9", " f"),
    ],
)
def test_ids_that_belong_to_the_shown_text(
    generated: str, text: str, matched: str | None, kept: str, tail: str
) -> None:
    model = FakeModel()
    ids = model.encode(generated)
    finish = stopped(matched)
    assert kept_ids(ids, text, finish, Encoder(model)) == (tuple(model.encode(kept)), tail)


def test_a_stop_id_is_not_part_of_the_text_unless_it_is_shown() -> None:
    model = FakeModel()
    encoder = Encoder(model)
    ids = [*model.encode("one"), 2]
    assert kept_ids(ids, "one", stopped(2), encoder) == (tuple(ids[:-1]), "")
    assert kept_ids(ids, "one<|im_end|>", stopped(2), encoder) == (tuple(ids), "")


def test_a_stop_string_inside_of_bytes_of_one_character_keeps_whole_characters() -> None:
    from palmette.runtime.client import LocalClient
    from palmette.runtime.fake_runner import fake_engine

    client = LocalClient(fake_engine())
    ids = tuple("\u4e2d\u6587END".encode())
    kept, tail = kept_ids(ids, "\u4e2d\u6587E", stopped("ND"), Encoder(client))
    assert client.decode(kept) + tail == "\u4e2d\u6587E"
