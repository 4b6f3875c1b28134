"""The integers of quantised tensors against ggml's own decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from palmette.runtime.group_codes import GROUP, read_group_codes
from palmette.runtime.weights import open_checkpoint

NAME = "model.layers.0.self_attn.q_proj.weight"  # its rows are reordered


@pytest.mark.parametrize(
    ("model", "kind"), [("llama", "q8_0"), ("llama", "q4_0"), ("llama", "q4_1"), ("wide", "q4_k")]
)
def test_codes_and_scales_make_the_numbers_of_the_file(
    model: str, kind: str, tiny_models: Any
) -> None:
    tensor = open_checkpoint(tiny_models.gguf(model, kind)).weights.get(NAME)
    expected = tensor.to_float32()
    found = read_group_codes(tensor)
    rows, columns = tensor.shape
    assert found.codes.shape == (rows, columns // GROUP, GROUP)
    assert found.scales.shape == (rows, columns // GROUP)
    codes = found.codes.astype(np.float32)
    if kind != "q8_0":
        assert found.codes.dtype == np.uint8 and found.codes.max() == 15
    if kind == "q4_0":
        codes -= 8
    minimums = 0 if found.minimums is None else found.minimums[..., None]
    numbers = found.scales[..., None] * codes + minimums
    np.testing.assert_array_equal(numbers.reshape(rows, columns), expected)
    assert (found.minimums is None) == (kind in ("q8_0", "q4_0"))
