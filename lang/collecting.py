"""Whether the garbage collector is at work in this thread.

A collection may begin wherever an object is made, also in the midst of native code that does not
expect to be entered anew: CPython 3.11's ast.parse raises a SystemError then. So code of users, the
`finally` blocks of a body that nobody waits for, runs after a collection and never in one.
"""

from __future__ import annotations

import gc
import threading


class _Watch:
    def __init__(self) -> None:
        self.thread = 0

    def __call__(self, phase: str, info: object) -> None:
        self.thread = threading.get_ident() if phase == "start" else 0


_WATCH = _Watch()  # there is one collector, and it has one list of those who watch
gc.callbacks.append(_WATCH)


def is_collecting() -> bool:
    return _WATCH.thread == threading.get_ident()
