"""Timing on the device, random models of real shapes, and results as JSON and a table.

With --dry everything is tiny and runs on the CPU, kernels under Triton's interpreter: it proves
that a part runs to its end, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashinfer_emulation
import numpy as np
import torch
import triton

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cuda.device import CudaDevice, Graph, HostDevice
from palmette.kernels.kv_dtype import KVDtype, kv_head_bytes
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.models.layout import EMBEDDING, LM_HEAD, decoder_layout
from palmette.runtime.models.matrix_loader import LoadMatrix, quantising

L2_BYTES = 64 << 20
_HEAD_START_CYCLES = 1_000_000  # about half a millisecond


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, help="the JSON file that is written")
    parser.add_argument("--format", default="bf16/bf16", help="of weights / of K and V")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which it is ended")
    parser.add_argument("--dry", action="store_true")
    return parser.parse_known_args()[0]


OPTIONS = _options()
DRY: bool = OPTIONS.dry
DEVICE = "cpu" if DRY else "cuda"
if DRY:  # so that what is measured of FlashInfer runs as well
    for _name in ("flashinfer", "flashinfer_jit_cache"):
        sys.modules[_name] = flashinfer_emulation


def model(name: str, **values: Any) -> ModelConfig:
    return ModelConfig(architecture=name, context_length=32768, rms_eps=1e-6, **values)


MODELS = {
    "smollm2-135m": model(
        "llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
        num_heads=9, num_kv_heads=3, head_dim=64, rope_theta=1e5, tie_embeddings=True,
    ),
    "qwen3-0.6b": model(
        "qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28,
        num_heads=16, num_kv_heads=8, head_dim=128, rope_theta=1e6, tie_embeddings=True,
        qk_norm=True,
    ),
    "llama-3.1-8b": model(
        "llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=5e5,
    ),
}  # fmt: skip


if DRY:
    _TINY = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
    MODELS = {
        name: replace(config, **_TINY, num_heads=2, num_kv_heads=1, head_dim=64)
        for name, config in MODELS.items()
    }


_BYTES = {"bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32, "fp8": 1.0}


def weight_bytes(config: ModelConfig, weights: str = "bf16") -> int:
    """Bytes that a step reads: all matrices, the embedding only where it is the head."""
    layout = decoder_layout(config)
    if not config.tie_embeddings:
        del layout[EMBEDDING]
    head = EMBEDDING if config.tie_embeddings else LM_HEAD
    kept = {head: "bf16"} if weights == "fp8" else {}
    return int(
        sum(
            int(np.prod(shape)) * _BYTES[kept.get(name, weights if len(shape) == 2 else "bf16")]
            for name, shape in layout.items()
        )
    )


def kv_bytes(config: ModelConfig, kv_dtype: KVDtype = "bf16") -> int:
    return 2 * config.num_layers * config.num_kv_heads * kv_head_bytes(kv_dtype, config.head_dim)


def load_matrices(config: ModelConfig, weights: str) -> LoadMatrix | None:
    """Random matrices in `weights`; None where they are numbers."""
    return None if weights == "bf16" else quantising(random_loader(config), weights)


def random_loader(
    config: ModelConfig, dtype: torch.dtype = torch.bfloat16
) -> Callable[[str], torch.Tensor]:
    layout = decoder_layout(config)
    generator = torch.Generator(DEVICE)

    def load(name: str) -> torch.Tensor:
        """The same numbers for a name in whatever order and dtype a model asks."""
        shape = layout[name]
        generator.manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        scale = 1.0 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        noise = noise * scale
        return (noise + 1 if "norm" in name else noise).to(dtype)

    return load


def checkpoint_of(config: ModelConfig) -> Any:
    return SimpleNamespace(config=config)


def decode_batch(
    lengths: list[int], page_size: int, *, shared: int = 0, seed: int = 0, num_pages: int
) -> ForwardBatch:
    """One new token per sequence, contexts of `lengths` with it, the first `shared` in common."""
    free = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    common, used = free[: shared // page_size], shared // page_size
    pages, kv, slots = [], [0], []
    for length in lengths:
        own = -(-length // page_size) - len(common)
        listed = np.concatenate((common, free[used : used + own]))
        used += own
        pages.append(listed)
        kv.append(kv[-1] + len(listed))
        slots.append(listed[(length - 1) // page_size] * page_size + (length - 1) % page_size)
    count = len(lengths)
    ends = np.array(lengths, np.int32)
    return ForwardBatch(
        token_ids=np.arange(count, dtype=np.int32) + 5,
        positions=ends - 1,
        kv_slots=np.array(slots, np.int32),
        qo_indptr=np.arange(count + 1, dtype=np.int32),
        kv_indptr=np.array(kv, np.int32),
        kv_page_ids=np.concatenate(pages),
        kv_last_page_len=((ends - 1) % page_size + 1).astype(np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
    )


def tree_batch(
    levels: Sequence[tuple[int, int]], page_size: int, *, num_pages: int
) -> ForwardBatch:
    """One new token for each leaf of a tree. levels: (tokens of each of its nodes, nodes below each
    node of the level above), root first. As in an engine whole pages are shared; where a node ends
    within one, those below it have copies."""
    free = iter(np.random.default_rng(0).permutation(num_pages).tolist())
    paths: list[list[int]] = [[]]  # pages of each node so far
    end = 0
    for depth, (tokens, branches) in enumerate(levels):
        end += tokens
        count = -(-end // page_size) if depth == len(levels) - 1 else end // page_size
        paths = [
            [*path, *(next(free) for _ in range(count - len(path)))]
            for path in paths
            for _ in range(branches)
        ]
    rows = len(paths)
    last = (end - 1) % page_size
    slots = np.array([path[-1] * page_size + last for path in paths], np.int32)
    return ForwardBatch(
        token_ids=np.arange(rows, dtype=np.int32) + 5,
        positions=np.full(rows, end - 1, np.int32),
        kv_slots=slots,
        qo_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=np.arange(0, rows * len(paths[0]) + 1, len(paths[0]), dtype=np.int32),
        kv_page_ids=np.array(paths, np.int32).reshape(-1),
        kv_last_page_len=np.full(rows, last + 1, np.int32),
        sample_rows=np.arange(rows, dtype=np.int32),
    )


def prefill_batch(new: int, cached: int, page_size: int) -> ForwardBatch:
    """One chunk of one sequence, of which the last row is sampled."""
    positions = np.arange(cached, cached + new, dtype=np.int32)
    count = -(-(cached + new) // page_size)
    return ForwardBatch(
        token_ids=positions % 1000,
        positions=positions,
        kv_slots=positions,
        qo_indptr=np.array([0, new], np.int32),
        kv_indptr=np.array([0, count], np.int32),
        kv_page_ids=np.arange(count, dtype=np.int32),
        kv_last_page_len=np.array([(cached + new - 1) % page_size + 1], np.int32),
        sample_rows=np.array([new - 1], np.int32),
    )


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def device_ms(function: Callable[[], Any], *, repeat: int = 20, cold: bool = True) -> float:
    """Median milliseconds on the device; cold: the L2 cache is overwritten before each, and the
    device kept busy while the host enqueues, so that kernels shorter than their launch count."""
    if DRY:
        return wall_ms(function)
    for _ in range(3):
        function()
    filler = torch.empty(4 * L2_BYTES, dtype=torch.int8, device="cuda") if cold else None
    pairs = []
    for _ in range(repeat):
        if filler is not None:
            filler.zero_()
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def wall_ms(function: Callable[[], Any], *, repeat: int = 30) -> float:
    """Mean milliseconds of `repeat` calls in a row, the device included."""
    if DRY:
        repeat = 1
    else:
        for _ in range(3):
            function()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    synchronize()
    return (time.perf_counter() - start) / repeat * 1000


def host_ms(function: Callable[[], Any], *, repeat: int = 10) -> float:
    """Median milliseconds until `function` returns, on an idle device that may still be at work."""
    function()
    times = []
    for _ in range(1 if DRY else repeat):
        synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    synchronize()
    return statistics.median(times) * 1000


def graphed(function: Callable[[], Any]) -> Callable[[], Any]:
    """The launches of `function` as one graph, so that the host's time does not count."""
    if DRY:
        return function
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay(_kept: Callable[[], Any] = function) -> None:
        """The graph reads what belongs to the function, which must live as long."""
        graph.replay()

    return replay


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(1 << 12 if DRY else 2 << 30, dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (device_ms(lambda: target.copy_(source), repeat=5) / 1000)


def gemm_rate() -> float:
    """FLOP per second of the library's large bf16 product on random data."""
    size = 64 if DRY else 8192
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (device_ms(lambda: a @ b, repeat=5) / 1000)


class _Noted:
    def __init__(self, graph: Graph, device: Any) -> None:
        self._graph, self._device = graph, device

    def replay(self) -> None:
        self._device.last = self._graph
        self._graph.replay()


class MeasuredDevice(HostDevice if DRY else CudaDevice):  # type: ignore[misc]
    """A runner's device that remembers the graph it replayed last."""

    last: Graph | None = None

    def capture(self, function: Callable[[], None]) -> Graph:
        return _Noted(super().capture(function), self)


def graph_ms(runner: Any, device: MeasuredDevice, batch: ForwardBatch) -> float:
    """Median milliseconds of the graph alone that serves this decode step."""
    device.last = None
    runner.launch(batch)  # uploads the arrays, and captures the graph if it must
    if device.last is None:
        raise RuntimeError(f"a step of {batch.num_tokens} rows ran without a graph")
    with torch.inference_mode():
        return device_ms(device.last.replay, repeat=8, cold=False)


def free_memory() -> None:
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def memory_gib() -> float:
    return 0.0 if DRY else torch.cuda.memory_reserved() / 2**30


class Results:
    """Rows of one part: printed as they come, written as JSON at the end."""

    def __init__(self, part: str) -> None:
        if OPTIONS.out is None:
            raise SystemExit(f"{part}: say where to write with --out FILE.json")
        self._out: Path = OPTIONS.out
        self._rows: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self._head = {
            "part": part,
            "device": "cpu, a dry run" if DRY else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        }
        self.failed = False

    def add(self, **row: Any) -> None:
        self._rows.append(row)
        print(
            "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
        )
        self._write()

    def check(self, name: str, passed: bool, **row: Any) -> None:
        self.failed |= not passed
        self.add(check=name, ok=passed, **row)

    def skip(self, what: str, why: str) -> None:
        self.add(skipped=what, why=why)

    def _write(self) -> None:
        seconds = round(time.monotonic() - self._started, 1)
        content = {**self._head, "seconds": seconds, "rows": self._rows}
        self._out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def finish(self) -> int:
        self._write()
        print(f"{time.monotonic() - self._started:.0f} s{', FAILED' if self.failed else ''}")
        return int(self.failed)
