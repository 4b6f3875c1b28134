"""Why a walk down the tree went no further."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from .ledger import EvictedKeys, Eviction, Miss, MissReason
from .node import TOKEN_BYTES, Node, decode, walk_down

Namespace = tuple[str, ...]
TokenBytes = Callable[[int], bytes]

_MAX_LOOKS = 16  # siblings or namespaces that are looked at
_LOOKAHEAD = 8  # tokens that are compared as text behind the first that differs


class Misses:
    """Explains misses, and remembers what was evicted for it.

    `token_bytes` gives the text of an id; None: a text that is cut into other tokens is not
    told from another text.
    """

    def __init__(self, page_size: int, token_bytes: TokenBytes | None = None) -> None:
        self.evicted = EvictedKeys()
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._token_bytes = token_bytes

    def note_eviction(self, node: Node, keep: int, eviction: Eviction) -> None:
        """A leaf is about to lose its pages from page `keep` on."""
        place = node if keep else node.parent
        assert place is not None
        start = keep * self._page_bytes
        self.evicted.add(place, bytes(node.edge[start : start + self._page_bytes]), eviction)

    def explain(
        self,
        node: Node,
        edge_bytes: int,
        data: bytes,
        limit: int,
        siblings: Mapping[Namespace, Node],
        *,
        is_limited: bool,
    ) -> Miss | None:
        """A walk for `data` ended `edge_bytes` into `node`; at most `limit` bytes could match.

        `siblings` are the roots of the same tenant, by namespace. None: nothing is missing.
        """
        depth = node.start * TOKEN_BYTES + edge_bytes
        if depth == len(data) - TOKEN_BYTES:
            return None
        if depth >= limit:
            whole = (len(data) // TOKEN_BYTES - 1) // self._page_size * self._page_bytes
            cut = is_limited and limit < whole
            return Miss(reason=MissReason.MATCH_LIMIT if cut else MissReason.PAGE_ROUNDING)
        if edge_bytes == len(node.edge):
            eviction = self.evicted.get(node, data[depth : depth + self._page_bytes])
            if eviction is not None:
                reason = MissReason.RELEASED if eviction.was_released else MissReason.EVICTED
                return Miss(reason=reason, eviction=eviction)
        if self._is_cut_otherwise(node, edge_bytes, data, depth):
            return Miss(reason=MissReason.TOKEN_BOUNDARY)
        for root in islice(siblings.values(), _MAX_LOOKS):
            other, other_bytes = walk_down(root, data, limit, self._page_bytes)
            if other.start * TOKEN_BYTES + other_bytes > depth:
                return Miss(reason=MissReason.OTHER_NAMESPACE)
        return Miss(reason=MissReason.NEVER_SEEN)

    def _is_cut_otherwise(self, node: Node, edge_bytes: int, data: bytes, depth: int) -> bool:
        """Whether a page that is there holds the text of the page that is missing."""
        if self._token_bytes is None:
            return False
        size = self._page_bytes + _LOOKAHEAD * TOKEN_BYTES
        ours = decode(data[depth : depth + size])
        if edge_bytes < len(node.edge):
            edges = [bytes(node.edge[edge_bytes : edge_bytes + size])]
        else:
            children = islice(node.children.values(), _MAX_LOOKS)
            edges = [bytes(child.edge[:size]) for child in children]
        return any(self._same_text(ours, decode(edge)) for edge in edges)

    def _same_text(self, ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
        pairs = zip(ours, theirs, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None or self._token_bytes is None:
            return False
        a = [self._token_bytes(i) for i in ours[first : first + _LOOKAHEAD]]
        b = [self._token_bytes(i) for i in theirs[first : first + _LOOKAHEAD]]
        text, other = b"".join(a), b"".join(b)
        known = min(len(text), len(other))
        return 0 < max(len(a[0]), len(b[0])) <= known and text[:known] == other[:known]
