"""Ranks that fail where a test wants it: at token ids that no other test uses.

As a script it is a worker of `tensor_parallel`; `install` makes rank 0 of the test's process so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch

from palmette.runtime.tensor_parallel import worker
from palmette.runtime.tensor_parallel.group import TensorGroup
from palmette.runtime.torch_runner import TorchRunner

ALL_BEFORE, ALL_MIDWAY, RANK_1_MIDWAY, RANK_0_MIDWAY, HANGS, STUCK, NOT_CHOSEN = range(290, 297)
_CALLS = 3  # of a step, before it fails midway


def install(patch: Any, rank: int) -> None:
    """patch(class, name, function) puts a function in place of a method."""
    launch, add = TorchRunner.launch, TensorGroup.sum
    left = [0]  # calls until one fails, 0: none does

    def faulty_launch(self: TorchRunner, batch: Any) -> Any:
        ids = set(batch.token_ids.tolist())
        if ALL_BEFORE in ids:
            raise MemoryError("before anything was computed")
        if ids & {ALL_MIDWAY, (RANK_0_MIDWAY, RANK_1_MIDWAY)[rank]}:
            left[0] = _CALLS
        if rank and HANGS in ids:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank and STUCK in ids:
            threading.Event().wait()
        return launch(self, batch)

    def faulty_sum(self: TensorGroup, x: torch.Tensor) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            if not left[0]:
                raise torch.OutOfMemoryError("midway")
        return add(self, x)

    patch(TorchRunner, "launch", faulty_launch)
    patch(TensorGroup, "sum", faulty_sum)


def _no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory for the weights")


if __name__ == "__main__":
    if "load" in sys.argv:
        sys.argv.remove("load")
        worker.build_rank = _no_memory
    install(setattr, 1)
    code = worker.main()
    os._exit(code)
