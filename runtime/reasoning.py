"""Thinking and answer told apart in a text as it comes; see `request.Reasoning`.

    "<think>why" | "ever</th" | "ink>{"      ->  reasoning "why", "ever"; content "{"

What could still be the beginning of an end is held back, as are blanks before one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .request import Reasoning

# How known models write it.
MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
)


_THINK = ("<think>", "</think>")
_CERTAIN = ("deepseek-r1", "minimax", "qwen3-thinking", "step3", "step3p5")
_OPTIONAL = ("deepseek-v3", "glm45", "interns1", "kimi_k2", "mimo", "nemotron_3", "qwen3")
# SGLang's names for kinds of models.
MODEL_TYPES: Mapping[str, Reasoning] = {
    **{name: Reasoning(start=_THINK[0], end=_THINK[1]) for name in _CERTAIN},
    **{name: Reasoning(start=_THINK[0], end=_THINK[1], is_certain=False) for name in _OPTIONAL},
    "gpt-oss": Reasoning(
        start="<|channel|>analysis<|message|>",
        end="<|end|><|start|>assistant<|channel|>final<|message|>",
        is_certain=False,
    ),
    "kimi": Reasoning(start="\u25c1think\u25b7", end="\u25c1/think\u25b7", is_certain=False),
    "mistral": Reasoning(start="[THINK]", end="[/THINK]", is_certain=False),
}


def reasoning_of(model_type: str) -> Reasoning:
    """How a kind of models thinks.

    Raises:
        ValueError: the kind is not known.
    """
    found = MODEL_TYPES.get(model_type.lower())
    if found is None:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ValueError(f"model_type: {model_type!r:.60} is not known; use one of {known}")
    return found


def reasoning_until(end: str) -> Reasoning:
    """Thinking that ends with `end`, for sure; of a known end also the start."""
    return Reasoning(end=end, start=next((start for start, known in MARKS if known == end), ""))


class Parts(NamedTuple):
    """What is new of a text."""

    reasoning: str
    content: str


class ReasoningSplit:
    """The text of one request."""

    def __init__(self, reasoning: Reasoning, *, is_exact: bool) -> None:
        """`is_exact`: the answer is to be told as it is, with blanks at its beginning."""
        self._reasoning = reasoning
        self._is_exact = is_exact
        self._held = ""
        self._is_begun = False  # past the start
        self._is_over = False  # past the end
        self._has_content = False
        self.reasoning = ""
        self.content = ""

    def push(self, text: str, *, is_last: bool = False) -> Parts:
        """Take what is new; after `is_last` nothing is held back."""
        self._held += text
        reasoning = ""
        if not self._is_over:
            if not self._is_begun and not self._begin(is_last):
                return Parts("", "")
            reasoning = self._take_reasoning(is_last)
        content = self._take_content() if self._is_over else ""
        self.reasoning += reasoning
        self.content += content
        return Parts(reasoning, content)

    def _begin(self, is_last: bool) -> bool:
        """Read the start, if it is there; False while that is not known."""
        start = self._reasoning.start
        text = self._held.lstrip()
        if start and text.startswith(start):
            self._held = text[len(start) :]
        elif start and start.startswith(text) and not is_last:
            return False
        elif not self._reasoning.is_certain:
            self._is_over = True
            self._is_exact = True
        self._is_begun = True
        return True

    def _take_reasoning(self, is_last: bool) -> str:
        if self._is_over:
            return ""
        end = self._reasoning.end
        found = self._held.find(end)
        if found >= 0:
            taken, self._held = self._held[:found].rstrip(), self._held[found + len(end) :]
            self._is_over = True
        else:
            length = 0 if is_last else overlap(self._held, end)
            taken = self._held[: len(self._held) - length].rstrip()
            self._held = self._held[len(taken) :]
        return taken if self.reasoning else taken.lstrip()

    def _take_content(self) -> str:
        if not self._is_exact and not self._has_content:
            self._held = self._held.lstrip()
        taken, self._held = self._held, ""
        self._has_content = self._has_content or bool(taken)
        return taken


class TokenCounter:
    """Counts the tokens of the thinking, its end included; by the bytes that tokens stand for."""

    def __init__(self, reasoning: Reasoning, bytes_of: Callable[[int], bytes]) -> None:
        self._start = reasoning.start.encode()
        self._end = reasoning.end.encode()
        self._is_certain = reasoning.is_certain
        self._bytes_of = bytes_of
        self._text = b""
        self._num_read = 0
        self._is_over = False

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._is_certain else 0

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._text += self._bytes_of(token_id)
            self._num_read += 1
            if not self._is_certain:
                self._decide()
            if self._end in self._text:
                self._is_over = True
            elif self._is_certain:
                self._text = self._text[-len(self._end) :]

    def _decide(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._start):
            self._is_certain = True
        elif not self._start.startswith(text):
            self._is_over = True


def overlap(text: str, end: str) -> int:
    """Length of the longest end of `text` with which `end` begins."""
    for length in range(min(len(text), len(end) - 1), 0, -1):
        if end.startswith(text[len(text) - length :]):
            return length
    return 0
