"""The grammar of one sequence at work: what is banned, what is held back, what must close now.

    accept -> fits? -> take -> (a value under a residual closed) valid? -> release
                |                                                  |
              reject: banned at its place, chosen again          back_track: to an earlier choice

A token is released to the client when no value it belongs to is still to be checked. What was
released is never taken back. All of it depends on the sequence's own tokens alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from palmette.constrained.backend import CompiledGrammar, GrammarState
from palmette.constrained.budget import closer_of
from palmette.constrained.masks import allowed_ids
from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.batch import Int32Array

MAX_TRIES = 256  # values that turned out invalid, of one request
MAX_SAME = 48  # of them without getting any further
MAX_REJECTS = 3  # choices at one place after which there is no time to close
RESERVE = 32  # tokens to spare, beside twice the shortest text, below which each choice is judged
MAX_LOST = 6  # searches for a way out that found none while none was known: it is given up
MAX_SIMILAR = 2048  # allowed ids among which spellings of the same are looked for


class Constraint:
    """Lives through preemption unchanged. `state` is moved by `accept` here and nowhere else."""

    __slots__ = (
        "_bans",
        "_check",
        "_closer",
        "_compiled",
        "_cursor",
        "_ends",
        "_exits",
        "_furthest",
        "_ids",
        "_num_lost",
        "_num_rejects",
        "_num_same",
        "_reserve",
        "_text",
        "_vocabulary",
        "_watch_below",
        "_way_out",
        "num_tries",
        "only",
        "state",
    )

    def __init__(
        self,
        state: GrammarState,
        compiled: CompiledGrammar,
        vocabulary: Vocabulary,
    ) -> None:
        self.state = state
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._closer = closer_of(vocabulary)
        self._check = compiled.check
        self._cursor = None if self._check is None else self._check.cursor()
        self._ids: list[int] = []
        self._ends = [0]  # bytes of text after each token
        self._text = bytearray()
        self._bans: dict[int, set[int]] = {}  # by place among the generated tokens
        self._exits = compiled.exits
        self._way_out: Sequence[int] | None = compiled.shortest
        # With more tokens left than this the end is not looked for; -1: none is known.
        self._reserve = 2 * len(compiled.shortest or ()) + RESERVE
        self._watch_below = -1 if compiled.shortest is None else 1 << 62
        self._num_lost = 0
        self._num_rejects = 0
        self.only: int | None = None  # the one id that may come next
        self.num_tries = 0
        self._num_same = 0  # tries since one got further than all before
        self._furthest = -1

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    @property
    def place_hint(self) -> tuple[int, ...]:
        """Equal for all that stand at the same place of the same grammar, and for few others."""
        return (id(self._compiled), len(self._ids), *self._ids[-2:])

    def is_twin(self, other: Constraint) -> bool:
        """Whether both stand at the same place of the same grammar."""
        return self._compiled is other._compiled and self._ids == other._ids

    @property
    def num_held(self) -> int:
        """How many of the newest tokens may not be given out yet."""
        start = None if self._cursor is None else self._cursor.held_from
        if start is None:
            return 0
        count = 0
        while count < len(self._ids) and self._ends[-1 - count] > start:
            count += 1
        return count

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a chosen id; `reject` takes it back."""
        if not self.state.accept(token_id):
            raise RuntimeError(f"grammar refused the sampled token {token_id}")

    def fits(self, token_id: int, *, num_left: int) -> bool:
        """Whether the text can still be closed in `num_left` tokens after the accepted id."""
        if num_left > self._watch_below:
            self._way_out = None
            return True
        way_out = self._way_out
        if way_out and way_out[0] == token_id:
            way_out = way_out[1:]
        elif self.state.may_end:
            way_out = ()
        elif way_out is None or not self._closer.leads_out(self.state, way_out):
            way_out = self._exit() or self._closer.way_out(self.state, num_left)
            if way_out is None and self._way_out is None:
                self._note_lost()
                return True  # nor was one known before: it may end as a failure
        if way_out is None or len(way_out) > num_left:
            return False
        self._way_out = way_out
        spare = num_left - len(way_out) - self._reserve
        self._watch_below = num_left - max(0, spare) // 2
        return True

    def _exit(self, banned: Collection[int] = ()) -> Sequence[int] | None:
        """A way out that the grammar itself proposes, of those that lead out from here."""
        for ids in self._exits:
            if ids and ids[0] not in banned and self._closer.leads_out(self.state, ids):
                return ids
        return None

    def reject(self, token_id: int) -> bool:
        """The accepted id leaves no time to close: it is not to be chosen here again.

        False when nothing else is left to choose.
        """
        place = len(self._ids)
        self.state.rollback(1)
        self._ban(place, (token_id,))
        self._num_rejects += 1
        row = np.zeros(self._vocabulary.mask_words, np.int32)
        return self._is_free(row, place, None)

    def take(self, token_id: int) -> int | None:
        """Note an accepted id; returns where a value that is complete and invalid begins."""
        self._num_rejects = 0
        self.only = None
        data = self._vocabulary.token_bytes[token_id]
        self._ids.append(token_id)
        if self._check is not None:
            self._text += data
        self._ends.append(self._ends[-1] + len(data))
        return None if self._cursor is None else self._cursor.push(data)

    @property
    def is_closing(self) -> bool:
        """Whether choosing freely has failed too often here."""
        return self._num_rejects >= MAX_REJECTS and bool(self._way_out)

    def closing(self, *, num_left: int) -> Sequence[int]:
        """The rest of the way out, where nothing else closes in time any more."""
        way_out = self._way_out
        if way_out and (self.is_closing or len(way_out) >= num_left):
            return tuple(way_out)
        return ()

    def is_valid(self) -> bool:
        """Whether the complete text satisfies the schema as the user sent it."""
        return self._check is None or self._check.is_valid(bytes(self._text))

    def edit(self, mask: Int32Array) -> None:
        """Take what is banned here out of a row that the grammar has filled."""
        if self.only is not None:
            mask.fill(0)
            _set(mask, self.only)
            return
        for token_id in self._bans.get(len(self._ids), ()):
            mask[token_id >> 5] &= ~_bit(token_id)

    def back_track(self, num_released: int, stop_ids: frozenset[int]) -> int | None:
        """Go back to an earlier free choice among the tokens not released, and ban it there.

        The longer it goes on failing, the further back. `stop_ids` is not empty when the choice
        to end here was wrong. Returns how many tokens are left, None when there is no way.
        """
        self.num_tries += 1
        self._num_same += 1
        if len(self._ids) > self._furthest:
            self._furthest, self._num_same = len(self._ids), 1
        if self.num_tries > MAX_TRIES or self._num_same > MAX_SAME:
            return None
        wanted, found = 2 ** ((self._num_same - 1) // 6), []
        row = np.zeros(self._vocabulary.mask_words, np.int32)
        last = len(self._ids)
        if stop_ids:
            self._ban(last, stop_ids)
            if self._is_free(row, last, None):
                found.append(last)
        for place in range(last - 1, num_released - 1, -1):
            if len(found) >= wanted:
                break
            self.state.rollback(1)
            if self._is_free(row, place, self._ids[place]):
                found.append(place)
        if not found:
            return None
        keep = found[-1]
        stands = found[-1] if len(found) >= wanted else min(num_released, last)
        for token_id in self._ids[stands:keep]:
            self.accept(token_id)
        if keep < last:
            self.state.fill(row)
            chosen = self._ids[keep]
            similar = self._similar(row, chosen)
            for other in similar - {chosen}:
                row[other >> 5] &= ~_bit(other)
            rest = self._without(row, keep, chosen)
            self._ban(keep, similar if rest else (chosen,))
        self._shorten(keep)
        return keep

    def _is_free(self, row: Int32Array, place: int, chosen: int | None) -> bool:
        """Whether something else could be chosen at `place`, where the grammar stands."""
        self.state.fill(row)
        return self._without(row, place, chosen)

    def _without(self, row: Int32Array, place: int, chosen: int | None) -> bool:
        """Take what is banned, the chosen and the stop ids out of `row`; whether any is left."""
        for token_id in self._bans.get(place, ()):
            row[token_id >> 5] &= ~_bit(token_id)
        if chosen is not None:
            row[chosen >> 5] &= ~_bit(chosen)
        for token_id in self._vocabulary.stop_ids:
            row[token_id >> 5] &= ~_bit(token_id)
        return bool(row.any())

    def _similar(self, row: Int32Array, token_id: int) -> set[int]:
        """The id, and others that spell the same but for blanks."""
        similar = {token_id}
        texts = self._vocabulary.token_bytes
        bare = texts[token_id].strip()
        ids = allowed_ids(row)
        if len(ids) <= MAX_SIMILAR and bare:
            similar.update(i for i in ids.tolist() if texts[i].strip() in (bare, b""))
            if len(similar) >= len(ids):
                return {token_id}
        return similar

    def _ban(self, place: int, token_ids: set[int] | frozenset[int] | tuple[int, ...]) -> None:
        self._bans.setdefault(place, set()).update(token_ids)

    def _shorten(self, keep: int) -> None:
        for place in [place for place in self._bans if place > keep]:
            del self._bans[place]
        del self._ids[keep:], self._ends[keep + 1 :]
        del self._text[self._ends[-1] :]
        if self._cursor is not None:
            self._cursor.truncate(self._ends[-1])
        self._num_rejects = 0
        self.only = None
        self._way_out = None
        if self._watch_below >= 0:
            self._watch_below = 1 << 62
            banned = self._bans.get(keep, ())
            self._way_out = self._exit(banned) or self._closer.way_out(self.state, 1024, banned)
            if self._way_out is None:
                self._note_lost()

    def _note_lost(self) -> None:
        """A search costs many masks: where none finds an end, others wait for it no longer."""
        self._num_lost += 1
        if self._num_lost >= MAX_LOST:
            self._watch_below = -1


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id & 31)).view(np.int32)


def _set(mask: Int32Array, token_id: int) -> None:
    mask[token_id >> 5] |= _bit(token_id)
