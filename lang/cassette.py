"""Answers of a backend kept in a file, and given again without the backend.

A `Cassette` is JSON: what the engine is, how texts and ids belong together, and for the digest of
each request the outputs that came. `Recorder` is an EngineClient that writes one while another
client works; `Player` is an EngineClient that has only the file. A request that is not on the
cassette is refused with a diff of the nearest one that is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from palmette.runtime.client import EngineClient, ReleasesPrefixes
from palmette.runtime.request import (
    EngineInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
    RequestError,
    ReuseHint,
)

from .errors import BackendError

VERSION = 1
CODE = "not_recorded"  # of a request that is not on the cassette
# Of a request, what does not decide its answer; prompts stand there as text, for people.
_LEFT_OUT = {"request_id", "prompt_ids", "program", "tenant", "priority", "hint", "deadline_s"}


class Take(msgspec.Struct):
    """One answer: its outputs without their request id, or the words of a refusal."""

    outputs: list[Output] = []
    refused: tuple[str, str | None, str] | None = None  # message, field, code


class Entry(msgspec.Struct):
    """All answers to equal requests, in the order in which they were asked."""

    digest: str
    request: dict[str, Any]
    takes: list[Take] = []


class Cassette(msgspec.Struct):
    """What was recorded. `encoded` maps [text, parse_special] as JSON to ids."""

    info: EngineInfo
    version: int = VERSION
    chat_template_name: str | None = None
    encoded: dict[str, list[int]] = {}
    tokens: dict[str, str] = {}  # id -> its text
    decoded: dict[str, str] = {}  # ids as JSON -> their text
    entries: list[Entry] = []

    @classmethod
    def read(cls, path: Path) -> Cassette:
        """
        Raises:
            ValueError: the file is no cassette of this version.
        """
        try:
            cassette = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is no cassette ({error}); record it again") from error
        if cassette.version != VERSION:
            raise ValueError(
                f"{path} has version {cassette.version}, not {VERSION}; record it again"
            )
        return cassette

    def write(self, path: Path) -> None:
        """Equal recordings give equal files."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(msgspec.to_builtins(self), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    def prompt(self, token_ids: Iterable[int]) -> str:
        """Roughly their text: characters of several tokens are not put together."""
        return "".join(self.tokens.get(str(one), "\N{REPLACEMENT CHARACTER}") for one in token_ids)

    def describe(self, request: Request) -> dict[str, Any]:
        """The request without what is its default; the prompt as text."""
        fields: dict[str, Any] = msgspec.to_builtins(request)
        plain: dict[str, Any] = msgspec.to_builtins(Request(request_id="", prompt_ids=()))
        shown = {
            name: _without(value, plain[name])
            for name, value in fields.items()
            if name not in _LEFT_OUT and value != plain[name]
        }
        return {"prompt": self.prompt(request.prompt_ids), **shown}


def _without(value: Any, default: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    return {name: one for name, one in value.items() if one != default.get(name)}


def digest_of(request: Request) -> str:
    """Equal for requests that ask for the same, whoever asks and when."""
    same = replace(
        request, request_id="", program="", tenant="", priority=0, hint=ReuseHint(), deadline_s=None
    )
    content = msgspec.json.encode(same, order="sorted")
    return hashlib.blake2b(content, digest_size=12).hexdigest()


class Recorder:
    """An EngineClient that keeps what passes between the programs and `client`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.polls_at_once = getattr(client, "polls_at_once", False)
        self.chat_template_name: str | None = getattr(client, "chat_template_name", None)
        self.cassette = Cassette(info=client.info(), chat_template_name=self.chat_template_name)
        self._entries: dict[str, Entry] = {}
        self._takes: dict[str, Take] = {}  # by unfinished request

    def submit(self, requests: Sequence[Request]) -> None:
        try:
            self._client.submit(requests)
        except RequestError as error:
            if len(requests) == 1 and error.code not in ("overloaded", "unavailable"):
                self._take(requests[0]).refused = (str(error), error.field, error.code)
            raise
        for request in requests:
            self._takes[request.request_id] = self._take(request)

    def _take(self, request: Request) -> Take:
        self._note_tokens(request.prompt_ids)
        digest = digest_of(request)
        if digest not in self._entries:
            entry = Entry(digest=digest, request=self.cassette.describe(request))
            self._entries[digest] = entry
            self.cassette.entries.append(entry)
        take = Take()
        self._entries[digest].takes.append(take)
        return take

    def _note_tokens(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if str(token_id) not in self.cassette.tokens:
                self.cassette.tokens[str(token_id)] = self._client.decode([token_id])

    def poll(self) -> list[Output]:
        outputs = self._client.poll()
        for output in outputs:
            take = self._takes.get(output.request_id)
            if take is None:
                continue  # of a program that ran before
            take.outputs.append(msgspec.structs.replace(output, request_id=""))
            self._note_tokens(output.token_ids)
            if output.finish is not None:
                del self._takes[output.request_id]
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        self._client.abort(request_ids)

    def release(self, releases: Sequence[Release]) -> None:
        if isinstance(self._client, ReleasesPrefixes):
            self._client.release(releases)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        ids = self._client.encode(text, parse_special=parse_special)
        self.cassette.encoded[_text_key(text, parse_special)] = ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._client.decode(token_ids)
        if len(token_ids) == 1:
            self.cassette.tokens[str(token_ids[0])] = text
        else:
            self.cassette.decoded[json.dumps(list(token_ids))] = text
        return text

    def info(self) -> EngineInfo:
        return self._client.info()

    def flush_cache(self) -> bool:
        return self._client.flush_cache()

    def close(self) -> None:
        """End what still runs; the client stays open, as others may use it."""
        if self._takes:
            self._client.abort(list(self._takes))
        while self._takes and self.poll():
            pass


@dataclass(slots=True)
class _Playing:
    request_id: str
    outputs: deque[Output] = field(default_factory=deque)


class Player:
    """An EngineClient that answers from a cassette, one output of each request a poll."""

    polls_at_once = True

    def __init__(self, cassette: Cassette, name: str = "the cassette") -> None:
        self._cassette = cassette
        self._name = name
        if cassette.chat_template_name is not None:
            self.chat_template_name = cassette.chat_template_name
        self._takes = {entry.digest: deque(entry.takes) for entry in cassette.entries}
        self._playing: list[_Playing] = []

    def submit(self, requests: Sequence[Request]) -> None:
        digests = [digest_of(request) for request in requests]
        for request, digest in zip(requests, digests, strict=True):
            if len(self._takes.get(digest, ())) < digests.count(digest):
                raise RequestError(self._missing(request, digest), code=CODE)
        refusal = self._takes[digests[0]][0].refused if len(requests) == 1 else None
        if refusal is not None:
            message, name, code = refusal
            self._takes[digests[0]].popleft()
            raise RequestError(message, field=name, code=code)
        if any(self._takes[digest][0].refused for digest in digests):
            raise RequestError("one of these was refused", code=CODE)  # then they come singly
        for request, digest in zip(requests, digests, strict=True):
            outputs = self._takes[digest].popleft().outputs
            self._playing.append(_Playing(request.request_id, deque(outputs)))

    def poll(self) -> list[Output]:
        playing, self._playing = self._playing, []
        outputs: list[Output] = []
        for one in playing:
            output = one.outputs.popleft() if one.outputs else _aborted()
            outputs.append(msgspec.structs.replace(output, request_id=one.request_id))
            if output.finish is None:
                self._playing.append(one)
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        for one in self._playing:
            if one.request_id in request_ids:
                one.outputs.clear()

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """
        Raises:
            BackendError: the text is not on the cassette; with a diff of the nearest.
        """
        ids = self._cassette.encoded.get(_text_key(text, parse_special))
        if ids is None:
            known = [json.loads(key)[0] for key in self._cassette.encoded]
            what = f"a text is not on {self._name}"
            raise BackendError(_explain(what, text, known))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        known = self._cassette.decoded.get(json.dumps(list(token_ids)))
        return self._cassette.prompt(token_ids) if known is None else known

    def info(self) -> EngineInfo:
        return self._cassette.info

    def flush_cache(self) -> bool:
        return not self._playing

    def close(self) -> None:
        self._playing.clear()

    def _missing(self, request: Request, digest: str) -> str:
        count = sum(len(one.takes) for one in self._cassette.entries if one.digest == digest)
        if count:
            return f"{self._name} has {count} answers to this request; one more was asked for"
        known = [_pretty(entry.request) for entry in self._cassette.entries]
        what = f"a request is not on {self._name}"
        return _explain(what, _pretty(self._cassette.describe(request)), known)


def _aborted() -> Output:
    return Output(request_id="", finish=Finish(reason=FinishReason.ABORT))


def _text_key(text: str, parse_special: bool) -> str:
    return json.dumps([text, parse_special], ensure_ascii=False)


def _pretty(request: dict[str, Any]) -> str:
    """One line for each field and each line of the prompt."""
    lines = [
        f"{name}: {json.dumps(value, ensure_ascii=False, sort_keys=True)}"
        for name, value in sorted(request.items())
        if name != "prompt"
    ]
    return "\n".join([*lines, "prompt:", *str(request["prompt"]).splitlines()])


def _explain(what: str, asked: str, known: Sequence[str]) -> str:
    """What is missing, and how it differs from the nearest of `known`."""
    if not known:
        return f"{what}, which is empty; record it again with --palmette-record"
    nearest = max(known, key=lambda one: _likeness(asked, one))
    diff = difflib.unified_diff(
        nearest.splitlines(), asked.splitlines(), "recorded (nearest)", "asked", lineterm="", n=1
    )
    return "\n".join(
        [f"{what}; record it again with --palmette-record, or see what changed:", *diff]
    )


def _likeness(left: str, right: str) -> float:
    matcher = difflib.SequenceMatcher(None, left[-4000:], right[-4000:], autojunk=False)
    return matcher.quick_ratio() if len(left) > 500 else matcher.ratio()
