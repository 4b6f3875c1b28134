"""Triton's kernels on CPU tensors: the interpreter, chosen before a kernel is first imported.

A process either interprets or compiles; these tests interpret, also where a device is.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def runner_of(fake_devices: Any) -> Any:
    """Makes (runner, device): of a model's directory, on `device` or one that records."""
    from palmette.runtime.cuda_runner import CudaRunner
    from palmette.runtime.weights import open_checkpoint

    def build(path: Any, **options: Any) -> tuple[Any, Any]:
        device = options.pop("device", None) or fake_devices.RecordingDevice()
        settings = {"dtype": "fp32", "graph_rows": (), "num_pages": 32, "page_size": 16, **options}
        return CudaRunner(open_checkpoint(path), device=device, **settings), device

    return build
