"""Whether another sequence has room, with what those that run are going to want: no thrashing."""

from __future__ import annotations

from collections.abc import Sequence

from palmette.radix_cache.tree import RadixTree

from .forecast import GrowthForecast
from .sequence import SequenceState
from .sequence_table import SequenceTable


class Room:
    """Asks tree, table and forecast; changes nothing."""

    def __init__(self, tree: RadixTree, table: SequenceTable, forecast: GrowthForecast) -> None:
        self._tree = tree
        self._table = table
        self._forecast = forecast

    def pages_for(self, sequence: SequenceState) -> int:
        """How many it needs now beside those that the tree has."""
        ids = sequence.all_ids()
        matched = self._tree.match(ids, sequence.request.namespace)
        return -(-(len(ids) - matched) // self._tree.page_size)

    def has_place(
        self,
        sequence: SequenceState,
        running: Sequence[SequenceState],
        leaving: Sequence[SequenceState],
    ) -> bool:
        """A row and pages, once `leaving` have gone."""
        has_row = self._table.num_free + len(leaving) > 0
        return has_row and self.has_pages(sequence, running, leaving)

    def has_pages(
        self,
        sequence: SequenceState,
        running: Sequence[SequenceState],
        leaving: Sequence[SequenceState] = (),
    ) -> bool:
        """leaving: of those that run, worst rank first; as if they had gone."""
        staying = running
        if leaving:
            gone = {other.arrival for other in leaving}
            staying = [other for other in staying if other.arrival not in gone]
        if not staying:
            return True
        available = self._tree.num_free_pages + self._tree.num_evictable_pages
        available += sum(map(self._forecast.own_pages, leaving))
        needed = self.pages_for(sequence)
        if needed > available:
            return False
        return needed + self._forecast.peak_pages((*staying, sequence)) <= available
