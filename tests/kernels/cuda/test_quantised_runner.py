"""The CUDA runner with K, V and weights as codes, by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.device import HostDevice
from palmette.kernels.cuda.quantised import QuantisedMatrix, dequantised
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import ReferenceAttention
from palmette.runtime.cpu_weights import QKV_PARTS
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.cuda_weights import check_weights, kept_bytes, kept_name, matrix_kind
from palmette.runtime.models.decoder import Decoder, LoadTensor
from palmette.runtime.models.layout import EMBEDDING, LM_HEAD, layer_name
from palmette.runtime.models.matrix_loader import matrices_of
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

    def __init__(
        self, checkpoint: Checkpoint, kv_dtype: torch.dtype, *, load: LoadTensor | None = None
    ) -> None:
        config = checkpoint.config
        self.pool = PagedKVPool(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=kv_dtype, **POOL,
        )  # fmt: skip
        self._attention = ReferenceAttention(self.pool, sliding_window=config.sliding_window)
        plain = lambda name: torch.tensor(checkpoint.weights.get(name).to_float32())  # noqa: E731
        self._model = Decoder(config, load or plain, 512)

    def launch(self, batch: Any) -> Any:
        self._attention.plan(batch)
        ids, positions, rows = (
            torch.from_numpy(a.astype(np.int64))
            for a in (batch.token_ids, batch.positions, batch.sample_rows)
        )
        logits = self._model.forward(ids, positions, rows, self._attention)
        return type("Handle", (), {"logits": logits})


@pytest.mark.parametrize(("name", "kv_dtype"), [("qwen3", "int8"), ("qwen2", "fp8")])
def test_logits_over_codes_are_those_of_the_reference_over_the_same_codes(
    name: str, kv_dtype: str, tiny_models: Any, model_driver: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.directory(name))
    runner = runner_of(checkpoint, kv_dtype=kv_dtype)
    reference = Reference(checkpoint, KV[kv_dtype])
    drivers = model_driver(runner), model_driver(reference)
    for parts in ({"a": PROMPT[:6]}, {"b": PROMPT[:2], "a": PROMPT[6:7]}):
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
    whole = logits_of(runner.launch(alone.batch({"a": PROMPT[:18]})))[-1]
    crowd = model_driver(runner, seed=3)
    runner.launch(crowd.batch({"a": PROMPT[:17], "x": PROMPT[5:8]}))
    crowd.share("b", "a", 16)
    runner.launch(crowd.batch({"b": PROMPT[16:17]}))
    last = logits_of(runner.launch(crowd.batch({name: PROMPT[17:18] for name in "ab"})))
    np.testing.assert_array_equal(last[0], whole)
    np.testing.assert_array_equal(last[1], whole)


@pytest.mark.parametrize(
    ("model", "kind", "weights"),
    [("llama", "q8_0", "int8"), ("wide", "q4_k", "int4"), ("qwen2", "bf16", "fp8")],
)
def test_logits_are_those_of_the_torch_decoder_over_the_same_weights(
    model: str, kind: str, weights: Any, tiny_models: Any, model_driver: Any
) -> None:
    """The decoder in torch gets the matrices that the runner keeps, as numbers."""
    checkpoint = open_checkpoint(tiny_models.gguf(model, kind))
    load = lambda name: torch.tensor(checkpoint.weights.get(name).to_float32())  # noqa: E731
    load_matrix = matrices_of(checkpoint, load, weights, torch.device("cpu"))
    kinds = set()

    def numbers(name: str) -> torch.Tensor:
        if len(checkpoint.weights.get(name).shape) == 1:
            return load(name)
        matrix = load_matrix([name])
        kinds.add(matrix.kind if isinstance(matrix, QuantisedMatrix) else "float")
        return dequantised(matrix) if isinstance(matrix, QuantisedMatrix) else matrix

    runner = runner_of(checkpoint, weights=weights)
    found = logits_of(runner.launch(model_driver(runner).batch({"a": PROMPT[:6]})))
    reference = Reference(checkpoint, torch.float32, load=numbers)
    expected = logits_of(reference.launch(model_driver(reference).batch({"a": PROMPT[:6]})))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)
    assert kinds - {"float"} == {weights}


def test_a_matrix_of_four_bits_beside_another_is_int8(tiny_models: Any) -> None:
    """As a Q4_K_M file mixes them: q and k of q4_k beside v of q6_k."""
    checkpoint = open_checkpoint(tiny_models.gguf("wide", "q4_k"))
    names = [layer_name(0, f"{part}.weight") for part in QKV_PARTS]
    tensors = {name: checkpoint.weights.get(name) for name in checkpoint.weights.names()}
    other = open_checkpoint(tiny_models.gguf("wide", "q6_k"))
    tensors[names[2]] = other.weights.get(names[2])
    mixed = replace(
        checkpoint, weights=SimpleNamespace(names=lambda: tuple(tensors), get=tensors.get)
    )
    assert matrix_kind("int4", mixed, names[:2]) == "int4"
    assert matrix_kind("int4", mixed, names) == "int8"
    load = lambda name: torch.tensor(tensors[name].to_float32())  # noqa: E731
    matrix = matrices_of(mixed, load, "int4", torch.device("cpu"))(names)
    assert isinstance(matrix, QuantisedMatrix) and matrix.kind == "int8"
    expected = torch.cat([load(name) for name in names])
    error = (dequantised(matrix) - expected).abs().max()
    assert error <= expected.abs().max() / 127 * 0.51
    with_int4 = kept_bytes("int4", checkpoint) - kept_bytes("int4", mixed)
    qkv = expected.numel()
    assert with_int4 == qkv // 32 * (20 - 34)


def test_int4_is_refused_where_nothing_has_four_bits(tiny_models: Any) -> None:
    with pytest.raises(ValueError, match="has none; use int8"):
        check_weights("int4", open_checkpoint(tiny_models.gguf("llama", "q8_0")))
    check_weights("int4", open_checkpoint(tiny_models.gguf("llama", "q4_0")))


@pytest.mark.parametrize(
    ("kind", "weights", "name"),
    [("q8_0", "int8", "q8_0"), ("q4_0", "int8", "int8"), ("q4_0", "int4", "q4_0"),
     ("bf16", "fp8", "fp8"), ("bf16", "bf16", "bf16"), ("f16", "int8", "int8")],
)  # fmt: skip
def test_the_kept_bytes_are_those_that_the_runner_takes(
    kind: str, weights: Any, name: str, tiny_models: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("llama", kind))
    assert kept_name(weights, checkpoint) == name
    load = lambda name: torch.tensor(checkpoint.weights.get(name).to_float32()).bfloat16()  # noqa: E731
    load_matrix = matrices_of(checkpoint, load, weights, torch.device("cpu"))
    taken = 0
    for tensor in checkpoint.weights.names():
        matrix = load_matrix([tensor]) if tensor.endswith("_proj.weight") else load(tensor)
        if tensor in (EMBEDDING, LM_HEAD):
            matrix = load_matrix([tensor])
        taken += matrix.num_bytes if isinstance(matrix, QuantisedMatrix) else 2 * matrix.numel()
    counted = kept_bytes(weights, checkpoint)
    assert counted == taken if weights != "int4" else taken <= counted <= taken * 1.13
