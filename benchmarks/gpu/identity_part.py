"""The same bits on the device: alone, in a batch, in chunks, over shared pages, with a graph."""

from __future__ import annotations

import sys

import torch
from measure import (
    DRY,
    MODELS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    free_memory,
    random_loader,
)
from model_driver import ModelDriver

from palmette.runtime.cuda_runner import CudaRunner

LENGTH, SHARED, CHUNK, FORKS = (21, 16, 10, 3) if DRY else (700, 688, 128, 48)
PROMPT = [(7 * i * i + 3 * i) % (150 if DRY else 30000) for i in range(LENGTH)]


def logits(runner: CudaRunner, driver: ModelDriver, parts: dict[str, list[int]]) -> torch.Tensor:
    return runner.launch(driver.batch(parts)).logits.clone()


def main() -> int:
    results = Results("identity")
    for name in ("qwen3-0.6b",) if DRY else ("qwen3-0.6b", "smollm2-135m"):
        config = MODELS[name]
        for deterministic in (True, False):
            runner = CudaRunner(
                checkpoint_of(config), num_pages=1024, page_size=16,
                graph_rows=(1, 4) if DRY else (1, 4, 64),
                deterministic=deterministic, load=random_loader(config), device=MeasuredDevice(),
            )  # fmt: skip
            whole = logits(runner, ModelDriver(runner), {"a": PROMPT})[-1]
            found = {}
            driver = ModelDriver(runner, seed=1)
            last = CHUNK * ((LENGTH - 1) // CHUNK)
            for start in range(0, last, CHUNK):
                logits(runner, driver, {"a": PROMPT[start : start + CHUNK]})
            found["chunks"] = logits(runner, driver, {"a": PROMPT[last:]})[-1]
            driver = ModelDriver(runner, seed=2)
            logits(runner, driver, {"a": PROMPT[:-1]})
            found["decoded alone"] = logits(runner, driver, {"a": PROMPT[-1:]})[-1]
            driver = ModelDriver(runner, seed=3)
            logits(runner, driver, {"a": PROMPT[:SHARED]})
            for i in range(FORKS):
                driver.share(f"b{i}", "a", SHARED)
            names = ["a", *(f"b{i}" for i in range(FORKS))]
            logits(runner, driver, {n: PROMPT[SHARED:-1] for n in names})
            rows = logits(runner, driver, {n: PROMPT[-1:] for n in names})
            found["decoded in forks over shared pages"] = rows[0]
            found["the last of the forks"] = rows[-1]
            driver = ModelDriver(runner, seed=4)
            crowd = {f"x{i}": PROMPT[i : i + 60] for i in range(FORKS // 4 + 1)}
            place = logits(runner, driver, {**crowd, "a": PROMPT})
            found["among others"] = place[-1]
            for how, row in found.items():
                same = torch.equal(row, whole)
                difference = (row - whole).abs().max().item()
                if deterministic:
                    results.check(f"{name} {how}", same, difference=difference)
                else:
                    results.add(model=name, free=how, same=same, difference=difference)
            del runner
            free_memory()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
