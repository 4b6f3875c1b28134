"""Which kind each matrix is kept in, what that costs, and what the user is told."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from palmette.kernels.cpu.ops import MatrixKind, MatrixRole
from palmette.runtime.cpu_runner import CpuRunner
from palmette.runtime.cpu_weights import (
    has_8_bit_activations,
    kept_bytes,
    kept_name,
    matrix_kind,
    plan_matrices,
)
from palmette.runtime.weights import open_checkpoint


@pytest.mark.parametrize(
    ("weights", "encodings", "kind"),
    [
        ("auto", {"f32"}, MatrixKind.F32),
        ("auto", {"bf16"}, MatrixKind.BF16),
        ("auto", {"f16"}, MatrixKind.F16),
        ("auto", {"bf16", "f16"}, MatrixKind.F32),
        ("auto", {"q8_0"}, MatrixKind.INT8_FAST),
        ("auto", {"q4_0", "q4_1", "q4_k"}, MatrixKind.UINT4_FAST),
        ("auto", {"q4_k", "q6_k"}, MatrixKind.INT8_FAST),
        ("auto", {"q5_k"}, MatrixKind.INT8_FAST),
        ("auto", {"q8_0", "bf16"}, MatrixKind.F32),
        ("stored", {"q8_0"}, MatrixKind.INT8),
        ("stored", {"q4_0", "q4_1"}, MatrixKind.UINT4),
        ("stored", {"q4_k"}, MatrixKind.F32),
        ("stored", {"q8_0", "q4_0"}, MatrixKind.F32),
        ("stored", {"bf16"}, MatrixKind.BF16),
        ("int4", {"q4_k"}, MatrixKind.UINT4_FAST),
        ("int4", {"q6_k"}, MatrixKind.INT8_FAST),
        ("int8", {"q4_1"}, MatrixKind.INT8_FAST),
        ("bf16", {"q4_1"}, MatrixKind.BF16),
        ("fp32", {"q4_1"}, MatrixKind.F32),
    ],
)
def test_kind_of_a_matrix(weights: str, encodings: set[str], kind: MatrixKind) -> None:
    assert matrix_kind(weights, encodings, 64) == kind


def test_rows_that_are_not_whole_groups_stay_float32() -> None:
    assert matrix_kind("int8", {"f32"}, 48) == MatrixKind.F32


@pytest.mark.parametrize(
    ("encoding", "weights", "name", "is_8_bit"),
    [
        ("q4_1", "auto", "q4_1", True),
        ("q4_1", "stored", "q4_1, 15-bit activations", False),
        ("q8_0", "auto", "q8_0", True),
        ("q6_k", "auto", "int8", True),
        ("q6_k", "stored", "fp32", False),
        ("bf16", "auto", "bf16", False),
        ("f16", "auto", "fp16", False),
        ("f32", "int8", "int8", True),
        ("q4_k", "int4", "q4_k", True),
    ],
)
def test_what_is_told(
    encoding: str, weights: str, name: str, is_8_bit: bool, tiny_models: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("wide", encoding))
    assert kept_name(weights, checkpoint) == name
    assert has_8_bit_activations(weights, checkpoint) == is_8_bit


@pytest.mark.parametrize("encoding", ["f32", "bf16", "q8_0", "q4_1", "q4_k", "q6_k"])
@pytest.mark.parametrize("weights", ["auto", "stored", "int8"])
def test_planned_bytes_are_those_of_the_matrices(
    encoding: str, weights: str, tiny_models: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("wide", encoding))
    kept = 0
    for plan in plan_matrices(weights, checkpoint):
        bits = {"F32": 32, "BF16": 16, "INT8": 8.5, "INT8_FAST": 8.5}.get(plan.kind.name, 5)
        kept += int(math.prod(plan.shape) * bits / 8)
    config = checkpoint.config
    norms = 4 * config.hidden_size * (2 * config.num_layers + 1)
    assert kept_bytes(weights, checkpoint) == kept + norms


def test_every_tensor_has_its_place_once(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("wide", "q4_k"))
    plans = list(plan_matrices("auto", checkpoint))
    names = [name for plan in plans for name in plan.names]
    assert len(names) == len(set(names))
    is_vector = {name for name in checkpoint.weights.names() if "norm" in name}
    assert set(names) | is_vector == set(checkpoint.weights.names())
    assert [plan.role for plan in plans[:4]] == list(MatrixRole)[:4]


def test_rounding_is_measured_and_logged(
    tiny_models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="palmette.runtime.cpu_runner"):
        checkpoint = open_checkpoint(tiny_models.gguf("wide", "q6_k"))
        CpuRunner(checkpoint, num_pages=4, page_size=16).close()
    (line,) = [r.getMessage() for r in caplog.records if "rounded" in r.getMessage()]
    assert "relative RMS error of the weights 0.00" in line and ".weight" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="palmette.runtime.cpu_runner"):
        checkpoint = open_checkpoint(tiny_models.gguf("wide", "q8_0"))
        CpuRunner(checkpoint, num_pages=4, page_size=16).close()
    assert not [r for r in caplog.records if "rounded" in r.getMessage()]
