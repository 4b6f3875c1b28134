"""The shortest text of a grammar, as far as it can be found while it compiles.

Its tokens are the way out that every request of the grammar begins with, and the least
`max_tokens` that is accepted.
"""

from __future__ import annotations

from .backend import GrammarState, TextCheck
from .budget import MAX_SEARCHED, NUM_WALKS, Closer, place_of
from .pattern_texts import pattern_texts
from .spec import GrammarError

_MAX_TOKENS = 4096
_FEW_MASKS = 96  # of the first walk; where they do not do, texts that are guessed are tried


def shortest_text(
    state: GrammarState,
    closer: Closer,
    check: TextCheck | None,
    *,
    proposal: str | None = None,
    pattern: str | None = None,
) -> tuple[int, ...] | None:
    """The ids of a short text that the grammar accepts and that passes `check`.

    `proposal` is taken when it is one; `pattern` is what the whole text has to match. None: none
    was found; only where there is no `check`.

    Raises:
        GrammarError: none was found, with what is in the way.
    """
    place = place_of(state, check)
    if proposal is not None:
        proposed = closer.vocabulary.encode(proposal)
        if closer.proves(place, proposed):
            return tuple(proposed)
    if check is None:
        texts = () if pattern is None else pattern_texts(pattern, NUM_WALKS)
        ways = [ids for text in texts if (ids := closer.spelt(state, text.encode()))]
        ways = [ids for ids in ways if closer.proves(place, ids)]
        found = closer.shortest(place, _MAX_TOKENS, num_walks=NUM_WALKS * (1 if ways else 2))
        ids = min((*ways, *([] if found is None else [found])), key=len, default=None)
        return None if ids is None else tuple(ids)
    ids = closer.shortest(place, _MAX_TOKENS, check, num_walks=1, num_masks=_FEW_MASKS)
    if ids is None:
        written = (closer.spelt(place.state, text) for text in check.examples())
        ids = next((ids for ids in written if ids and closer.proves(place, ids)), None)
    if ids is None or len(ids) <= MAX_SEARCHED:
        others = closer.shortest(place, _MAX_TOKENS, check)
        ids = min((way for way in (ids, others) if way is not None), key=len, default=None)
    if ids is not None:
        return tuple(ids)
    residuals = check.residuals
    if not residuals:
        raise GrammarError(f"no text of at most {_MAX_TOKENS} tokens was found")
    first = residuals[0]
    more = "" if len(residuals) == 1 else f", with {len(residuals) - 1} more that are checked"
    raise GrammarError(
        f"{first.keyword}: no text that satisfies it was found{more}",
        pointer=f"{first.pointer}/{first.keyword}",
        keyword=first.keyword,
        suggestion="add an example of a valid value to the schema (`examples`)",
    )
