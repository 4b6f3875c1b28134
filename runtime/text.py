"""Text out of a running sequence: bytes of tokens -> characters -> text before a stop string.

    ids -> Detokenizer -> whole characters -> StopMatcher -> text that is safe to show

Both are plain state machines: however the stream is cut into pushes, the joined result is the
same. Only `flush` ends a stream; nothing is flushed early. `well_formed` is the one place where
unpaired surrogates are dealt with.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Collection, Iterable, Sequence

from palmette.constrained.vocabulary import Vocabulary


def well_formed(text: str) -> str:
    """`text` with every unpaired surrogate replaced by U+FFFD; split pairs are joined.

    A JSON string may hold half of a surrogate pair, which no UTF-8 can express. Palmette's rule
    for every string it is given: replace, as a decoder of bad UTF-8 would. NUL is a character.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class Detokenizer:
    """Turns generated ids into text as they come, never splitting a character.

    The joined result of all pushes and one flush is the UTF-8 decoding, with errors replaced, of
    all bytes together. `skip_special` leaves special ids out. Constant cost per token.
    """

    __slots__ = ("_pending", "_skipped", "_token_bytes")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special: bool = True,
        shown: Collection[str] = (),
    ) -> None:
        """`shown`: special tokens that are not left out."""
        self._token_bytes = vocabulary.token_bytes
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        if shown:
            kept = {text.encode() for text in shown}
            self._skipped = frozenset(i for i in self._skipped if self._token_bytes[i] not in kept)
        self._pending = b""  # at most three bytes: the beginning of a character

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that `token_ids` complete.

        Raises:
            IndexError: an id is beyond the vocabulary.
        """
        data = self._pending
        token_bytes, skipped = self._token_bytes, self._skipped
        for token_id in token_ids:
            if token_id not in skipped:
                data += token_bytes[token_id]
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def push_one(self, token_id: int) -> str:
        """`push` of one token."""
        if token_id in self._skipped:
            return ""
        data = self._token_bytes[token_id]
        if self._pending:
            data = self._pending + data
        text, consumed = utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def flush(self) -> str:
        """End the stream: one U+FFFD when it stopped inside a character, else nothing."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class StopMatcher:
    """Finds the first stop string that a stream completes, and holds back what may become one.

    First means: the match that ends earliest; of those that end together, the longest. So the
    answer does not depend on how the text is cut. The automaton is Aho and Corasick's ("Efficient
    string matching", 1975) with its failure links folded into the transitions: one dictionary
    look-up per character, none while no stop string has begun.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_depth", "_held", "_matched", "_moves", "_output", "_search_first", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string may not be empty")
        self._moves: list[dict[str, int]] = [{}]  # state -> character -> state; else the root
        self._depth = [0]  # characters of a stop string that a state has seen
        self._output: list[str | None] = [None]  # longest stop string that ends in a state
        self._build([well_formed(stop) for stop in stops])
        first = "".join(re.escape(character) for character in self._moves[0])
        self._search_first = re.compile(f"[{first}]").search if first else None
        self._state = 0
        self._held = ""  # the last depth[state] characters of the stream
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """What of the stream can be shown now, and the stop string it ran into, if any.

        After a match nothing more comes out: later text is dropped and `matched` repeated.
        """
        if self._matched is not None or self._search_first is None:
            return ("", self._matched) if self._matched is not None else (text, None)
        start = 0
        if self._state == 0:
            found = self._search_first(text)
            if found is None:
                return text, None
            start = found.start()
        state, moves, output = self._state, self._moves, self._output
        for end in range(start, len(text)):
            state = moves[state].get(text[end], 0)
            if (stop := output[state]) is not None:
                self._matched, self._state = stop, 0
                shown = self._held + text[: end + 1]
                self._held = ""
                return shown[: len(shown) - len(stop)], stop
        self._state = state
        stream = self._held + text
        cut = len(stream) - self._depth[state]
        self._held = stream[cut:]
        return stream[:cut], None

    def flush(self) -> str:
        """End the stream: the text that was held back, which began no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held

    @property
    def matched_text(self) -> str:
        """What was cut out of the stream."""
        return self._matched or ""

    def skip(self, text: str) -> None:
        """Text in which no stop string counts, before all that is pushed."""

    def end(self) -> tuple[str, str | None]:
        """`flush`, and the stop string that the end completes: never one."""
        return self.flush(), None

    def _build(self, stops: list[str]) -> None:
        children: list[dict[str, int]] = [{}]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in children[state]:
                    children[state][character] = len(children)
                    children.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._output.append(None)
                    self._moves.append({})
                state = children[state][character]
            self._output[state] = stop
        failure = [0] * len(children)
        self._moves[0] = children[0]
        queue = list(children[0].values())
        for state in queue:  # breadth first: shorter states are complete; grows as it is walked
            suffix = failure[state]
            if self._output[state] is None:
                self._output[state] = self._output[suffix]
            for character, child in children[state].items():
                failure[child] = self._moves[suffix].get(character, 0)
                queue.append(child)
            self._moves[state] = {**self._moves[suffix], **children[state]}
