"""The grammar of one sequence at work: what is banned, what is held back, how it can end.

    accept -> fits? -> take -> (a value under a residual closed) valid? -> release
                |                                                  |
              reject: banned at its place, chosen again          back_track: to an earlier choice
                                                                   | no more tries, or no more room
                                                                 fall_back: to a known way out

A token is released to the client when no value it belongs to is still to be checked. What was
released is never taken back. At what was released a way out is known: tokens after which the text
is complete and valid, no more than are left. So whatever the model chooses, the text ends valid.
All of it depends on the sequence's own tokens alone: searches are bounded by counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palmette.constrained.backend import CompiledGrammar, GrammarState, TextCursor
from palmette.constrained.budget import Place, Search, closer_of
from palmette.constrained.masks import allowed_ids
from palmette.constrained.vocabulary import Vocabulary
from palmette.kernels.batch import Int32Array

MAX_TRIES = 256  # values that turned out invalid, of one request
MAX_SAME = 48  # of them without getting any further
MAX_REJECTS = 3  # choices at one place after which there is no time to close
RESERVE = 32  # tokens to spare, beside twice the shortest text, below which each choice is judged
RETRY = 4  # tokens after a search that found no way, before the next one; then twice as many
MAX_SIMILAR = 2048  # allowed ids among which spellings of the same are looked for


class Constraint:
    """Lives through preemption unchanged. `state` is moved by `accept` here and nowhere else."""

    __slots__ = (
        "_ahead",
        "_bans",
        "_check",
        "_closer",
        "_compiled",
        "_cursor",
        "_ends",
        "_failed",
        "_furthest",
        "_ids",
        "_is_free",
        "_known",
        "_next_way",
        "_num_follow",
        "_num_rejects",
        "_num_same",
        "_reserve",
        "_retry",
        "_shape",
        "_step",
        "_text",
        "_vocabulary",
        "_watch_below",
        "_ways",
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
        self._is_free = self._check is None
        self._ids: list[int] = []
        self._ends = [0]  # bytes of text after each token
        self._text = bytearray()
        self._bans: dict[int, set[int]] = {}  # by place among the generated tokens
        # Ways out by place: at or after what was released; the earliest and the latest of them.
        shortest = tuple(compiled.shortest or ())
        self._ways: list[tuple[int, tuple[int, ...]]] = []
        if compiled.shortest is not None:
            self._ways.append((0, shortest))
        self._known = shortest  # the way that was found last, wherever that was
        self._shape: object = None  # of the open values where it was proven
        # With more tokens left than this the end is not looked for.
        self._reserve = 2 * len(shortest) + RESERVE
        self._watch_below = 1 << 62
        # Each token can take so many of those to spare; what is held back is never lost.
        self._step = (
            2
            if self._cursor is not None
            else 1 + (1 << 30 if compiled.check is None else compiled.check.heaviest)
        )
        self._retry = RETRY
        self._num_rejects = 0
        self._num_follow = 0  # tokens of the way out that must come now
        # What `fits` has found out for `take`.
        self._ahead: TextCursor | None = None
        self._failed: int | None = None
        self._next_way: tuple[int, ...] | None = None
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

    @property
    def way_out(self) -> tuple[int, ...] | None:
        """The way that is known from here; None: none is."""
        if self._ways and self._ways[-1][0] == len(self._ids):
            return self._ways[-1][1]
        return None

    def accept(self, token_id: int) -> None:
        """Advance the grammar by a chosen id; `reject` takes it back."""
        if not self.state.accept(token_id):
            raise RuntimeError(f"grammar refused the sampled token {token_id}")

    def fits(self, token_id: int, *, num_left: int) -> bool:
        """Whether the text can still end well in `num_left` tokens after the accepted id.

        Where the id belongs to a value that is held back, an earlier way out is as good.
        """
        self._next_way = None
        is_held = False
        if self._cursor is not None:
            self._ahead = self._cursor.fork()
            self._failed = self._ahead.push(self._vocabulary.token_bytes[token_id])
            if self._failed is not None:
                return True  # `take` tells
            is_held = self._ahead.held_from is not None
        way_out = self.way_out
        if way_out and way_out[0] == token_id:
            self._next_way = way_out[1:]
            return True
        can_wait = is_held or self._cursor is None
        if can_wait and num_left > self._watch_below:
            return True
        found = self._find(token_id, num_left)
        if found is not None:
            self._next_way = found
            self._retry = RETRY
            spare = num_left - len(found) - self._reserve
            self._watch_below = num_left - max(0, spare) // self._step
            return True
        if not can_wait or num_left == 0 or (way_out is not None and not is_held):
            return False
        self._watch_below = num_left - self._retry
        self._retry *= 2
        return True  # what is held can be taken back; else nothing was known before either

    def _find(self, token_id: int, num_left: int) -> tuple[int, ...] | None:
        """A way out after the accepted id, of at most `num_left` tokens."""
        cursor, known = self._ahead, self._known
        place = Place(self.state, cursor, self._is_free)
        shape = None
        if cursor is not None and cursor.held_from is None:
            shape = cursor.shape
        if known and len(known) <= num_left and self._closer.leads_out(self.state, known):
            is_proven = cursor is None or (shape is not None and shape == self._shape)
            if is_proven or self._closer.proves(place, known):
                self._shape = shape
                return known
        search = Search(known=known, exits=self._compiled.exits, check=self._check)
        found = self._closer.way_out(place, num_left, search)
        if found is None:
            return None
        self._known, self._shape = tuple(found), shape
        return self._known

    def reject(self, token_id: int) -> bool:
        """The accepted id leaves no way to end well: it is not to be chosen here again.

        False when nothing else is to be chosen.
        """
        place = len(self._ids)
        self.state.rollback(1)
        self._ban(place, (token_id,))
        self._num_rejects += 1
        if self.only is not None or self._num_rejects >= MAX_REJECTS:
            return False
        row = np.zeros(self._vocabulary.mask_words, np.int32)
        return self._can_choose(row, place, None) or self.state.may_end

    def take(self, token_id: int) -> int | None:
        """Note an accepted id; returns where a value that is complete and invalid begins."""
        self._num_rejects = 0
        self._num_follow = max(0, self._num_follow - 1)
        self.only = None
        data = self._vocabulary.token_bytes[token_id]
        self._ids.append(token_id)
        if self._check is not None:
            self._text += data
        self._ends.append(self._ends[-1] + len(data))
        is_held = False
        if self._cursor is not None:
            self._cursor = self._ahead
            assert self._cursor is not None
            if self._failed is not None:
                return self._failed
            is_held = self._cursor.held_from is not None
        if not is_held:
            self._ways.clear()
        elif len(self._ways) > 1 and self._next_way is not None:
            self._ways.pop()
        if self._next_way is not None:
            self._ways.append((len(self._ids), self._next_way))
            self._known = self._next_way
        return None

    def follow(self, *, num_left: int) -> None:
        """Nothing is to be chosen here: the way out goes on, to the end if there is no time."""
        way_out = self.way_out
        assert way_out is not None
        has_time = num_left > len(way_out) + self._reserve
        self._num_follow = 1 if has_time else len(way_out)

    def closing(self, *, num_left: int) -> Sequence[int]:
        """What of the way out must come now."""
        way_out = self.way_out
        if not way_out:
            return ()
        return way_out if len(way_out) >= num_left else way_out[: self._num_follow]

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
            if self._can_choose(row, last, None):
                found.append(last)
        for place in range(last - 1, num_released - 1, -1):
            if len(found) >= wanted:
                break
            self.state.rollback(1)
            if self._can_choose(row, place, self._ids[place]):
                found.append(place)
        if not found:
            for token_id in self._ids[min(num_released, last) : last]:
                self.accept(token_id)
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

    def _can_choose(self, row: Int32Array, place: int, chosen: int | None) -> bool:
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

    def fall_back(self, num_released: int, *, is_full: bool) -> int | None:
        """Go back to the latest way out that is known, which is then followed.

        As far as the value that failed, or to the end when there is no room left. Returns how many
        tokens are left; None: none is known, which is a fault.
        """
        while self._ways and self._ways[-1][0] > len(self._ids):
            self._ways.pop()
        if not self._ways or self._ways[-1][0] < num_released:
            return None
        keep, way_out = self._ways[-1]
        self.state.rollback(len(self._ids) - keep)
        self._shorten(keep)
        self._num_same, self._furthest = 0, -1
        is_over = is_full or self.num_tries > MAX_TRIES
        self._num_follow = len(way_out) if is_over else self._num_to_value_end(way_out)
        self.only = way_out[0] if way_out else None
        return keep

    def _num_to_value_end(self, way_out: Sequence[int]) -> int:
        """How many tokens of the way it takes until nothing is held back any more."""
        if self._cursor is None:
            return len(way_out)
        cursor = self._cursor.fork()
        was_held = cursor.held_from is not None
        for count, token_id in enumerate(way_out, start=1):
            cursor.push(self._vocabulary.token_bytes[token_id])
            is_held = cursor.held_from is not None
            if was_held and not is_held:
                return count
            was_held = is_held
        return len(way_out)

    def _shorten(self, keep: int) -> None:
        for place in [place for place in self._bans if place > keep]:
            del self._bans[place]
        del self._ids[keep:], self._ends[keep + 1 :]
        del self._text[self._ends[-1] :]
        if self._cursor is not None:
            self._cursor.truncate(self._ends[-1])
        self._ways = [way for way in self._ways if way[0] <= keep]
        self._num_rejects = self._num_follow = 0
        self.only = None


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id & 31)).view(np.int32)


def _set(mask: Int32Array, token_id: int) -> None:
    mask[token_id >> 5] |= _bit(token_id)
