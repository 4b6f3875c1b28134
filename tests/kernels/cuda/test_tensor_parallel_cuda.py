"""The CUDA runner over two processes, kernels interpreted, ranks joined by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.constrained.spec import GrammarSpec
from palmette.kernels.backend import StreamedPool
from palmette.kernels.cuda.device import HostDevice
from palmette.kernels.cuda.quantised import QuantisedMatrix, dequantised
from palmette.runtime.config import SchedulerConfig
from palmette.runtime.cpu_weights import tensor_names
from palmette.runtime.cuda_runner import CudaRunner
from palmette.runtime.cuda_weights import check_rank_weights, kept_bytes, matrix_kind
from palmette.runtime.fake_runner import Answer, ByteTokenizer, fake_engine, run_all
from palmette.runtime.models.layout import EMBEDDING, LM_HEAD
from palmette.runtime.models.matrix_loader import matrices_of
from palmette.runtime.models.shard import Alone
from palmette.runtime.rank_weights import rank_checkpoint
from palmette.runtime.request import LogprobOptions, Request, SamplingParams
from palmette.runtime.runner import AheadRunner
from palmette.runtime.tensor_parallel.frames import RankOptions
from palmette.runtime.tensor_parallel.runner import tensor_parallel_runner
from palmette.runtime.weights import Checkpoint, open_checkpoint

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 40)]
POOL = {"num_pages": 16, "page_size": 16}


def numbers_of(checkpoint: Checkpoint, weights: Any, names: tuple[str, ...]) -> torch.Tensor:
    load = lambda name: torch.tensor(checkpoint.weights.get(name).to_float32())  # noqa: E731
    matrix = matrices_of(checkpoint, load, weights, torch.device("cpu"))(names)
    return dequantised(matrix) if isinstance(matrix, QuantisedMatrix) else matrix


@pytest.mark.parametrize(
    ("kind", "weights", "size"),
    [("q8_0", "int8", 2), ("q6_k", "int8", 4), ("q4_0", "int4", 4), ("q4_1", "int4", 2),
     ("bf16", "fp8", 2), ("bf16", "int8", 4)],
)  # fmt: skip
def test_ranks_hold_parts_of_the_codes_that_one_process_has(
    kind: str, weights: Any, size: int, tiny_models: Any
) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("wide", kind))
    parts = [rank_checkpoint(checkpoint, Alone(rank, size)) for rank in range(size)]
    check_rank_weights(weights, checkpoint, parts[0])
    for _, _, names in tensor_names(checkpoint.config):
        for name in names:
            whole = numbers_of(checkpoint, weights, (name,))
            found = [numbers_of(part, weights, (name,)) for part in parts]
            if ".k_proj" in name or ".v_proj" in name:
                found = found[:: max(1, size // checkpoint.config.num_kv_heads)]
            dim = int("o_proj" in name or "down_proj" in name)
            assert torch.equal(torch.cat(found, dim=dim)[: len(whole)], whole), name


@pytest.mark.parametrize(("kind", "weights"), [("q4_0", "int4"), ("q8_0", "int8"), ("bf16", "fp8")])
def test_a_ranks_memory_is_known_before(kind: str, weights: Any, tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("wide", kind))
    part = rank_checkpoint(checkpoint, Alone(1, 2))
    outline = rank_checkpoint(checkpoint, Alone(0, 2), is_outline=True)
    load = lambda name: torch.tensor(part.weights.get(name).to_float32()).bfloat16()  # noqa: E731
    load_matrix = matrices_of(part, load, weights, torch.device("cpu"))
    taken = 0
    for name in part.weights.names():
        is_matrix = name.endswith("_proj.weight") or name in (EMBEDDING, LM_HEAD)
        kept = load_matrix([name]) if is_matrix else load(name)
        taken += kept.num_bytes if isinstance(kept, QuantisedMatrix) else 2 * kept.numel()
    counted = kept_bytes(weights, outline)
    assert counted == taken if weights != "int4" else taken <= counted <= 1.13 * taken
    # the rest of a half: norms, scales of whole rows
    assert 0.5 <= counted / kept_bytes(weights, checkpoint) < 0.53


def test_groups_that_ranks_would_break_are_refused_by_name(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models.gguf("llama", "q8_0"))
    part = rank_checkpoint(checkpoint, Alone(0, 2), is_outline=True)
    with pytest.raises(ValueError, match=r"down_proj.* kept as int8 in groups of 32 .* 96 into 48"):
        check_rank_weights("int8", checkpoint, part)
    check_rank_weights("bf16", checkpoint, part)  # decoded row by row
    check_rank_weights("fp8", checkpoint, part)
    wide = open_checkpoint(tiny_models.gguf("wide", "q4_k"))  # one block of 256 a row
    halves = rank_checkpoint(wide, Alone(0, 2), is_outline=True)
    with pytest.raises(ValueError, match=r"o_proj.* kept as int4 in groups of 256 .* 256 into 128"):
        check_rank_weights("int4", wide, halves)
    check_rank_weights("int8", wide, halves)  # rounded from numbers in groups of 32
    name = "model.layers.0.self_attn.o_proj.weight"
    assert matrix_kind("int8", halves, [name]) == "int8"
    whole = wide.weights.get(name).to_float32()
    for rank in range(2):
        own = rank_checkpoint(wide, Alone(rank, 2)).weights.get(name).to_float32()
        np.testing.assert_array_equal(own, whole[:, 128 * rank : 128 * rank + 128])


@pytest.fixture(scope="module")
def pair(tiny_models: Any) -> Iterator[tuple[Any, Any]]:
    """One process, and two with codes as weights and as K and V."""
    path = tiny_models.gguf("narrow", "q8_0")
    kinds = {"weights": "int8", "dtype": "fp32", "kv_dtype": "int8"}
    alone = CudaRunner(open_checkpoint(path), device=HostDevice(), graph_rows=(), **kinds, **POOL)  # type: ignore[arg-type]
    options = RankOptions(
        model=str(path), size=2, runner="cuda", device="cpu", graph_rows=(2,), **kinds, **POOL
    )  # type: ignore[arg-type]
    ranks = tensor_parallel_runner(options)
    yield alone, ranks
    ranks.close()


def logits_of(handle: Any) -> np.ndarray:
    array: np.ndarray = getattr(handle, "_inner", handle).logits.cpu().numpy().copy()
    return array


def test_two_ranks_give_the_logits_of_one(pair: Any, model_driver: Any) -> None:
    alone, ranks = pair
    drivers = [model_driver(runner, seed=1) for runner in pair]
    for parts in ({"a": PROMPT[:6]}, {"b": PROMPT[:2], "a": PROMPT[6:7]}):
        expected, found = (
            logits_of(runner.launch(driver.batch(parts)))
            for runner, driver in zip(pair, drivers, strict=True)
        )
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    pages = drivers[1].pages["a"]
    assert isinstance(ranks.pool, StreamedPool)
    later = ranks.pool.export_later(pages)
    data = later.data()
    assert len(data) == ranks.pool.page_bytes
    assert ranks.pool.page_bytes == alone.pool.page_bytes
    ranks.pool.import_(pages, data)
    del later
    unwanted = ranks.pool.export_later(pages)
    del unwanted
    assert ranks.pool.export(pages) == data


def test_a_step_ahead_feeds_all_ranks_from_the_choice_of_one(pair: Any) -> None:
    alone, ranks = pair
    assert isinstance(ranks, AheadRunner)
    drawn = SamplingParams(max_new_tokens=3, seed=3, presence_penalty=0.5, ignore_eos=True)
    requests = [
        Request(
            request_id="drawn",
            prompt_ids=tuple(PROMPT[:3]),
            sampling=drawn,
            logprobs=LogprobOptions(output=True, num_top=2),
        ),
        Request(
            request_id="masked",
            prompt_ids=tuple(PROMPT[2:4]),
            sampling=SamplingParams(max_new_tokens=3, seed=1),
            grammar=GrammarSpec.regex("[a-c]{2,9}"),
        ),
    ]

    def answers(runner: Any, *, overlap: bool) -> dict[str, Answer]:
        engine = fake_engine(
            runner=runner,
            tokenizer=ByteTokenizer(),
            context_length=64,
            scheduler=SchedulerConfig(overlap=overlap, token_budget=64),
        )
        found = run_all(engine, requests)
        assert (engine.stats().overlapped_steps > 0) == overlap
        return found

    expected, found = answers(alone, overlap=False), answers(ranks, overlap=True)
    assert ranks._inner.graph_replays > 1
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].text == answer.text
        for mine, theirs in zip(found[name].logprobs, answer.logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
