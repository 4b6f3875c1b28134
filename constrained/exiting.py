"""Threads that have to end before the interpreter does.

A thread that comes back from a native engine while the interpreter is torn down is ended by Python
inside of the engine's own frames: llguidance faults then, xgrammar calls std::terminate. So who has
such threads ends them at exit, when Python still runs, whether it was closed or not.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.3  # before a thread that computes in Python is told to end
_WAIT_S = 5.0  # for one in a native engine, which nothing can end


def call_at_exit(owner: T, end: Callable[[T], object]) -> Callable[[], None]:
    """Have `end(owner)` called when this process ends, if `owner` is still there.

    The answer is to be given to `forget`. Not called in a forked child, whose threads are gone.
    """
    pid = os.getpid()
    reference = weakref.ref(owner)

    def at_exit() -> None:
        still_there = reference()
        if still_there is not None and os.getpid() == pid:
            end(still_there)

    atexit.register(at_exit)
    weakref.finalize(owner, atexit.unregister, at_exit).atexit = False
    return at_exit


def forget(at_exit: Callable[[], None]) -> None:
    """The owner has ended its threads itself."""
    atexit.unregister(at_exit)


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were asked to end; those that still compute are interrupted."""
    if not join_all(threads, _PATIENCE_S):
        for thread in threads:
            if thread.is_alive() and thread.ident is not None:
                interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
                interrupt(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        join_all(threads, _WAIT_S)


def join_all(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Wait for all threads together; False when one goes on."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
