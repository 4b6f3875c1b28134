"""Which programs still want a prefix, so that what none wants is the first to be evicted.

A node is *held* by every program that used it and has not said that it is done with it; the hold
counts the uses that the program has announced. A use outside of programs makes a node *public*:
nobody can say that it is over. A node that is neither held nor public is *released*: it goes first,
and is found as long as it is there. A use takes the release back; one by another program than the
one that released it shows that such prefixes return, and makes the node public for good.

A program's word moves its own holds and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from .node import Holder, Node, ProgramKey, Use
from .tenants import Tenant

MAX_PROGRAMS = 4096  # of a tenant; what the one unused for longest holds becomes public


class Holds:
    """The books of all programs. `num_pages` are released now, `num_tokens` ever were."""

    def __init__(self, max_programs: int = MAX_PROGRAMS) -> None:
        self.num_pages = 0
        self.num_tokens = 0
        self._max_programs = max_programs

    def holder(self, tenant: Tenant, key: ProgramKey) -> Holder | None:
        """The holds of a program; None: a lease that belongs to none."""
        return (tenant.programs.get(key) or Holder(key)) if key[1] else None

    def use(self, node: Node, use: Use, holder: Holder | None, tenant: Tenant) -> None:
        """A lease begins with a node: what was released of it is wanted again."""
        if node.released_by is not None:
            self.num_pages -= len(node.pages)
            node.is_public |= node.released_by != use.program
            node.released_by = None
        if holder is not None and not holder.nodes:
            self._enter(holder, tenant)
        node.want(use.uses_of(node.end), holder)

    def drop(self, node: Node, holder: Holder, tenant: Tenant) -> bool:
        """A program is done with a node; whether nobody wants it any more."""
        uses = node.holds.pop(holder, None)
        if uses is None:
            return False
        node.future_uses -= uses
        holder.nodes.discard(node)
        if not holder.nodes:
            tenant.programs.pop(holder.key, None)
        if node.holds or node.is_public or not node.is_timeless:
            return False
        node.released_by = holder.key[1]
        self.num_pages += len(node.pages)
        self.num_tokens += node.size
        return True

    def trimmed(self, node: Node, num_pages: int, *, is_gone: bool) -> None:
        """A node loses `num_pages`, or leaves the tree."""
        if node.released_by is not None:
            self.num_pages -= num_pages
        if is_gone and node.tenant is not None:
            self._drop_all([node], node.tenant)

    def check(self, nodes: Iterable[Node], tenants: Iterable[Tenant]) -> None:
        """Raise AssertionError where the books disagree. O(size of the tree)."""
        pages, held = 0, 0
        for node in nodes:
            assert node.future_uses == node.announced + sum(node.holds.values())
            assert min(node.holds.values(), default=0) >= 0 <= node.announced
            assert all(node in holder.nodes for holder in node.holds), "a hold is not booked"
            if node.released_by is not None:
                assert not node.holds and not node.is_public, "released, but wanted"
                pages += len(node.pages)
            held += len(node.holds)
        assert pages == self.num_pages, f"{self.num_pages} released pages told, {pages} are"
        programs = [holder for tenant in tenants for holder in tenant.programs.values()]
        assert all(holder.nodes for holder in programs), "a program without holds is kept"
        assert held == sum(len(holder.nodes) for holder in programs), "a hold on what is gone"

    def _enter(self, holder: Holder, tenant: Tenant) -> None:
        programs = tenant.programs
        programs[holder.key] = holder
        if len(programs) > self._max_programs:
            oldest = programs[next(iter(programs))]
            for node in list(oldest.nodes):
                node.is_public = True
                self.drop(node, oldest, tenant)

    def _drop_all(self, nodes: Iterable[Node], tenant: Tenant) -> None:
        for node in nodes:
            for holder in node.holds:
                holder.nodes.discard(node)
                if not holder.nodes:
                    tenant.programs.pop(holder.key, None)
            node.future_uses = node.announced
            node.holds.clear()
