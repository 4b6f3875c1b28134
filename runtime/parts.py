"""What an engine needs beside a runner: the seams to tokenizers and grammars.

`tokenizer.Tokenizer` and `constrained.compiler.GrammarCompiler` are the real parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from palmette.constrained.backend import CompiledGrammar
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary


class TokenCodec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids without BOS; `parse_special`: spellings of control tokens count."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of whole token ids, special tokens included."""
        ...

    def vocabulary(self, size: int) -> Vocabulary:
        """Bytes per id, padded to `size`, the width of the logits."""
        ...


class GrammarSource(Protocol):
    """Compiles grammars elsewhere. Repeated requests for a spec are one.

    on_done: called with the key of a spec that has become ready, from any thread.
    """

    on_done: Callable[[str], object] | None

    def request(self, spec: GrammarSpec) -> object:
        """Start compiling, unless it is done or under way. Never blocks."""
        ...

    def cancel(self, spec: GrammarSpec) -> None:
        """Take back one `request` of a grammar that is not ready: nobody waits for it."""
        ...

    def ready(self, spec: GrammarSpec) -> bool:
        """Whether `get` answers at once; a failed compilation is ready too."""
        ...

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        """The compiled grammar.

        Raises:
            GrammarError: why it cannot be enforced.
        """
        ...

    def close(self) -> None: ...
