"""Every kernel on the device against the reference operations, before anything is timed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_cases import Case, Sequence_, make_batch, poisoned_pool, random_rows
from measure import (
    DEVICE,
    DRY,
    MeasuredDevice,
    Results,
    checkpoint_of,
    model,
    prefill_batch,
    random_loader,
)
from side_by_side import Row, check_all, rows_of

from palmette.kernels import reference
from palmette.kernels.cuda import flashinfer, gemm
from palmette.kernels.cuda.add_rms_norm import add_rms_norm
from palmette.kernels.cuda.logits import DeviceLogits, DeviceSampler, StepOutput
from palmette.kernels.cuda.rope_write import rope_write
from palmette.kernels.cuda.silu_mul import silu_mul
from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import ReferenceAttention
from palmette.kernels.sampling import RowSampling, SampleBatch, sample_rows
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.models.decoder import Decoder
from palmette.runtime.tensor_parallel.group import TensorGroup

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FORKS = (*(Sequence_(1, 530 + i, "a", 512) for i in range(20)), Sequence_(1, 40))
SEQUENCES = ((1, 0), (1, 700), (37, 0), (130, 300), (1, 255), (2, 255), (0, 20))
OURS = ("deterministic", "free", "unshared")
WIDTH, VOCABULARIES = (64, (300,)) if DRY else (4096, (49152, 151936))


def attention_cases() -> list[Case]:
    if DRY:
        dry = Case(heads=2, kv_heads=1, dtype=torch.float32, sequences=((1, 20), (5, 14)))
        return [dry, replace(dry, dtype=torch.bfloat16, sequences=FORKS[:4])]
    cases = [
        Case(heads=heads, kv_heads=kv, head_dim=dim, dtype=kind, sequences=SEQUENCES)
        for kind, heads, kv, dim in (
            (torch.bfloat16, 9, 3, 64),
            (torch.float16, 8, 8, 96),
            (torch.bfloat16, 32, 8, 128),
            (torch.bfloat16, 8, 1, 256),
        )
    ]
    cases.append(Case(head_dim=64, sequences=SEQUENCES))
    for size in (1, 64):
        cases.append(Case(page_size=size, dtype=torch.bfloat16, sequences=SEQUENCES))
    cases.append(Case(dtype=torch.bfloat16, window=100, sequences=SEQUENCES))
    cases.append(Case(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, sequences=FORKS))
    return cases


def check_attention(results: Results, case: Case, modes: tuple[str, ...]) -> None:
    batch = make_batch(case)
    q, k, v = random_rows(case, batch, DEVICE)
    expected: torch.Tensor | None = None
    name = f"{str(case.dtype)[6:]} H{case.heads}/{case.kv_heads} D{case.head_dim}"
    for mode in ("reference", *modes):
        pool = poisoned_pool(case, DEVICE)
        if mode == "reference":
            attention: Any = ReferenceAttention(pool, sliding_window=case.window)
        elif mode == "flashinfer":
            attention = flashinfer.FlashInferAttention(
                pool, num_heads=case.heads, sliding_window=case.window
            )
        else:
            attention = TritonAttention(
                pool,
                num_heads=case.heads,
                sliding_window=case.window,
                deterministic=mode != "free",
                share=mode != "unshared",
            )
        attention.plan(batch)
        found = attention.run(1, q, k, v)
        if expected is None:
            expected = found
            continue
        error = (found.float() - expected.float()).abs().max().item()
        passed = error < TOLERANCE[case.dtype]  # NaN fails
        results.check(f"attention {name} page {case.page_size} {mode}", passed, error=error)
        if mode == "deterministic":
            first = found
        if mode == "unshared":
            same = torch.equal(found, first)
            results.check(f"attention {name} same bits shared or not", same)


def check_flashinfer(results: Results, case: Case) -> None:
    reason = flashinfer.why_not(case.head_dim, case.dtype)
    if reason is None:
        check_attention(results, case, ("flashinfer",))
    else:
        results.skip(f"flashinfer {str(case.dtype)[6:]} D{case.head_dim}", reason)


def check_operations(results: Results) -> None:
    def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        error = (found.float() - expected.float()).abs().max().item()
        results.check(name, error <= tolerance, error=error)

    for kind in (torch.bfloat16, torch.float32):
        fine = 2e-5 if kind == torch.float32 else 0.26
        x = torch.randn(33, 2 * WIDTH, device=DEVICE, dtype=kind)
        gate, up = x[:, :WIDTH].contiguous(), x[:, WIDTH:].contiguous()
        compare(f"silu_mul {kind}", silu_mul(x), reference.silu_mul(gate, up), fine)
        weight, before = torch.randn(WIDTH, device=DEVICE, dtype=kind), up.clone()
        found = add_rms_norm(gate, weight, 1e-5, before)
        compare(f"add_rms_norm {kind}", found, reference.rms_norm(gate + up, weight, 1e-5), fine)
        qkv = torch.randn(5, 48 * 128, device=DEVICE, dtype=kind)
        keys, values = torch.zeros(2, 64, 8, 128, device=DEVICE, dtype=kind)
        angles = torch.rand(100, 64, device=DEVICE) * 6
        positions = torch.tensor([0, 99, 5, 5, 7], device=DEVICE, dtype=torch.int32)
        slots = torch.tensor([3, 0, -1, 60, 9], device=DEVICE, dtype=torch.int32)
        q = rope_write(
            qkv, keys, values, positions=positions, slots=slots, cos=angles.cos(),
            sin=angles.sin(), num_heads=32,
        )  # fmt: skip
        turn = (angles.cos()[positions.long()], angles.sin()[positions.long()])
        parts = qkv.view(5, 48, 128).split((32, 8, 8), dim=1)
        compare(f"rope {kind}", q, reference.rope(parts[0], *turn), fine)
        there = slots >= 0
        expected = reference.rope(parts[1], *turn)[there]
        compare(f"key write {kind}", keys[slots[there].long()], expected, fine)
        compare(f"value write {kind}", values[slots[there].long()], parts[2][there], 0.0)
        for rows in (1, 70) if DRY else (1, 64, 300):
            depth, columns = (64, 40) if DRY else (1024, 3000)
            x, w = (torch.randn(n, depth, device=DEVICE, dtype=kind) for n in (rows, columns))
            compare(
                f"gemm {kind} {rows}", gemm.linear(x, w), (x.double() @ w.double().T),
                2e-3 if kind == torch.float32 else 0.6,
            )  # fmt: skip


def sampling_params(rows: int, vocab_size: int) -> SampleBatch:
    rng = np.random.default_rng(0)

    def pick(values: list[float], kind: Any) -> np.ndarray:
        return np.array(values, kind)[np.arange(rows) % len(values)]

    none = np.empty(0, np.int32)
    special = RowSampling(
        bias_ids=np.array([3, 9], np.int32),
        bias_values=np.array([4, -4], np.float32),
        output_ids=np.array([9, 70], np.int32),
        output_counts=np.array([1, 2], np.int32),
        prompt_ids=np.array([5, 9], np.int32),
        banned_ids=none,
    )
    return SampleBatch(
        targets=pick([-1, -1, -1, 7, -1], np.int32),
        temperature=pick([0, 1, 0.7, 1, 1.5, 0.3, 1], np.float32),
        top_k=pick([0, 0, 40, 1, 1000], np.int32),
        top_p=pick([1, 0.9, 0.95, 1], np.float32),
        min_p=pick([0, 0, 0.05], np.float32),
        presence_penalty=pick([0, 0.5], np.float32),
        frequency_penalty=pick([0, 0.25, 0], np.float32),
        repetition_penalty=pick([1, 1.2], np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        choices=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        rows=tuple(special if i % 4 == 1 else None for i in range(rows)),
        num_top=pick([-1, 0, 5], np.int32),
        masks=rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32))).astype(np.int32),
        has_mask=np.arange(rows) % 3 == 0,
    )


def check_sampler(results: Results) -> None:
    for vocab_size in VOCABULARIES:
        rows = 4 if DRY else 60
        logits = torch.randn(rows, vocab_size, device=DEVICE) * 3
        params = sampling_params(rows, vocab_size)
        expected = sample_rows(logits.cpu().numpy(), params)
        sampler = DeviceSampler(MeasuredDevice(), vocab_size)
        found = DeviceLogits(StepOutput(logits), sampler).sample(params)
        same = int((found.token_ids == expected.token_ids).sum())
        wanted = ~np.isnan(expected.logprobs) & (found.token_ids == expected.token_ids)
        error = float(np.abs(found.logprobs - expected.logprobs)[wanted].max())
        tops = all(map(np.array_equal, found.top_ids, expected.top_ids))
        results.check(
            f"sampler V{vocab_size}",
            same >= rows - 1 and error < 1e-4 and tops,  # a draw may fall on a rounding
            same=f"{same}/{rows}",
            error=error,
        )


def check_model(results: Results, attention: str = "triton") -> None:
    """Prefill, a decode in its graph and a longer chunk, against the plain decoder."""
    hidden, layers = (32, 1) if DRY else (512, 3)
    config = model(
        "qwen3", vocab_size=160 if DRY else 1000, hidden_size=hidden,
        intermediate_size=2 * hidden, num_layers=layers, num_heads=8, num_kv_heads=2, head_dim=64,
        rope_theta=1e6, qk_norm=True,
    )  # fmt: skip
    pool: dict[str, Any] = {"num_pages": 64, "page_size": 16}
    dtypes = (("fp32", torch.float32, 1e-3), ("bf16", torch.bfloat16, 0.3))
    if attention == "flashinfer":
        dtypes = dtypes[1:]
    for dtype, kind, tolerance in dtypes[:1] if DRY else dtypes:
        runner = CudaRunner(
            checkpoint_of(config), dtype=dtype, graph_rows=(1, 4), device=MeasuredDevice(),
            attention=attention, deterministic=attention == "triton",
            load=random_loader(config, kind), **pool,
        )  # fmt: skip
        with torch.inference_mode():
            slow = Decoder(config, random_loader(config, kind), 1024)
            plain = ReferenceAttention(PagedKVPool(
                num_layers=layers, num_kv_heads=2, head_dim=64, dtype=kind, device=DEVICE, **pool
            ))  # fmt: skip
            for new, cached in ((70, 0), (1, 70), (9, 71)):
                batch = prefill_batch(new, cached, 16)
                plain.plan(batch)
                ids, positions, rows = (
                    torch.from_numpy(a.astype(np.int64)).to(DEVICE)
                    for a in (batch.token_ids, batch.positions, batch.sample_rows)
                )
                expected = slow.forward(ids, positions, rows, plain)
                found = runner.launch(batch).logits
                error = (found - expected).abs().max().item()
                what = f"model {dtype} {attention} {new} after {cached}"
                results.check(what, error < tolerance, error=error)
        used = runner.graph_replays == 1
        results.check(f"model {dtype} {attention} used its graph", used)


def check_collectives(results: Results) -> None:
    """What ranks compute together, called and captured: of one rank, which has NCCL as well."""
    device = MeasuredDevice()
    shape = 600, 512  # beyond what an ordered sum sends all to all
    x = torch.randn(shape, device=DEVICE).bfloat16()
    for is_ordered in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            group = TensorGroup(
                0, 1, folder=Path(folder), device=device.torch_device, timeout_s=60.0,
                is_ordered=is_ordered,
            )  # fmt: skip
            found = torch.zeros(3, *shape, device=DEVICE, dtype=torch.bfloat16)

            def call(group: TensorGroup = group, found: torch.Tensor = found) -> None:
                found[0].copy_(group.sum(x.clone()))
                found[1].copy_(group.join(x))
                found[2].copy_(x)
                group.share(found[2])

            what = f"collectives{' in order' if is_ordered else ''}"
            device.submit(call)
            results.check(f"{what} called", bool((found == x).all()))
            graph = device.capture(call)
            found.zero_()
            graph.replay()
            results.check(f"{what} captured", bool((found == x).all()))
            del graph
            group.abort()


def all_steps() -> list[Callable[[Results], None]]:
    has_flashinfer = flashinfer.why_not(64) is None
    cases = attention_cases()
    return [
        check_operations,
        check_sampler,
        check_model,
        check_collectives,
        *(lambda results, case=case: check_attention(results, case, OURS) for case in cases),
        # last, as it may have to compile its kernels
        *(
            lambda results, case=case: check_flashinfer(results, case)
            for case in cases
            if case.dtype != torch.float32
        ),
        *([lambda results: check_model(results, "flashinfer")] if has_flashinfer else []),
    ]


def check_rows(index: int) -> list[Row]:
    return rows_of(all_steps()[index], index)


def main() -> int:
    results = Results("check")
    check_all(results, len(all_steps()), check_rows)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
