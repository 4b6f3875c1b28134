"""Masks of a step: what is filled once, what is told, what a row of another must not change."""

from __future__ import annotations

from typing import Any

import pytest

from palmette.constrained.llguidance_backend import LLGuidanceState
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarSpec, Whitespace
from palmette.runtime.fake_runner import fake_engine, run_all
from palmette.runtime.mask_rows import MaskRows
from palmette.runtime.request import Request, SamplingParams

NAMES = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "is_new": {"type": "boolean"}},
    "required": ["name", "is_new"],
    "additionalProperties": False,
}


def ask(name: str, *, choice: int = 0, **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(b"Say"),
        grammar=GrammarSpec.json_schema(NAMES, whitespace=Whitespace.COMPACT),
        sampling=SamplingParams(max_new_tokens=60, **sampling),
        choice_index=choice,
    )


@pytest.fixture
def num_filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step of the engine has filled."""
    counts: list[int] = []
    fill_batch = LLGuidanceState.fill_batch

    def counting(states: Any, rows: Any, masks: Any) -> None:
        counts.append(len(states))
        fill_batch(states, rows, masks)

    monkeypatch.setattr(LLGuidanceState, "fill_batch", staticmethod(counting))
    return counts


def test_forks_at_the_same_place_are_filled_once(num_filled: list[int]) -> None:
    """rt-fork: the states are each their own, which the different ends of the forks show."""
    engine = fake_engine()
    got = run_all(engine, [ask(f"{i}", choice=i, temperature=1.0, seed=3) for i in range(4)])
    texts = [got[f"{i}"].text for i in range(4)]
    assert num_filled[0] == 1  # all at the start
    assert max(num_filled) == 4  # each on its own way
    assert len(set(texts)) == 4
    for i, text in enumerate(texts):
        alone = ask("alone", choice=i, temperature=1.0, seed=3)
        assert run_all(fake_engine(), [alone])["alone"].text == text


def test_equal_texts_need_one_fill_to_the_end(num_filled: list[int]) -> None:
    got = run_all(fake_engine(), [ask(f"{i}", choice=i, temperature=0.0) for i in range(3)])
    assert len({got[f"{i}"].text for i in range(3)}) == 1
    assert set(num_filled) == {1}


def test_stop_ids_of_every_word_follow_the_end_of_the_text() -> None:
    """Ids 31 and 63 are the sign bits of their words; 7 and 95 end other texts."""
    rows = MaskRows(4, frozenset({7, 95}))
    masks = rows.rows(2)
    assert (masks == -1).all()
    for place, may_end in enumerate((False, True)):
        rows._set_stops(masks, place, frozenset({31, 63, 64}), may_end)
        banned = set(range(128)) - set(allowed_ids(masks[place]).tolist())
        assert banned == ({7, 95} if may_end else {7, 31, 63, 64, 95})
