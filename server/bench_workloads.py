"""What `palmette bench serve` asks: workloads as plain data, made of a seed.

A workload is a forest of calls. A call without a parent starts a transcript; a child continues
its parent's transcript and answer, so chats are chains and a tree of thoughts is a tree. The same
seed gives the same calls on every machine; another seed shares no prompt with it, so that a
second round does not find the first one's prompts in the server's cache.

    W1       one stream
    W2-8/16  distinct prompts, 8 or 16 at a time
    W3       many short requests that share a long prefix
    W3-own   the same lengths, but nothing to share: what sharing saves
    W4       chats of several turns with one system message
    W5       a tree: a long prefix, every node's answer continued by 4 children
    W6       answers that must be JSON of a schema
    W7       streams decode while a long prompt arrives
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .bench_schemas import SCHEMAS

CountTokens = Callable[[str], int]

WORKLOADS = ("W1", "W2-8", "W2-16", "W3", "W3-own", "W4", "W5", "W6", "W7")

# Common words: one token each, with a space before, in the usual vocabularies.
_WORDS = (
    "able about above across after again against air all almost along already also always among "
    "and animal another answer any area around art ask away back bad ball bank base be because bed "
    "been before began begin behind being believe below best better between big bird black blood "
    "blue board boat body book both bottom box boy bring brother brought brown build building "
    "business buy call came can capital car care carry case cause center century certain change "
    "check child children choose church city class clean clear close cold color come common "
    "complete contain control cook cool copy corn corner correct cost cotton could country course "
    "cover create cross crowd cry current cut dance dark data date daughter day dead deal death "
    "decide deep design develop did differ direct discuss distance divide do doctor does dog done "
    "door down draw dream dress drink drive drop dry during each early earth ease east eat edge "
    "effect egg eight either electric element else end energy engine enough enter equal even "
    "evening event ever every exact example except expect experience experiment eye face fact "
    "fair fall family famous far farm fast father favor fear feed feel feet fell felt few field "
    "fight figure fill final find fine finger finish fire first fish fit five flat floor flow "
    "flower fly follow food foot for force forest form forward found four free fresh friend from "
    "front fruit full game garden gas gather gave general gentle get girl give glad glass go gold "
    "gone good got govern grand grass gray great green grew ground group grow guess guide hair "
    "half hand happen happy hard has hat have head hear heard heart heat heavy held help her here "
    "high hill him his history hit hold hole home hope horse hot hour house how human hundred "
    "hunt hurry ice idea if imagine in inch include indicate industry insect instant instrument "
    "interest iron island it job join joy jump just keep kept key kill kind king knew know"
).split()


class Scale(enum.StrEnum):
    FULL = "full"
    SMALL = "small"  # about a quarter of the requests and of the lengths: does it work at all?


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `text` is what it adds to the transcript of its parent, or starts one with."""

    call_id: str
    text: str
    max_tokens: int
    is_chat: bool = False
    system: str = ""  # the system message of a chat's first call
    parent: int | None = None  # index in the workload's calls; smaller than this call's own
    schema: dict[str, Any] | None = None  # the answer is JSON of it; then it ends where it likes
    is_arrival: bool = False  # sent when every other call is streaming


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    workload_id: str
    title: str
    concurrency: int
    calls: tuple[Call, ...]


class TextSource:
    """Random words of a seed, measured in tokens.

    With `count` a text has exactly the tokens asked for, as long as the tokenizer has words of
    one token, and never more; without, one word stands for one token.
    """

    def __init__(self, seed: str, count: CountTokens | None = None):
        self._random = random.Random(seed)  # noqa: S311 - words, no secrets
        self._count = count
        self._costs: dict[str, int] = {}

    def text(self, num_tokens: int, *, continues: bool = False) -> str:
        """`num_tokens` tokens of words; one that continues another text begins with a space."""
        pieces: list[str] = []
        left = num_tokens
        while left > 0:
            space = " " if pieces or continues else ""
            piece = space + self._random.choice(_WORDS)
            if self._cost(piece) > left:
                fitting = [w for w in _WORDS if self._cost(space + w) <= left]
                if not fitting:
                    break
                piece = space + self._random.choice(fitting)
            pieces.append(piece)
            left -= self._cost(piece)
        return "".join(pieces)

    def _cost(self, piece: str) -> int:
        if self._count is None:
            return 1
        if piece not in self._costs:
            self._costs[piece] = max(1, self._count(piece))
        return self._costs[piece]


def build(
    workload_id: str,
    *,
    seed: str,
    scale: Scale = Scale.FULL,
    count: CountTokens | None = None,
) -> Workload:
    """The workload of this id; `count` counts the tokens of a text.

    Raises:
        ValueError: there is no workload of this id.
    """
    if workload_id not in _BUILDERS:
        raise ValueError(f"workload: {workload_id} is not known; use one of {', '.join(WORKLOADS)}")
    words = TextSource(f"{seed}/{workload_id}", count)
    return _BUILDERS[workload_id](workload_id, words, scale is Scale.FULL)


def select(names: Sequence[str]) -> tuple[str, ...]:
    """The ids that `names` mean, in the order of the table: W2 is W2-8 and W2-16, W3 is both.

    Raises:
        ValueError: a name means none.
    """
    for name in names:
        if not any(_means(name, workload_id) for workload_id in WORKLOADS):
            raise ValueError(f"workloads: {name} is not known; use {', '.join(WORKLOADS)}")
    return tuple(w for w in WORKLOADS if any(_means(name, w) for name in names))


def _means(name: str, workload_id: str) -> bool:
    return name.upper() in (workload_id.upper(), workload_id.split("-")[0])


def _one_stream(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    tokens = 128 if is_full else 32
    call = Call(call_id="0", text=words.text(tokens), max_tokens=tokens)
    title = f"one stream, {tokens} in, {tokens} out"
    return Workload(workload_id=workload_id, title=title, concurrency=1, calls=(call,))


def _distinct(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    concurrency = int(workload_id.removeprefix("W2-"))
    requests, prompt, out = (32, 256, 128) if is_full else (concurrency, 64, 32)
    calls = tuple(
        Call(call_id=str(i), text=words.text(prompt), max_tokens=out) for i in range(requests)
    )
    title = f"{requests} distinct prompts of {prompt}, {out} out"
    return Workload(workload_id=workload_id, title=title, concurrency=concurrency, calls=calls)


def _shared_prefix(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    requests, shared, own, out = (64, 1000, 40, 16) if is_full else (16, 250, 10, 4)
    is_shared = workload_id == "W3"
    prefix = words.text(shared)
    calls = []
    for i in range(requests):
        start = prefix if is_shared else words.text(shared)
        text = start + words.text(own, continues=True)
        calls.append(Call(call_id=str(i), text=text, max_tokens=out))
    how = f"sharing {shared}" if is_shared else f"of {shared}, nothing shared"
    title = f"{requests} requests {how}, {own} own, {out} out"
    return Workload(workload_id=workload_id, title=title, concurrency=8, calls=tuple(calls))


def _chats(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    chats, turns, system, own, out = (8, 6, 64, 32, 48) if is_full else (2, 3, 16, 8, 12)
    message = words.text(system)
    calls: list[Call] = []
    for chat in range(chats):
        for turn in range(turns):
            calls.append(
                Call(
                    call_id=f"{chat}.{turn}",
                    text=words.text(own),
                    max_tokens=out,
                    is_chat=True,
                    system=message if turn == 0 else "",
                    parent=len(calls) - 1 if turn else None,
                )
            )
    title = f"{chats} chats of {turns} turns, {own} in and {out} out a turn"
    return Workload(workload_id=workload_id, title=title, concurrency=chats, calls=tuple(calls))


def _tree(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    prefix, levels, own, out = (600, 3, 8, 32) if is_full else (150, 2, 4, 8)
    branch = 4
    calls = [Call(call_id="r", text=words.text(prefix), max_tokens=out)]
    level = [0]
    for _ in range(levels):
        parents, level = level, []
        for parent in parents:
            for child in range(branch):
                level.append(len(calls))
                call_id = f"{calls[parent].call_id}.{child}"
                text = words.text(own, continues=True)
                calls.append(Call(call_id=call_id, text=text, max_tokens=out, parent=parent))
    title = f"tree: prefix {prefix}, {levels} levels of {branch}, {out} out, {len(calls)} calls"
    return Workload(workload_id=workload_id, title=title, concurrency=16, calls=tuple(calls))


def _json(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    requests, out = (32, 160) if is_full else (8, 160)
    calls = []
    for i in range(requests):
        name, schema = SCHEMAS[i % len(SCHEMAS)]
        text = f"Write one {name} as JSON. Use some of these words: {words.text(16)}."
        calls.append(
            Call(call_id=f"{i}.{name}", text=text, max_tokens=out, is_chat=True, schema=schema)
        )
    title = f"{requests} JSON answers, {len(SCHEMAS)} schemas, at most {out} out"
    return Workload(workload_id=workload_id, title=title, concurrency=8, calls=tuple(calls))


def _arrival(workload_id: str, words: TextSource, is_full: bool) -> Workload:
    streams = 4
    prompt, out, arriving, arrival_out = (64, 256, 4000, 16) if is_full else (16, 64, 1000, 4)
    calls = [
        Call(call_id=f"stream.{i}", text=words.text(prompt), max_tokens=out) for i in range(streams)
    ]
    text = words.text(arriving)
    calls.append(Call(call_id="arrival", text=text, max_tokens=arrival_out, is_arrival=True))
    title = f"{streams} streams of {out}, a prompt of {arriving} arrives"
    return Workload(
        workload_id=workload_id, title=title, concurrency=len(calls), calls=tuple(calls)
    )


_BUILDERS: dict[str, Callable[[str, TextSource, bool], Workload]] = {
    "W1": _one_stream,
    "W2-8": _distinct,
    "W2-16": _distinct,
    "W3": _shared_prefix,
    "W3-own": _shared_prefix,
    "W4": _chats,
    "W5": _tree,
    "W6": _json,
    "W7": _arrival,
}
