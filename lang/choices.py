"""How `select` decides: three methods over the log-probabilities of the choices' tokens.

The methods and their names are those of SGLang's frontend. Each gets, per choice, at least one
scored token with a real log-probability; see `calls.SelectCall`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


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

    def __call__(self, scores: ChoiceScores) -> Decision:
        """Decide; of equally good choices the first."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLengthNormalized:
    """The largest mean log-probability per token."""

    needs_unconditional: bool = False

    def __call__(self, scores: ChoiceScores) -> Decision:
        return Decision(index=_argmax(means(scores.scores)), meta={})


@dataclass(frozen=True, slots=True)
class GreedyTokenSelection:
    """Token by token the most probable, as greedy decoding among the choices would.

    A choice that has ended stands in later columns with its mean.
    """

    needs_unconditional: bool = False

    def __call__(self, scores: ChoiceScores) -> Decision:
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
class UnconditionalLikelihoodNormalized:
    """The largest mean gain of log-probability that the prompt gives over no prompt."""

    needs_unconditional: bool = True

    def __call__(self, scores: ChoiceScores) -> Decision:
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


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def means(scores: Sequence[Sequence[Score]]) -> list[float]:
    """Mean log-probability per choice."""
    return [sum(token.logprob for token in tokens) / len(tokens) for tokens in scores]


def _argmax(numbers: Sequence[float]) -> int:
    return max(range(len(numbers)), key=lambda index: numbers[index])
