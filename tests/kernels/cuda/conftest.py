"""Triton's kernels on CPU tensors: the interpreter, chosen before a kernel is first imported.

A process either interprets or compiles; these tests interpret, also where a device is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"
HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import checked_interpreter

    checked_interpreter.install()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody may read what `torch.empty` gives, or what lies behind an array in its section of
    uploaded memory, which an earlier step may have left there: NaN, or the largest integer."""
    if HAS_TRITON:
        _poison_sections(monkeypatch)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _poison_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.kernels.cuda.staging import Staging
    from palmette.runtime.cuda_inputs import _ROW_ARRAYS, GraphInputs

    upload, put = Staging.upload, GraphInputs._put

    def upload_whole_sections(staging: Any, arrays: Any, layout: Any) -> None:
        whole = {}
        for name, array in arrays.items():
            size = layout[name].num_words * 4 // array.dtype.itemsize
            poison = np.nan if array.dtype.kind == "f" else np.iinfo(array.dtype).max
            whole[name] = np.full(size, poison, array.dtype)
            whole[name][: array.size] = array.reshape(-1)
        upload(staging, whole, layout)

    def put_and_poison(inputs: Any, names: Any, rows: int, given: Any) -> int:
        end = put(inputs, names, rows, given)
        for name in set(names) - {"num_items", *_ROW_ARRAYS}:
            inputs._parts[rows][name][len(given[name]) :] = np.iinfo(np.int32).max
        return end

    monkeypatch.setattr(Staging, "upload", upload_whole_sections)
    monkeypatch.setattr(GraphInputs, "_put", put_and_poison)


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
