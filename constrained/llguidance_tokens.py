"""A vocabulary as llguidance asks for it: bytes, special ids and canonical tokenisation."""

from __future__ import annotations

import llguidance

from .vocabulary import Vocabulary

_ENCODE_CACHE_ENTRIES = 4096
_MAX_FORCED_CHARS = 1024  # of forced text that are put into tokens at a time
_HELD_BACK = 16  # tokens at such a cut, which more text could change


class Tokens(llguidance.TokenizerWrapper):
    """What `LLTokenizer` asks for: bytes, special ids and canonical tokenisation."""

    def __init__(self, vocabulary: Vocabulary):
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = sorted(vocabulary.special_ids | set(vocabulary.stop_ids))
        self.eos_token_id = vocabulary.stop_ids[0]
        self._encode = vocabulary.encode
        self._cache: dict[str, list[int]] = {}  # forced texts repeat for every request

    def __call__(self, text: str) -> list[int]:
        """Its canonical ids; of a long text the first ones, the others when those are taken."""
        is_long = len(text) > _MAX_FORCED_CHARS
        text = text[: _MAX_FORCED_CHARS + 1]
        ids = self._cache.get(text)
        if ids is None:
            ids = self._encode(text[:_MAX_FORCED_CHARS])
            if is_long:
                ids = ids[:-_HELD_BACK] or ids
            if len(self._cache) >= _ENCODE_CACHE_ENTRIES:
                self._cache.clear()
            self._cache[text] = ids
        return ids
