"""What programs say they are done with: with a request, or by a message of its own.

A program's word counts when its requests have ended, whatever order the messages come in: it is
over once it has said so and none of its requests is live.
"""

from __future__ import annotations

from collections.abc import Sequence

from palmette.radix_cache.node import ProgramKey
from palmette.radix_cache.tree import RadixTree

from .request import Release, Request


class LastUses:
    """The live requests of each program, and which programs are about to end."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._num_live: dict[ProgramKey, int] = {}
        self._ending: dict[ProgramKey, tuple[int, ...]] = {}  # and what others begin with

    def begin(self, requests: Sequence[Request]) -> None:
        """These were accepted."""
        for request in requests:
            if name := program_of(request):
                key = (request.namespace, name)
                self._num_live[key] = self._num_live.get(key, 0) + 1

    def end(self, request: Request) -> None:
        """A request has ended, well or badly, and its lease with it."""
        name, hint = program_of(request), request.hint
        if not name:
            return
        key, prompt, keep = (request.namespace, name), request.prompt_ids, hint.keep_tokens
        if hint.ends_program or not request.program:
            self._ending[key] = prompt[: keep or 0]
        elif keep is not None:
            self._tree.release_path(name, prompt, request.namespace, keep=keep)
        self._num_live[key] -= 1
        if self._num_live[key] == 0:
            del self._num_live[key]
            if key in self._ending:
                self._tree.end_program(name, key[0], shared_ids=self._ending.pop(key))

    def take(self, releases: Sequence[Release]) -> None:
        """Messages of programs."""
        for release in releases:
            key, prompt, keep = (
                (release.namespace, release.program),
                release.prompt_ids,
                release.keep_tokens,
            )
            if not release.ends_program:
                self._tree.release_path(release.program, prompt, release.namespace, keep=keep)
            elif key in self._num_live:
                self._ending[key] = prompt[:keep]
            else:
                self._tree.end_program(key[1], key[0], shared_ids=prompt[:keep])


def program_of(request: Request) -> str:
    """Whose word counts for what a request has used; a request that gives it may stand alone."""
    hint = request.hint
    is_told = hint.ends_program or hint.keep_tokens is not None
    return request.program or (request.request_id if is_told else "")
