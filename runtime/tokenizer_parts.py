"""What a tokenizer is made of, whichever file it came from, and how pieces spell bytes.

Two families of pieces are read: byte-level BPE, where each of 256 visible characters stands for
one byte (GPT-2's alphabet), and SentencePiece, where U+2581 stands for a space and `<0xNN>` for
one byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

from palmette.runtime.chat_template import check_template

# Spellings that end a turn or a document wherever they are control tokens; declared ids come on
# top of them. `<|end|>` ends only a channel where `<|return|>` ends the turn.
_END_SPELLINGS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTROL_LOOK = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerParts:
    """Everything `Tokenizer` needs. `backend` finds control tokens in text; BOS is never added."""

    backend: Backend
    token_bytes: tuple[bytes, ...]  # by id; b"" where an id stands for no text
    control: dict[str, int]  # spelling -> id of every control token
    bos_token_id: int | None  # None: the model wants none
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]  # named ones (bos_token, ...), then the rest by spelling
    chat_template: str | None
    strips_space: bool  # decoding drops the space that encoding puts before the text

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            check_template(self.chat_template)


def looks_like_control(spelling: str) -> bool:
    """Whether an added token is a control token by its look, e.g. <|fim_prefix|>.

    Some models do not mark theirs as special; text of users must not turn into them either.
    """
    return _CONTROL_LOOK.fullmatch(spelling) is not None


def end_token_ids(declared: Iterable[int | None], control: dict[str, int]) -> tuple[int, ...]:
    """The declared ids in order, then the control tokens that end a turn by their spelling."""
    ids = [token_id for token_id in declared if token_id is not None]
    for spelling in _END_SPELLINGS:
        if spelling in control and not (spelling == "<|end|>" and "<|return|>" in control):
            ids.append(control[spelling])
    return tuple(dict.fromkeys(ids))


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [value for value in range(256) if value not in set(printable)]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(256 + index): value for index, value in enumerate(shifted)})
    return alphabet


_ALPHABET = byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a piece of a byte-level vocabulary spells."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:  # a piece outside the alphabet stands for its own text
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """The bytes that a SentencePiece piece spells."""
    found = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece.replace("\u2581", " ").encode()
