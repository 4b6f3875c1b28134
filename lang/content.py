"""What a state holds: constant text and generated ids, and the ids of both as one prompt.

A `Content` is one link of a chain that forks share. Constant text is kept as text until a request
needs it: then every maximal run of constants with the same trust is encoded as one text, whether
it was written in one piece or in ten, before or after a fork. Generated ids stay the ids they were,
so a prompt that goes on from a generation always starts with the very tokens in the cache.

    root <- "Q: " <- "1+1=" <- [ids of "2"] <- "\\n"
            `--one encode--'                   `--one encode
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from palmette.runtime.request import EngineInfo, Finish
from palmette.runtime.text import well_formed


class Content:
    """One link: `token_ids` None is constant text; else exactly these ids, whose text is `text`."""

    __slots__ = ("parent", "size", "text", "token_ids", "trusted")

    def __init__(
        self,
        parent: Content | None,
        text: str,
        token_ids: tuple[int, ...] | None,
        trusted: bool,
    ) -> None:
        self.parent = parent
        self.text = text
        self.token_ids = token_ids
        self.trusted = trusted
        # of this and all before, in characters; a link counts as one, so no chain is free
        self.size: int = len(text) + 1 + (0 if parent is None else parent.size)


def start(info: EngineInfo) -> Content:
    """The content of an empty state: the beginning-of-text id, where the model wants one."""
    ids = () if info.bos_token_id is None else (info.bos_token_id,)
    return Content(None, "", ids, True)


def extend(parent: Content, text: str, *, trusted: bool) -> Content:
    return Content(parent, well_formed(text), None, trusted) if text else parent


def splice(parent: Content, *, base: Content, tip: Content) -> Content:
    """`parent` followed by everything between `base` and `tip`."""
    for link in links(tip, base):
        parent = Content(parent, link.text, link.token_ids, link.trusted)
    return parent


def links(tip: Content, base: Content | None = None) -> list[Content]:
    """The links after `base` up to `tip`, oldest first."""
    found: list[Content] = []
    link: Content | None = tip
    while link is not None and link is not base:
        found.append(link)
        link = link.parent
    found.reverse()
    return found


def text_of(tip: Content, base: Content | None = None) -> str:
    """The text after `base` up to `tip`."""
    return "".join([link.text for link in links(tip, base)])


def end_of(tip: Content, length: int) -> str:
    """The last `length` characters of the text up to `tip`; O(links that hold them)."""
    texts: list[str] = []
    link: Content | None = tip
    while link is not None and sum(map(len, texts)) < length:
        texts.append(link.text)
        link = link.parent
    return "".join(reversed(texts))[-length:]


def prompt_ids(tip: Content, encoder: Encoder) -> tuple[int, ...]:
    """The prompt of a request that goes on from `tip`."""
    ids: list[int] = []
    for run in _runs(tip):
        if isinstance(run, tuple):
            ids.extend(run)
        else:
            ids.extend(encoder.encode(run.text, trusted=run.trusted))
    return tuple(ids) if ids else encoder.start_ids


def choice_ids(
    tip: Content, choices: Sequence[str], encoder: Encoder, *, trusted: bool
) -> list[tuple[int, ...]]:
    """The ids of `tip` + each choice, the choice encoded together with the constant before it."""
    runs = list(_runs(tip))
    head = ""
    last = runs[-1] if runs else ()
    if isinstance(last, _Run) and last.trusted == trusted:
        head = last.text
        runs.pop()
    ids: list[int] = []
    for run in runs:
        if isinstance(run, tuple):
            ids.extend(run)
        else:
            ids.extend(encoder.encode(run.text, trusted=run.trusted))
    ends = [encoder.encode(head + choice, trusted=trusted) for choice in choices]
    if not ids and (not head or any(end[:1] != ends[0][:1] for end in ends)):
        ids = list(encoder.start_ids)  # the first scored token needs one before it
    return [(*ids, *end) for end in ends]


class _Run:
    __slots__ = ("text", "trusted")

    def __init__(self, text: str, trusted: bool) -> None:
        self.text = text
        self.trusted = trusted


def _runs(tip: Content) -> Iterator[tuple[int, ...] | _Run]:
    """Ids as they are, and neighbouring constants of equal trust joined."""
    texts: list[str] = []
    trusted = True
    for link in links(tip):
        if link.token_ids is None:
            if texts and link.trusted != trusted:
                yield _Run("".join(texts), trusted)
                texts.clear()
            texts.append(link.text)
            trusted = link.trusted
            continue
        if texts:
            yield _Run("".join(texts), trusted)
            texts.clear()
        if link.token_ids:
            yield link.token_ids
    if texts:
        yield _Run("".join(texts), trusted)


# After a line feed that ends a line of text, before a letter or digit: pre-tokenizers of byte
# level BPE always split there. `Encoder` asks the tokenizer at hand before it relies on it.
_LINE_START = re.compile(r"(?<=\S\n)(?=[^\W_])")
_PROBES = ("a\nb", "A word.\nAnother one", "x:\n1 2", "end\n\nnew\nx\ny")


class TextCoder(Protocol):
    """As much of an EngineClient as an encoder asks of it."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def info(self) -> EngineInfo: ...


@runtime_checkable
class ManyTexts(Protocol):
    """A client for which one call with many texts costs less than many calls."""

    def encode_many(self, texts: Sequence[str], *, parse_special: bool) -> list[list[int]]: ...

    def decode_many(self, lists: Sequence[Sequence[int]]) -> list[str]: ...


class Encoder:
    """The client's tokenizer, with the ids of long texts remembered piece by piece.

    Pieces end at line starts at least `_PIECE` characters apart, counted from the beginning, so
    texts with a common beginning have their first pieces in common and pay for them once.
    """

    _PIECE = 256  # characters
    _CAPACITY = 8_000_000  # characters remembered; the oldest go first

    def __init__(self, client: TextCoder) -> None:
        self._client = client
        self._pieces: dict[tuple[str, bool], list[int]] = {}
        self._num_chars = 0
        self._splits_at_lines: dict[bool, bool] = {}
        self._token_texts: dict[int, str] = {}
        self._start_ids: tuple[int, ...] | None = None

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The prompt that stands for no text at all: a model needs at least one token."""
        if self._start_ids is None:
            info = self._client.info()
            first = info.bos_token_id
            if first is None and info.eos_token_ids:
                first = info.eos_token_ids[0]  # separates documents, so it also begins one
            self._start_ids = () if first is None else (first,)
        return self._start_ids

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        """Ids of `text`. The list may be shared: do not change it."""
        pieces = self._cut(text, trusted)
        if len(pieces) == 1:
            return self._encode_pieces(pieces, trusted)[0]
        return [i for ids in self._encode_pieces(pieces, trusted) for i in ids]

    def _cut(self, text: str, trusted: bool) -> list[str]:
        """The pieces that are encoded each alone."""
        if len(text) <= self._PIECE or not self._may_split(trusted):
            return [text]
        pieces: list[str] = []
        begin = 0
        for match in _LINE_START.finditer(text):
            if match.start() - begin >= self._PIECE:
                pieces.append(text[begin : match.start()])
                begin = match.start()
        pieces.append(text[begin:])
        return pieces

    def remember(self, texts: Sequence[tuple[str, bool]]) -> None:
        """Encode texts that will be asked for, with few calls; each with whether it is trusted."""
        for trusted in (True, False):
            pieces = [
                piece
                for text, is_trusted in texts
                if is_trusted == trusted
                for piece in self._cut(text, trusted)
            ]
            if pieces:
                self._encode_pieces(pieces, trusted)

    def token_text(self, token_id: int) -> str:
        """Text of one id alone; U+FFFD where it is a part of a character."""
        return self.token_texts([token_id])[0]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """`token_text` of each."""
        known = self._token_texts
        missing = [i for i in dict.fromkeys(token_ids) if i not in known]
        if missing:
            known.update(zip(missing, self._decode_each(missing), strict=True))
        return [known[token_id] for token_id in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids together, special tokens included."""
        text = "".join(self.token_texts(token_ids))
        return self._client.decode(token_ids) if "\ufffd" in text else text

    def _encode_pieces(self, pieces: Sequence[str], trusted: bool) -> list[list[int]]:
        known = self._pieces
        missing = [text for text in dict.fromkeys(pieces) if (text, trusted) not in known]
        found = [known[text, trusted] if (text, trusted) in known else [] for text in pieces]
        if not missing:
            return found
        fresh = dict(zip(missing, self._encode_each(missing, trusted), strict=True))
        for text, ids in fresh.items():
            known[text, trusted] = ids
            self._num_chars += len(text)
        while self._num_chars > self._CAPACITY and known:
            oldest = next(iter(known))
            del known[oldest]
            self._num_chars -= len(oldest[0])
        return [fresh.get(text, ids) for text, ids in zip(pieces, found, strict=True)]

    def _encode_each(self, texts: Sequence[str], trusted: bool) -> list[list[int]]:
        client = self._client
        if len(texts) > 1 and isinstance(client, ManyTexts):
            return client.encode_many(texts, parse_special=trusted)
        return [client.encode(text, parse_special=trusted) for text in texts]

    def _decode_each(self, token_ids: Sequence[int]) -> list[str]:
        client = self._client
        if len(token_ids) > 1 and isinstance(client, ManyTexts):
            return client.decode_many([[token_id] for token_id in token_ids])
        return [client.decode([token_id]) for token_id in token_ids]

    def _may_split(self, trusted: bool) -> bool:
        known = self._splits_at_lines.get(trusted)
        if known is None:
            known = all(self._splits(probe, trusted) for probe in _PROBES)
            self._splits_at_lines[trusted] = known
        return known

    def _splits(self, probe: str, trusted: bool) -> bool:
        match = list(_LINE_START.finditer(probe))[-1]
        left, right = probe[: match.start()], probe[match.start() :]
        encode = self._client.encode
        parts = [*encode(left, parse_special=trusted), *encode(right, parse_special=trusted)]
        return parts == encode(probe, parse_special=trusted)


def kept_ids(
    token_ids: Sequence[int], text: str, finish: Finish | None, encoder: Encoder
) -> tuple[tuple[int, ...], str]:
    """The generated ids whose text is a beginning of `text`, and the rest of `text`.

    `text` is what the generation shows; a stop string that was trimmed can have cut the last
    token. Then that token is dropped, and what it held before the stop string is constant text
    again. A stop id is not part of the text.
    """
    ids = tuple(token_ids)
    if finish is None or finish.matched is None:
        return ids, ""
    if isinstance(finish.matched, int):
        is_hidden = (
            ids
            and ids[-1] == finish.matched
            and not text.endswith(encoder.token_text(finish.matched))
        )
        return (ids[:-1] if is_hidden else ids), ""
    whole = encoder.decode(ids)
    num_beyond = len(whole) - len(text)
    if num_beyond <= 0 or not whole.startswith(text):
        return ids, ""  # nothing was cut, or special tokens were left out of the text
    for index in range(len(ids) - 1, -1, -1):
        end = encoder.decode(ids[index:])
        if len(end) >= num_beyond and not end.startswith("\ufffd"):
            return ids[:index], end[: len(end) - num_beyond]
    return (), text
