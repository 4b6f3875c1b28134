"""How a text can end: the tokens to go from where it stands, proven on its grammar and its checks.

A *way out* is a list of ids after which the text is complete and every value that is checked
passes. Its length bounds the distance to the end from above; whoever follows it ends in time.

    {"a": 1, "b": [            known, from one token before:   5], "c": ""}
                 ^ here        found: a walk of few masks, then the end of the known way

A walk goes along the masks and closes what is open; where a value that is checked begins, it
writes one that is known to pass. At each of its places the ends of the way that was known before
are tried, which takes a microsecond each. All bounds are counts: the same text has the same ways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol, cast

import numpy as np

from .backend import GrammarState, MaskRow, TextCheck, TextCursor
from .masks import allowed_ids
from .vocabulary import Vocabulary

MAX_MASKS = 64  # of a search while others wait
MAX_PROOFS = 512  # of such a search: each may read what is left of a text
NUM_WALKS = 8  # for a start
_MAX_START_MASKS = 3000  # of the first of them
MAX_SEARCHED = 16  # tokens of a text for which shorter ones are looked for
_MAX_PATTERN_MASKS = 2000
_MAX_LAID_STEPS = 40  # after which a layout may have no way of its own
_MAX_CANONICAL = 4096  # texts whose ids are kept
_MAX_LETTERS = 20  # of a pattern that are guessed before its end is searched for
_MAX_FAILED = 24  # values of one walk that do not pass
_MAX_ENDS = 96  # ends of a known way that are tried at one place
_CLOSING = (
    *(b'"}]', b'"}}', b'"]}', b'"}', b'"]'),
    *(b"}]}", b"]}}", b"}}}", b"}}", b"]]", b"]}", b"}]", b"}", b"]"),
)
_GOING_ON = (b":", b",")
_OPENING = (b'"', b"null", b"true", b"{}", b"[]", b"{", b"[", b"n", b"t", b"f")
_IN_STRINGS = b"kqxz"  # in no value but strings
_LETTERS = b"a0-1:.T9Z5 @2be/"  # one of each kind comes early


class LaidOutState(GrammarState, Protocol):
    """An engine's state whose blanks something else decides, see `layout`."""

    @property
    def inner(self) -> GrammarState: ...

    def laid_out(self, ids: Sequence[int] | None) -> list[int] | None:
        """A way of `inner` with the blanks that are asked for from here."""
        ...

    def fork(self) -> LaidOutState: ...


@dataclass(slots=True)
class Place:
    """Where a text stands. `cursor` is None where the grammar says it all."""

    state: GrammarState
    cursor: TextCursor | None = None
    is_free: bool = False  # the text need not be JSON

    def fork(self) -> Place:
        cursor = None if self.cursor is None else self.cursor.fork()
        return Place(self.state.fork(), cursor, self.is_free)


def place_of(state: GrammarState, check: TextCheck | None) -> Place:
    """The start of a text."""
    return Place(state, None if check is None else check.cursor(), is_free=check is None)


@dataclass(slots=True)
class Search:
    """What one search may cost, and what it is to avoid. Walking uses the counts up."""

    num_masks: int = MAX_MASKS
    num_proofs: int = MAX_PROOFS  # ends that are tried
    variant: int = 0  # of the letters that are tried
    is_start: bool = False  # the text begins here
    known: Sequence[int] = ()  # a way from a place nearby
    exits: Sequence[Sequence[int]] = ()  # ways that the grammar proposes
    check: TextCheck | None = None  # knows keys and strings that may have to be written


@lru_cache(maxsize=4)
def closer_of(vocabulary: Vocabulary) -> Closer:
    """One for each vocabulary: vocabularies compare by identity."""
    return Closer(vocabulary)


class Closer:
    """Finds ways to the end for the grammars of one vocabulary. Any thread may use it."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        ids: dict[bytes, int] = {}
        for token_id, text in enumerate(vocabulary.token_bytes):
            if text and token_id not in vocabulary.special_ids:
                ids.setdefault(text, token_id)
        self.byte_ids = [ids.get(bytes([byte])) for byte in range(256)]
        self._canonical: dict[bytes, list[int]] = {}
        self.blank_id = ids.get(b" ")
        printable = [ids[bytes([c])] for c in (*range(33, 127), 10, 32) if bytes([c]) in ids]
        groups = (
            [ids[bytes([c])] for c in _IN_STRINGS if bytes([c]) in ids],
            [ids[text] for text in (*_CLOSING[:5], b'"') if text in ids],
            [ids[text] for text in _CLOSING[5:] if text in ids],
            [ids[text] for text in _GOING_ON if text in ids],
            [ids[bytes([c])] for c in _LETTERS if bytes([c]) in ids],
            [ids[text] for text in _OPENING if text in ids],
            printable,
        )
        watched = np.array([token_id for group in groups for token_id in group], np.int64)
        self._words, self._shifts = watched >> 5, (watched & 31).astype(np.uint32)
        self._watched = watched
        ends = np.cumsum([len(group) for group in groups]).tolist()
        self._ends = ends

    def proves(self, place: Place, ids: Sequence[int]) -> bool:
        """Whether the text is complete after `ids`, and passes; `place` is not changed."""
        if not self.leads_out(place.state, ids):
            return False
        return place.cursor is None or place.cursor.ends_well(self.text_of(ids))

    def leads_out(self, state: GrammarState, ids: Sequence[int]) -> bool:
        """Whether the text is complete after `ids`, says the grammar; `state` is not changed."""
        if not ids:
            return state.may_end
        ends_after = getattr(state, "ends_after", None)  # a quick way of some engines
        if ends_after is not None:
            return bool(ends_after(ids))
        fork = state.fork()
        return all(fork.accept(token_id) for token_id in ids) and fork.may_end

    def text_of(self, ids: Sequence[int]) -> bytes:
        texts = self.vocabulary.token_bytes
        return b"".join([texts[token_id] for token_id in ids])

    def way_out(
        self, place: Place, max_tokens: int, search: Search | None = None
    ) -> list[int] | None:
        """Ids that lead out, at most `max_tokens`; None: none was found.

        `place` is not changed. Raises the GrammarError of an engine at its limits.
        """
        search = search or Search()
        # Spelt canonically a way has fewer tokens than it was walked with.
        ids = _Walk(self, place.fork(), search, 3 * max_tokens + 8).run()
        if ids is None:
            return None
        if len(ids) > max_tokens // 2:
            ids = self.shorter(place, ids)
        return ids if len(ids) <= max_tokens else None

    def shortest(
        self,
        place: Place,
        max_tokens: int,
        check: TextCheck | None = None,
        *,
        num_walks: int = NUM_WALKS,
        num_masks: int = _MAX_START_MASKS,
    ) -> list[int] | None:
        """For a start: of several ways the one with the fewest tokens; None: none was found.

        `num_masks` bounds the longest of the walks.
        Texts that are longer than a few tokens are walked once: their start is forced.
        """
        best: list[int] | None = None
        if place.is_free:
            search = Search(num_masks=_MAX_PATTERN_MASKS, is_start=True)
            letters = _Walk(self, place.fork(), search, 0).through_pattern()
            best = None if letters is None else self.shorter(place, list(letters))
        for variant in range(num_walks):
            if best is not None and len(best) > MAX_SEARCHED:
                break
            most_masks = 256 if variant % 4 or place.is_free else num_masks
            search = Search(most_masks, variant=variant, is_start=True, check=check)
            most = max_tokens if best is None else len(best)
            walk = _Walk(self, place.fork(), search, 3 * most + 8)
            ids = walk.run()
            if ids is not None:
                ids = self.shorter(place, ids)
                if len(ids) <= max_tokens and (best is None or len(ids) < len(best)):
                    best = ids
            if best is not None and not walk.varies:
                break
        return best

    def shorter(self, place: Place, ids: list[int]) -> list[int]:
        """The same text in canonical tokens, if those are fewer and legal."""
        try:
            canonical = self.vocabulary.encode(self.text_of(ids).decode())
        except UnicodeDecodeError:
            return ids
        if len(canonical) < len(ids) and self.leads_out(place.state, canonical):
            return canonical
        return ids

    def spelt(self, state: GrammarState, data: bytes) -> list[int] | None:
        """Ids for `data`, with the blanks that the grammar asks for between."""
        ids = self._canonical.get(data)
        if ids is None:
            if len(self._canonical) >= _MAX_CANONICAL:
                self._canonical.clear()
            ids = self._canonical[data] = self.vocabulary.encode(data.decode())
        fork = state.fork()
        if all(fork.accept(token_id) for token_id in ids):
            return list(ids)
        fork, ids = state.fork(), []
        texts = self.vocabulary.token_bytes
        for byte in data:
            token_id = self.byte_ids[byte]
            if token_id is None:
                return None
            if not fork.accept(token_id):
                blanks = list(fork.forced())
                if not blanks or b"".join(texts[i] for i in blanks).strip():
                    return None
                ids += blanks
                if not all(fork.accept(i) for i in (*blanks, token_id)):
                    return None
            ids.append(token_id)
        return ids

    def allowed(self, row: MaskRow) -> list[list[int]]:
        """The ids of interest that `row` allows: in strings, ends, closing, ..., printable."""
        bits = (row.view(np.uint32)[self._words] >> self._shifts) & np.uint32(1)
        places = np.flatnonzero(bits)
        cuts = [0, *np.searchsorted(places, self._ends).tolist()]
        ids = self._watched[places].tolist()
        return [ids[start:end] for start, end in pairwise(cuts)]


@dataclass(slots=True)
class _Step:
    """One token of a walk."""

    token_id: int
    cursor: TextCursor | None  # before it
    is_in_string: bool | None  # before it
    banned: set[int]  # instead of it


class _Walk:
    """One walk from `place`, which it owns."""

    def __init__(self, closer: Closer, place: Place, search: Search, max_steps: int):
        self._closer = closer
        self._place = place
        self._search = search
        self._max_steps = max_steps
        self._steps: list[_Step] = []
        self._failed_left = _MAX_FAILED
        self._banned: set[int] = set()  # at this place
        self._visits: dict[bytes, int] = {}  # by what was allowed
        self._num_letters = 0  # in a row
        self._tried: set[bytes] = set()  # what was allowed where ends were tried
        self._last, self._num_same = b"", 0  # what was allowed last, and how often in a row
        self._rng = random.Random(search.variant)  # noqa: S311 - letters to try, no secrets
        self._row = np.zeros(closer.vocabulary.mask_words, np.int32)
        self._is_in_string = False if search.is_start else None  # None: not known
        self.varies = False  # whether another variant could write something else
        if place.is_free:
            self._is_in_string = None
        self._inserted: set[int] = set()  # where a value that passes was written

    def run(self) -> list[int] | None:
        while len(self._steps) <= self._max_steps:
            rest = self._known_end()
            if rest is not None:
                return [step.token_id for step in self._steps] + rest
            if self._insert():
                continue
            chosen = self._next()
            if chosen is None:
                if not self._step_back():
                    return None
                continue
            for token_id in chosen:
                if not self._take(token_id):
                    break
        return None

    def _known_end(self) -> list[int] | None:
        """The end of the known way that leads out from here."""
        place, closer, known = self._place, self._closer, self._search.known
        if not self._banned and place.state.may_end and closer.proves(place, ()):
            return []
        first = max(0, len(known) - _MAX_ENDS)
        for start in range(len(known) - 1, first - 1, -1):
            rest = list(known[start:])
            if rest[0] not in self._banned and self._proves(rest):
                return rest
        if hasattr(place.state, "laid_out") and len(self._steps) < _MAX_LAID_STEPS:
            laid = self._laid_end(cast(LaidOutState, place.state))
            if laid and laid[0] not in self._banned and closer.proves(place, laid):
                return laid
        for exit_ids in self._search.exits:
            if exit_ids and exit_ids[0] not in self._banned and self._proves(exit_ids):
                return list(exit_ids)
        return None

    def _proves(self, ids: Sequence[int]) -> bool:
        """Whether `ids` lead out from here, while that may still be asked."""
        if self._search.num_proofs <= 0 or not self._closer.leads_out(self._place.state, ids):
            return False
        cursor = self._place.cursor
        if cursor is None:
            return True
        self._search.num_proofs -= 1
        return cursor.ends_well(self._closer.text_of(ids))

    def _laid_end(self, state: LaidOutState) -> list[int] | None:
        """A way of the engine's grammar, laid out: it costs half of what is left at most."""
        search = self._search
        num_masks = min(MAX_MASKS, search.num_masks // 2)
        if num_masks == 0:
            return None
        part = replace(search, num_masks=num_masks, num_proofs=search.num_proofs // 2, known=())
        inner = Place(state.inner, self._place.cursor, self._place.is_free)
        ids = self._closer.way_out(inner, self._max_steps, part)
        search.num_masks -= num_masks - part.num_masks
        search.num_proofs -= search.num_proofs // 2 - part.num_proofs
        return state.laid_out(ids)

    def _insert(self) -> bool:
        """Write a value that passes where one that is checked begins; whether that was done."""
        cursor, num_before = self._place.cursor, len(self._steps)
        if cursor is None or self._banned or num_before in self._inserted:
            return False
        for text in cursor.proposals():
            self._inserted.add(num_before)
            ids = self._closer.spelt(self._place.state, text)
            if ids and all(self._take(token_id, backs=False) for token_id in ids):
                return True
            while len(self._steps) > num_before:
                self._undo()
        return False

    def _next(self) -> Sequence[int] | None:
        """What to write next; None: nothing is left here, or nothing may be spent any more."""
        state = self._place.state
        forced = () if self._banned else state.forced()
        if forced:
            return forced
        if self._search.num_masks <= 0:
            self._failed_left = 0
            return None
        self._search.num_masks -= 1
        state.fill(self._row)
        for token_id in self._banned:
            self._row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
        return self._choose()

    def _choose(self) -> Sequence[int] | None:
        in_strings, ends, closing, going_on, letters, opening, printable = self._closer.allowed(
            self._row
        )
        is_in_string = self._is_in_string
        if is_in_string is None and not self._place.is_free:
            is_in_string = True if in_strings else None
        key = self._row.tobytes()
        self._num_same = self._num_same + 1 if key == self._last else 0
        self._last = key
        if self._place.is_free and (ending := self._ending(printable)) is not None:
            return (ending,)
        wanted = ends if is_in_string else [*closing, *going_on]
        if not wanted and self._search.check is not None and self._num_letters == 0:
            check = self._search.check
            word = self._proposed(check.strings if is_in_string else check.words)
            if word is not None:
                return word
        if is_in_string is None and not wanted and not self._place.is_free:
            wanted = ends  # one opens or ends a string
        if wanted:
            self._num_letters = 0
            return (wanted[self._num_same % len(wanted)],)
        num_visits = self._visits[key] = self._visits.get(key, -1) + 1
        if printable and (is_in_string or self._place.is_free):
            self.varies = True
            if self._search.variant:
                return (self._rng.choice(printable),)
        if is_in_string is not True and not self._place.is_free:
            letters = [i for i in letters if i != self._closer.blank_id] or opening
        some = letters or printable
        self._num_letters = self._num_letters + 1 if some else 0
        if self._num_letters > _MAX_LETTERS and is_in_string is not False:
            self._num_letters = 0
            return self.through_pattern()
        if not some:
            stop_ids = self._closer.vocabulary.stop_ids
            some = [i for i in allowed_ids(self._row)[:64].tolist() if i not in stop_ids]
        return (some[num_visits % len(some)],) if some else None

    def _proposed(self, texts: Sequence[bytes]) -> Sequence[int] | None:
        """The ids of the first of `texts` that can be written here."""
        for text in texts:
            ids = self._closer.spelt(self._place.state, text)
            if ids is not None and ids[0] not in self._banned:
                return ids
        return None

    def through_pattern(self) -> Sequence[int] | None:
        """The fewest letters after which a string, or the text, may end.

        Breadth first; places at which the same is allowed count as one.
        """
        closer, row = self._closer, self._row
        seen: set[bytes] = set()
        queue: list[tuple[GrammarState, tuple[int, ...]]] = [(self._place.state.fork(), ())]
        for state, ids in queue:  # grows meanwhile
            state.fill(row)
            _, ends, _, _, _, _, printable = closer.allowed(row)
            if ids and (state.may_end if self._place.is_free else ends):
                return ids
            for token_id in printable:
                fork = state.fork()
                if self._search.num_masks <= 0 or not fork.accept(token_id):
                    continue
                self._search.num_masks -= 1
                fork.fill(row)
                key = row.tobytes()
                if key not in seen:
                    seen.add(key)
                    queue.append((fork, (*ids, token_id)))
        return None

    def _ending(self, ids: Sequence[int]) -> int | None:
        """One of `ids` that completes the text at once, where that was not tried before."""
        state = self._place.state
        if self._last in self._tried:
            return None
        self._tried.add(self._last)
        return next((i for i in ids if self._closer.leads_out(state, (i,))), None)

    def _take(self, token_id: int, *, backs: bool = True) -> bool:
        """Add a token; where it ends a value that does not pass, another one is tried."""
        place = self._place
        if not place.state.accept(token_id):
            self._banned.add(token_id)
            self._failed_left -= 1
            return False
        data = self._closer.vocabulary.token_bytes[token_id]
        before = place.cursor
        self._steps.append(_Step(token_id, before, self._is_in_string, self._banned))
        self._banned = set()
        if b"," in data and self._is_in_string is not True:
            self._visits.clear()  # another value begins
        if b'"' in data and self._is_in_string is not None:
            quotes = data.count(b'"') - data.count(b'\\"')
            self._is_in_string ^= bool(quotes % 2)
        if before is not None:
            place.cursor = before.fork()
            if place.cursor.push(data) is not None:
                self._undo()
                if backs:
                    self._banned.add(token_id)
                    self._failed_left -= 1
                return False
        return True

    def _undo(self) -> None:
        step = self._steps.pop()
        place = self._place
        place.state.rollback(1)
        place.cursor = step.cursor
        self._is_in_string = step.is_in_string
        self._banned = step.banned

    def _step_back(self) -> bool:
        """Choose otherwise at the place before; False when that is no use."""
        if self._failed_left <= 0 or not self._steps or self._place.cursor is None:
            return False
        token_id = self._steps[-1].token_id
        self._undo()
        self._banned.add(token_id)
        self._failed_left -= 1
        return True
