"""Beam search over forks: the continuations of a state with the largest log-probability.

    s -- "a" -- "a c"     every step: one request per beam for its likeliest next tokens, all
      `- "b" -- "b d"     together in one batch; the best `width` of all continuations go on

Prefixes are shared in the engine's cache, so a step computes little more than one token per beam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import located
from .generation import gen
from .host import Span, caller_line
from .ir import Line
from .state import ProgramState

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
class _Live:
    state: ProgramState
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
        ProgramError: a request failed.
    """
    if not isinstance(s, ProgramState):
        raise TypeError(
            f"beam: it waits for each step, and {type(s).__name__} reads with await; put it into a "
            "plain program and `await program.run_async(...)`"
        )
    line = caller_line()
    session = s._host.session
    if session is None:
        raise located(ValueError("beam: it reads what it generates; run the program"), line)
    info = session.client.info()
    limit = info.limits.max_top_logprobs
    if not 1 <= width <= limit:
        raise located(ValueError(f"width: {width} is out of range; it must be 1..{limit}"), line)
    if max_tokens < 1:
        raise located(
            ValueError(f"max_tokens: {max_tokens} is out of range; it must be >= 1"), line
        )
    if not math.isfinite(length_penalty):
        what = f"length_penalty: {length_penalty} is out of range; it must be finite"
        raise located(ValueError(what), line)
    nothing = Beam(text="", token_ids=(), logprob=0.0, is_finished=False)
    live, finished = [_Live(s.fork(1)[0], nothing)], list[Beam]()
    for _ in range(max_tokens):
        found = _continuations(live, width, frozenset(info.eos_token_ids))
        finished += [beam for _, beam in found if beam.is_finished]
        live = [_child(parent, beam, line) for parent, beam in found if not beam.is_finished]
        finished = _best(finished, width, length_penalty)
        if not live or (not length_penalty and _is_settled(live, finished, width)):
            break
    beams = _best([*finished, *(one.beam for one in live)], width, length_penalty)
    decode = session.encoder.decode  # of all ids together: a character may have several
    beams = [replace(one, text=decode(one.token_ids)) for one in beams]
    base = s._state
    s._append_tokens(beams[0].text, beams[0].token_ids, line)
    s._variables[name] = Span(base, s._state)
    return beams


def _continuations(
    live: Sequence[_Live], width: int, end_ids: frozenset[int]
) -> list[tuple[_Live, Beam]]:
    """The best `width` beams that are one token longer, each with the one it goes on from."""
    probes = [one.state.fork(1)[0] for one in live]
    for probe in probes:  # written before any is read: they run together
        probe += gen(
            _NEXT,
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            skip_special_tokens=False,
            n=1,
            stop=(),
            return_logprob=True,
            top_logprobs_num=width,
            return_text_in_logprobs=True,
        )
    found: list[tuple[_Live, Beam]] = []
    for one, probe in zip(live, probes, strict=True):
        meta: Any = probe.get_meta_info(_NEXT)
        for logprob, token_id, text in meta["output_top_logprobs"][0]:
            is_end = token_id in end_ids
            beam = Beam(
                text=one.beam.text + ("" if is_end else text),
                token_ids=one.beam.token_ids if is_end else (*one.beam.token_ids, token_id),
                logprob=one.beam.logprob + logprob,
                is_finished=is_end,
            )
            found.append((one, beam))
    found.sort(key=lambda item: -item[1].logprob)  # stable: of equals the earlier
    return found[:width]


def _child(parent: _Live, beam: Beam, line: Line) -> _Live:
    state = parent.state.fork(1)[0]
    text = beam.text[len(parent.beam.text) :]
    state._append_tokens(text, beam.token_ids[-1:], line)
    return _Live(state, beam)


def _is_settled(live: Sequence[_Live], finished: Sequence[Beam], width: int) -> bool:
    """Whether no longer text can be among the best: a log-probability only falls."""
    return len(finished) == width and finished[-1].logprob >= max(one.beam.logprob for one in live)


def _best(beams: Sequence[Beam], width: int, length_penalty: float) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score(length_penalty))[:width]
