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
