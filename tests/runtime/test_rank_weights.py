"""What a rank reads of a tensor, and what is never in its memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from palmette.runtime import rank_weights
from palmette.runtime.models.shard import WeightPart
from palmette.runtime.rank_weights import cut, row_peaks
from palmette.runtime.weight_tensor import WeightTensor

ROWS, COLUMNS = 512, 2048


def tensor(encoding: str, row_bytes: int) -> WeightTensor:
    data = np.random.default_rng(1).integers(0, 60, (ROWS, row_bytes), np.uint8)
    data.flags.writeable = False
    return WeightTensor(
        name="w", shape=(ROWS, COLUMNS), encoding=encoding, data=data, source="file"
    )


def peak_bytes(work: Any) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "part",
    [WeightPart(rows=slice(128, 256)), WeightPart(columns=slice(512, 1024))],
    ids=["rows", "columns"],
)
@pytest.mark.parametrize(("encoding", "row_bytes"), [("bf16", 2 * COLUMNS), ("q8_0", 34 * 64)])
def test_a_quarter_takes_a_quarter(encoding: str, row_bytes: int, part: WeightPart) -> None:
    whole = tensor(encoding, row_bytes)
    expected = whole.to_float32()[part.rows, part.columns]
    np.testing.assert_array_equal(cut(whole, part).to_float32(), expected)
    most = peak_bytes(lambda: whole.to_float32())
    assert peak_bytes(lambda: cut(whole, part)) < 50_000  # a view
    assert peak_bytes(lambda: cut(whole, part).to_float32()) < 0.3 * most


def test_columns_inside_of_blocks_are_decoded_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_weights, "_CHUNK_NUMBERS", 16 * COLUMNS)
    whole = tensor("q8_0", 34 * 64)
    part = WeightPart(columns=slice(100, 612))
    found = cut(whole, part)
    assert (found.encoding, found.shape) == ("f32", (ROWS, 512))
    np.testing.assert_array_equal(found.to_float32(), whole.to_float32()[:, 100:612])
    assert peak_bytes(lambda: cut(whole, part)) < 0.4 * peak_bytes(lambda: whole.to_float32())
    outline = cut(whole, part, is_outline=True)
    assert (outline.encoding, outline.shape) == ("f32", (ROWS, 512))
    assert outline.data.size == 0


def test_peaks_are_those_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_weights, "_CHUNK_NUMBERS", 100 * COLUMNS)
    whole = tensor("bf16", 2 * COLUMNS)
    peaks = row_peaks(cut(whole, WeightPart(columns=slice(0, 512))))
    assert peaks is not None
    np.testing.assert_array_equal(peaks, np.abs(whole.to_float32()).max(axis=1))
    assert row_peaks(cut(whole, WeightPart(rows=slice(0, 128)))) is None
    below = cut(whole, WeightPart(rows=slice(500, 512), num_padded=3))
    np.testing.assert_array_equal(below.to_float32()[12:], np.zeros((3, COLUMNS)))
