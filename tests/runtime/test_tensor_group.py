"""What ranks compute together: here each is a thread, joined by gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from palmette.runtime.tensor_parallel import group as group_module
from palmette.runtime.tensor_parallel.group import TensorGroup

SIZE = 3
ROWS = torch.randn(SIZE, 6, 9, generator=torch.Generator().manual_seed(1)).mul(8).bfloat16()


def on_ranks(
    folder: Path, work: Callable[[TensorGroup], Any], *, size: int = SIZE, **options: Any
) -> list[Any]:
    """work(group) of each rank; an exception is its result."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        settings = {"device": torch.device("cpu"), "timeout_s": 20.0, **options}
        try:
            found[rank] = work(TensorGroup(rank, size, folder=folder, **settings))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("gathered", [1 << 18, 4])  # all to all; by parts, with padding
def test_ordered_sums_of_a_row_do_not_depend_on_the_others(
    gathered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_GATHERED", gathered)
    total = ROWS[0].float() + ROWS[1].float() + ROWS[2].float()  # in order of rank, rounded once

    def work(group: TensorGroup) -> Any:
        own = ROWS[group.rank]
        alone = torch.cat([group.sum(own[row : row + 1].clone()) for row in range(len(own))])
        return group.sum(own.clone()), alone, group.num_calls

    for whole, alone, num_calls in on_ranks(tmp_path, work, is_ordered=True):
        assert torch.equal(whole, total.bfloat16())
        assert torch.equal(alone, whole)
        assert num_calls == on_ranks_calls(gathered)


def on_ranks_calls(gathered: int) -> int:
    """Three to find each other; then one a sum, or two."""
    return 3 + 7 * (2 if gathered < ROWS[0, 0].numel() else 1)


def test_parts_are_joined_shared_and_summed(tmp_path: Path) -> None:
    def work(group: TensorGroup) -> Any:
        chosen = torch.full((4,), group.rank + 5, dtype=torch.int32)
        group.share(chosen[:3])
        joined = group.join(ROWS[group.rank])
        nothing = group.join(ROWS[group.rank][:0]), group.sum(ROWS[group.rank][:0])
        return chosen.tolist(), joined, nothing, group.sum(ROWS[group.rank].float())

    for rank, (chosen, joined, nothing, total) in enumerate(on_ranks(tmp_path, work)):
        assert chosen == [5, 5, 5, rank + 5]
        assert torch.equal(joined, torch.cat(list(ROWS), dim=1))
        assert nothing[0].shape == (0, SIZE * 9) and nothing[1].shape == (0, 9)
        torch.testing.assert_close(total, ROWS.float().sum(0))


def test_a_call_that_others_do_not_join_ends(tmp_path: Path) -> None:
    def work(group: TensorGroup) -> Any:
        if group.rank == 0:
            with pytest.raises(RuntimeError):
                group.sum(torch.zeros(4))
            return group.num_calls
        return None

    calls = on_ranks(tmp_path, work, size=2, timeout_s=1.0)
    assert calls[0] == 3  # a call that failed is none


def test_bits_of_two_ranks_have_one_order(tmp_path: Path) -> None:
    """No ordered sums are needed there: a + b is b + a."""
    found = on_ranks(
        tmp_path,
        lambda group: (group.sum(ROWS[group.rank].clone()), group.num_calls),
        size=2,
        is_ordered=True,
    )
    for total, num_calls in found:
        assert torch.equal(total, (ROWS[0].float() + ROWS[1].float()).bfloat16())
        assert num_calls == 4
