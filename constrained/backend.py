"""What an engine of grammars offers. Implementations inherit nothing from here.

A mask row is int32 [W], W = ceil(vocab_size / 32), bit i % 32 of word i // 32 set when token id i
is allowed. `vocab_size` is the width of the logits, never the length of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .rewrite import Residual
from .spec import ConstraintIssue, GrammarError, GrammarKind, GrammarSpec
from .vocabulary import Vocabulary

MaskRow = NDArray[np.int32]  # [W]


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. Not shared between threads."""

    @property
    def is_done(self) -> bool:
        """True when nothing but a stop id may follow, or a stop id was accepted."""
        ...

    @property
    def may_end(self) -> bool:
        """True when the text so far is complete: stop ids are allowed next."""
        ...

    def fill(self, row: MaskRow) -> None:
        """Write the ids allowed next into `row`. Does not change the state.

        Raises:
            GrammarError: when a limit of the engine is reached; ends this request alone.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, when it is not allowed."""
        ...

    def forced(self) -> Sequence[int]:
        """The canonical ids that must follow, possibly none. Does not change the state."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ...

    def fork(self) -> GrammarState:
        """An independent copy."""
        ...


class TextCursor(Protocol):
    """Reads the bytes of a text as it grows, and checks each value as it closes."""

    @property
    def held_from(self) -> int | None:
        """Where the outermost open value that is still to be checked begins; None: nowhere."""
        ...

    def push(self, data: bytes) -> int | None:
        """Read on; returns where a value that is complete and not valid begins, if one is."""
        ...

    def truncate(self, num_bytes: int) -> None:
        """Forget what came after the first `num_bytes`."""
        ...

    def fork(self) -> TextCursor:
        """An independent copy."""
        ...

    @property
    def shape(self) -> object:
        """Where two are equal, the same is checked of the text to come; None: never."""
        ...

    def ends_well(self, data: bytes) -> bool:
        """Whether the text is whole and valid when `data` is its rest. Does not change this."""
        ...

    def proposals(self) -> Sequence[bytes]:
        """The rests of known texts that pass, for the value that is checked and begins here, or
        has begun."""
        ...


class TextCheck(Protocol):
    """What the grammar leaves to be checked on the text; shared by its sequences."""

    @property
    def residuals(self) -> Sequence[Residual]: ...

    @property
    def heaviest(self) -> int:
        """How much one token can add to what a text still needs, in bytes, from above."""
        ...

    @property
    def words(self) -> Sequence[bytes]:
        """Keys that some object must have, as `"key":`: what a way to the end may need."""
        ...

    @property
    def strings(self) -> Sequence[bytes]:
        """Strings in which a pattern is found, from behind the first quote; proposals."""
        ...

    def examples(self) -> Sequence[bytes]:
        """Whole texts that are likely to be short and valid; proposals."""
        ...

    def cursor(self) -> TextCursor | None:
        """One for a new sequence; None when nothing is to be checked on the way."""
        ...

    def is_valid(self, text: bytes) -> bool:
        """Whether a whole text passes."""
        ...


class CompiledGrammar(Protocol):
    """A grammar ready for one vocabulary; immutable, shared by all requests that use it."""

    warnings: tuple[ConstraintIssue, ...]
    """What was weakened, see `spec.Policy`; the compile service sets it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What in the source restricts nothing, for the user: unknown formats and the like."""
        ...

    @property
    def check(self) -> TextCheck | None:
        """What is to be checked on the text itself; None: the grammar says it all."""
        ...

    @property
    def shortest(self) -> Sequence[int] | None:
        """The ids of a text as short as any that was found; None: none was found."""
        ...

    @property
    def exits(self) -> Sequence[Sequence[int]]:
        """Ids with which a text may end where one of its parts has closed; proposals."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory it holds, for the cache's bound."""
        ...

    def start(self) -> GrammarState: ...


class GrammarBackend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Sequence[GrammarKind]:
        """What it serves; another kind is refused by `compile`."""
        ...

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        """Compile, off the hot path.

        Raises:
            GrammarError: what cannot be enforced, and where.
        """
        ...


@runtime_checkable
class ManagedBackend(Protocol):
    """A backend with something to build before it compiles, and to end after it."""

    def prepare(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """Have ready what `spec` and others of `vocabulary` share, outside of any time budget."""
        ...

    def close(self) -> None:
        """End what it has started; it may be used again."""
        ...


BACKENDS = ("llguidance", "outlines_core", "xgrammar", "pure")


def select_backend(name: str = "auto") -> GrammarBackend:
    """The engine called `name`; "auto" is llguidance.

    What each enforces, all of it exactly or refused with a reason:

    llguidance     json_schema, json_object, regex, choice, ebnf, lark, structural_tag
    outlines_core  regex, choice; `palmette[outlines]`; compiles in a process of its own
    xgrammar       json_schema and json_object of shapes on its verified list;
                   `palmette[xgrammar]`; compiles in a process of its own
    pure           regex, choice; Python only, the reference that tests compare with

    Raises:
        GrammarError: an unknown name, or one whose package is missing.
    """
    match name:
        case "auto" | "llguidance":
            from .llguidance_backend import LLGuidanceBackend

            return LLGuidanceBackend()
        case "outlines_core":
            from .outlines_core_backend import OutlinesCoreBackend

            return OutlinesCoreBackend()
        case "xgrammar":
            from .xgrammar_backend import XGrammarBackend

            return XGrammarBackend()
        case "pure":
            from .pure_backend import PureBackend

            return PureBackend()
    raise GrammarError(f"unknown grammar backend {name!r}; known are: auto, {', '.join(BACKENDS)}")


def refuse_other_kinds(backend: GrammarBackend, spec: GrammarSpec) -> None:
    """Raises the GrammarError of a kind that `backend` does not serve, with what does."""
    if spec.kind not in backend.kinds:
        raise GrammarError(
            f"{spec.kind}: the grammar backend {backend.name!r} serves {', '.join(backend.kinds)}; "
            "use grammar_backend 'auto'"
        )
