"""How many tokens a text still needs: a way to its end from where a grammar stands.

The way found is an upper bound of the distance, with the tokens to go as proof: whoever follows
them ends in time. It is walked greedily along the masks, closing what is open; where a pattern
leads the first walk astray, others with other letters are tried.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from .backend import GrammarState, MaskRow
from .masks import allowed_ids, is_allowed
from .vocabulary import Vocabulary

_MAX_TOKENS = 1024
_NUM_WALKS = 4
_MAX_LAID_STEPS = 40
_MAX_SEARCHED = 16  # tokens of a text for which shorter ones are looked for
# What ends something, the more the better; then what JSON needs to get there.
_STRING_ENDS = (b'"}]', b'"}}', b'"]}', b'"}', b'"]', b'"')
_CLOSING = (b"}]}", b"]}}", b"}}}", b"}}", b"]]", b"]}", b"}]", b"}", b"]", b'"')
_OPENING = (b'":', b"0", b"1", b":", b",", b"null", b"{}", b"[]", b"{", b"[")
_IN_STRINGS = b"aeqx"  # no value begins with them
_LETTERS = b"a0-1:.T9Z5 @2be/"


@runtime_checkable
class LaidOutState(GrammarState, Protocol):
    """An engine's state whose blanks something else decides, see `layout`."""

    @property
    def inner(self) -> GrammarState: ...

    def laid_out(self, ids: Sequence[int] | None) -> list[int] | None:
        """A way of `inner` with the blanks that are asked for from here."""
        ...

    def fork(self) -> LaidOutState: ...


@lru_cache(maxsize=4)
def closer_of(vocabulary: Vocabulary) -> Closer:
    """One for each vocabulary: vocabularies compare by identity."""
    return Closer(vocabulary)


class Closer:
    """Finds ways to the end for the grammars of one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        ids: dict[bytes, int] = {}
        for token_id, text in enumerate(vocabulary.token_bytes):
            if token_id not in vocabulary.special_ids:
                ids.setdefault(text, token_id)
        self._closing: list[int] = [ids[text] for text in (*_CLOSING, *_OPENING) if text in ids]
        self._string_ends: list[int] = [ids[text] for text in _STRING_ENDS if text in ids]
        self._in_strings = [ids[bytes([c])] for c in _IN_STRINGS if bytes([c]) in ids]
        self._letters = [ids[bytes([c])] for c in _LETTERS if bytes([c]) in ids]
        self._singles = [ids[bytes([c])] for c in range(32, 127) if bytes([c]) in ids]
        self._enders = [ids[bytes([c])] for c in (10, *range(32, 127)) if bytes([c]) in ids]

    def way_out(
        self, state: GrammarState, max_tokens: int, banned: Collection[int] = ()
    ) -> list[int] | None:
        """Ids after which the text is complete, at most `max_tokens`; None: none was found.

        `banned` ids may not come first. `state` is not changed. Raises the GrammarError of an
        engine at its limits.
        """
        if isinstance(state, LaidOutState):
            return self._way_in_layout(state, max_tokens, banned)
        limit = min(max_tokens, _MAX_TOKENS)
        for walk in range(_NUM_WALKS):
            # Spelt canonically a way has fewer tokens than it was walked with.
            ids = self._walk(state.fork(), walk, 3 * limit + 8, banned)
            if ids is None:
                continue
            ids = self._shorter(state, ids, banned)
            if len(ids) <= limit:
                return ids
        return None

    def _way_in_layout(
        self, state: LaidOutState, max_tokens: int, banned: Collection[int]
    ) -> list[int] | None:
        """A way of the engine's grammar with the blanks of the layout; where that asks for more
        than the grammar does, a few tokens are walked first."""
        fork = state.fork()
        ids: list[int] = []
        row = np.zeros(self._vocabulary.mask_words, np.int32)
        for _ in range(_MAX_LAID_STEPS):
            rest = fork.laid_out(self.way_out(fork.inner, max_tokens))
            way = None if rest is None else [*ids, *rest]
            is_free = bool(way) and way is not None and way[0] not in banned
            if way is not None and (is_free or not banned) and len(way) <= max_tokens:
                if self.leads_out(state, way):
                    return way
            fork.fill(row)
            for banned_id in banned if not ids else ():
                row[banned_id >> 5] &= ~np.uint32(1 << (banned_id & 31)).view(np.int32)
            chosen = self._choose(row, 0, random.Random(0))  # noqa: S311
            if chosen is None or not fork.accept(chosen):
                return None
            ids.append(chosen)
        return None

    def shortest(self, state: GrammarState, max_tokens: int) -> list[int] | None:
        """As `way_out`, of several ways the one with the fewest tokens; for a start."""
        best: list[int] | None = None
        for walk in range(2 * _NUM_WALKS):
            if walk > 0 and best is not None and len(best) > _MAX_SEARCHED:
                break  # its start is forced: others would hardly be shorter
            most = max_tokens if best is None else len(best)
            ids = self._walk(state.fork(), walk, 3 * most + 8, ())
            if ids is None:
                continue
            ids = self._shorter(state, ids, ())
            if len(ids) <= max_tokens and (best is None or len(ids) < len(best)):
                best = ids
        return best

    def leads_out(self, state: GrammarState, ids: Sequence[int]) -> bool:
        """Whether the text is complete after `ids`; `state` is not changed."""
        if not ids:
            return state.may_end
        fork = state.fork()
        return all(fork.accept(token_id) for token_id in ids) and fork.may_end

    def _walk(
        self, state: GrammarState, walk: int, max_steps: int, banned: Collection[int]
    ) -> list[int] | None:
        row = np.zeros(self._vocabulary.mask_words, np.int32)
        rng = random.Random(walk)  # noqa: S311 - letters to try, no secrets
        ids: list[int] = []
        while not state.may_end or (banned and not ids):
            if len(ids) > max_steps:
                return None
            is_limited = bool(banned) and not ids
            forced = [] if is_limited else list(state.forced())
            if not forced:
                state.fill(row)
                for banned_id in banned if is_limited else ():
                    row[banned_id >> 5] &= ~np.uint32(1 << (banned_id & 31)).view(np.int32)
                chosen = self._ending(state, row, anyhow=walk == 0 and len(ids) < 3)
                if chosen is None:
                    chosen = self._choose(row, walk, rng)
                if chosen is None:
                    return None
                forced = [chosen]
            for token_id in forced:
                if not state.accept(token_id):
                    return None
                ids.append(token_id)
        return ids

    def _ending(self, state: GrammarState, row: MaskRow, *, anyhow: bool) -> int | None:
        """An id that completes the text at once; where brackets may close, only `anyhow`."""
        closing = (*self._closing, *self._string_ends)
        if not anyhow and any(is_allowed(row, token_id) for token_id in closing):
            return None
        for token_id in self._enders:
            if is_allowed(row, token_id) and state.accept(token_id):
                may_end = state.may_end
                state.rollback(1)
                if may_end:
                    return token_id
        return None

    def _choose(self, row: MaskRow, walk: int, rng: random.Random) -> int | None:
        is_in_string = any(is_allowed(row, token_id) for token_id in self._in_strings)
        ends = [*self._string_ends, *self._closing] if is_in_string else self._closing
        for token_id in ends:
            if is_allowed(row, token_id):
                return token_id
        letters: list[int] = self._letters if walk == 0 else self._singles
        legal = [token_id for token_id in letters if is_allowed(row, token_id)]
        if legal:
            return legal[0] if walk == 0 else rng.choice(legal)
        for other in allowed_ids(row)[:64].tolist():
            if other not in self._vocabulary.stop_ids:
                return int(other)
        return None

    def _shorter(self, state: GrammarState, ids: list[int], banned: Collection[int]) -> list[int]:
        """The same text in canonical tokens, if those are fewer and legal."""
        data = b"".join(self._vocabulary.token_bytes[token_id] for token_id in ids)
        try:
            canonical = self._vocabulary.encode(data.decode())
        except UnicodeDecodeError:
            return ids
        if canonical and canonical[0] in banned:
            return ids
        if len(canonical) < len(ids) and self.leads_out(state, canonical):
            return canonical
        return ids
