"""FlashInfer's backend: its control flow over an emulation, and its calls against the original."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flashinfer_emulation
import flashinfer_signatures
import numpy as np
import pytest
import torch
from attention_cases import Case, Sequence_, make_batch, poisoned_pool, random_rows

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda import flashinfer
from palmette.kernels.cuda.device import HostDevice
from palmette.kernels.cuda.flashinfer_filters import FlashInferFilters
from palmette.kernels.cuda.logits import DeviceLogits, DeviceSampler, StepOutput
from palmette.kernels.reference import ReferenceAttention
from palmette.kernels.sampling import SampleBatch, sample_rows
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.torch_runner import TorchRunner
from palmette.runtime.weights import open_checkpoint

TREE = tuple(Sequence_(1, 1040 + i, "a", 1024) for i in range(6))
CASES = {
    "decodes": Case(sequences=((1, 0), (1, 15), (1, 300), (1, 16))),
    "mixed": Case(sequences=((1, 20), (12, 4), (1, 0), (2, 255))),
    "group of six": Case(heads=6, kv_heads=1, sequences=((1, 20), (1, 33))),
    "window": Case(window=20, sequences=((1, 300), (1, 7))),
    "extend in a window": Case(window=20, sequences=((30, 10), (1, 300))),
    "shared": Case(sequences=(*TREE[:2], Sequence_(1, 40), *TREE[2:])),
    "shared in a window": Case(window=100, sequences=TREE[:3]),
    "bf16": Case(dtype=torch.bfloat16, sequences=TREE[:3]),
    "nothing": Case(sequences=((0, 20),)),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_emulation)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    batch = make_batch(case)
    q, k, v = random_rows(case, batch)
    expected = ReferenceAttention(poisoned_pool(case), sliding_window=case.window)
    found = flashinfer.FlashInferAttention(
        poisoned_pool(case), num_heads=case.heads, sliding_window=case.window
    )
    for attention in (expected, found):
        attention.plan(batch)
    results = [attention.run(1, q, k, v).float() for attention in (found, expected)]
    torch.testing.assert_close(*results, rtol=0, atol=TOLERANCE[case.dtype])


def test_it_plans_once_a_step_and_runs_once_a_layer() -> None:
    case = CASES["shared"]
    attention = flashinfer.FlashInferAttention(poisoned_pool(case), num_heads=case.heads)
    batch = make_batch(case)
    attention.plan(batch)
    for layer in range(2):
        attention.run(layer, *random_rows(case, batch))
    wrappers = attention._wrappers.eager(2)
    assert [wrapper.calls for wrapper in wrappers] == [["plan", "run", "run"]] * 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "tiles"),
    [
        (9, 3, 64, 0),  # less than recommended
        (32, 8, 128, 71 * 128),  # 256 rows as 64 entries: 8 tiles of rows and one more for each
        (64, 8, 128, 79 * 128),
        (64, 64, 256, 271 * 16),
    ],
)
def test_the_workspace_holds_the_largest_plan(
    heads: int, kv_heads: int, head_dim: int, tiles: int
) -> None:
    """Of graphs of 256 rows, whose parts for Llama 3.1 8B are more than the recommended 128 MiB."""
    found = flashinfer.workspace_bytes(heads, kv_heads, head_dim)
    assert found >= max(128 << 20, 4 * heads * tiles * (head_dim + 1))
    assert found <= 512 << 20


def test_a_plan_waits_for_the_same_wrappers_last_one_alone() -> None:
    """The other levels' plans of the step lie behind the step before, which is still computed."""
    case = CASES["shared"]
    attention = flashinfer.FlashInferAttention(poisoned_pool(case), num_heads=case.heads)
    calls: list[tuple[str, int]] = []

    class Event:
        def record(self) -> None:
            calls.append(("record", id(self)))

        def synchronize(self) -> None:
            calls.append(("wait", id(self)))

    attention._make_event = Event
    attention.plan(make_batch(case))
    (_, shared), (_, own) = calls
    assert shared != own and [what for what, _ in calls] == ["record", "record"]
    calls.clear()
    attention.plan(make_batch(case))
    assert calls == [(what, event) for event in (shared, own) for what in ("wait", "record")]


@pytest.mark.parametrize("share", [True, False])
def test_a_replay_reads_the_buffers_of_its_graph(
    share: bool, tiny_models: Any, model_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of 1, 3 and 2 rows over graphs of 1 and 4, one of them a cascade: as torch's."""
    from palmette.kernels.cuda import cascade

    monkeypatch.setattr(cascade, "MIN_GROUP_TOKENS", 16)
    path = tiny_models.directory("qwen3")
    prompt = [int(token) for token in np.random.default_rng(7).integers(3, 300, 50)]
    pool = {"num_pages": 32, "page_size": 16}
    plain = TorchRunner(open_checkpoint(path), **pool)
    runner = CudaRunner(
        open_checkpoint(path),
        dtype="fp32",
        device=HostDevice(),
        graph_rows=(1, 4),
        attention="flashinfer",
        share_pages=share,
        **pool,
    )
    expected, found = model_driver(plain), model_driver(runner)
    steps = [{"a": prompt[:35]}, {"a": prompt[35:36]}, {"b": prompt[32:34], "c": prompt[40:45]}]
    steps += [{"a": [5], "b": [6], "c": [7]}, {"c": [8], "b": [9]}, {"a": [10]}]
    for index, parts in enumerate(steps):
        if index == 2:
            for driver in (expected, found):
                driver.share("b", "a", 32)
        want = np.concatenate(list(expected.step(parts).values()))
        logits = runner.launch(found.batch(parts)).logits.numpy()
        np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)
    assert runner.graph_replays == 4
    kinds = {tiles.block_m for _, tiles in runner.graphs._graphs}
    assert kinds == ({1, 2} if share else {1})


def test_its_filters_leave_the_draw_to_the_row(tiny_models: Any, model_driver: Any) -> None:
    """Tokens and log-probabilities are the host's rule for every mix of filters and masks."""
    rows = 6
    logits = torch.randn(rows, 300, generator=torch.Generator().manual_seed(1)) * 3
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, 10)).astype(np.int32)
    masks[4] = 0  # a row whose grammar allows nothing
    params = SampleBatch(
        targets=np.array([-1, -1, -1, 7, -1, -1], np.int32),
        temperature=np.array([0, 1, 0.7, 1, 1, 2], np.float32),
        top_k=np.array([0, 5, 0, 3, 2, 9], np.int32),
        top_p=np.array([1, 0.8, 0.6, 1, 1, 0.9], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0.1], np.float32),
        presence_penalty=np.zeros(rows, np.float32),
        frequency_penalty=np.zeros(rows, np.float32),
        repetition_penalty=np.ones(rows, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        choices=np.zeros(rows, np.int32),
        positions=np.arange(1, rows + 1, dtype=np.int32),
        rows=(None,) * rows,
        num_top=np.zeros(rows, np.int32),
        masks=masks,
        has_mask=np.array([True, True, False, False, True, True]),
    )
    sampler = DeviceSampler(HostDevice(), 300, filters=FlashInferFilters())
    found = DeviceLogits(StepOutput(logits), sampler).sample(params)
    expected = sample_rows(logits.numpy(), params)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


RECORDED = json.loads(Path(flashinfer_signatures.__file__).with_suffix(".json").read_text())
OWN = Path(flashinfer_emulation.__file__)


def source() -> Path | None:
    """The installed package's: the emulation hides it, not its files."""
    places = [Path(entry, "flashinfer") for entry in sys.path]
    return next((place for place in places if (place / "decode.py").exists()), None)


@pytest.fixture(scope="module", params=[*RECORDED, "installed"])
def original(request: pytest.FixtureRequest) -> Any:
    """Signatures of a version, by what is called."""
    if request.param != "installed":
        return RECORDED[request.param]
    folder = source()
    if folder is None:
        pytest.skip("flashinfer is not installed")
    return flashinfer_signatures.signatures(folder)


def emulated_signature(class_name: str | None, name: str, file: str) -> dict[str, list[str]]:
    holder = "_Wrapper" if name == "reset_workspace_buffer" else class_name
    if file == "sampling.py" and not name.endswith("renorm_probs"):
        holder = "sampling"
    return flashinfer_signatures.signature(OWN, holder, name)


@pytest.mark.parametrize(("file", "class_name", "name"), flashinfer_signatures.CALLED)
def test_calls_fit_the_original(
    file: str, class_name: str | None, name: str, original: Any
) -> None:
    """What the emulation takes, the original takes: by position its first ones, in order, by
    keyword any; and it needs nothing else."""
    own = emulated_signature(class_name, name, file)
    called = ".".join(filter(None, (file.removesuffix(".py"), class_name, name)))
    theirs = original[called]
    by_position = own["positional"]
    assert theirs["positional"][: len(by_position)] == by_position
    assert set(own["keyword"]) <= {*theirs["positional"], *theirs["keyword"]}
    assert set(theirs["required"]) <= {*by_position, *own["keyword"]}


def test_a_call_that_a_version_does_not_take_is_found_out() -> None:
    plan = RECORDED["0.7.4"]["decode.BatchDecodeWithPagedKVCacheWrapper.plan"]
    assert "pos_encoding_mode" not in plan["positional"]  # as it was in 0.6
    assert {"window_left", "kv_data_type"} <= set(plan["keyword"])
    assert all(len(called) == len(flashinfer_signatures.CALLED) for called in RECORDED.values())
