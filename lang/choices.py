"""How `select` decides: methods over the log-probabilities of the choices' tokens.

Three of them and their names are those of SGLang's frontend. Each gets, per choice, at least one
scored token with a real log-probability; see `calls.SelectCall`. They can be called as SGLang's
are, and a method written for SGLang decides here (`decide`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, overload


class Score(NamedTuple):
    """One scored token."""

    logprob: float
    token_id: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScores:
    """What a method may look at: per choice, the tokens that tell it from the others."""

    choices: tuple[str, ...]
    scores: tuple[tuple[Score, ...], ...]  # given the prompt
    unconditional: tuple[tuple[Score, ...], ...] | None = None  # given the start of text only


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The index of the best choice, and what a method adds to the meta information."""

    index: int
    meta: dict[str, object]


class ChoicesMethod(Protocol):
    @property
    def needs_unconditional(self) -> bool:
        """Whether `ChoiceScores.unconditional` must be there; costs one request per choice."""
        ...

    def __call__(self, scores: ChoiceScores, /) -> Decision:
        """Decide; of equally good choices the first."""
        ...


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """What a method of SGLang's form gives: the best choice, and what it adds to the meta
    information."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


# Per choice its tokens: log-probability, id and text, as the meta information has them.
_Rows: TypeAlias = Sequence[Sequence[Sequence[Any]]]


class ChoicesSamplingMethod:
    """A method of `select`; what SGLang's methods are derived from is this here.

    `decide` makes the decision. Called with `ChoiceScores`, a method gives its `Decision`; called
    with SGLang's keyword arguments, a `ChoicesDecision`.
    """

    __slots__ = ()

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """SGLang's name of `needs_unconditional`."""
        return False

    @property
    def needs_unconditional(self) -> bool:
        return self.requires_unconditional_logprobs

    def decide(self, scores: ChoiceScores) -> Decision:
        """The best choice; of equally good ones the first."""
        raise NotImplementedError

    @overload
    def __call__(self, scores: ChoiceScores, /) -> Decision: ...
    @overload
    def __call__(
        self,
        /,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: _Rows,
        output_token_logprobs: _Rows,
        unconditional_token_logprobs: _Rows | None = None,
    ) -> ChoicesDecision: ...

    def __call__(
        self, scores: ChoiceScores | None = None, /, **given: Any
    ) -> Decision | ChoicesDecision:
        if scores is not None:
            return self.decide(scores)
        return _decide_given(self, **given)


def _decide_given(
    method: ChoicesSamplingMethod,
    *,
    choices: Sequence[str],
    input_token_logprobs: _Rows,
    unconditional_token_logprobs: _Rows | None = None,
    **told: Any,
) -> ChoicesDecision:
    alone = unconditional_token_logprobs
    if method.needs_unconditional and alone is None:
        raise ValueError("unconditional_token_logprobs: this method needs them")
    scores = ChoiceScores(
        choices=tuple(choices),
        scores=_scores_of(input_token_logprobs),
        unconditional=None if alone is None else _scores_of(alone),
    )
    decision = method.decide(scores)
    meta = {**told, "input_token_logprobs": input_token_logprobs, **decision.meta}
    return ChoicesDecision(choices[decision.index], meta)


def _scores_of(rows: _Rows) -> tuple[tuple[Score, ...], ...]:
    """Rows of log-probability, id and text; a first token has no log-probability of its own."""
    return tuple(
        tuple(Score(0.0 if row[0] is None else row[0], *row[1:]) for row in tokens)
        for tokens in rows
    )


def needs_unconditional(method: ChoicesMethod) -> bool:
    """Whether a method, SGLang's too, needs `ChoiceScores.unconditional`."""
    told = getattr(method, "requires_unconditional_logprobs", None)
    return method.needs_unconditional if told is None else bool(told)


def decide(method: ChoicesMethod, scores: ChoiceScores) -> Decision:
    """What a method decides: one of ours, or one with SGLang's keyword arguments.

    Raises:
        ValueError: it gives a text that is no choice.
    """
    is_sglangs = hasattr(method, "requires_unconditional_logprobs")
    if not is_sglangs or type(method).__call__ is ChoicesSamplingMethod.__call__:
        return method(scores)
    call: Any = method
    given = call(
        choices=list(scores.choices),
        normalized_prompt_logprobs=means(scores.scores),
        input_token_logprobs=[list(tokens) for tokens in scores.scores],
        output_token_logprobs=[[] for _ in scores.choices],
        unconditional_token_logprobs=scores.unconditional
        and [list(tokens) for tokens in scores.unconditional],
    )
    if given.decision not in scores.choices:
        raise ValueError(f"choices_method: it gave {given.decision!r:.80}, which is no choice")
    return Decision(index=scores.choices.index(given.decision), meta=dict(given.meta_info or {}))


@dataclass(frozen=True, slots=True)
class TokenLengthNormalized(ChoicesSamplingMethod):
    """The largest mean log-probability per token."""

    def decide(self, scores: ChoiceScores) -> Decision:
        return Decision(index=_argmax(means(scores.scores)), meta={})


@dataclass(frozen=True, slots=True)
class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token by token the most probable, as greedy decoding among the choices would.

    A choice that has ended stands in later columns with its mean.
    """

    def decide(self, scores: ChoiceScores) -> Decision:
        width = max(len(tokens) for tokens in scores.scores)
        matrix = [
            [token.logprob for token in tokens] + [mean] * (width - len(tokens))
            for tokens, mean in zip(scores.scores, means(scores.scores), strict=True)
        ]
        remaining = list(range(len(matrix)))
        for column in range(width):
            best = max(matrix[row][column] for row in remaining)
            remaining = [row for row in remaining if matrix[row][column] == best]
            if len(remaining) == 1:
                break
        return Decision(index=remaining[0], meta={"greedy_logprob_matrix": matrix})


@dataclass(frozen=True, slots=True)
class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The largest mean gain of log-probability that the prompt gives over no prompt."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return True

    def decide(self, scores: ChoiceScores) -> Decision:
        assert scores.unconditional is not None  # asked for by needs_unconditional
        gains = [
            sum(a.logprob - b.logprob for a, b in zip(given, alone, strict=True)) / len(given)
            for given, alone in zip(scores.scores, scores.unconditional, strict=True)
        ]
        meta: dict[str, object] = {
            "unconditional_token_logprobs": [list(tokens) for tokens in scores.unconditional],
            "normalized_unconditional_prompt_logprobs": gains,
        }
        return Decision(index=_argmax(gains), meta=meta)


@dataclass(frozen=True, slots=True)
class ConstrainedLikelihood(ChoicesSamplingMethod):
    """The choice that decoding constrained to the choices gives with the largest probability.

    Where choices part, the probabilities of the tokens that lead to some choice are scaled to sum
    to 1; a token that must come costs nothing, so the length of a choice does not count. A choice
    that others go on from ends there with what those leave. Exact: each token is conditioned on all
    before it, and `choice_probabilities` in the meta information sum to 1.
    """

    def decide(self, scores: ChoiceScores) -> Decision:
        logprobs = [0.0] * len(scores.scores)
        groups = [(list(range(len(scores.scores))), 0)]
        while groups:
            rows, depth = groups.pop()
            children: dict[int, list[int]] = {}
            ended = [row for row in rows if len(scores.scores[row]) == depth]
            for row in rows:
                if len(scores.scores[row]) > depth:
                    children.setdefault(scores.scores[row][depth].token_id, []).append(row)
            steps = [scores.scores[child[0]][depth].logprob for child in children.values()]
            branches = list(children.values())
            groups += [(branch, depth + 1) for branch in branches]
            if ended:
                left = 1.0 - sum(map(math.exp, steps))
                steps.append(math.log(left) if left > 0.0 else -math.inf)
                branches.append(ended)
            total = _log_sum(steps)
            for branch, step in zip(branches, steps, strict=True):
                for row in branch:
                    logprobs[row] += step - total
        probabilities = [math.exp(logprob) for logprob in logprobs]
        return Decision(index=_argmax(logprobs), meta={"choice_probabilities": probabilities})


def _log_sum(logprobs: Sequence[float]) -> float:
    """The logarithm of the sum of probabilities, of which one at least is above 0."""
    top = max(logprobs)
    return top + math.log(sum(math.exp(logprob - top) for logprob in logprobs))


constrained_likelihood = ConstrainedLikelihood()
token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def means(scores: Sequence[Sequence[Score]]) -> list[float]:
    """Mean log-probability per choice."""
    return [sum(token.logprob for token in tokens) / len(tokens) for tokens in scores]


def _argmax(numbers: Sequence[float]) -> int:
    return max(range(len(numbers)), key=lambda index: numbers[index])
