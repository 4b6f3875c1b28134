"""The tokenizer of a directory in Hugging Face layout.

`tokenizer.json` gives the ids; what else a model declares is spread over tokenizer_config.json,
special_tokens_map.json, config.json, generation_config.json and the chat template's file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Decoder

from .tokenizer_parts import (
    TokenizerParts,
    byte_level_bytes,
    end_token_ids,
    looks_like_control,
    sentencepiece_bytes,
)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token")


def directory_parts(path: Path) -> TokenizerParts:
    """Build the tokenizer of the directory `path`.

    Raises:
        ValueError: a file is missing or does not fit; the message names it.
    """
    return _HfDirectory(path).parts()


class _HfDirectory:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = self._read_json("tokenizer_config.json")
        self._special_map = self._read_json("special_tokens_map.json")
        self._backend = self._load_backend()
        self._added = self._backend.get_added_tokens_decoder()
        self._ids = self._backend.get_vocab(with_added_tokens=True)

    def parts(self) -> TokenizerParts:
        named = {key: text for key in _NAMED if (text := self._named(key)) is not None}
        control = {
            token.content: token_id
            for token_id, token in sorted(self._added.items())
            if token.special or looks_like_control(token.content)
        }
        for token_id in sorted(control.values()):
            token = self._added[token_id]
            if token.normalized or not token.special:
                self._backend.add_special_tokens([_as_control(token)])
        eos_token_ids = end_token_ids(
            [
                *_ids_in(self._read_json("generation_config.json").get("eos_token_id")),
                *_ids_in(self._read_json("config.json").get("eos_token_id")),
                self._ids.get(named.get("eos_token", "")),
            ],
            control,
        )
        if not eos_token_ids:
            raise ValueError(f"{self._path}: no file declares a token that ends a text (eos)")
        rest = {token: token for token in control if token not in named.values()}
        token_bytes, strips_space = self._token_bytes()
        return TokenizerParts(
            backend=self._backend,
            token_bytes=token_bytes,
            control=control,
            bos_token_id=self._bos_token_id(named.get("bos_token")),
            eos_token_ids=eos_token_ids,
            special_tokens={**named, **rest},
            chat_template=self._chat_template(),
            strips_space=strips_space,
        )

    def _load_backend(self) -> Backend:
        file = self._path / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file}: not found; a tokenizer.model alone is not supported, save the model "
                "with its fast tokenizer"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception, whatever is wrong
            raise ValueError(f"{file}: cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _token_bytes(self) -> tuple[tuple[bytes, ...], bool]:
        """Bytes by id, and whether decoding drops one leading space."""
        decoder = _state(self._backend.decoder)
        kinds = set(_types_in(decoder))
        spell: Callable[[str], bytes]
        if "ByteLevel" in kinds:
            spell = byte_level_bytes
        elif kinds & {"ByteFallback", "Metaspace"}:
            spell = sentencepiece_bytes
        else:
            raise ValueError(
                f"{self._path / 'tokenizer.json'}: decoder {decoder.get('type')!r} is not "
                "supported: byte-level and SentencePiece ones are"
            )
        table = [b""] * (max(self._ids.values()) + 1)
        for piece, token_id in self._ids.items():
            added = token_id in self._added
            table[token_id] = piece.encode() if added else spell(piece)
        strips = "Strip" in kinds or (
            "Metaspace" in kinds and decoder.get("prepend_scheme") != "never"
        )
        return tuple(table), strips and spell is sentencepiece_bytes

    def _bos_token_id(self, bos_token: str | None) -> int | None:
        """The file says it, or the post-processor puts one before an empty text."""
        token_id = self._ids.get(bos_token) if bos_token is not None else None
        wanted = self._config.get("add_bos_token")
        if wanted is None:
            wanted = self._backend.encode("").ids[:1] == [token_id]
        return token_id if wanted else None

    def _named(self, key: str) -> str | None:
        for source in (self._config, self._special_map):
            value = source.get(key)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                return value
        return None

    def _chat_template(self) -> str | None:
        file = self._path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        for source in (self._read_json("chat_template.json"), self._config):
            value = source.get("chat_template")
            if isinstance(value, list):  # several, by name
                named = {entry.get("name"): entry.get("template") for entry in value}
                value = named.get("default", next(iter(named.values()), None))
            if isinstance(value, str):
                return value
        return None

    def _read_json(self, name: str) -> Mapping[str, object]:
        file = self._path / name
        if not file.is_file():
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{file}: must hold a JSON object")
        return value


def _as_control(token: AddedToken) -> AddedToken:
    """The same token, special, and spelled by itself only: nothing may normalise into it."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _ids_in(value: object) -> list[int]:
    """One id or a list of them, as configurations write eos_token_id."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int)]


def _state(decoder: Decoder | None) -> Mapping[str, object]:
    """The JSON form of a decoder; {} for None."""
    if decoder is None:
        return {}
    state = json.loads(decoder.__getstate__())
    return state if isinstance(state, dict) else {}


def _types_in(state: Mapping[str, object]) -> list[str]:
    types = [str(state.get("type"))]
    children = state.get("decoders")
    if isinstance(children, list):
        for child in children:
            types += _types_in(child)
    return types
