"""What a run is done with: which releases an engine is still to be told.

Most is told with the requests themselves (`outlook.py`). The rest is told here: branches that were
joined or left, calls that failed, and the end of a program whose last call was not known as such.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from palmette.runtime.request import FinishReason, Output, Release, Request

from .content import Content, Encoder, prompt_ids
from .errors import ProgramError
from .ir import Gen, Select, StateId
from .outlook import Lookahead

Contents = Mapping[StateId, Content | ProgramError]


class Releases:
    """The releases of one run, in the order in which they come up."""

    def __init__(
        self, run_id: str, *, encoder: Encoder, lookahead: Lookahead, contents: Contents
    ) -> None:
        self._run_id = run_id
        self._encoder = encoder
        self._lookahead = lookahead
        self._contents = contents
        self._left: deque[tuple[StateId, StateId]] = deque()  # fork and tip of branches
        self._found: list[Release] = []
        self._has_sent = False
        self._has_ended = False

    def leave(self, fork: StateId, tip: StateId) -> None:
        """Nobody goes on from `tip` any more. Called by destructors too: nothing happens here."""
        self._left.append((fork, tip))

    def sent(self) -> None:
        """A request has gone out: there is something to release."""
        self._has_sent = True

    def ended(self, request: Request, output: Output) -> None:
        """A request has ended; if it was accepted, the engine knows what it said."""
        finish = output.finish
        if request.hint.ends_program and finish and finish.reason is not FinishReason.ERROR:
            self._has_ended = True

    def over(self, node: Gen | Select) -> None:
        """A call has ended, and its requests did not say what it was the last use of."""
        keep, content = self._lookahead.kept_length(node.target), self._contents[node.source]
        if keep is None or not isinstance(content, Content):
            return
        known = content if isinstance(node, Gen) else _last_generated(content)
        if known is not None:
            self._add(known, keep)

    def reopen(self) -> None:
        """More is written to a program that had ended."""
        self._has_ended = False

    def end(self) -> None:
        """The program has ended, whatever became of it."""
        if self._has_sent and not self._has_ended:
            self._has_ended = True
            self._found = [Release(program=self._run_id, ends_program=True)]

    def take(self) -> list[Release]:
        """What has come up since the last call."""
        if self._left and not self._has_ended:
            self._settle_left()
        found, self._found = self._found, []
        return found

    def _settle_left(self) -> None:
        for _ in range(len(self._left)):
            fork, tip = self._left.popleft()
            content = self._contents.get(tip)
            if content is None:
                self._left.append((fork, tip))  # its calls are not done
                continue
            generated = _last_generated(content) if isinstance(content, Content) else None
            keep = self._lookahead.shared_length(fork)
            if generated is not None and keep is not None:
                self._add(generated, keep)

    def _add(self, content: Content, keep: int) -> None:
        ids = prompt_ids(content, self._encoder)
        if keep < len(ids):
            self._found.append(Release(program=self._run_id, prompt_ids=ids, keep_tokens=keep))


def _last_generated(content: Content) -> Content | None:
    """The last link that a call made: up to here all was encoded before."""
    link: Content | None = content
    while link is not None and not (link.token_ids and link.parent is not None):
        link = link.parent
    return link
