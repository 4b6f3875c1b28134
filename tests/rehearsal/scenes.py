"""What runners are driven through in a rehearsal: every kind of step, then an engine.

`python -m rehearsal.scenes [--all | SCENE...]` prints one JSON object per scene.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from model_driver import ModelDriver
from tiny_files import write_tiny_model

from . import flashinfer_stand_in, launches, streams, tensors
from .log import LOG

tensors.install()
streams.install()
launches.install()
sys.modules["flashinfer"] = flashinfer_stand_in

from palmette.kernels.sampling import RowSampling, SampleBatch  # noqa: E402
from palmette.runtime.config import EngineConfig, SchedulerConfig  # noqa: E402
from palmette.runtime.fake_runner import ByteTokenizer, fake_engine  # noqa: E402
from palmette.runtime.load import load_engine  # noqa: E402
from palmette.runtime.request import Request, SamplingParams  # noqa: E402
from palmette.runtime.runner import select_runner as select  # noqa: E402

from .models import TwoRanks, runner_of  # noqa: E402
from .table import lacking  # noqa: E402

PROMPT = [int(token) for token in np.random.default_rng(7).integers(3, 300, 600)]
_NONE = np.empty(0, np.int32)
_EDITS = RowSampling(
    bias_ids=np.array([3, 9], np.int32),
    bias_values=np.array([1.0, -2.0], np.float32),
    output_ids=np.array([5], np.int32),
    output_counts=np.array([2], np.int32),
    prompt_ids=np.array([7], np.int32),
    banned_ids=np.array([11], np.int32),
)
FREE = {"deterministic": False}
SCENES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 8b": ("llama-3.1-8b", {}),
    "llama 8b free": ("llama-3.1-8b", FREE),
    "llama 8b alone": ("llama-3.1-8b", {"share_pages": False, "page_size": 1}),
    "llama 8b fp32": ("llama-3.1-8b", {"dtype": "fp32"}),
    "llama 8b fp16": ("llama-3.1-8b", {"dtype": "fp16", "page_size": 32}),
    "qwen3": ("qwen3-0.6b", {}),
    "qwen3 int8": ("qwen3-0.6b", {"weights": "int8", "kv_dtype": "int8"}),
    "qwen3 int4": ("qwen3-0.6b", {"weights": "int4", "kv_dtype": "fp8", **FREE}),
    "smollm2": ("smollm2-135m", {}),
    "smollm2 free": ("smollm2-135m", {"page_size": 64, **FREE}),
    "smollm2 fp8": ("smollm2-135m", {"weights": "fp8", "kv_dtype": "fp8", **FREE}),
    "qwen2.5": ("qwen2.5-0.5b", {}),
    "qwen2.5 fp8": ("qwen2.5-0.5b", {"weights": "fp8"}),
    "head 96": ("phi-3-mini", {}),
    "head 256": ("gemma-2b", FREE),
    "head 256 int8": ("gemma-2b", {"weights": "int8", "kv_dtype": "int8"}),
    "window": ("mistral-7b", {}),
    "odd vocabulary": ("odd-vocabulary", {}),
    "two ranks": ("odd-vocabulary", {"group": TwoRanks()}),
    "flashinfer": ("llama-3.1-8b", {"attention": "flashinfer", "sampling": "flashinfer", **FREE}),
}
FILES: tuple[dict[str, Any], ...] = (
    {"weights": "auto"},
    {"weights": "int8", "kv_dtype": "int8"},
    {"weights": "fp8", "kv_dtype": "fp8", "deterministic": False, "attention": "triton"},
)
SLOW = {"llama 8b alone", "llama 8b fp16", "smollm2 free", "qwen2.5", "head 256 int8"}
OLDER = ("llama 8b free", "qwen3 int8", "smollm2 fp8")  # also on GPUs before Hopper
GRAPH_ROWS = (1, 4, 16)


def params(num_rows: int, positions: np.ndarray, **values: Any) -> SampleBatch:
    def column(name: str, neutral: float, kind: Any) -> np.ndarray:
        return np.full(num_rows, values.get(name, neutral), kind)

    masks = values.get("masks")
    return SampleBatch(
        targets=column("targets", -1, np.int32),
        temperature=column("temperature", 0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1, np.float32),
        min_p=column("min_p", 0, np.float32),
        presence_penalty=column("presence_penalty", 0, np.float32),
        frequency_penalty=column("frequency_penalty", 0, np.float32),
        repetition_penalty=column("repetition_penalty", 1, np.float32),
        seeds=column("seeds", 3, np.uint64),
        choices=column("choices", 0, np.int32),
        positions=positions,
        rows=values.get("rows", (None,) * num_rows),
        num_top=column("num_top", -1, np.int32),
        masks=masks,
        has_mask=np.full(num_rows, masks is not None),
    )


class Scene:
    """One runner, its steps and what they did."""

    def __init__(self, name: str, capability: tuple[int, int]) -> None:
        model, options = SCENES[name]
        streams.capability(capability)
        self.capability = 10 * capability[0] + capability[1]
        launches.forget()
        LOG.mode = "load"
        LOG.faults.clear()
        self.runner = runner_of(model, graph_rows=GRAPH_ROWS, warm=True, **options)
        self.num_compiled = len(launches.KERNELS)
        self.driver = ModelDriver(self.runner)
        self.steps: dict[str, dict[str, Any]] = {}
        LOG.mode = "steady"

    def step(
        self, name: str, parts: dict[str, list[int]], *, every: bool = False, **choice: Any
    ) -> None:
        """every: all rows are sampled, not the last of each sequence."""
        LOG.calls.clear()
        LOG.counts.clear()
        batch = self.driver.batch(parts)
        if not every:
            batch = replace(batch, sample_rows=batch.qo_indptr[1:] - 1)
        handle = self.runner.launch(batch)
        launched = list(LOG.calls)
        rows = batch.sample_rows
        handle.sample(params(len(rows), batch.positions[rows] + 1, **choice))
        self.steps[name] = {
            "launch": launched,
            "choice": LOG.calls[len(launched) :],
            "launches": sum(LOG.counts.values()),
        }

    def drive(self) -> None:
        step, rows = self.step, self.runner.vocab_size // 32 + (self.runner.vocab_size % 32 > 0)
        step("prefill", {"a": PROMPT[:520]})
        step("long prefill", {"l": PROMPT * 4})
        step("short prefill", {"b": PROMPT[:17]})
        step("scored prefill", {"e": PROMPT[:100]}, every=True, targets=5)
        step("one decode", {"a": [5]})
        step("the same row", {"a": [5]})
        step("two decodes", {"a": [5], "b": [6]})
        step("mixed", {"a": [5], "c": PROMPT[:100], "b": [5]})
        for index in range(7):
            self.driver.share(f"r{index}", "a", 512)
        for count in range(3, 8):
            step(f"{count} sharing", {f"r{index}": [5] for index in range(count)})
        self.driver.share("d", "a", 512)
        step("mixed, sharing", {"r0": [5], "r1": [5], "d": PROMPT[:30]})
        for count in (3, 4):
            parts = {f"r{index}": [5] for index in range(count)}
            drawn = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
            step(f"{count} drawn", parts, **drawn)
            step(f"{count} masked", parts, masks=np.zeros((count, rows), np.int32))
            step(f"{count} with edits", parts, rows=(_EDITS,) * count, repetition_penalty=1.2)
            step(f"{count} logprobs", parts, num_top=0)
            step(f"{count} scored", parts, targets=4)
            step(f"{count} top", parts, num_top=5)
        step("beyond the graphs", {f"s{index}": [5] for index in range(17)})
        self._move_pages()

    def _move_pages(self) -> None:
        LOG.mode = "run"  # each export has pinned memory of its own
        pool, data = self.runner.pool, [b""]

        def export() -> None:
            data[0] = pool.export([1, 2, 3])

        for name, work in (
            ("export", export),
            ("import", lambda: pool.import_([4, 5, 6], data[0])),
            ("copy", lambda: pool.copy([1, 2], [3, 4])),
        ):
            LOG.calls.clear()
            work()
            self.steps[name] = {"launch": list(LOG.calls)}

    def result(self) -> dict[str, Any]:
        graphs = [one for one in self.runner.graphs._graphs.values() if one is not None]
        return {
            "faults": list(LOG.faults),
            "late": [kernel.describe() for kernel in launches.KERNELS[self.num_compiled :]],
            "capability": self.capability,
            "kernels": [kernel.describe() for kernel in launches.KERNELS],
            "lacking": lacking(map(launches.Kernel.describe, launches.KERNELS), self.capability),
            "steps": self.steps,
            "graph launches": sorted({captured.graph._graph.num_launches for captured in graphs}),
            "graphs": len(graphs),
        }


def overlapped(name: str) -> dict[str, Any]:
    """An engine a step ahead, long into its decodes: the calls of each step."""
    scene = Scene(name, (9, 0))
    engine = fake_engine(
        runner=scene.runner,
        tokenizer=ByteTokenizer(),
        context_length=2048,
        scheduler=SchedulerConfig(overlap=True, token_budget=512),
    )
    LOG.mode = "run"
    engine.submit(
        [
            Request(
                request_id=str(index),
                prompt_ids=tuple(PROMPT[: 256 + index]),
                sampling=SamplingParams(
                    max_new_tokens=60, temperature=0.7, top_p=0.9, seed=index, ignore_eos=True
                ),
            )
            for index in range(3)
        ]
    )
    steps: list[list[str]] = []
    while engine.has_work:
        LOG.calls.clear()
        engine.step()
        engine.check()
        steps.append(list(LOG.calls))
        LOG.mode = "steady" if 8 < len(steps) else "run"
    return {
        "faults": list(LOG.faults),
        "steps": steps[9:50],
        "overlapped": engine.stats().overlapped_steps,
    }


def from_files(**options: Any) -> dict[str, Any]:
    """A model of a folder, loaded as a user does, and its answers."""
    launches.forget()
    streams.capability((9, 0))
    LOG.mode = "load"
    LOG.faults.clear()
    select.__globals__["_cuda_available"] = lambda: True
    with TemporaryDirectory() as folder:
        path = write_tiny_model(Path(folder) / "tiny")
        config = EngineConfig(model=str(path), device="cuda", kv_tokens=16384, **options)
        engine = load_engine(config)
    LOG.mode = "run"
    engine.submit(
        [
            Request(
                request_id=str(index),
                prompt_ids=tuple(PROMPT[: 300 + index]),
                sampling=SamplingParams(max_new_tokens=20, seed=index, ignore_eos=True),
            )
            for index in range(4)
        ]
    )
    late, tokens = len(launches.KERNELS), 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
        engine.check()
    return {
        "faults": list(LOG.faults),
        "late": [kernel.describe() for kernel in launches.KERNELS[late:]],
        "tokens": tokens,
    }


def results(names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    chosen = [name for name in SCENES if name not in SLOW]
    for name in SCENES if names == ["--all"] else names or chosen:
        others = ((8, 0), (8, 9)) if name in OLDER else ()
        for capability in ((9, 0), *others):
            scene = Scene(name, capability)
            scene.drive()
            yield f"{name} sm_{capability[0]}{capability[1]}", scene.result()
    for options in FILES:
        yield " ".join(map(str, ("files", *options.values()))), from_files(**options)
    yield "overlapped", overlapped("qwen3")


def main() -> None:
    warnings.simplefilter("ignore")
    for name, result in results(sys.argv[1:]):
        print(json.dumps({"scene": name, **result}))


if __name__ == "__main__":
    main()
