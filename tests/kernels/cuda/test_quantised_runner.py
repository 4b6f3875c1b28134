"""The CUDA runner with K, V and weights as codes, by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.device import HostDevice
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import ReferenceAttention
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.models.decoder import Decoder
from palmette.runtime.weights import Checkpoint, open_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 40)]
POOL = {"num_pages": 32, "page_size": 16}
KV = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def runner_of(checkpoint: Checkpoint, **options: Any) -> CudaRunner:
    options = {"dtype": "fp32", "graph_rows": (), **POOL, **options}
    return CudaRunner(checkpoint, device=HostDevice(), **options)


def logits_of(handle: Any) -> np.ndarray:
    array: np.ndarray = handle.logits.cpu().numpy().copy()
    return array


class Reference:
    """The decoder in torch over a pool of the same codes; driven as a runner is."""

    def __init__(self, checkpoint: Checkpoint, kv_dtype: torch.dtype) -> None:
        config = checkpoint.config
        self.pool = PagedKVPool(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=kv_dtype, **POOL,
        )  # fmt: skip
        self._attention = ReferenceAttention(self.pool, sliding_window=config.sliding_window)
        self._model = Decoder(
            config, lambda name: torch.tensor(checkpoint.weights.get(name).to_float32()), 512
        )

    def launch(self, batch: Any) -> Any:
        self._attention.plan(batch)
        ids, positions, rows = (
            torch.from_numpy(a.astype(np.int64))
            for a in (batch.token_ids, batch.positions, batch.sample_rows)
        )
        logits = self._model.forward(ids, positions, rows, self._attention)
        return type("Handle", (), {"logits": logits})


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "int8"), ("mistral", "fp8")])
def test_logits_over_codes_are_those_of_the_reference_over_the_same_codes(
    name: str, kv_dtype: str, tiny_models: Any, model_driver: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.directory(name))
    runner = runner_of(checkpoint, kv_dtype=kv_dtype)
    reference = Reference(checkpoint, KV[kv_dtype])
    drivers = model_driver(runner), model_driver(reference)
    for parts in (
        {"a": PROMPT[:10]},
        {"b": PROMPT[:2], "a": PROMPT[10:11]},
        {"a": PROMPT[11:12], "b": PROMPT[2:3]},
    ):
        found, expected = (
            logits_of(kind.launch(driver.batch(parts)))
            for kind, driver in zip((runner, reference), drivers, strict=True)
        )
        # a K on the border of two codes may fall to either side; few do
        assert np.abs(found - expected).max() < 0.1
        assert np.abs(found - expected).mean() < 0.01


def test_bits_over_codes_do_not_depend_on_batch_chunks_or_sharing(
    tiny_models: Any, model_driver: Any
) -> None:
    runner = runner_of(open_checkpoint(tiny_models.directory("qwen3")), kv_dtype="int8")
    alone = model_driver(runner)
    whole = logits_of(runner.launch(alone.batch({"a": PROMPT[:19]})))[-1]
    crowd = model_driver(runner, seed=3)
    runner.launch(crowd.batch({"a": PROMPT[:16], "x": PROMPT[5:8]}))
    crowd.share("b", "a", 16)
    runner.launch(crowd.batch({"a": PROMPT[16:18], "b": PROMPT[16:18]}))
    last = logits_of(runner.launch(crowd.batch({name: PROMPT[18:19] for name in "ab"})))
    np.testing.assert_array_equal(last[0], whole)
    np.testing.assert_array_equal(last[1], whole)
