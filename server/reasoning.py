"""Whether a chat's answer begins with thinking, and how that ends.

reasoning_end in the request        it ends with that text
the prompt ends inside of thinking  as the template of a model that always thinks makes it
the template has enable_thinking    and the request does not turn it off
anything else                       no thinking; so too when the prompt ends behind it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palmette.runtime.reasoning import MARKS, reasoning_until
from palmette.runtime.request import Reasoning

from .errors import invalid

PROMPT_TAIL = 64  # tokens of a prompt in which its last mark is looked for


def named_reasoning(end: str | None) -> Reasoning | None:
    """What a request's `reasoning_end` says.

    Raises:
        ApiError: 400 when it is empty.
    """
    if end is None:
        return None
    if not end:
        raise invalid("reasoning_end: may not be empty", "reasoning_end")
    return reasoning_until(end)


def chat_reasoning(
    template: str | None, prompt_tail: str, kwargs: Mapping[str, Any], end: str | None
) -> Reasoning | None:
    """Of a chat whose rendered prompt ends with `prompt_tail`; `kwargs` went to the template."""
    tail = prompt_tail.rstrip()
    if end is not None:
        reasoning = named_reasoning(end)
        return None if tail.endswith(end) else reasoning
    for start, known in MARKS:
        if template is None or known not in template:
            continue
        if tail.endswith(known):
            return None
        if tail.endswith(start):
            return Reasoning(end=known, start=start)
        switch = next((name for name in ("enable_thinking", "thinking") if name in kwargs), None)
        if "enable_thinking" in template and (switch is None or kwargs[switch] is not False):
            return Reasoning(end=known, start=start, is_certain=False)
    return None
