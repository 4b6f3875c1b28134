"""Requests whose grammar is compiling, by grammar: a step looks at those that may be ready.

The compiler says from its threads which grammar is done. That is a hint: in each step the grammar
waited for longest is looked at too, so a hint that is lost delays and never hangs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from palmette.constrained.backend import CompiledGrammar
from palmette.constrained.gate import gated
from palmette.constrained.spec import GrammarError, GrammarSpec

from .faults import check_room
from .parts import GrammarSource
from .sequence import SequenceState


def fitted(grammar: CompiledGrammar, sequence: SequenceState) -> CompiledGrammar:
    """The grammar as a sequence is to follow it: behind its thinking, if there is any.

    Raises:
        SequenceFault: it has no room for the shortest text.
    """
    vocabulary = sequence.delivery.vocabulary
    grammar = gated(grammar, sequence.request.reasoning_end, vocabulary)
    check_room(grammar.shortest, sequence.max_generated)
    return grammar


class GrammarWaiters:
    """By the key of the grammar, in order of arrival."""

    def __init__(self, grammars: GrammarSource) -> None:
        self._grammars = grammars
        self._by_key: dict[str, dict[int, SequenceState]] = {}
        self._done: deque[str] = deque()  # keys to look at; compiler threads append
        self._news = threading.Event()
        grammars.on_done = self._note_done

    def _note_done(self, key: str) -> None:
        self._done.append(key)
        self._news.set()

    def wait(self, timeout_s: float) -> None:
        """Until a grammar is ready, or the time is up; other threads have the interpreter."""
        self._news.wait(timeout_s)

    def add(self, sequence: SequenceState, spec: GrammarSpec) -> None:
        """It waits from now on. Raises whatever the compiler does; then it waits too."""
        self._by_key.setdefault(spec.key, {})[sequence.arrival] = sequence
        self._done.append(spec.key)  # it may be known
        self._grammars.request(spec)

    def remove(self, sequence: SequenceState) -> None:
        """It waits no more, if it did."""
        spec = sequence.request.grammar
        if spec is None:
            return
        if self._forget(sequence, spec):
            self._grammars.cancel(spec)

    def _forget(self, sequence: SequenceState, spec: GrammarSpec) -> bool:
        waiting = self._by_key.get(spec.key, {})
        if waiting.pop(sequence.arrival, None) is None:
            return False
        if not waiting:
            del self._by_key[spec.key]
        return True

    def take_ready(self) -> Iterator[tuple[SequenceState, CompiledGrammar | Exception]]:
        """Who waits no more, with the grammar or why there is none. O(ready)."""
        self._news.clear()  # before the keys are taken: what comes later sets it again
        if not self._by_key:
            return
        for key in self._to_look_at():
            while waiting := self._by_key.get(key):
                first = next(iter(waiting.values()))
                spec = first.request.grammar
                assert spec is not None
                outcome: CompiledGrammar | Exception
                try:
                    if not self._grammars.ready(spec):
                        break
                    outcome = self._grammars.get(spec)
                except GrammarError as error:
                    outcome = error
                except Exception as error:  # fault boundary: this request, the others ask anew
                    yield first, error  # whose end takes it out
                    self._forget(first, spec)
                    continue
                del self._by_key[key]
                for sequence in waiting.values():
                    yield sequence, outcome

    def _to_look_at(self) -> list[str]:
        keys = {next(iter(self._by_key)): None}
        while self._done:
            keys[self._done.popleft()] = None
        return list(keys)
