"""Where the books of an engine must agree, between steps: each sequence is in one place."""

from __future__ import annotations

from collections.abc import Collection

from palmette.radix_cache.tree import RadixTree

from .scheduler import Scheduler
from .sequence import SequenceState, Status
from .sequence_table import SequenceTable


def check_books(
    scheduler: Scheduler, tree: RadixTree, table: SequenceTable, live: Collection[SequenceState]
) -> None:
    """Raise AssertionError where they disagree; for tests. O(pages)."""
    tree.check()
    table.check()
    running = {sequence.arrival for sequence in scheduler.running}
    assert running == {sequence.arrival for sequence in table.running()}
    assert tree.num_open_leases == len(running)
    scheduler.check()
    queued = [*scheduler.waiting, *scheduler.compiling.values()]
    assert all(s.status is Status.WAITING and s.lease is None for s in queued)
    stages = running | {sequence.arrival for sequence in queued}
    assert len(stages) == len(running) + len(queued)
    assert stages == {sequence.arrival for sequence in live}
