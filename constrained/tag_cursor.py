"""Checks inside of structural tags: where a JSON part opens, and whether it is valid as it closes.

A cursor follows all ways in which the text can be read as the tag document says, byte by byte. On
each way a JSON part is read by a cursor of its own schema; a way ends when its value turns out
invalid. Where no way is left the value is to be taken back. The grammar has made sure that the
text is one of the document's; documents whose ways can't be followed have no checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .residual import ResidualCursor, SchemaCheck
from .rewrite import Residual
from .spec import GrammarError
from .tag_nodes import (
    AnyText,
    Choice,
    Const,
    Ebnf,
    JsonPart,
    Part,
    Regex,
    Repeat,
    Sequence,
    Tag,
    Triggered,
    walk,
)

_MAX_STEPS = 50_000  # of one document with its repeats written out
_NUMBER = b"+-.0123456789eE"
_MATCH = "match"


@dataclass(slots=True)
class _Byte:
    byte: int
    next: int


@dataclass(slots=True)
class _Json:
    check: SchemaCheck
    next: int


@dataclass(slots=True)
class _Free:
    """Text until one of `exits`; `leave`: what may follow without one."""

    exits: dict[bytes, int | None]  # None: the way ends there
    excludes: tuple[bytes, ...]
    max_chars: int | None
    leave: int | None
    keep: int = 0  # bytes that decide


@dataclass(slots=True)
class _Split:
    ways: list[int]


_Step = _Byte | _Json | _Free | _Split | str


@dataclass(frozen=True, slots=True)
class _InFree:
    at: int
    tail: bytes
    num_chars: int


@dataclass(eq=False, slots=True)
class _InJson:
    at: int
    start: int
    cursor: ResidualCursor

    def __hash__(self) -> int:
        return id(self)


_Way = int | _InFree | _InJson  # the step that stands next


class TagCheck:
    """See `residual.SchemaCheck`; of a whole tag document. Immutable, shared by its sequences."""

    def __init__(self, root: Part, checks: Mapping[JsonPart, SchemaCheck], *, follows: bool):
        """`follows` False: a document whose ways can't be followed; nothing in it is checked."""
        self._checks = checks
        self._follows = follows
        self._program: list[_Step] = [_MATCH]
        self._start = self._compile(root, (), 0) if follows else 0
        self.residuals = tuple(
            replace(residual, pointer=f"{part.pointer}{residual.pointer}")
            for part, check in checks.items()
            for residual in check.residuals
        )

        found = checks.values()
        self.heaviest = 1 << 30  # not known
        self.words = tuple(dict.fromkeys(word for check in found for word in check.words))
        self.strings = tuple(dict.fromkeys(text for check in found for text in check.strings))

    def examples(self) -> list[bytes]:
        """None: the document proposes a text itself."""
        return []

    def cursor(self) -> TagCursor | None:
        return TagCursor(self._program, self._start) if self.residuals else None

    def is_valid(self, text: bytes) -> bool:
        if not self._follows:
            return True
        cursor = TagCursor(self._program, self._start)
        cursor.push(text)
        return cursor.may_end

    def _add(self, step: _Step) -> int:
        if len(self._program) >= _MAX_STEPS:
            raise GrammarError(
                f"a structural tag with checks has at most {_MAX_STEPS} steps", pointer=""
            )
        self._program.append(step)
        return len(self._program) - 1

    def _compile(self, part: Part, ends: tuple[str, ...], then: int) -> int:
        """The first step of `part`, then one of `ends` if there are any, then `then`."""
        if isinstance(part, AnyText):
            return self._free(part.excludes, part.max_chars, ends, {}, then)
        if isinstance(part, Tag):
            return self._const(part.begin, self._content(part, ends, then))
        if isinstance(part, Triggered):
            return self._triggered(part, ends, then)
        if isinstance(part, Choice):
            return self._split([self._compile(element, ends, then) for element in part.elements])
        if isinstance(part, Sequence) and part.elements:
            at = self._compile(part.elements[-1], ends, then)
            for element in reversed(part.elements[:-1]):
                at = self._compile(element, (), at)
            return at
        then = self._one_of(ends, then)
        if isinstance(part, Const):
            return self._const(part.text, then)
        if isinstance(part, JsonPart):
            return self._add(_Json(self._checks[part], then))
        if isinstance(part, Repeat):
            return self._repeat(part, then)
        return then

    def _content(self, tag: Tag, ends: tuple[str, ...], then: int) -> int:
        if tag.ends == ("",):
            return self._compile(tag.content, ends, then)
        return self._compile(tag.content, tag.ends, self._one_of(ends, then))

    def _repeat(self, part: Repeat, then: int) -> int:
        at = then
        if part.most is None:
            loop = _Split([then])
            at = self._add(loop)
            loop.ways.insert(0, self._compile(part.content, (), at))
        else:
            for _ in range(part.most - part.least):
                at = self._split([self._compile(part.content, (), at), then])
        for _ in range(part.least):
            at = self._compile(part.content, (), at)
        return at

    def _triggered(self, part: Triggered, ends: tuple[str, ...], then: int) -> int:
        loop = _Split([])
        start = self._add(loop)
        after = self._one_of(ends, then) if part.is_single else start
        bodies = [(tag, self._content(tag, (), after)) for tag in part.tags]
        exits = {
            trigger: self._split(
                [
                    self._const(tag.begin[len(trigger) :], body)
                    for tag, body in bodies
                    if part.trigger_of(tag) == trigger
                ]
            )
            for trigger in part.triggers
        }
        loop.ways.append(self._free(part.excludes, None, ends, exits, then))
        if part.needs_tag:
            return self._split([self._const(tag.begin, body) for tag, body in bodies])
        return start

    def _free(
        self,
        excludes: tuple[str, ...],
        max_chars: int | None,
        ends: tuple[str, ...],
        exits: Mapping[str, int],
        then: int,
    ) -> int:
        targets: dict[bytes, int | None] = {end.encode(): then for end in ends}
        targets |= {trigger.encode(): at for trigger, at in exits.items()}
        banned = tuple(text.encode() for text in excludes if text.encode() not in targets)
        for text in banned:
            if any(_overlaps(text, target) for target in targets):
                raise GrammarError(f"excludes {text.decode()!r}, which overlaps what ends the text")
        keep = max(map(len, (*targets, *banned)), default=0)
        return self._add(_Free(targets, banned, max_chars, None if ends else then, keep))

    def _const(self, text: str, then: int) -> int:
        for byte in reversed(text.encode()):
            then = self._add(_Byte(byte, then))
        return then

    def _one_of(self, texts: tuple[str, ...], then: int) -> int:
        return self._split([self._const(text, then) for text in texts]) if texts else then

    def _split(self, ways: list[int]) -> int:
        return ways[0] if len(ways) == 1 else self._add(_Split(ways))


def _overlaps(text: bytes, end: bytes) -> bool:
    """Whether `text` can be complete only inside of `end`."""
    return text in end or any(end.startswith(text[i:]) for i in range(1, len(text)))


def tag_check(root: Part, checks: Mapping[JsonPart, SchemaCheck]) -> TagCheck | None:
    """The check of a document; None when it has no JSON.

    Raises:
        GrammarError: a part is to be checked, and the document has parts that can't be followed.
    """
    if not checks:
        return None
    reason = next(
        (
            f"beside a {'regex' if isinstance(other, Regex) else 'grammar'}"
            for other in walk(root)
            if isinstance(other, Regex | Ebnf)
        ),
        None,
    )
    try:
        if reason is None:
            return TagCheck(root, checks, follows=True)
    except GrammarError as error:
        reason = f"here: {error}"
    found = [(part, residual) for part, check in checks.items() for residual in check.residuals[:1]]
    if not found:
        return TagCheck(root, checks, follows=False)
    part, residual = found[0]
    raise GrammarError(
        f"{residual.keyword}: can't be checked {reason}",
        pointer=_pointer(part, residual),
        keyword=residual.keyword,
        can_weaken=True,
    )


def _pointer(part: JsonPart, residual: Residual) -> str:
    return f"{part.pointer}{residual.pointer}/{residual.keyword}"


@dataclass(slots=True)
class TagCursor:
    """See `residual.ResidualCursor`."""

    _program: list[_Step]
    _start: int
    _text: bytearray = field(default_factory=bytearray)
    _ways: list[_Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ways = self._reached([self._start])

    @property
    def held_from(self) -> int | None:
        """Where the outermost open value that is still to be checked begins; None: nowhere."""
        starts = [
            way.start + held
            for way in self._ways
            if isinstance(way, _InJson) and (held := way.cursor.held_from) is not None
        ]
        return min(starts, default=None)

    @property
    def is_in_string(self) -> bool:
        return any(isinstance(way, _InJson) and way.cursor.is_in_string for way in self._ways)

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        ways = list(self._ways)
        for way in self._ways:
            if isinstance(way, _InJson) and way.cursor.is_number:
                copy = way.cursor.fork()  # a number is complete where nothing follows
                if copy.push(b" ") is None and self._is_valid(way, copy):
                    step = self._program[way.at]
                    assert isinstance(step, _Json)
                    ways += self._reached([step.next])
        return any(way == 0 for way in ways if isinstance(way, int))

    def push(self, data: bytes) -> int | None:
        """Read on; returns where a value that is complete and not valid begins, if one is and
        there is no other way to read the text."""
        failed: int | None = None
        for byte in data:
            starts: list[int] = []
            ways: dict[_Way, None] = {}
            for way in self._ways:
                ways.update(dict.fromkeys(self._step(way, byte, starts)))
            self._text.append(byte)
            self._ways = list(ways)
            if not self._ways and failed is None:
                failed = starts[0] if starts else len(self._text) - 1
        return failed

    def truncate(self, num_bytes: int) -> None:
        """Forget what came after the first `num_bytes`."""
        text = bytes(self._text[:num_bytes])
        self._text.clear()
        self._ways = self._reached([self._start])
        self.push(text)

    @property
    def shape(self) -> object:
        """Never the same: what is to come is checked as it stands."""
        return None

    def ends_well(self, data: bytes) -> bool:
        """Whether the text is whole and valid when `data` is its rest."""
        copy = self.fork()
        return copy.push(data) is None and copy.may_end

    def proposals(self) -> list[bytes]:
        """The rests of known values that pass, for those that begin here or have begun."""
        return [
            text
            for way in self._ways
            if isinstance(way, _InJson)
            for text in way.cursor.proposals()
        ]

    def fork(self) -> TagCursor:
        """An independent copy."""
        ways = [
            _InJson(way.at, way.start, way.cursor.fork()) if isinstance(way, _InJson) else way
            for way in self._ways
        ]
        return TagCursor._of(self._program, self._start, bytearray(self._text), ways)

    @classmethod
    def _of(cls, program: list[_Step], start: int, text: bytearray, ways: list[_Way]) -> TagCursor:
        cursor = cls(program, start)
        cursor._text, cursor._ways = text, ways
        return cursor

    def _reached(self, steps: Iterable[int]) -> list[_Way]:
        """The ways that stand at `steps`, with choices made."""
        found: list[_Way] = []
        stack, seen = list(steps), set[int]()
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            step = self._program[at]
            if isinstance(step, _Split):
                stack += step.ways
            elif isinstance(step, _Free):
                found.append(_InFree(at, b"", 0))
                if step.leave is not None:
                    stack.append(step.leave)
            elif isinstance(step, _Json):
                found.append(_InJson(at, len(self._text), ResidualCursor(step.check)))
            else:
                found.append(at)
        return found

    def _step(self, way: _Way, byte: int, starts: list[int]) -> list[_Way]:
        if isinstance(way, _InFree):
            return self._step_free(way, byte)
        if isinstance(way, _InJson):
            return self._step_json(way, byte, starts)
        step = self._program[way]
        if not isinstance(step, _Byte) or step.byte != byte:
            return []
        return self._after(step.next)

    def _after(self, at: int) -> list[_Way]:
        """The ways that stand at `at` when the byte at hand is read."""
        self._text.append(0)
        ways = self._reached([at])
        self._text.pop()
        return ways

    def _step_free(self, way: _InFree, byte: int) -> list[_Way]:
        step = self._program[way.at]
        assert isinstance(step, _Free)
        text = way.tail + bytes([byte])
        for end, at in step.exits.items():
            if text.endswith(end):
                return [] if at is None else self._after(at)
        num_chars = way.num_chars + (byte & 0xC0 != 0x80)
        if step.max_chars is not None and num_chars > step.max_chars + step.keep:
            return []
        if any(text.endswith(other) for other in step.excludes):
            return []
        num_chars = num_chars if step.max_chars is not None else 0
        ways: list[_Way] = [_InFree(way.at, text[-step.keep :] if step.keep else b"", num_chars)]
        return ways if step.leave is None else ways + self._after(step.leave)

    def _step_json(self, way: _InJson, byte: int, starts: list[int]) -> list[_Way]:
        step, cursor = self._program[way.at], way.cursor
        assert isinstance(step, _Json)
        if cursor.is_number and byte not in _NUMBER:
            if cursor.push(b" ") is not None or not self._is_valid(way, cursor):
                starts.append(way.start)
                return []
            ways: list[_Way] = []
            for other in self._reached([step.next]):
                ways += self._step(other, byte, starts)
            return ways
        if (failed := cursor.push(bytes([byte]))) is not None:
            starts.append(way.start + failed)
            return []
        if not cursor.is_complete:
            return [way]
        if not self._is_valid(way, cursor):
            starts.append(way.start)
            return []
        return self._after(step.next)

    def _is_valid(self, way: _InJson, cursor: ResidualCursor) -> bool:
        step = self._program[way.at]
        assert isinstance(step, _Json)
        return step.check.is_valid(cursor.text)
