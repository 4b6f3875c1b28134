"""A process that compiles with engines that can't bound themselves, and may be killed for it.

    python -m palmette.constrained.compile_worker llguidance|outlines_core|xgrammar

Reads messages (see `frames`) from its standard input and answers each on its standard output:
first the vocabulary, then one grammar after the other. Ends with its input. `worker_pool` is the
other end; budgets of time and memory are watched from there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import numpy as np

from . import frames

Answer = tuple[dict[str, Any], bytes]
Compile = Callable[[dict[str, Any]], Answer]  # raises ValueError: what is wrong with the grammar

_CPU_MARGIN_S = 30  # beyond the budget: the last resort, when nobody is left to kill us


def main() -> None:
    engines = {
        "llguidance": _llguidance,
        "outlines_core": _outlines_core,
        "xgrammar": _xgrammar,
    }
    build = engines[sys.argv[1]]
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what engines print is no message
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    first = frames.read(source)
    if first is None:
        return
    header, body = first
    compile_one = build(_split(body, header["sizes"]), header)
    frames.write(sink, {"ready": True})
    while (message := frames.read(source)) is not None:
        _limit_cpu_time()
        _answer(sink, compile_one, message[0])


def _answer(sink: IO[bytes], compile_one: Compile, request: dict[str, Any]) -> None:
    try:
        header, body = compile_one(request)
    except Exception as error:  # fault boundary: one grammar
        header, body = {"error": f"{error}"[:2_000], "type": type(error).__name__}, b""
    frames.write(sink, header, body)


def _split(body: bytes, sizes: list[int]) -> list[bytes]:
    tokens, start = [], 0
    for size in sizes:
        tokens.append(body[start : start + size])
        start += size
    return tokens


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _limit_cpu_time() -> None:
    try:
        import resource
    except ImportError:  # not on this system
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _CPU_MARGIN_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _llguidance(tokens: list[bytes], header: dict[str, Any]) -> Compile:
    from .llguidance_proof import proof_of

    return proof_of(tokens, header)


def _xgrammar(tokens: list[bytes], header: dict[str, Any]) -> Compile:
    """The engine's own serialisation, JSON text."""
    from .xgrammar_backend import compiler_of

    return compiler_of(tokens, header["stop_ids"])


def _outlines_core(tokens: list[bytes], header: dict[str, Any]) -> Compile:
    r"""Indices as arrays: states 0..S-1, 0 is the start; the transitions of state s are
    `ids[offsets[s]:offsets[s + 1]]` and `nexts` there.

    The engine's DFA stops at the first alternative that matches, and can't begin with an anchor:
    `\x00(?:...)\z` has neither trouble. The zero is a token of its own and comes first.
    """
    from outlines_core import Index, Vocabulary

    sentinel, end = len(tokens), len(tokens) + 1
    vocabulary = Vocabulary(end, {})
    vocabulary.insert(b"\0", sentinel)
    for token_id, text in enumerate(tokens):
        if text:
            vocabulary.insert(text, token_id)

    def compile_one(request: dict[str, Any]) -> Answer:
        index = Index(rf"\x00(?:{request['pattern']})\z", vocabulary)
        first = index.get_next_state(index.get_initial_state(), sentinel)
        if first is None:
            raise ValueError("no text matches it")
        transitions = index.get_transitions()
        numbers, order = {first: 0}, [first]
        for state in order:  # grows: states reached from the start
            for token_id, to in transitions.get(state, {}).items():
                if token_id < sentinel and to not in numbers:
                    numbers[to] = len(order)
                    order.append(to)
            if len(order) > request["max_states"]:
                raise ValueError(f"it needs more than {request['max_states']} states")
        return _arrays(order, numbers, transitions, set(index.get_final_states()), sentinel)

    return compile_one


def _arrays(
    order: list[int],
    numbers: dict[int, int],
    transitions: dict[int, dict[int, int]],
    final: set[int],
    num_tokens: int,
) -> Answer:
    offsets, ids, nexts = [0], [], []
    for state in order:
        leaving = transitions.get(state, {})
        for token_id in sorted(leaving):
            if token_id < num_tokens:
                ids.append(token_id)
                nexts.append(numbers[leaving[token_id]])
        offsets.append(len(ids))
    arrays = [np.array(values, np.int32) for values in (offsets, ids, nexts)]
    body = b"".join(array.tobytes() for array in arrays)
    finals = [number for number, state in enumerate(order) if state in final]
    return {"num_states": len(order), "num_transitions": len(ids), "finals": finals}, body


if __name__ == "__main__":
    main()
