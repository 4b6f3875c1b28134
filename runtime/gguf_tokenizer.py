"""The tokenizer that a GGUF file describes, equal to llama.cpp's id for id.

Two kinds are read: `gpt2`, byte-level BPE with a named way of cutting text into words first, and
`llama`, SentencePiece BPE whose merges follow from the scores of the pieces. The patterns below
restate those of llama.cpp (src/llama-vocab.cpp); each group was compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from .text import well_formed
from .tokenizer_parts import (
    TokenizerParts,
    byte_alphabet,
    byte_level_bytes,
    end_token_ids,
    looks_like_control,
    sentencepiece_bytes,
)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # values of token_type

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
}
# Whole words that are pieces are taken as they are, and BOS is wanted unless the file says no.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the key is spelled so in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


def gguf_parts(metadata: Mapping[str, object], *, name: str) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes; `name` is for messages.

    Raises:
        ValueError: a key is missing, or the kind of tokenizer is not supported.
    """
    return _GgufVocabulary(metadata, name).parts()


class _GgufVocabulary:
    """The `tokenizer.ggml.*` keys of one file."""

    def __init__(self, metadata: Mapping[str, object], name: str) -> None:
        self._metadata = metadata
        self._name = name
        self._kind = str(self._get("model", ""))
        if self._kind not in ("gpt2", "llama"):
            raise self._error(f"tokenizer model {self._kind!r} is not supported: gpt2, llama are")
        self._pre = str(self._get("pre", "default"))
        if self._kind == "gpt2" and self._pre not in _PATTERNS:
            known = ", ".join(sorted(_PATTERNS))
            raise self._error(f"pre-tokenizer {self._pre!r} is not supported; known are: {known}")
        self._tokens = [well_formed(token) for token in cast("list[str]", self._require("tokens"))]
        types = cast("Sequence[int] | None", self._get("token_type", None))
        self._types = [1] * len(self._tokens) if types is None else [int(kind) for kind in types]
        if len(self._types) != len(self._tokens):
            raise self._error(f"{len(self._tokens)} tokens, but {len(self._types)} token types")
        self._control = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and looks_like_control(token))
        }

    def parts(self) -> TokenizerParts:
        backend = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        self._add_tokens(backend)
        eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        eos_token_ids = end_token_ids([self._id(key) for key in eos_keys], self._control)
        if not eos_token_ids:
            raise self._error("the tokenizer declares no token that ends a text (eos_token_id)")
        template = self._metadata.get("tokenizer.chat_template")
        return TokenizerParts(
            backend=backend,
            token_bytes=self._token_bytes(),
            control=self._control,
            bos_token_id=self._bos_token_id(),
            eos_token_ids=eos_token_ids,
            special_tokens=self._special_tokens(),
            chat_template=well_formed(template) if isinstance(template, str) else None,
            strips_space=self._kind == "llama" and self._adds_space,
        )

    def _byte_level(self) -> Backend:
        merges = []
        for merge in cast("list[str]", self._require("merges")):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        ids = self._ids_by_token()
        for left, right in merges:
            if left not in ids or right not in ids or left + right not in ids:
                raise self._error(f"the merge of {left!r} and {right!r} is not among the tokens")
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=self._pre in _WHOLE_WORDS)
        backend = Backend(model)
        steps: list[pre_tokenizers.PreTokenizer] = []
        *patterns, last = _PATTERNS[self._pre]
        for pattern in patterns:
            if pattern == _DIGIT:
                steps.append(pre_tokenizers.Digits(individual_digits=True))
            else:
                steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        if last != _GPT2:  # that one is ByteLevel's own
            steps.append(pre_tokenizers.Split(Regex(last), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last == _GPT2))
        missing = sorted(set(byte_alphabet()).difference(self._tokens))
        if missing:  # pieces on both sides of a byte that has no token do not meet
            characters = "".join(map(re.escape, missing))
            steps.append(pre_tokenizers.Split(Regex(f"[{characters}]"), "removed"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return backend

    def _sentencepiece(self) -> Backend:
        unknown = self._id("unknown_token_id")
        model = models.BPE(
            vocab=self._ids_by_token(),
            merges=self._merges_by_score(),
            byte_fallback=_BYTE in self._types,
            fuse_unk=True,
            unk_token=self._tokens[0 if unknown is None else unknown],
        )
        backend = Backend(model)
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
        if self._adds_space:
            steps.insert(0, normalizers.Prepend("\u2581"))
        backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = decoders.ByteFallback()
        return backend

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """All ways to put a piece together from two, best piece first (SentencePiece's rule)."""
        scores = cast("Sequence[float]", self._require("scores"))
        ids = {
            token: token_id
            for token, token_id in self._ids_by_token().items()
            if token not in self._control and self._types[token_id] not in (_UNUSED, _BYTE)
        }
        ranked = []
        for token, token_id in ids.items():
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in ids and right in ids:
                    ranked.append((-float(scores[token_id]), token_id, cut, left, right))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _add_tokens(self, backend: Backend) -> None:
        """Tell the backend which spellings to cut out of a text before it is encoded."""
        backend.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in self._control]
        )
        backend.add_tokens(
            [
                AddedToken(token, special=False, normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind == _USER_DEFINED and token not in self._control
            ]
        )

    def _token_bytes(self) -> tuple[bytes, ...]:
        spell = byte_level_bytes if self._kind == "gpt2" else sentencepiece_bytes
        verbatim = {_CONTROL, _UNKNOWN, _USER_DEFINED}
        table = []
        for token, kind in zip(self._tokens, self._types, strict=True):
            if kind == _UNUSED:
                table.append(b"")
            elif kind in verbatim and self._kind == "gpt2":
                table.append(token.encode())
            else:
                table.append(spell(token))
        return tuple(table)

    def _special_tokens(self) -> dict[str, str]:
        named = {}
        for key, id_key in _NAMED.items():
            if (token_id := self._id(id_key)) is not None:
                named[key] = self._tokens[token_id]
        rest = {token: token for token in self._control if token not in named.values()}
        return {**named, **rest}

    def _bos_token_id(self) -> int | None:
        wanted = self._get("add_bos_token", self._kind == "llama" or self._pre in _WHOLE_WORDS)
        return self._id("bos_token_id") if wanted else None

    @property
    def _adds_space(self) -> bool:
        return bool(self._get("add_space_prefix", True))

    def _ids_by_token(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self._tokens):
            ids.setdefault(token, token_id)
        return ids

    def _id(self, key: str) -> int | None:
        value = self._get(key, None)
        if not isinstance(value, int):
            return None
        if not 0 <= value < len(self._tokens):
            raise self._error(f"{key} {value} is outside the {len(self._tokens)} tokens")
        return value

    def _get(self, key: str, default: object) -> object:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _require(self, key: str) -> object:
        value = self._get(key, None)
        if value is None:
            raise self._error(f"tokenizer.ggml.{key} is missing")
        return value

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self._name}: {message}")
