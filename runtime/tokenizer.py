"""Text to token ids and back, with the bytes of every token.

A thin layer over the `tokenizers` library that owns three promises: ids are what the model was
trained on, BOS is never added behind the caller's back, and text of users never turns into a
control token unless the caller asks for it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer as Backend

from palmette.constrained.vocabulary import Vocabulary

from .gguf_file import read_gguf
from .gguf_tokenizer import gguf_parts
from .hf_tokenizer import directory_parts
from .text import well_formed
from .tokenizer_parts import TokenizerParts

_LONG_TEXT = 2048  # characters; some 2 ms


class Tokenizer:
    """Immutable after construction; `encode` may run in several threads at once."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._parsing = parts.backend
        self._plain = _without_control_tokens(parts.backend)
        self._control_ids = frozenset(parts.control.values())
        spellings = sorted(parts.control, key=len, reverse=True)
        self._find_control = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._token_bytes = parts.token_bytes

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read a directory in Hugging Face layout: `tokenizer.json` and the files beside it.

        Raises:
            ValueError: a file is missing or does not fit; the message names it.
        """
        return cls(directory_parts(Path(path)))

    @classmethod
    def from_gguf(cls, source: Path | Mapping[str, object]) -> Tokenizer:
        """Read the tokenizer of a .gguf file, or of its metadata (`GgufFile.metadata`) alone.

        Raises:
            ValueError: the file is damaged, or its tokenizer is of a kind that is not supported.
        """
        if isinstance(source, Mapping):
            return cls(gguf_parts(source, name="GGUF metadata"))
        path = Path(source)
        return cls(gguf_parts(read_gguf(path).metadata, name=str(path)))

    @property
    def bos_token_id(self) -> int | None:
        """To be put before every prompt; None when the model wants none."""
        return self._parts.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation: all that the model declares, and ends of turns."""
        return self._parts.eos_token_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings of all control tokens: bos_token, eos_token, ..., the rest by spelling."""
        return dict(self._parts.special_tokens)

    @property
    def chat_template(self) -> str | None:
        return self._parts.chat_template

    @property
    def size(self) -> int:
        """Largest id plus one; the logits may be wider."""
        return len(self._token_bytes)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text`, without BOS.

        `parse_special`: spellings of control tokens become these tokens; else they are text like
        any other. Unpaired surrogates become U+FFFD. Bytes that the vocabulary cannot spell (a
        few rare ones in some models) are left out, as the models' own tokenizers do.
        """
        text = well_formed(text)
        if parse_special:
            return _ids(self._parsing, text)
        ids = _ids(self._plain, text)
        if self._control_ids.isdisjoint(ids):
            return ids
        return self._encode_around_control(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of whole token ids, special tokens included; padding ids stand for nothing.

        Raises:
            ValueError: an id is negative.
        """
        token_bytes, size = self._token_bytes, len(self._token_bytes)
        ids = list(ids)
        if ids and min(ids) < 0:
            raise ValueError(f"token id {min(ids)} is negative")
        data = b"".join([token_bytes[i] if i < size else b"" for i in ids])
        if self._parts.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def vocabulary(self, size: int) -> Vocabulary:
        """The bytes of every id for logits of width `size`.

        Raises:
            ValueError: the logits are narrower than the tokenizer.
        """
        padding = size - self.size
        if padding < 0:
            raise ValueError(f"the tokenizer has {self.size} ids, but the logits are {size} wide")
        return Vocabulary(
            token_bytes=self._token_bytes + (b"",) * padding,
            special_ids=self._control_ids,
            stop_ids=self.eos_token_ids,
            encode=self.encode,
        )

    def _encode_around_control(self, text: str) -> list[int]:
        """Plain ids of a text whose pieces merge into a control token as they stand.

        A few vocabularies list control tokens among their ordinary pieces. Cutting the text
        after the first character of each spelling keeps the pieces from meeting.
        """
        cuts = [found.start() + 1 for found in self._find_control.finditer(text)]
        edges = [0, *cuts, len(text)]
        ids: list[int] = []
        for start, end in itertools.pairwise(edges):
            ids += _ids(self._plain, text[start:end])
        return [token_id for token_id in ids if token_id not in self._control_ids]


def _ids(backend: Backend, text: str) -> list[int]:
    """Ids without BOS; a long text lets other threads run.

    `encode` holds the GIL to its end, seconds for a text of megabytes; the calls for batches give
    it up, and the fast one leaves out the offsets that nobody reads here. The ids are the same.
    """
    ids: list[int]
    if len(text) <= _LONG_TEXT:
        ids = backend.encode(text, add_special_tokens=False).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _without_control_tokens(backend: Backend) -> Backend:
    """A second front on the same model (shared, not copied) that reads control tokens as text."""
    plain = Backend(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([added[token_id] for token_id in sorted(added)])
    if set(plain.get_added_tokens_decoder()) != set(added):  # ids with gaps: copy the whole
        plain = Backend.from_str(backend.to_str())
    plain.encode_special_tokens = True
    return plain
