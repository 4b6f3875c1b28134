"""From chosen tokens to what the client gets: text, stop strings, and which ids go with it.

Text that could begin a stop string is held back, and with it the ids and logprobs it came from:
what was delivered is never taken back, and a trimmed stop string leaves no ids behind.

    text      a b c | E N          held back: "EN" may become the stop string "END"
    emitted  -------^              a token is delivered once its text begins before this point
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from palmette.constrained.vocabulary import Vocabulary

from .request import SamplingParams, TokenLogprob
from .stop_regex import StopRegexMatcher
from .text import Detokenizer, StopMatcher


def stop_matcher(sampling: SamplingParams) -> StopMatcher | StopRegexMatcher | None:
    """What finds the ends that `sampling` asks for; None: it asks for none."""
    if sampling.stop_regex:
        return StopRegexMatcher(sampling.stop, sampling.stop_regex)
    return StopMatcher(sampling.stop) if sampling.stop else None


@dataclass(frozen=True, slots=True)
class _Held:
    token_id: int
    logprob: TokenLogprob | None
    start: int  # characters of text before this token's


class Delivery:
    """The text side of one request; lives through preemption unchanged.

    Special tokens that are left out of the text are delivered as ids all the same.
    """

    __slots__ = (
        "_detokenizer",
        "_emitted",
        "_held",
        "_ids",
        "_is_over",
        "_keeps_stop",
        "_length",
        "_logprobs",
        "_matcher",
        "_min_tokens",
        "_num_pushed",
        "_texts",
        "num_delivered",
        "vocabulary",
    )

    def __init__(
        self, sampling: SamplingParams, *, vocabulary: Vocabulary, shown: Collection[str] = ()
    ) -> None:
        """`shown`: special tokens that are part of the text in any case."""
        self.vocabulary = vocabulary
        skip_special = sampling.skip_special_tokens
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special, shown=shown)
        self._matcher = stop_matcher(sampling)
        self._keeps_stop = sampling.no_stop_trim
        self._min_tokens = sampling.min_new_tokens
        self._held: deque[_Held] = deque()
        self._num_pushed = 0
        self._length = 0  # characters that came out of the detokenizer
        self._emitted = 0  # characters that may be delivered
        self._is_over = False  # a stop string is complete: nothing more comes out
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self.num_delivered = 0  # ids delivered or about to be

    @property
    def is_direct(self) -> bool:
        """Whether every token may be delivered when it is known: there is no stop string."""
        return self._matcher is None and not self._ids

    def pass_on(self, token_id: int) -> str:
        """`push` and `take` of one token without logprob, where that `is_direct`; its text."""
        self.num_delivered += 1
        text = self._detokenizer.push_one(token_id)
        if self._texts:
            self._texts.append(text)
            text = "".join(self._texts)
            self._texts.clear()
        return text

    def push(self, token_id: int, logprob: TokenLogprob | None) -> str | None:
        """Add a generated token; returns the stop string that is now complete, if any."""
        text = self._detokenizer.push_one(token_id)
        self._num_pushed += 1
        if self._matcher is None:
            self._deliver(token_id, logprob)
            if text:
                self._texts.append(text)
            return None
        self._held.append(_Held(token_id, logprob, self._length))
        self._length += len(text)
        if self._num_pushed < self._min_tokens:  # before that no stop string counts
            self._matcher.skip(text)
            self._emit(text)
            return None
        return self._match(text)

    def end(self) -> str | None:
        """Generation is over: give out what was held back; returns a stop string found in it."""
        if self._is_over:
            return None
        text = self._detokenizer.flush()
        if self._matcher is None:
            if text:
                self._texts.append(text)
            return None
        self._length += len(text)
        matched = self._match(text)
        if matched is None:
            matched = self._matched(*self._matcher.end())
        if matched is None:
            self._deliver_held(upto=self._length + 1)
        return matched

    def take(self) -> tuple[tuple[int, ...], str, tuple[TokenLogprob, ...]]:
        """What is new since the last call: ids, text, logprobs."""
        ids, texts, logprobs = tuple(self._ids), self._texts, self._logprobs
        self._ids.clear()
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        if not logprobs:
            return ids, text, ()
        taken = ids, text, tuple(logprobs)
        logprobs.clear()
        return taken

    def _match(self, text: str) -> str | None:
        assert self._matcher is not None
        return self._matched(*self._matcher.push(text))

    def _matched(self, emit: str, matched: str | None) -> str | None:
        assert self._matcher is not None
        self._emit(emit)
        if matched is not None:
            self._is_over = True
            if self._keeps_stop:
                self._texts.append(self._matcher.matched_text)
                self._deliver_held(upto=self._length + 1)
            self._held.clear()
        return matched

    def _emit(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._emitted += len(text)
        self._deliver_held(upto=self._emitted)

    def _deliver_held(self, *, upto: int) -> None:
        """Deliver the held tokens whose text begins before character `upto`."""
        while self._held and self._held[0].start < upto:
            held = self._held.popleft()
            self._deliver(held.token_id, held.logprob)

    def _deliver(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self._ids.append(token_id)
        self.num_delivered += 1
        if logprob is not None:
            self._logprobs.append(logprob)
