"""A progress bar on a terminal while CUDA graphs are captured and kernels are compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def capture_bar() -> Iterator[Callable[[int, int], None] | None]:
    """What is to be told how many are done, of how many; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("preparing CUDA graphs and kernels"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
