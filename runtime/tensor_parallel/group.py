"""Ranks that compute together, by torch's collectives. Nothing here is process-wide."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # its classes of groups have no types


class TensorGroup:
    """Implements `models.shard.Group`: gloo between processes of one host, NCCL on CUDA.

    folder: empty at first, seen by all ranks. A call that other ranks do not join within
    timeout_s raises RuntimeError, as does one whose peer has died.
    """

    def __init__(
        self, rank: int, size: int, *, folder: Path, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=timeout_s))
        self._is_nccl = device.type == "cuda"
        make = _nccl if self._is_nccl else _gloo
        self._group: Any = make(store, rank, size, timedelta(seconds=timeout_s))

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def join(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=1)

    def abort(self) -> None:
        """Let go of calls that wait for a rank which has died, where they would wait for ever."""
        if self._is_nccl:
            self._group.abort()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
