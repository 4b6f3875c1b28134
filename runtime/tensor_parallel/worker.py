"""A rank above 0: a process that builds its part of the model and does what rank 0 tells it.

`python -m palmette.runtime.tensor_parallel.worker --fd N`. It ends when it is told to, when rank 0
is gone, or when it fails; rank 0 sees the end.
"""

from __future__ import annotations

import argparse
import logging
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import msgspec
import torch

from palmette.kernels.kv_dtype import FloatDtype
from palmette.runtime.models.shard import shard_config
from palmette.runtime.runner import ModelRunner
from palmette.runtime.weights import Checkpoint, open_checkpoint

from .frames import Copy, Export, Import, Launch, RankOptions, Ready, Start, Stop, batch_of, decode
from .group import TensorGroup

logger = logging.getLogger(__name__)


def open_model(options: RankOptions) -> Checkpoint:
    """ValueError when it cannot be opened, or not be cut into so many parts."""
    checkpoint = open_checkpoint(options.model)
    shard_config(checkpoint.config, options.size)
    return checkpoint


def build_rank(
    rank: int, options: RankOptions, checkpoint: Checkpoint
) -> tuple[ModelRunner, TensorGroup]:
    """This rank's runner; all ranks build at the same time."""
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    group = TensorGroup(
        rank,
        options.size,
        folder=Path(options.folder),
        device=device,
        timeout_s=options.timeout_s,
    )
    if options.runner == "cuda":
        from palmette.runtime.cuda_graphs import graph_rows_up_to
        from palmette.runtime.cuda_runner import CudaRunner

        return CudaRunner(
            checkpoint,
            num_pages=options.num_pages,
            page_size=options.page_size,
            dtype=options.weights,
            kv_dtype=options.kv_dtype,
            deterministic=options.deterministic,
            attention=options.attention,
            graph_rows=graph_rows_up_to(options.max_running),
            group=group,
            warm=True,
        ), group
    from palmette.runtime.torch_runner import TorchRunner

    return TorchRunner(
        checkpoint,
        num_pages=options.num_pages,
        page_size=options.page_size,
        device="cuda" if options.device == "cuda" else "cpu",
        dtype=msgspec.convert(options.weights, Literal["fp32", "bf16"]),
        kv_dtype=msgspec.convert(options.kv_dtype, FloatDtype),
        group=group,
    ), group


def serve(connection: Connection) -> None:
    """Until `Stop`, or until rank 0 is gone."""
    start = decode(connection.recv_bytes())
    assert isinstance(start, Start)
    try:
        checkpoint = open_model(start.options)
        connection.send_bytes(msgspec.msgpack.encode(Ready()))
        runner, _ = build_rank(start.rank, start.options, checkpoint)
    except Exception as error:
        connection.send_bytes(msgspec.msgpack.encode(Ready(f"{type(error).__name__}: {error}")))
        raise
    connection.send_bytes(msgspec.msgpack.encode(Ready()))
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        frame = decode(data)
        try:
            if isinstance(frame, Launch):
                runner.launch(batch_of(frame))
            elif isinstance(frame, Copy):
                runner.pool.copy(frame.sources, frame.targets)
            elif isinstance(frame, Export):
                connection.send_bytes(runner.pool.export(frame.pages))
            elif isinstance(frame, Import):
                runner.pool.import_(frame.pages, frame.data)
            else:
                assert isinstance(frame, Stop)
                runner.close()
                return
        except ValueError as error:  # what rank 0 refused as well, before anything was computed
            logger.warning("refused: %s", error)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    with connection:
        serve(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
