"""The fake runner finds what a real model would only answer wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.fake_runner import FakeRunner

PAGE = 4


def batch(rows: list[tuple[list[int], int, list[int]]], *, sample: bool = True) -> ForwardBatch:
    """Rows of (new token ids, first position, pages)."""
    token_ids, positions, slots, pages = [], [], [], []
    qo, kv, last = [0], [0], []
    for ids, start, row_pages in rows:
        for i, token_id in enumerate(ids, start=start):
            token_ids.append(token_id)
            positions.append(i)
            slots.append(row_pages[i // PAGE] * PAGE + i % PAGE)
        pages += row_pages
        qo.append(len(token_ids))
        kv.append(len(pages))
        last.append((start + len(ids) - 1) % PAGE + 1)
    arrays = (token_ids, positions, slots, qo, kv, pages, last, [end - 1 for end in qo[1:]])
    return ForwardBatch(
        **dict(
            zip(
                ForwardBatch.__dataclass_fields__,
                [np.array(values, np.int32) for values in arrays],
                strict=False,  # it is no run
            )
        )
    )


def runner() -> FakeRunner:
    return FakeRunner(num_pages=8, page_size=PAGE, vocab_size=50)


def logits(of: FakeRunner, step: ForwardBatch) -> list[list[float]]:
    handle = of.launch(step)
    return handle.logits.tolist()  # type: ignore[attr-defined, no-any-return]


def test_logits_depend_on_the_prefix_and_on_nothing_else() -> None:
    one, other = runner(), runner()
    whole = logits(one, batch([([1, 2, 3, 4, 5, 6], 0, [0, 1])]))
    logits(other, batch([([1, 2, 3], 0, [5])]))
    logits(other, batch([([9], 0, [2]), ([4, 5], 3, [5, 7])]))
    assert logits(other, batch([([6], 5, [5, 7])])) == whole
    assert logits(one, batch([([1, 2, 3, 4, 5, 7], 0, [2, 3])])) != whole


def test_a_suffix_may_rest_on_a_prefix_of_the_same_step_in_any_order() -> None:
    prefix, suffix = ([1, 2, 3, 4], 0, [3]), ([5, 6], 4, [3, 6])
    alone = logits(runner(), batch([([1, 2, 3, 4, 5, 6], 0, [0, 1])]))
    assert logits(runner(), batch([prefix, suffix]))[1:] == alone
    assert logits(runner(), batch([suffix, prefix]))[:1] == alone


@pytest.mark.parametrize(
    "wrong",
    [
        ([5], 4, [2, 1]),  # page 2 was never written
        ([5], 4, [1, 0]),  # page 1 holds another prefix's end
        ([5], 8, [0, 1, 2]),  # the first pages are of two prefixes
    ],
)
def test_pages_of_another_prefix_are_refused(wrong: tuple[list[int], int, list[int]]) -> None:
    fake = runner()
    fake.launch(batch([([1, 2, 3, 4], 0, [0]), ([9, 9, 9, 9, 8, 8, 8, 8], 0, [3, 1])]))
    with pytest.raises(AssertionError, match="prefix"):
        fake.launch(batch([wrong]))


def test_a_token_written_to_a_foreign_slot_is_refused() -> None:
    step = batch([([1, 2], 0, [0])])
    step.kv_slots[1] = 9
    with pytest.raises(AssertionError):
        runner().launch(step)


def test_pages_travel_by_copy_and_export() -> None:
    fake, other = runner(), runner()
    fake.launch(batch([([1, 2, 3, 4], 0, [0])]))
    fake.pool.copy([0], [5])
    other.pool.import_([7], fake.pool.export([5]))
    assert logits(fake, batch([([5], 4, [5, 6])])) == logits(other, batch([([5], 4, [7, 0])]))
    with pytest.raises(ValueError, match="bytes"):
        other.pool.import_([1, 2], fake.pool.export([5]))


def test_a_script_sees_all_ids_and_names_the_next() -> None:
    fake = FakeRunner(lambda ids: sum(ids) % 50, num_pages=8, page_size=PAGE, vocab_size=50)
    (row,) = logits(fake, batch([([1, 2, 3, 4, 5], 0, [0, 1])]))
    assert int(np.argmax(row)) == 15
