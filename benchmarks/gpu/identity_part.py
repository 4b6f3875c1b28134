"""The same bits on the device: alone, in a batch, in chunks, over shared pages, with a graph."""

from __future__ import annotations

import sys

import torch
from measure import MODELS, Results, checkpoint_of, random_loader
from model_driver import ModelDriver

from palmette.runtime.cuda_runner import CudaRunner

PROMPT = [(7 * i * i + 3 * i) % 30000 for i in range(700)]


def logits(runner: CudaRunner, driver: ModelDriver, parts: dict[str, list[int]]) -> torch.Tensor:
    return runner.launch(driver.batch(parts)).logits.clone()


def main() -> int:
    results = Results("identity")
    for name in ("qwen3-0.6b", "smollm2-135m"):
        config = MODELS[name]
        for deterministic in (True, False):
            runner = CudaRunner(
                checkpoint_of(config), num_pages=1024, page_size=16, graph_rows=(1, 4, 64),
                deterministic=deterministic, load=random_loader(config),
            )  # fmt: skip
            whole = logits(runner, ModelDriver(runner), {"a": PROMPT})[-1]
            found = {}
            driver = ModelDriver(runner, seed=1)
            for start in range(0, 640, 128):
                logits(runner, driver, {"a": PROMPT[start : start + 128]})
            found["chunks"] = logits(runner, driver, {"a": PROMPT[640:]})[-1]
            driver = ModelDriver(runner, seed=2)
            logits(runner, driver, {"a": PROMPT[:699]})
            found["decoded alone"] = logits(runner, driver, {"a": PROMPT[699:]})[-1]
            driver = ModelDriver(runner, seed=3)
            logits(runner, driver, {"a": PROMPT[:688]})
            for i in range(48):
                driver.share(f"b{i}", "a", 688)
            names = ["a", *(f"b{i}" for i in range(48))]
            logits(runner, driver, {n: PROMPT[688:699] for n in names})
            rows = logits(runner, driver, {n: PROMPT[699:] for n in names})
            found["decoded in 49 over shared pages"] = rows[0]
            found["the last of the 49"] = rows[-1]
            driver = ModelDriver(runner, seed=4)
            crowd = {f"x{i}": PROMPT[i : i + 60] for i in range(12)}
            place = logits(runner, driver, {**crowd, "a": PROMPT})
            found["among 12 others"] = place[-1]
            for how, row in found.items():
                same = torch.equal(row, whole)
                difference = (row - whole).abs().max().item()
                if deterministic:
                    results.check(f"{name} {how}", same, difference=difference)
                else:
                    results.add(model=name, free=how, same=same, difference=difference)
            del runner
            torch.cuda.empty_cache()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
