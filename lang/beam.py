"""Beam search over forks: the continuations of a state with the largest log-probability.

    s -- "a" -- "a c"     every step: one request per beam for its likeliest next tokens, all
      `- "b" -- "b d"     together in one batch; the best `width` of all continuations go on

Prefixes are shared in the engine's cache, so a step computes little more than one token per beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import ConcretizationError, brief, located
from .generation import gen
from .host import caller_line
from .ir import Line
from .state import ProgramState
from .variables import Span
from .writer import StateWriter

if TYPE_CHECKING:
    from .async_state import AsyncState

S = TypeVar("S", bound=StateWriter)
_MOST_PENALTY = 16.0  # powers of lengths up to the context stay numbers
_NEXT = "beam"  # the variable of a step, in forks that nobody else sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """One continuation. `logprob` is the sum over its tokens, the end token included."""

    text: str
    token_ids: tuple[int, ...]  # without the end token
    logprob: float
    is_finished: bool  # the model ended it; else it has `max_tokens`

    def score(self, length_penalty: float) -> float:
        """`logprob` divided by the number of tokens to the power of `length_penalty`."""
        length = len(self.token_ids) + self.is_finished
        return self.logprob / float(max(length, 1) ** length_penalty)


@dataclass(slots=True)
class _Live(Generic[S]):
    state: S
    beam: Beam


def beam(
    s: ProgramState,
    name: str,
    *,
    width: int = 4,
    max_tokens: int = 32,
    length_penalty: float = 0.0,
) -> list[Beam]:
    """Append the likeliest continuation that a beam search finds, and bind it to `name`.

    >>> s += "The capital of France is"
    >>> beams = pm.beam(s, "answer", width=2, max_tokens=4)  # best first; s["answer"] is the best

    Beams are ranked by `logprob / tokens ** length_penalty`, of the raw distribution; 0 ranks by
    the probability alone. The beams of a step are one batch. Waits for all of it.

    Raises:
        ValueError: a parameter is out of range.
        ConcretizationError: the program is compiled; a search reads what it generates.
        ProgramError: a request failed.
    """
    if not isinstance(s, ProgramState):
        raise TypeError(
            f"beam: it waits for each step, and {type(s).__name__} reads with await; write "
            "`await pm.beam_async(s, ...)`"
        )
    search = _Search(s, caller_line(), width, max_tokens, length_penalty)
    while probes := search.probes():
        search.take([probe.get_meta_info(_NEXT) for probe in probes])
    return search.appended(name)


async def beam_async(
    s: AsyncState,
    name: str,
    *,
    width: int = 4,
    max_tokens: int = 32,
    length_penalty: float = 0.0,
) -> list[Beam]:
    """`beam` in an `async def` program.

    >>> s += "The capital of France is"
    >>> beams = await pm.beam_async(s, "answer", width=2, max_tokens=4)

    Raises:
        ValueError: a parameter is out of range.
        ConcretizationError: the program is compiled; a search reads what it generates.
        ProgramError: a request failed.
    """
    search = _Search(s, caller_line(), width, max_tokens, length_penalty)
    while probes := search.probes():
        search.take([await probe.get_meta_info(_NEXT) for probe in probes])
    return search.appended(name)


class _Search(Generic[S]):
    """The beams of a state; who calls it waits for the probes of each step."""

    def __init__(
        self, s: S, line: Line, width: int, max_tokens: int, length_penalty: float
    ) -> None:
        session = s._host.session
        if session is None:
            raise ConcretizationError("what a beam search reads at each step", line)
        self._encoder, info = session.encoder, session.client.info()
        limit = info.limits.max_top_logprobs
        width = _checked("width", width, (1, limit), line)
        max_tokens = _checked("max_tokens", max_tokens, (1, info.context_length), line)
        if not isinstance(length_penalty, int | float) or not abs(length_penalty) <= _MOST_PENALTY:
            what = f"length_penalty: {brief(length_penalty)} is out of range; it must be within "
            raise located(ValueError(f"{what}+-{_MOST_PENALTY:g}"), line)
        self._state, self._line = s, line
        self._width, self._num_left, self._length_penalty = width, max_tokens, length_penalty
        self._end_ids = frozenset(info.eos_token_ids)
        nothing = Beam(text="", token_ids=(), logprob=0.0, is_finished=False)
        self._live, self._finished = [_Live(s.fork(1)[0], nothing)], list[Beam]()

    def probes(self) -> list[S]:
        """States that ask for the next token of each beam, to be waited for; none at the end."""
        if not self._num_left or not self._live:
            return []
        self._num_left -= 1
        probes = [one.state.fork(1)[0] for one in self._live]
        next_token = gen(
            _NEXT,
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            skip_special_tokens=False,
            n=1,
            stop=(),
            stop_token_ids=(),
            stop_regex=(),
            return_logprob=True,
            top_logprobs_num=self._width,
            return_text_in_logprobs=True,
        )
        for probe in probes:  # written before any is read: they run together
            probe._append(next_token)
        return probes

    def take(self, metas: Sequence[Any]) -> None:
        """The meta information of the probes' gens: the best continuations go on."""
        found: list[tuple[_Live[S], Beam]] = []
        for one, meta in zip(self._live, metas, strict=True):
            for logprob, token_id, text in meta["output_top_logprobs"][0]:
                is_end = token_id in self._end_ids
                beam = Beam(
                    text=one.beam.text + ("" if is_end else text),
                    token_ids=one.beam.token_ids if is_end else (*one.beam.token_ids, token_id),
                    logprob=one.beam.logprob + logprob,
                    is_finished=is_end,
                )
                found.append((one, beam))
        found.sort(key=lambda item: -item[1].logprob)  # stable: of equals the earlier
        found = found[: self._width]
        finished = [*self._finished, *(beam for _, beam in found if beam.is_finished)]
        self._live = [self._child(one, beam) for one, beam in found if not beam.is_finished]
        self._finished = _best(finished, self._width, self._length_penalty)
        live = [one.beam for one in self._live]
        if live and not self._length_penalty and _is_settled(live, self._finished, self._width):
            self._num_left = 0

    def appended(self, name: str) -> list[Beam]:
        """All beams, best first; the best is what the state goes on with."""
        beams = [*self._finished, *(one.beam for one in self._live)]
        beams = _best(beams, self._width, self._length_penalty)
        decode = self._encoder.decode  # of all ids together: a character may have several
        beams = [replace(one, text=decode(one.token_ids)) for one in beams]
        s, base = self._state, self._state._state
        s._append_tokens(beams[0].text, beams[0].token_ids, self._line)
        s._variables[name] = Span(base, s._state)
        return beams

    def _child(self, parent: _Live[S], beam: Beam) -> _Live[S]:
        state = parent.state.fork(1)[0]
        text = beam.text[len(parent.beam.text) :]
        state._append_tokens(text, beam.token_ids[-1:], self._line)
        return _Live(state, beam)


def _checked(name: str, value: object, limits: tuple[int, int], line: Line) -> int:
    """
    Raises:
        ValueError: it is no whole number within `limits`, both included; with the line.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise located(ValueError(f"{name}: {brief(value)} is no whole number"), line)
    if not limits[0] <= value <= limits[1]:
        what = f"{name}: {brief(value)} is out of range; it must be {limits[0]}..{limits[1]}"
        raise located(ValueError(what), line)
    return value


def _is_settled(live: Sequence[Beam], finished: Sequence[Beam], width: int) -> bool:
    """Whether no longer text can be among the best: a log-probability only falls."""
    return len(finished) == width and finished[-1].logprob >= max(one.logprob for one in live)


def _best(beams: Sequence[Beam], width: int, length_penalty: float) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score(length_penalty))[:width]
