"""One call of a hosted API that answers several gens: what it wrote past a stop string.

    "Name:" gen(stop="\\n")  asked without its stop   ->  " Ada\\nBirthday: 1815\\nWork: "
            takes " Ada";   "Name: Ada\\nBirthday:" is a beginning of prompt and answer together,
            gen(stop="\\n")  takes " 1815" without a call; "Work:" gen(stop="\\n") makes one again

A text is taken only where a call of its own would have given it, or another draw from the same
distribution: equal parameters, the end inside of the overrun, no more tokens than allowed. What
is drawn (temperature above 0) is taken once, so forks stay independent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import msgspec

from palmette.runtime.request import (
    Finish,
    FinishReason,
    Output,
    Request,
    RequestError,
    SamplingParams,
    Usage,
)
from palmette.runtime.text import StopMatcher

MAX_KEPT = 1 << 21  # characters of prompts and answers, of all programs; the oldest go first
_STOP, _LENGTH = Finish(reason=FinishReason.STOP), Finish(reason=FinishReason.LENGTH)
_SHOWN = 40  # characters of an answer in an error


class Asker(NamedTuple):
    """How an API is asked: as the request says, or without its stop for so many tokens."""

    plain: Callable[[], AsyncIterator[Output]]
    open: Callable[[int], AsyncIterator[Output]]


def may_overrun(request: Request) -> bool:
    """Whether the request's text may come from a call that is not told where it ends."""
    sampling = request.sampling
    return (
        request.hint.overrun_tokens > 0
        and sampling.max_new_tokens != 0
        and request.grammar is None
        and request.reasoning is None
        and not request.logprobs.output
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )


class Cut(NamedTuple):
    """Where the text of one gen ends in an answer, and why."""

    end: int
    finish: Finish


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one call gave. The API saw `given`; its text follows that."""

    given: tuple[int, ...]
    whole: tuple[int, ...]  # `given` and the text
    text: str
    ends: Sequence[int]  # of the pieces in which it came
    usage: Usage
    is_ended: bool  # by the model, not by a limit
    sampling: SamplingParams
    taken: int = 0  # characters that gens have taken

    def cut(self, begin: int, sampling: SamplingParams, limit: int | None) -> Cut | None:
        """The text from `begin` on up to its stop; None: a call must tell where it ends."""
        shown, matched = StopMatcher(sampling.stop).push(self.text[begin:])
        if matched is None and not self.is_ended:
            return None
        end = len(self.text) if matched is None else begin + len(shown)
        if limit is not None:
            # The end token may not be in the count, nor was there room for it without one more.
            num_ends = int(matched is None)
            if self.most_tokens(begin, end + len(matched or "")) + num_ends > limit:
                return None
        return Cut(end, _STOP)

    def most_tokens(self, begin: int, end: int) -> int:
        """A bound of the tokens of a part: none is without a byte, and no piece without one."""
        num_bytes, num_tokens = len(self.text[begin:end].encode()), self.usage.completion_tokens
        if not num_tokens or len(self.ends) > num_tokens:
            return num_bytes  # they were not counted, or somebody cut the pieces anew
        num_before = bisect_right(self.ends, begin)
        num_after = max(0, len(self.ends) - 1 - bisect_left(self.ends, end))
        return min(num_bytes, num_tokens - num_before - num_after)

    def end_of_tokens(self, count: int) -> int | None:
        """Where the first `count` tokens end; None: the pieces are not tokens."""
        # One token more than pieces: an end, which has no text, or two that came as one piece.
        is_known = self.usage.completion_tokens == len(self.ends)
        return self.ends[count - 1] if is_known and 0 < count <= len(self.ends) else None


class Overruns:
    """The answers that gens to come may take their texts from, by program."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._kept: OrderedDict[str, list[Answer]] = OrderedDict()
        self._size = 0

    async def outputs(self, request: Request, begun: str, asker: Asker) -> AsyncIterator[Output]:
        """The text of `request`: taken from an answer, or asked for.

        `begun`: text of the program that the API cannot go on from; its answer must begin so.

        Raises:
            RequestError: it does not.
        """
        taken = self._take(request)
        if taken is not None:
            yield self._last(request, *taken, Usage(api_calls=0))
            return
        if begun:
            self._refuse_second(request, begun)
        elif not request.sampling.stop:
            async for output in asker.plain():
                yield output
            return
        limit, wanted = request.sampling.max_new_tokens, request.hint.overrun_tokens
        asked = wanted if limit is None else max(limit, wanted)
        # What may have to be asked for again, or is not known to be the answer, is not shown yet.
        stops = StopMatcher(request.sampling.stop) if not begun and asked == limit else None
        shown, pieces = 0, list[str]()
        async for output in asker.open(asked):
            if output.finish is not None:
                break
            pieces.append(output.text)
            piece = stops.push(output.text)[0] if stops is not None else ""
            if piece:
                shown += len(piece)
                yield self._piece(request, piece)
        else:
            return  # the stream broke off
        answer = self._answer(request, begun, pieces, output)
        cut = self._first_cut(answer, request.sampling, begun, asked)
        if cut is not None:
            answer.taken = cut.end
            text = answer.text[len(begun) + shown : cut.end]
            yield self._last(request, text, cut.finish, answer.usage)
            return
        async for output in asker.plain():
            if output.finish is not None:
                usage = _sum(answer.usage, output.usage)
                output = msgspec.structs.replace(output, usage=usage)
            yield output

    def _answer(self, request: Request, begun: str, pieces: list[str], last: Output) -> Answer:
        """What a call gave, kept for gens to come."""
        text, ends, end = "".join(pieces), list[int](), 0
        for piece in pieces:
            end += len(piece)
            ends.append(end)
        given = request.prompt_ids[: len(request.prompt_ids) - len(begun)]
        answer = Answer(
            given=given,
            whole=(*given, *self._encode(text)),
            text=text,
            ends=ends,
            usage=last.usage,
            is_ended=last.finish is not None and last.finish.reason is FinishReason.STOP,
            sampling=request.sampling,
        )
        self._keep(request.program, answer)
        if not text.startswith(begun):
            _refuse(begun, f"the model wrote {text[:_SHOWN]!r}")
        return answer

    def _first_cut(
        self, answer: Answer, sampling: SamplingParams, begun: str, asked: int
    ) -> Cut | None:
        """What the gen that made the call takes of its answer; None: it has to ask again.

        Raises:
            RequestError: it would have to, and cannot.
        """
        limit, begin = sampling.max_new_tokens, len(begun)
        is_bound = asked != limit and limit is not None  # more was asked for than it may have
        cut = answer.cut(begin, sampling, limit if is_bound else None)
        if cut is not None:
            return cut
        is_whole = StopMatcher(sampling.stop).push(answer.text[begin:])[1] is None
        if not is_bound:
            return Cut(len(answer.text), _LENGTH) if is_whole and limit is not None else None
        assert limit is not None
        if not begun:
            end = answer.end_of_tokens(limit)
            return None if end is None else Cut(end, _LENGTH)
        if is_whole and answer.most_tokens(begin, len(answer.text)) <= limit:
            return Cut(len(answer.text), _LENGTH)
        _refuse(begun, f"its answer may have more than max_tokens ({limit}) behind it")

    def _take(self, request: Request) -> tuple[str, Finish] | None:
        """The text of `request` out of an earlier answer, if there is one."""
        prompt, sampling = request.prompt_ids, request.sampling
        is_drawn = sampling.temperature > 0
        if is_drawn and sampling.seed is not None:
            return None
        for answer in reversed(self._kept.get(request.program, ())):
            begin = len(prompt) - len(answer.given)
            if not 0 < begin < len(answer.text) or (is_drawn and begin < answer.taken):
                continue
            if answer.whole[: len(prompt)] != prompt:
                continue
            if _drawn(answer.sampling) != _drawn(sampling):
                continue
            cut = answer.cut(begin, sampling, sampling.max_new_tokens)
            if cut is not None:
                answer.taken = max(answer.taken, cut.end)
                return answer.text[begin : cut.end], cut.finish
        return None

    def _keep(self, program: str, answer: Answer) -> None:
        self._kept.setdefault(program, []).append(answer)
        self._kept.move_to_end(program)
        self._size += len(answer.whole)
        while self._size > MAX_KEPT:
            oldest, answers = next(iter(self._kept.items()))
            if answers[0] is answer:
                return  # the newest stays, however long it is
            self._size -= len(answers.pop(0).whole)
            if not answers:
                del self._kept[oldest]

    def _refuse_second(self, request: Request, begun: str) -> None:
        """A message that the API was asked for already has gone on otherwise.

        Raises:
            RequestError: there is one.
        """
        given = request.prompt_ids[: len(request.prompt_ids) - len(begun)]
        for answer in self._kept.get(request.program, ()):
            if answer.given == given:
                length = _common(answer.text, begun)
                wrote = answer.text[length : length + _SHOWN]
                _refuse(begun[length:], f"after {begun[:length][-_SHOWN:]!r} it wrote {wrote!r}")

    def _piece(self, request: Request, text: str) -> Output:
        ids = tuple(self._encode(text))
        return Output(request_id=request.request_id, text=text, token_ids=ids)

    def _last(self, request: Request, text: str, finish: Finish, usage: Usage) -> Output:
        ids = tuple(self._encode(text))
        return Output(
            request_id=request.request_id, text=text, token_ids=ids, finish=finish, usage=usage
        )


def _drawn(sampling: SamplingParams) -> SamplingParams:
    """What decides the distribution of a text, not where it ends."""
    return replace(sampling, max_new_tokens=None, min_new_tokens=0, stop=(), seed=None)


def _sum(first: Usage, second: Usage) -> Usage:
    return Usage(
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
        computed_tokens=first.computed_tokens + second.computed_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        api_calls=(first.api_calls or 0) + (second.api_calls or 0),
    )


def _common(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _refuse(begun: str, why: str) -> NoReturn:
    raise RequestError(
        f"prompt: the assistant's message goes on with {begun[:_SHOWN]!r}, and the chat API cannot "
        f"go on with text of the program: {why}; ask for these words in the message before, or put "
        "gen first in pm.assistant(...)",
        field="prompt",
        code="unsupported",
    )
