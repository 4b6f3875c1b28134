"""A short table of what the parts wrote: `python benchmarks/gpu/table.py FOLDER`.

Each line names what was measured, the figure and, where there is one, what it is measured against.
The last ones are the bars.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bars import Parts, Row, bars, rows_with


def read(folder: Path) -> Parts:
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def checks(parts: Parts) -> Iterator[str]:
    for name, part in parts.items():
        made = [row for row in part["rows"] if "check" in row]
        bad = [row["check"] for row in made if not row["ok"]]
        if made:
            yield f"{name}: {len(made) - len(bad)} of {len(made)} checks passed"
        yield from (f"{name}: FAILED {what}" for what in bad)
        for row in part["rows"]:
            if "skipped" in row:
                yield f"{name}: no {row['skipped']}: {row['why']}"


def figures(parts: Parts) -> Iterator[str]:
    def rows(part: str, *keys: str) -> Iterator[Row]:
        for row in parts.get(part, {"rows": []})["rows"]:
            if all(key in row for key in keys):
                yield row

    for row in rows("attention", "copy_GBps"):
        yield f"ceilings: copy {row['copy_GBps']:.0f} GB/s, GEMM {row['gemm_TFLOPs']:.0f} TFLOP/s"
    for row in rows("attention", "decode"):
        what = f"{row['rows']} x {row['context']} {row['decode']}"
        yield f"decode attention {what}: {row['GBps']:.0f} GB/s, {row['of_copy']:.0%} of copy"
    for row in rows("attention", "extend"):
        what = f"{row['new']} after {row['cached']} {row['extend']}"
        yield f"extend attention {what}: {row['TFLOPs']:.0f} TFLOP/s, {row['of_gemm']:.0%} of GEMM"
    for row in rows("attention", "forks"):
        yield f"{row['forks']} forks of {row['prefix']}, {row['of']}: {row['speedup']:.1f}x shared"
    for part in (name for name in parts if name.split("-")[0] == "model"):
        for row in rows(part, "of_floor"):
            mode = "deterministic" if row["deterministic"] else "free"
            what = f"{row['model']} {mode}, {row['rows']} rows of {row['context']}"
            speed = f"{row['tokens_per_s']:.0f} tokens/s, {row['of_floor']:.0%} of the floor"
            yield f"{what}, {parts[part]['part']}: {speed}"
        for row in rows(part, "prefill"):
            mode = "deterministic" if row["deterministic"] else "free"
            what = f"{row['model']} {mode}, prefill {row['prefill']} after {row['cached']}"
            speed = f"{row['tokens_per_s']:.0f} tokens/s, {row['of_gemm']:.0%} of GEMM"
            yield f"{what}, {parts[part]['part']}: {speed}"
    for row in rows("quantised", "weights"):
        what = f"{row['weights']} {row['columns']} x {row['depth']}, {row['rows']} rows"
        times = f"{row['us']:.0f} us, {row['of_copy']:.0%} of copy"
        yield f"{what}: {times}, bf16 of the library {row['us_bf16']:.0f} us"
    for row in rows("transformers", "tokens_per_s"):
        what = f"prefill {row['prefill']}" if "prefill" in row else f"{row['rows']} rows"
        speed = f"{row['tokens_per_s']:.0f} tokens/s{beside(parts, row)}"
        yield f"transformers {row['model']}, {what}: {speed}"
    for row in rows("engine", "us_idle"):
        times = f"step {row['us_step']:.0f} us, graph {row['us_graph']:.0f} us"
        gap = f"gap {row['us_gap']:.0f} us, of it idle {row['us_idle']:.0f} us"
        counts = f"{row['ahead']:.0%} launched ahead, {row['syncs_per_step']:.2g} syncs a step"
        yield f"engine {row['engine']}, {row['rows']} rows: {times}, {gap}, {counts}"
    for row in rows("prefix", "speedup"):
        what = f"{row['model']} {row['attention']}, {row['workload']}"
        yield f"{what}: {row['speedup']:.2f}x with shared pages"
    for row in rows("host", "us_host_launch"):
        how = "graph" if row["graphs"] else "no graph"
        times = f"launch {row['us_host_launch']:.0f} us, beyond the device {row['us_gap']:.0f} us"
        yield f"host, {row['rows']} rows, {how}: {times}"
    for row in rows("sampling", "us"):
        yield f"sampling {row['rows']} rows, {row['how']}: {row['us']:.0f} us {row['by']}"
    for row in rows("price", "step"):
        yield f"deterministic {row['model']}, {row['step']}: {row['price']:.2f}x the time"


def beside(parts: Parts, theirs: Row) -> str:
    """What the model part made of the same, in both modes."""
    same = {key: theirs[key] for key in ("model", "rows", "context", "prefill") if key in theirs}
    if "prefill" in theirs:
        same["cached"] = 0
    return "".join(
        f", {'deterministic' if row['deterministic'] else 'free'} ours "
        f"{row['tokens_per_s'] / theirs['tokens_per_s']:.2f}x"
        for row in rows_with(parts, "model", **same)
        if "tokens_per_s" in row
    )


def main() -> int:
    parts = read(Path(sys.argv[1]))
    for part in parts.values():
        print(f"== {part['part']} on {part['device']}, {part['seconds']} s")
    for text in (*figures(parts), *checks(parts), *bars(parts)):
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
