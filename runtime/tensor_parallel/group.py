"""Ranks that compute together, by torch's collectives. Nothing here is process-wide but what NCCL
reads from the environment.

On CUDA a call is enqueued on the stream of the kernels, also while a graph is captured. NCCL wants
a call to be captured on all ranks or on none, in the same order; the first run of a step, before
its capture, makes the connections.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d

dist: Any = torch.distributed  # its classes of groups have no types
c10d: Any = distributed_c10d

_GATHERED = 1 << 18  # numbers of which an ordered sum sends all to all
_NCCL_SETTINGS = {
    # A rank that has died must not end this process, nor may a thread look at events in a capture;
    # whoever waits too long is freed by `abort`.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_SOCKET_IFNAME": "lo",  # ranks are of one machine: no port is open to others
}


def _nothing() -> None:
    return None


class TensorGroup:
    """Implements `models.shard.Group`: gloo between processes of one host, NCCL on CUDA.

    folder: empty at first, seen by all ranks. is_ordered: sums are added in order of rank, so that
    bits do not depend on how many rows are summed at once; of two numbers every order is one.
    meet: called for `Group.meet`. A call of gloo that other ranks do not join within timeout_s
    raises RuntimeError, as does one whose peer has died; one of NCCL waits until `abort`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        folder: Path,
        device: torch.device,
        timeout_s: float,
        is_ordered: bool = False,
        meet: Callable[[], None] = _nothing,
    ) -> None:
        self.rank, self.size = rank, size
        self.num_calls = 0  # equal on all ranks wherever they are in step
        self._is_ordered = is_ordered and size != 2
        self._aborting, self._is_aborted = threading.Lock(), False
        self._meet = meet
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=timeout_s))
        self._is_nccl = device.type == "cuda"
        make = _nccl if self._is_nccl else _gloo
        self._group: Any = make(store, rank, size, timedelta(seconds=timeout_s))
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._broadcast, self._exchange = c10d.BroadcastOptions(), c10d.AllToAllOptions()
        for options in (self._reduce, self._gather, self._broadcast, self._exchange):
            options.asyncOp = False  # on the stream of the kernels, not on one beside it
        self._check(device)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._is_ordered:
            return self._ordered_sum(x)
        if x.numel():
            self._wait(self._group.allreduce([x], self._reduce))
        return x

    def join(self, x: Tensor) -> Tensor:
        parts = self._gathered(x.contiguous())
        return parts.transpose(0, 1).flatten(1)

    def share(self, x: Tensor) -> None:
        self._broadcast.rootRank = 0
        self._wait(self._group.broadcast([x], self._broadcast))

    def meet(self) -> None:
        self._meet()

    def abort(self) -> None:
        """Let go of calls that wait for a rank which has died, where they would wait for ever.

        From any thread, and more than once. Graphs that hold calls are to be gone, or not used.
        """
        with self._aborting:
            if self._is_nccl and not self._is_aborted:
                self._is_aborted = True
                self._group.abort()

    def _ordered_sum(self, x: Tensor) -> Tensor:
        """Few numbers go to all ranks; of many each rank adds a part, which then goes to all."""
        if x.numel() <= _GATHERED:
            return _added(self._gathered(x))
        flat = x.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % self.size))
        parts = torch.empty_like(padded)
        self._wait(self._group.alltoall_base(parts, padded, [], [], self._exchange))
        own = _added(parts.view(self.size, -1))
        return self._gathered(own).flatten()[: len(flat)].view_as(x)

    def _gathered(self, x: Tensor) -> Tensor:
        """[...] of each rank -> [size, ...]."""
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        if x.numel():
            self._wait(self._group._allgather_base(parts, x.view(-1), self._gather))
        return parts.view(self.size, *x.shape)

    def _wait(self, work: Any) -> None:
        work.wait()  # of NCCL: on the device
        self.num_calls += 1

    def _check(self, device: torch.device) -> None:
        """The ranks are who they think they are, and their connections are made."""
        ranks = self._gathered(torch.tensor([self.rank], device=device)).flatten().tolist()
        if ranks != list(range(self.size)):
            raise RuntimeError(f"ranks have found each other in the order {ranks}")
        for call in (self.sum, self.share):
            call(torch.zeros(1, device=device))


def _added(parts: Tensor) -> Tensor:
    """[size, ...] -> [...], from the first to the last, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    for name, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
