"""A small vocabulary of the real kind and a compiler on it, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

_WORDS = (
    'th he in er an re on at en nd true false null name score items value type "} {" ": ", '
    '":" "," [{ }] }} ]} [" "] \\n \\" 10 12 00 99 abc xyz yes no tool </ /> -> == é 日 日本'
).split(" ")
_PIECES = [*_WORDS, "  ", "    ", "\n  ", "\n    ", ' "', ": ", ", ", '": "', '", "', " a", " the"]


def make_vocabulary() -> Vocabulary:
    """256 bytes, some 55 longer pieces, four control ids (two of them stop), padding to 352 ids.

    Canonical tokenisation is the longest match.
    """
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += sorted({piece.encode() for piece in _PIECES if len(piece.encode()) > 1})
    first_special = len(pieces)
    tokens = [*pieces, b"<|end|>", b"<|eot|>", b"<|user|>", b"<tool>"]
    tokens += [b""] * (352 - len(tokens))
    ids = {piece: token_id for token_id, piece in enumerate(pieces)}
    longest = max(map(len, pieces))

    def encode(text: str) -> list[int]:
        data, result = text.encode(), []
        while data:
            size = next(n for n in range(longest, 0, -1) if data[:n] in ids)
            result.append(ids[data[:size]])
            data = data[size:]
        return result

    return Vocabulary(
        token_bytes=tuple(tokens),
        special_ids=frozenset(range(first_special, first_special + 4)),
        stop_ids=(first_special, first_special + 1),
        encode=encode,
    )


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return make_vocabulary()


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary, select_backend(), cache_bytes=64 * 1024 * 1024)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def accepts(compiler: GrammarCompiler) -> Callable[[GrammarSpec, str], bool]:
    """Whether a grammar takes a whole text, byte by byte and in canonical tokens alike, and what
    it leaves to the runtime is satisfied."""

    def drive(spec: GrammarSpec, ids: list[int]) -> bool:
        state = compiler.get(spec).start()
        return all(state.accept(token_id) for token_id in ids) and state.may_end

    def accepts(spec: GrammarSpec, text: str) -> bool:
        by_byte = drive(spec, list(text.encode()))
        by_token = drive(spec, compiler.vocabulary.encode(text))
        assert by_byte == by_token, text
        return by_byte and passes(spec, text.encode())

    def passes(spec: GrammarSpec, text: bytes) -> bool:
        """What the runtime checks: value by value, then the whole."""
        check = compiler.get(spec).check
        cursor = None if check is None else check.cursor()
        if cursor is not None and cursor.push(text) is not None:
            return False
        return check is None or check.is_valid(text)

    return accepts
