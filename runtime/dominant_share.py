"""Who gives way to a tenant that is kept from its share: whom to preempt so that it gets a place.

What a tenant holds is the larger of its parts of the pages and of the rows (dominant resource
fairness: Ghodsi et al., 2011), what it may hold its weight over the weights of all that run or
want to:

    0 ........ FAR_BELOW * share ........ share ..... FAR_OVER * share ......... 1
    |  may take from others  |                          |  gives way

Between the two the queue decides alone, by tokens served: who generates slowly may rightly hold
more rows than another.

No livelock: whoever takes stays below its share, or had nothing and then has one sequence, and
whoever gives keeps its first in rank and was over its share with what it gave. So what was given
cannot be taken back before a request arrives, ends or grows; and the first in rank of all that
run is never preempted.

No starvation: who needs nobody to leave goes in only if nobody further behind, who has less than
its share, waits for more room: else the small would take up, one by one, what the large waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from .config import SchedulerConfig
from .sequence import SequenceState

FAR_OVER = 1.25  # times its share: less is not worth a preemption
FAR_BELOW = 0.5


PagesOf = Callable[[SequenceState], int]


def shares_of(config: SchedulerConfig, num_pages: int, own_pages: PagesOf) -> DominantShare | None:
    """Only `fair` takes from one tenant for another."""
    if config.policy != "fair":
        return None
    weights, num_rows = dict(config.tenant_weights), min(config.num_rows, num_pages)
    return DominantShare(weights, num_rows=num_rows, num_pages=num_pages, own_pages=own_pages)


class DominantShare:
    """Of `num_rows` rows and `num_pages` pages; `weights` by tenant, others weigh 1.

    own_pages: what the end of a sequence gives back.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        num_rows: int,
        num_pages: int,
        own_pages: PagesOf,
    ) -> None:
        self._own_pages = own_pages
        self._weights = weights
        self._num_rows = num_rows
        self._num_pages = num_pages

    def victims(
        self,
        wanting: SequenceState,
        *,
        num_pages: int,
        running: Sequence[SequenceState],
        waiting: Sequence[SequenceState],
        is_enough: Callable[[Sequence[SequenceState]], bool],
    ) -> list[SequenceState] | None:
        """The fewest that make room for `wanting`, worst rank first; None: it has to wait.

        num_pages: what it needs. running: by rank. waiting: the first of each tenant, furthest
        behind first, `wanting` among them. is_enough: whether it fits once these are gone.
        O(running * victims).
        """
        own_pages = self._own_pages
        pages, rows = defaultdict[str, int](int), defaultdict[str, int](int)
        for sequence in running:
            pages[sequence.request.tenant] += own_pages(sequence)
            rows[sequence.request.tenant] += 1
        tenant = wanting.request.tenant
        names = {*rows, *(sequence.request.tenant for sequence in waiting)}
        total = sum(self._weight(name) for name in sorted(names))

        def part(name: str, *, more_pages: int = 0, more_rows: int = 0) -> float:
            """What it holds, over its share."""
            held = max(
                (pages[name] + more_pages) / self._num_pages,
                (rows[name] + more_rows) / self._num_rows,
            )
            return held * total / self._weight(name)

        if rows[tenant] and part(tenant, more_pages=num_pages, more_rows=1) > FAR_BELOW:
            return None
        victims: list[SequenceState] = []
        if is_enough(victims):
            ahead = takewhile(lambda sequence: sequence is not wanting, waiting)
            return None if any(part(other.request.tenant) < 1 for other in ahead) else victims
        for sequence in reversed(running):
            name = sequence.request.tenant
            if name == tenant or rows[name] == 1 or part(name) <= FAR_OVER:
                continue
            victims.append(sequence)
            if is_enough(victims):
                return victims
            pages[name] -= own_pages(sequence)
            rows[name] -= 1
        return None

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
