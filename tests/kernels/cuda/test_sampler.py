"""The device sampler under the interpreter against the host's rule, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda import sampler
from palmette.kernels.sampling import RowSampling, SampleBatch, sample_rows, uniforms

NONE = np.empty(0, np.int32)


def batch_of(num_rows: int, **values: Any) -> SampleBatch:
    """Rows with the given parameter values, else the neutral ones."""
    neutral: dict[str, Any] = {
        "targets": -1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seeds": 7,
        "choices": 0,
        "num_top": 0,
    }
    whole = {"targets", "top_k", "choices", "num_top"}
    columns = {
        name: np.full(
            num_rows,
            0,
            np.uint64 if name == "seeds" else np.int32 if name in whole else np.float32,
        )
        for name in neutral
    }
    for name, column in columns.items():
        column[:] = values.get(name, neutral[name])
    masks = values.get("masks")
    return SampleBatch(
        **columns,
        positions=np.arange(num_rows, dtype=np.int32),
        rows=(None,) * num_rows,
        masks=masks,
        has_mask=np.full(num_rows, masks is not None),
    )


def device_sample(logits: np.ndarray, params: SampleBatch) -> tuple[np.ndarray, np.ndarray]:
    raw = torch.from_numpy(logits)
    ids, logprobs = sampler.sample(
        raw,
        raw,
        None if params.masks is None else torch.from_numpy(params.masks),
        has_masks=torch.from_numpy(params.has_mask.astype(np.int32)),
        targets=torch.from_numpy(params.targets),
        temperatures=torch.from_numpy(params.temperature),
        top_ks=torch.from_numpy(params.top_k),
        top_ps=torch.from_numpy(params.top_p),
        min_ps=torch.from_numpy(params.min_p),
        randoms=torch.from_numpy(uniforms(params.seeds, params.choices, params.positions)),
        wants_logprob=torch.from_numpy(
            ((params.num_top >= 0) | (params.targets >= 0)).astype(np.int32)
        ),
    )
    return ids.numpy(), logprobs.numpy()


def logits_of(num_rows: int, vocab_size: int, *, seed: int = 0) -> np.ndarray:
    """Rounded to a sixteenth, so that equal logits are common."""
    values = np.random.default_rng(seed).normal(0, 3, (num_rows, vocab_size))
    return (np.round(values * 16) / 16).astype(np.float32)


def check_equal(logits: np.ndarray, params: SampleBatch) -> np.ndarray:
    expected = sample_rows(logits, params)
    ids, logprobs = device_sample(logits, params)
    np.testing.assert_array_equal(ids, expected.token_ids)
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=0, atol=2e-6)
    return ids


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": [1, 2, 5, 40]},
    "top-k-beyond": {"top_k": 10**6},
    "top-p": {"top_p": [0.1, 0.5, 0.9, 0.999]},
    "top-k-and-p": {"top_k": [3, 10, 50, 200], "top_p": [0.9, 0.3, 0.95, 0.5]},
    "min-p": {"min_p": [0.01, 0.1, 0.5, 1.0], "temperature": 1.7},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 0.6},
    "scored": {"targets": [0, 5, -1, 299]},
    "no-logprob": {"num_top": -1, "targets": [-1, 5, -1, -1]},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_chooses_as_the_host_does(name: str) -> None:
    check_equal(logits_of(4, 300), batch_of(4, **PARAMETERS[name]))


def test_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_BLOCK", 128)
    logits = logits_of(3, 300, seed=1)
    check_equal(logits, batch_of(3, top_k=[0, 20, 60], top_p=[1.0, 0.8, 0.9], min_p=[0, 0.1, 0]))


def test_masks_ties_and_rows_that_are_not_finite() -> None:
    vocab_size = 70
    logits = logits_of(8, vocab_size, seed=2)
    logits[3] = 1.0  # all equal: ties everywhere
    logits[4, 5] = np.nan
    logits[5] = -np.inf
    logits[6, 1] = np.inf
    logits[7, 2:] = -np.inf
    masks = np.random.default_rng(3).integers(-(2**31), 2**31, (8, 3)).astype(np.int32)
    masks[1] = 0
    masks[2] = 0
    masks[2, 1] = 1 << 4
    masks[3], masks[7] = -1, -1
    ids = check_equal(logits, batch_of(8, masks=masks, top_k=[0, 3, 3, 3, 3, 3, 3, 5], top_p=0.9))
    assert ids[1] == ids[4] == ids[5] == ids[6] == -1 and ids[2] == 36


def test_edits_give_the_hosts_row() -> None:
    logits = logits_of(2, 50, seed=4)
    special = RowSampling(
        bias_ids=np.array([3, 7], np.int32),
        bias_values=np.array([2.5, -100.0], np.float32),
        output_ids=np.array([3, 9], np.int32),
        output_counts=np.array([2, 1], np.int32),
        prompt_ids=np.array([9, 11], np.int32),
        banned_ids=np.array([1], np.int32),
    )
    edited = torch.from_numpy(logits.copy())
    rows, ids, repetitions, subtracts, adds = sampler.edits_of(
        [None, special],
        presence=np.array([0, 0.5], np.float32),
        frequency=np.array([0, 0.25], np.float32),
        repetition=np.array([1, 1.5], np.float32),
    )
    sampler.apply_edits(
        edited, *(torch.from_numpy(a) for a in (rows, ids, repetitions, subtracts, adds))
    )
    expected = logits.copy()
    for token in (3, 9, 11):
        value = expected[1, token]
        expected[1, token] = value / 1.5 if value > 0 else value * 1.5
    expected[1, 3] -= 0.5 + 0.25 * 2
    expected[1, 9] -= 0.5 + 0.25
    expected[1, 3] += 2.5
    expected[1, 7] -= 100.0
    expected[1, 1] = -np.inf
    np.testing.assert_allclose(edited.numpy(), expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's
def test_an_edit_beyond_float32_stays_a_number() -> None:
    """A small repetition penalty of a large logit: infinite, it would end the row."""
    logits = torch.tensor([[1e38, 1.0, -1.0]])
    ids = torch.arange(3, dtype=torch.int32)
    real = [torch.full((3,), value) for value in (2.0**-10, 0.0, 0.0)]
    sampler.apply_edits(logits, torch.zeros_like(ids), ids, *real)
    assert logits.tolist() == [[torch.finfo(torch.float32).max, 1024.0, -(2.0**-10)]]


def test_masks_and_results_of_another_shape_are_refused() -> None:
    logits, params = logits_of(2, 70), batch_of(2, masks=np.full((2, 2), -1, np.int32))
    with pytest.raises(ValueError, match=r"masks: \(2, 2\) does not cover \(2, 70\)"):
        device_sample(logits, params)
    with pytest.raises(ValueError, match=r"masks: \(1, 3\) does not cover \(2, 70\)"):
        device_sample(logits, batch_of(2, masks=np.full((1, 3), -1, np.int32)))
