"""The engine outlines_core: an index of all states of a regex over all tokens.

Masks cost next to nothing, compiling may cost anything: it runs in a process that is killed over
its budget, and only arrays of numbers come back. What the engine does wrong is kept from it:
patterns are parsed and written anew by us (alternatives, anchors, `.`, classes), special ids are
not in its vocabulary, tokens are bytes and no text, stop ids are ours, and nothing is ever cached
on disk.

Source: outlines_core 0.2.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from .automaton import AutomatonGrammar, row_from
from .backend import CompiledGrammar, MaskRow, refuse_other_kinds
from .choices import read_options
from .limits import GrammarLimits
from .messages import refuse_surrogates
from .regex_syntax import Tree, literal, parse, written
from .regex_syntax import Union as UnionTree
from .spec import GrammarError, GrammarKind, GrammarSpec
from .vocabulary import Vocabulary
from .worker_pool import WorkerPool

MAX_STATES = 4_096
_MAX_ROWS = 64  # of masks remembered for each grammar


class IndexAutomaton:
    """See `automaton.TokenAutomaton`; states are numbers.

    offsets int32 [S + 1], ids and nexts int32 [N]: the transitions of state s lie at
    offsets[s]:offsets[s + 1], ascending by id.
    """

    start = 0

    def __init__(
        self,
        offsets: NDArray[np.int32],
        ids: NDArray[np.int32],
        nexts: NDArray[np.int32],
        finals: frozenset[int],
        vocabulary_size: int,
    ):
        self._offsets, self._ids, self._nexts = offsets, ids, nexts
        self._finals = finals
        self._size = vocabulary_size
        self._rows: OrderedDict[int, MaskRow] = OrderedDict()
        self._lock = threading.Lock()

    def next(self, state: int, token_id: int) -> int | None:
        start, end = self._offsets[state : state + 2]
        place = start + int(np.searchsorted(self._ids[start:end], token_id))
        if place < end and self._ids[place] == token_id:
            return int(self._nexts[place])
        return None

    def row(self, state: int) -> MaskRow:
        with self._lock:
            row = self._rows.get(state)
            if row is None:
                start, end = self._offsets[state : state + 2]
                row = row_from(self._ids[start:end], self._size)
                self._rows[state] = row
                if len(self._rows) > _MAX_ROWS:
                    self._rows.popitem(last=False)
            return row

    def is_final(self, state: int) -> bool:
        return state in self._finals


class OutlinesCoreBackend:
    """See `backend.GrammarBackend` and `backend.ManagedBackend`."""

    name = "outlines_core"
    kinds = (GrammarKind.REGEX, GrammarKind.CHOICE)

    def __init__(self, limits: GrammarLimits | None = None, *, pool: WorkerPool | None = None):
        if importlib.util.find_spec("outlines_core") is None:
            raise GrammarError(
                "the grammar backend 'outlines_core' is not installed: "
                "pip install 'palmette[outlines]'"
            )
        self._limits = limits or GrammarLimits()
        self._pool = pool or WorkerPool("outlines_core")

    def prepare(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self._pool.prepare(vocabulary)

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        refuse_other_kinds(self, spec)
        pattern = written(self._tree(spec))
        try:
            header, body = self._pool.compile(
                {"pattern": pattern, "max_states": MAX_STATES}, vocabulary
            )
        except GrammarError as error:
            raise GrammarError(f"{spec.kind}: {error}") from None
        num_states, num_transitions = int(header["num_states"]), int(header["num_transitions"])
        arrays = np.frombuffer(body, np.int32)
        cuts = [num_states + 1, num_states + 1 + num_transitions]
        offsets, ids, nexts = np.split(arrays, cuts)
        automaton = IndexAutomaton(
            offsets, ids, nexts, frozenset(header["finals"]), vocabulary.size
        )
        num_bytes = len(body) + min(num_states, _MAX_ROWS) * 4 * vocabulary.mask_words
        return AutomatonGrammar(automaton, vocabulary, num_bytes)

    def close(self) -> None:
        self._pool.close()

    def _tree(self, spec: GrammarSpec) -> Tree:
        if spec.kind == GrammarKind.CHOICE:
            options = [literal(option) for option in read_options(spec.source, self._limits)]
            return options[0] if len(options) == 1 else UnionTree(tuple(options))
        refuse_surrogates(spec.source, "regex")
        self._limits.check_regex(spec.source)
        return parse(spec.source)
