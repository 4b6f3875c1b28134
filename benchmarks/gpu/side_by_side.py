"""Steps of checks in processes of their own: kernels are compiled side by side, which takes most
of the time, and a device that one of them lost is not lost for the others."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from measure import DRY, Results

JOBS = min(8, os.cpu_count() or 1)
Row = dict[str, Any]


class Collected:
    """`Results` of a process whose rows another one prints and writes."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def check(self, name: str, passed: bool, **row: Any) -> None:
        self.rows.append({"name": name, "passed": passed, **row})

    def skip(self, what: str, why: str) -> None:
        self.rows.append({"what": what, "why": why})


def rows_of(step: Callable[[Any], None], index: int) -> list[Row]:
    """What the step tells, also where it raises."""
    torch.manual_seed(index)
    results = Collected()
    try:
        step(results)
    except Exception as error:  # the other checks still tell something
        results.check("raised", False, step=index, error=repr(error)[:500])
    return results.rows


def check_all(results: Results, count: int, rows: Callable[[int], list[Row]]) -> None:
    """`rows(i)` of i below count, told in their order. A dry run makes them one by one, here."""
    if DRY:
        for place in range(count):
            _report(results, rows(place))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(JOBS, context, max_tasks_per_child=1) as pool:
        running = [pool.submit(rows, place) for place in range(count)]
        for place, future in enumerate(running):
            try:
                _report(results, future.result())
            except Exception as error:  # a process that ended in the midst of it
                results.check("ended", False, step=place, error=repr(error)[:500])


def _report(results: Results, rows: list[Row]) -> None:
    for row in rows:
        if "passed" in row:
            results.check(**row)
        else:
            results.skip(**row)
