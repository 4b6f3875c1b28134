"""A reference engine in plain Python: slow, obvious, and what the tests compare with.

It serves `choice` and `regex` and needs no native code. Every answer is worked out from the
definition: an id is legal when some option, or some way to match, continues with its bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from .automaton import AutomatonGrammar
from .backend import CompiledGrammar, GrammarState, MaskRow, refuse_other_kinds
from .choices import read_options
from .limits import GrammarLimits
from .messages import refuse_surrogates
from .pure_regex import Nfa, Places, RegexAutomaton
from .regex_syntax import parse
from .spec import ConstraintIssue, GrammarError, GrammarKind, GrammarSpec
from .vocabulary import Vocabulary


class PureState:
    """See `backend.GrammarState`. The state is the list of accepted ids."""

    def __init__(self, options: Sequence[bytes], vocabulary: Vocabulary):
        self._options = options  # sorted
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._lengths = [0]  # of the text, after each accepted id
        self._text = b""

    @property
    def is_done(self) -> bool:
        return self._has_ended or (self.may_end and not self._continues(self._text, strictly=True))

    @property
    def may_end(self) -> bool:
        return self._has_ended or self._text in self._options[self._position(self._text) :][:1]

    def fill(self, row: MaskRow) -> None:
        row[:] = 0
        for token_id in range(self._vocabulary.size):
            if self._allows(token_id):
                row[token_id >> 5] |= np.array(1 << (token_id & 31), dtype=np.uint32).view(np.int32)

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self._ids.append(token_id)
        if token_id not in self._vocabulary.stop_ids:
            self._text += self._vocabulary.token_bytes[token_id]
        self._lengths.append(len(self._text))
        return True

    def forced(self) -> Sequence[int]:
        return ()

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._ids):
            raise ValueError(f"can't roll back {num_tokens} of {len(self._ids)} tokens")
        end = len(self._ids) - num_tokens
        del self._ids[end:], self._lengths[end + 1 :]
        self._text = self._text[: self._lengths[-1]]

    def fork(self) -> GrammarState:
        copy = PureState(self._options, self._vocabulary)
        copy._ids, copy._lengths, copy._text = self._ids[:], self._lengths[:], self._text
        return copy

    @property
    def _has_ended(self) -> bool:
        return bool(self._ids) and self._ids[-1] in self._vocabulary.stop_ids

    def _allows(self, token_id: int) -> bool:
        if token_id in self._vocabulary.stop_ids:
            return self.may_end
        if self._has_ended or not 0 <= token_id < self._vocabulary.size:
            return False
        token = self._vocabulary.token_bytes[token_id]
        return (
            token != b""
            and token_id not in self._vocabulary.special_ids
            and self._continues(self._text + token)
        )

    def _position(self, text: bytes) -> int:
        return bisect_left(self._options, text)

    def _continues(self, text: bytes, *, strictly: bool = False) -> bool:
        """Whether some option starts with `text` (and is longer)."""
        position = self._position(text + b"\0" if strictly else text)
        return position < len(self._options) and self._options[position].startswith(text)


class PureGrammar:
    """See `backend.CompiledGrammar`."""

    notes: tuple[str, ...] = ()
    warnings: tuple[ConstraintIssue, ...] = ()
    check = None
    exits: tuple[tuple[int, ...], ...] = ()

    def __init__(self, options: Sequence[bytes], vocabulary: Vocabulary):
        self._options = options
        self._vocabulary = vocabulary
        texts = [option.decode() for option in options]
        self.shortest = min((vocabulary.encode(text) for text in texts), key=len)
        self.num_bytes = sum(len(option) + 64 for option in options)

    def start(self) -> GrammarState:
        return PureState(self._options, self._vocabulary)


class PureBackend:
    """See `backend.GrammarBackend`."""

    name = "pure"
    kinds = (GrammarKind.CHOICE, GrammarKind.REGEX)

    def __init__(self, limits: GrammarLimits | None = None):
        self._limits = limits or GrammarLimits()

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        refuse_other_kinds(self, spec)
        if spec.kind == GrammarKind.REGEX:
            return self._regex(spec.source, vocabulary)
        options = read_options(spec.source, self._limits)
        return PureGrammar(sorted(option.encode() for option in options), vocabulary)

    def _regex(self, pattern: str, vocabulary: Vocabulary) -> AutomatonGrammar[Places]:
        refuse_surrogates(pattern, "regex")
        self._limits.check_regex(pattern)
        nfa = Nfa(parse(pattern))
        if not nfa.start:
            raise GrammarError(f"regex {pattern!r:.200}: no text matches it")
        automaton = RegexAutomaton(nfa, vocabulary)
        return AutomatonGrammar(automaton, vocabulary, _bytes_of(nfa, vocabulary))


def _bytes_of(nfa: Nfa, vocabulary: Vocabulary) -> int:
    """Estimated: places, and the rows and steps that are remembered at most."""
    return 400 * nfa.num_places + 4_096 * 200 + 256 * 4 * vocabulary.mask_words
