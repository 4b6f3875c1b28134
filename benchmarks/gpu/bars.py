"""The bars that the CUDA path is held to on an H200, and what the parts measured beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Parts = dict[str, dict[str, Any]]
Values = Iterator[tuple[str, float]]  # (of what, value)
LARGE = "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    limit: float
    unit: str
    values: Callable[[Parts], Values]
    is_most: bool = False  # the limit is to be stayed below

    def lines(self, parts: Parts) -> Iterator[str]:
        wanted = f"{'<' if self.is_most else '>='} {self._text(self.limit)}"
        found = list(self.values(parts))
        if not found:
            yield f"bar: {self.name}, {wanted}: not run"
        for what, value in found:
            is_met = value < self.limit if self.is_most else value >= self.limit
            name = f"{self.name}, {what}" if what else self.name
            yield f"bar: {name}, {wanted}: {self._text(value)}, {'met' if is_met else 'MISSED'}"

    def _text(self, value: float) -> str:
        if self.unit == "%":
            return f"{value * 100:.1f} %"
        return f"{value:.3g}{self.unit}"


def rows_with(parts: Parts, part: str, **values: Any) -> Iterator[Row]:
    """Rows of a part that have these values."""
    for row in parts.get(part, {"rows": []})["rows"]:
        if all(row.get(key) == value for key, value in values.items()):
            yield row


def _mode(row: Row) -> str:
    return "deterministic" if row["deterministic"] else "free"


def _decode(rows: int, least_context: int) -> Callable[[Parts], Values]:
    def values(parts: Parts) -> Values:
        for row in rows_with(parts, "model", model=LARGE, rows=rows):
            if row["context"] >= least_context:
                yield _mode(row), row["of_floor"]

    return values


def _prefill(parts: Parts) -> Values:
    for row in rows_with(parts, "model", model=LARGE, cached=0):
        if row["prefill"] >= 2048:
            yield _mode(row), row["of_gemm"]


def _beside_flashinfer(parts: Parts) -> Values:
    """Of all shapes the worst."""
    theirs = {
        (row["rows"], row["context"]): row["GBps"]
        for row in rows_with(parts, "attention", decode="flashinfer")
    }
    for mode in ("deterministic", "free"):
        ratios = [
            (row["GBps"] / theirs[shape], shape)
            for row in rows_with(parts, "attention", decode=mode)
            if (shape := (row["rows"], row["context"])) in theirs and row["context"] >= 1024
        ]
        if ratios:
            worst, (rows, context) = min(ratios)
            yield f"{mode}, at worst {rows} x {context}", worst


def _idle(parts: Parts) -> Values:
    for row in rows_with(parts, "engine", rows=64):
        if row.get("ahead", 0) > 0:
            yield row["engine"], row["us_idle"]


def _cascade(parts: Parts) -> Values:
    for row in rows_with(parts, "attention", forks=64, prefix=8192, of="triton"):
        yield "", row["speedup"]


BARS = (
    Bar("decode of the 8B shape in bf16, 1 row, of the floor", 0.75, "%", _decode(1, 1024)),
    Bar("the same, 64 rows of 2k, of the floor", 0.65, "%", _decode(64, 2048)),
    Bar("prefill of the 8B shape, of the GEMM rate", 0.60, "%", _prefill),
    Bar("decode attention, of FlashInfer's", 0.90, "%", _beside_flashinfer),
    Bar("idle between decode steps, 64 rows", 150.0, " us", _idle, is_most=True),
    Bar("64 forks over 8k, pages read once", 3.0, "x", _cascade),
)


def bars(parts: Parts) -> Iterator[str]:
    for bar in BARS:
        yield from bar.lines(parts)
