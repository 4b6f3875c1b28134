"""After the warm-up no step launches a kernel that would have to be compiled first.

Launches are noted, not computed: it is their arguments that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import InterpretedFunction

from palmette.kernels.sampling import SampleBatch
from palmette.runtime.cuda_warmup import choices, steps, warm_up

Key = tuple[str, tuple[Any, ...]]


def key_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """What Triton compiles a kernel for, as `JITFunction` sees it: constants, dtypes, and of
    arguments which are 1, or multiples of 16."""
    plain = kernel.kwargs.get("do_not_specialize") or ()
    anywhere = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    key: list[Any] = []
    for name, value in sorted(given.items()):
        if isinstance(value, torch.Tensor):
            key.append((name, value.dtype, name in anywhere or value.data_ptr() % 16 == 0))
        elif name in kwargs or isinstance(value, float):
            key.append((name, value if name in kwargs else "a number"))
        elif name in plain:
            key.append((name, "an integer"))
        else:
            key.append((name, value == 1, value % 16 == 0))
    return kernel.__name__, tuple(key)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Key]]:
    keys: set[Key] = set()

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        keys.add(key_of(self, args, kwargs))
        for name in {"out", "out_ids"} & set(self.arg_names):
            args[self.arg_names.index(name)].zero_()  # ids are looked up

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    yield keys


def params_of(batch: Any, vocab_size: int, *, masked: bool) -> SampleBatch:
    greedy, _, with_masks, *_ = choices(batch, vocab_size)
    return with_masks if masked else greedy


@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_is_compiled_after_the_warm_up(
    deterministic: bool, tiny_models: Any, runner_of: Any, model_driver: Any, launched: set[Key]
) -> None:
    runner, _ = runner_of(
        tiny_models.directory("qwen3"), graph_rows=(2, 4), deterministic=deterministic, warm=True
    )
    assert (runner.eager_steps, runner.graph_replays) == (0, 0)
    known = set(launched)
    assert {name for name, _ in known} >= {"sample_kernel", "paged_extend_kernel", "edit_kernel"}
    driver = model_driver(runner)
    for place, parts in enumerate(
        (
            {"a": range(33)},
            {"b": range(5), "c": range(3), "a": [4]},
            {"a": [1], "b": [2], "c": [3]},
            {"a": [1]},
            {"d": [1], "e": [1, 2], "f": range(71), "a": [4], "b": [5]},
        )
    ):
        batch = driver.batch({name: list(ids) for name, ids in parts.items()})
        handle = runner.launch(batch)
        for masked in (False, True):
            handle.sample(params_of(batch, runner.vocab_size, masked=masked or place % 2 == 1))
    assert launched == known
    assert (runner.eager_steps, runner.graph_replays) == (3, 2)


def test_steps_are_those_that_the_pool_holds() -> None:
    class Pool:
        num_pages, page_size = 40, 16

    whole: Any = Pool()
    lengths = [batch.num_tokens for batch in steps(whole, 512)]
    assert lengths == [2, 12, 40, 100, 1, 2, 4, 3, 5]
    forks = list(steps(whole, 512))[7]
    assert forks.kv_page_ids.tolist() == [*range(17), *range(16), 17, *range(16), 18]
    assert forks.positions.tolist() == [256, 257, 258]
    assert [batch.num_tokens for batch in steps(whole, 60)] == [2, 12, 40, 1, 2, 4]
    Pool.num_pages = 2
    assert [batch.num_tokens for batch in steps(whole, 512)] == [2, 12, 1, 2]


@pytest.mark.usefixtures("launched")
def test_progress_is_told(tiny_models: Any, runner_of: Any) -> None:
    runner, _ = runner_of(tiny_models.directory("llama"))
    told: list[tuple[int, int]] = []
    warm_up(runner, max_positions=40, progress=lambda *done: told.append(done))
    assert told == [(done, 6) for done in range(7)]
    assert runner.eager_steps == 6


def test_choices_are_of_every_sort() -> None:
    class Pool:
        num_pages, page_size = 40, 16

    whole: Any = Pool()
    batch = next(steps(whole, 512))
    found = list(choices(batch, 300))
    assert [params.masks is not None for params in found].count(True) == 1
    assert found[0].positions.tolist() == [1, 2]
    assert any(any(params.rows) for params in found)
