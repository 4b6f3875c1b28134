"""A rank above 0: a process that builds its part of the model and does what rank 0 tells it.

`python -m palmette.runtime.tensor_parallel.worker --fd N`. It ends when it is told to, when rank 0
is gone, or when it fails; rank 0 sees the end.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec
import torch

from palmette.kernels.backend import PendingPages, StreamedPool
from palmette.kernels.kv_dtype import FloatDtype
from palmette.runtime.models.shard import Group, shard_config
from palmette.runtime.runner import AheadRunner, ModelRunner
from palmette.runtime.weights import Checkpoint, open_checkpoint

from .frames import (
    Build,
    Copy,
    Export,
    Fetch,
    Forget,
    Frame,
    GoOn,
    Import,
    Launch,
    Launches,
    Pages,
    RankOptions,
    Ready,
    Start,
    Stop,
    Sync,
    Synced,
    encode,
    receive,
)
from .group import TensorGroup

logger = logging.getLogger(__name__)

SYNC_S = 2.0  # within which rank 0 tells that its launch has failed as well

Progress = Callable[[int, int], None]  # graphs captured, of how many


def open_model(options: RankOptions) -> Checkpoint:
    """ValueError when it cannot be opened, or not be cut into so many parts."""
    checkpoint = open_checkpoint(options.model)
    shard_config(checkpoint.config, options.size)
    return checkpoint


def take_device(rank: int, options: RankOptions) -> int:
    """Make this process the rank's device's; the device's free bytes, 0 on the CPU."""
    if options.device != "cuda":
        return 0
    torch.cuda.set_device(rank)
    return int(torch.cuda.mem_get_info()[0])


def join_group(rank: int, options: RankOptions, meet: Callable[[], None]) -> TensorGroup:
    """All ranks join at the same time."""
    return TensorGroup(
        rank,
        options.size,
        folder=Path(options.folder),
        device=torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu"),
        timeout_s=options.timeout_s,
        is_ordered=options.deterministic,
        meet=meet,
    )


def build_rank(
    group: Group,
    options: RankOptions,
    checkpoint: Checkpoint,
    *,
    progress: Progress | None = None,
) -> ModelRunner:
    """This rank's runner; all ranks build at the same time."""
    if options.runner == "cuda":
        from palmette.kernels.cuda.device import HostDevice
        from palmette.runtime.cuda_runner import CudaRunner
        from palmette.runtime.cuda_weights import cuda_weights

        dtype = options.dtype or options.weights
        return CudaRunner(
            checkpoint,
            num_pages=options.num_pages,
            page_size=options.page_size,
            dtype=dtype,
            weights=None if options.weights == dtype else cuda_weights(options.weights),
            kv_dtype=options.kv_dtype,
            deterministic=options.deterministic,
            attention=options.attention,
            sampling=options.sampling if group.rank == 0 else "triton",
            graph_rows=options.graph_rows,
            device=None if options.device == "cuda" else HostDevice(),
            progress=progress,
            group=group,
            warm=options.device == "cuda",
        )
    from palmette.runtime.torch_runner import TorchRunner

    runner = TorchRunner(
        checkpoint,
        num_pages=options.num_pages,
        page_size=options.page_size,
        device="cuda" if options.device == "cuda" else "cpu",
        dtype=msgspec.convert(options.weights, Literal["fp32", "bf16"]),
        kv_dtype=msgspec.convert(options.kv_dtype, FloatDtype),
        group=group,
    )
    group.meet()
    return runner


class Worker:
    """Follows rank 0 over `connection`, once the runner is built."""

    def __init__(self, connection: Connection, runner: ModelRunner, group: TensorGroup) -> None:
        self._connection = connection
        self._runner = runner
        self._group = group
        self._launches = Launches()
        self._exports: dict[int, PendingPages | bytes] = {}

    def follow(self) -> None:
        """Until `Stop`. Raises EOFError when rank 0 is gone, and whatever fails here alone."""
        while not isinstance(frame := receive(self._connection), Stop):
            if isinstance(frame, Launch):
                self._launch(frame)
            else:
                self._do(frame)
        self._runner.close()

    def _launch(self, frame: Launch) -> None:
        try:
            batch, sources = self._launches.read(frame)
            if sources is None:
                self._runner.launch(batch)
            else:
                assert isinstance(self._runner, AheadRunner)
                self._runner.launch_ahead(batch, sources)
            failure = None
        except Exception as error:
            logger.warning("launch failed: %r", error)
            failure = error
        # What failed on all ranks at the same call, as what is refused does, harms nobody else.
        if failure is not None:
            if not self._connection.poll(SYNC_S) or not isinstance(receive(self._connection), Sync):
                raise failure
            self._answer_sync(has_failed=True)

    def _do(self, frame: Frame) -> None:
        pool = self._runner.pool
        if isinstance(frame, Copy):
            pool.copy(frame.sources, frame.targets)
        elif isinstance(frame, Export):
            if isinstance(pool, StreamedPool):
                self._exports[frame.id] = pool.export_later(frame.pages)
            else:
                self._exports[frame.id] = pool.export(frame.pages)
        elif isinstance(frame, Fetch):
            pages = self._exports.pop(frame.id)
            data = pages if isinstance(pages, bytes) else pages.data()
            self._connection.send_bytes(encode(Pages(data)))
        elif isinstance(frame, Forget):
            for number in frame.ids:
                self._exports.pop(number, None)
        elif isinstance(frame, Import):
            pool.import_(frame.pages, frame.data)
        else:
            assert isinstance(frame, Sync), frame
            self._answer_sync(has_failed=False)

    def _answer_sync(self, *, has_failed: bool) -> None:
        self._connection.send_bytes(encode(Synced(has_failed, self._group.num_calls)))


def serve(connection: Connection) -> None:
    """Until `Stop`. Raises EOFError when rank 0 is gone."""
    start = receive(connection)
    assert isinstance(start, Start)

    def meet() -> None:
        connection.send_bytes(encode(Ready()))
        assert isinstance(receive(connection), GoOn)

    try:
        options = start.options
        free_bytes = take_device(start.rank, options)
        checkpoint = open_model(options)
        connection.send_bytes(encode(Ready(free_bytes=free_bytes)))
        build = receive(connection)
        assert isinstance(build, Build)
        options = msgspec.structs.replace(options, num_pages=build.num_pages)
        group = join_group(start.rank, options, meet)
        runner = build_rank(group, options, checkpoint)
    except EOFError:
        raise
    except Exception as error:
        connection.send_bytes(encode(Ready(error=f"{type(error).__name__}: {error}")))
        raise
    connection.send_bytes(encode(Ready()))
    Worker(connection, runner, group).follow()


def end_with(connection: Connection) -> None:
    """End this process when rank 0's has: it may be waiting for a device that never answers."""
    poller = select.poll()
    poller.register(connection.fileno(), getattr(select, "POLLRDHUP", 0))  # and POLLHUP, always

    def wait() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    end_with(connection)
    try:
        serve(connection)
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return 1  # rank 0 is gone
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of collectives may wait for ranks that are gone
