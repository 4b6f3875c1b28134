"""Masks for drafts: ids that another model proposes, verified in one forward pass.

    chain  d0 d1 d2         rows  before d0 | behind d0 | behind d1 | behind d2
    tree   parents -1 0 0   row i + 1 is behind draft i and the drafts above it

A draft is judged by the mask and not by `accept`: so what is forced stays canonical, and the text
is the one that the same choices would have given without drafts. Behind a draft that is not legal,
or that ends the text, nothing is legal any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from .backend import GrammarState
from .masks import MaskRows, is_allowed


def fill_drafts(
    state: GrammarState,
    draft_ids: Sequence[int],
    rows: MaskRows,
    *,
    stop_ids: frozenset[int] = frozenset(),
    parents: Sequence[int] | None = None,
) -> list[bool]:
    """Fill `rows` [len(draft_ids) + 1, W]; returns which drafts are legal, with all above them.

    The row behind a draft that is not legal, or that is one of `stop_ids`, allows everything: it
    says nothing. `parents`: of each draft the place of the one before it, -1 at the root; None: a
    chain. `state` is as before, also when a row raises the GrammarError of an engine's limit.

    Raises:
        ValueError: `rows` has too few rows, or a parent does not come before its child.
    """
    num_drafts = len(draft_ids)
    if len(rows) < num_drafts + 1:
        raise ValueError(f"rows: {len(rows)} rows; {num_drafts} drafts need {num_drafts + 1}")
    if parents is None:
        parents = range(-1, num_drafts - 1)
    children: list[list[int]] = [[] for _ in range(num_drafts + 1)]
    for draft, parent in enumerate(parents):
        if not -1 <= parent < draft:
            raise ValueError(f"parents[{draft}]: {parent} does not come before {draft}")
        children[parent + 1].append(draft)
    legal = [False] * num_drafts
    rows[1 : num_drafts + 1].fill(-1)
    state.fill(rows[0])
    path = [iter(children[0])]  # the drafts still to be tried at each depth
    try:
        while path:
            draft = next(path[-1], -1)
            if draft < 0:
                path.pop()
                if path:
                    state.rollback(1)
                continue
            token_id = draft_ids[draft]
            if not _is_legal(state, rows[parents[draft] + 1], token_id, stop_ids):
                continue
            legal[draft] = True
            if token_id in stop_ids or not state.accept(token_id):
                continue
            path.append(iter(children[draft + 1]))
            state.fill(rows[draft + 1])
    finally:
        state.rollback(max(0, len(path) - 1))
    return legal


def accept_drafts(
    state: GrammarState,
    draft_ids: Sequence[int],
    chosen_ids: Sequence[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
) -> int:
    """Advance `state` over the drafts of a chain that were chosen; returns how many.

    `chosen_ids[i]` was chosen with row i of `fill_drafts`. The one that follows the accepted
    prefix is the caller's to accept, as any chosen id.
    """
    count = 0
    for draft_id, chosen_id in zip(draft_ids, chosen_ids, strict=False):
        if draft_id != chosen_id or draft_id in stop_ids or not state.accept(draft_id):
            break
        count += 1
    return count


def _is_legal(state: GrammarState, row: MaskRows, token_id: int, stop_ids: frozenset[int]) -> bool:
    if token_id in stop_ids:
        return state.may_end
    return 0 <= token_id < 32 * row.shape[-1] and is_allowed(row, token_id)
