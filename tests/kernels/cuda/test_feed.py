"""What a step takes from the choice before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels import sampling
from palmette.kernels.cuda.feed import feed_tokens, uniforms


def test_rows_take_their_id_from_the_choice_or_from_the_batch() -> None:
    chosen = torch.tensor([70, -1, 72, 73], dtype=torch.int32)
    given = torch.arange(300, dtype=torch.int32)
    sources = torch.full((300,), -1, dtype=torch.int32)
    sources[0], sources[5], sources[299] = 3, 1, 0
    expected = given.clone()
    expected[0], expected[5], expected[299] = 73, 0, 70  # a failed choice gives id 0
    assert feed_tokens(given, sources, chosen).equal(expected)
    assert len(feed_tokens(given[:0], sources[:0], chosen)) == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_row_puts_the_page_of_its_slot_into_its_list(page_size: int) -> None:
    ids = torch.zeros(3, dtype=torch.int32)
    lists = {
        "positions": torch.tensor([5, 33, 40], dtype=torch.int32),
        "slots": torch.tensor([7 * page_size, -1, 9 * page_size], dtype=torch.int32),
        "row_pages": torch.tensor([2, 4, -1], dtype=torch.int32),  # the others write nothing
        "page_ids": torch.full((60,), -5, dtype=torch.int32),
    }
    expected = lists["page_ids"].clone()
    expected[2 + 5 // page_size] = 7
    assert feed_tokens(ids, ids - 1, ids, lists=lists, page_size=page_size).equal(ids)
    assert lists["page_ids"].equal(expected)


@pytest.mark.parametrize("with_rows", [False, True])
def test_random_numbers_are_those_of_the_host(with_rows: bool) -> None:
    rng = np.random.default_rng(2)
    seeds = rng.integers(0, 2**64, 300, dtype=np.uint64)
    seeds[:3] = 0, 2**64 - 1, 2**63
    choices = rng.integers(0, 2**31, 300).astype(np.int32)
    tokens = rng.integers(0, 2**31 - 1, 700).astype(np.int32)
    rows = np.sort(rng.choice(700, 300, replace=False)).astype(np.int32)
    positions = tokens[rows] if with_rows else tokens[:300]
    expected = sampling.uniforms(seeds, choices, positions + np.int32(1))
    found = uniforms(
        torch.from_numpy(seeds.view(np.int64)),
        torch.from_numpy(choices),
        torch.from_numpy(tokens),
        torch.from_numpy(rows) if with_rows else None,
    )
    np.testing.assert_array_equal(found.numpy(), expected)
