"""What the grammar leaves open, checked on the text itself: value by value, then as a whole.

A cursor reads the accepted bytes and knows which subschemas apply to the value at its place:

    {"tags": ["a", "b", "a"], ...        schema: properties/tags has uniqueItems
             ^ opens         ^ closes: validated by properties/tags

The subschemas that apply without a condition are followed through allOf, $ref, properties and
items. A residual that stands below a condition (anyOf, if, patternProperties, ...) is checked
where the condition stands, on the value around it. Every finished document is validated as a
whole against the schema as the user sent it; validator: the crate jsonschema.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import quote

import jsonschema_rs

from .instances import Instances
from .residual_plan import Plan, make_plan
from .rewrite import Residual
from .schema_walk import Draft, Json, escape
from .schema_weight import heaviest
from .spec import GrammarError

_NUMBER = b"+-.0123456789eE"
_MAX_PLACES = 200  # at which values are checked: of more no witness is looked for
_ROOT_URI = "urn:palmette:schema"
_INSIDE = frozenset(("additionalItems", "additionalProperties", "items", "prefixItems"))
_DRAFT7 = "http://json-schema.org/draft-07/schema#"
_MAX_DIGITS = 4_000  # of an integer; Python reads no more than 4,300
_NEWEST = "https://json-schema.org/draft/2020-12/schema"


class SchemaCheck:
    """The residuals and the validator of one schema, shared by its sequences.

    It never changes but for what is made when it is first asked for, the same by any thread.
    """

    def __init__(
        self,
        source: str,
        draft: Draft,
        residuals: Sequence[Residual],
        *,
        is_dynamic: bool,
        is_any_order: bool = False,
    ):
        self.residuals = tuple(residuals)
        document = json.loads(source)
        if isinstance(document, dict):
            if draft == Draft.DRAFT2020:
                document["$schema"] = _NEWEST  # an unknown dialect is read as this one
            elif "$schema" not in document:
                document["$schema"] = _DRAFT7  # see preflight
        self._formats = any(residual.keyword == "format" for residual in residuals)
        self._validator = _validator(document, self._formats)
        self._plan = Plan({}, {}, {}, set())
        if residuals:
            self._plan = make_plan(document, draft, self.residuals, is_dynamic=is_dynamic)
        self._unique = {
            residual.pointer
            for residual in self.residuals
            if residual.keyword == "uniqueItems" and residual.pointer in self._plan.checked
        }
        self._document = document
        self._parts = {"": self._validator}  # made where the first such value closes
        self.heaviest = heaviest(document)
        self._instances = Instances(document, draft)
        self._proposed = self._candidates() if residuals else {}
        self._witnesses: dict[tuple[str, ...], list[bytes]] = {}  # as far as asked for
        self.strings = tuple(_to_text(text)[1:] for text in self._instances.strings)
        names = self._instances.required if is_any_order else ()  # else the grammar forces them
        self.words = tuple(_to_text(name) + b":" for name in names)

    def examples(self) -> list[bytes]:
        """Short texts that are valid and may be the grammar's."""
        texts = (_to_text(value) for value in self._instances.of([""]))
        return [text for text in texts if self.is_valid(text)]

    def _candidates(self) -> dict[tuple[str, ...], list[bytes]]:
        """For each place at which a value is checked: short texts that may pass."""
        instances = self._instances
        found: dict[tuple[str, ...], list[bytes]] = {}
        for nodes in self._plan.places(self.root_nodes, _MAX_PLACES):
            if self.to_check(nodes):
                found[nodes] = [_to_text(value) for value in instances.of(nodes)]
        return found

    def witnesses(self, nodes: tuple[str, ...]) -> list[bytes]:
        """Short texts, without blanks, of values that pass where `nodes` apply; [] if none is
        known."""
        known = self._witnesses.get(nodes)
        if known is None:
            pointers = self.to_check(nodes)
            texts = self._proposed.get(nodes, ())
            known = [text for text in texts if self.is_valid_part(pointers, text)]
            self._witnesses[nodes] = known
        return known

    def _part(self, pointer: str) -> jsonschema_rs.Validator:
        """The validator of a subschema; all share what is made of the document once."""
        part = self._parts.get(pointer)
        if part is None:
            document = self._document
            if not isinstance(document, dict):
                return self._validator
            wrapper = {
                "$schema": document.get("$schema", _NEWEST),
                "$ref": f"{_ROOT_URI}#{quote(pointer, safe='/~')}",
            }
            part = self._parts[pointer] = jsonschema_rs.validator_for(
                wrapper, validate_formats=self._formats, registry=self._registry
            )
        return part

    @cached_property
    def _registry(self) -> jsonschema_rs.Registry:
        assert isinstance(self._document, dict)
        return jsonschema_rs.Registry(
            [(_ROOT_URI, {**self._document, "$id": _ROOT_URI})], retriever=_nothing
        )

    def is_valid_part(self, pointers: Iterable[str], text: bytes) -> bool:
        """Whether a complete value satisfies the subschemas at `pointers`."""
        try:
            value = json.loads(text, object_pairs_hook=_unique_keys, parse_float=_finite)
        except ValueError:
            return False
        return all(self._part(pointer).is_valid(value) for pointer in pointers)

    def is_valid(self, text: bytes) -> bool:
        """Whether a whole document satisfies the schema as the user sent it.

        Without residuals the grammar decides what it says about keys that repeat and numbers
        beyond a double, which the validator can't read.
        """
        try:
            if self.residuals:
                value = json.loads(
                    text,
                    object_pairs_hook=_unique_keys,
                    parse_float=_clamped,
                    parse_int=_integer,
                )
            else:
                value = json.loads(text, parse_float=_finite)
            return bool(self._validator.is_valid(value))
        except ValueError:
            return not self.residuals

    def cursor(self) -> ResidualCursor | None:
        """One for a new sequence; None when nothing is to be checked on the way."""
        return ResidualCursor(self) if self._plan.checked else None

    # For the cursor

    @property
    def root_nodes(self) -> tuple[str, ...]:
        return self._plan.expand([""])

    def inside(self, nodes: Sequence[str], key: str | int) -> tuple[str, ...]:
        """The subschemas that apply to the property or item `key` of a value under `nodes`."""
        found: list[str] = []
        for pointer in nodes:
            target = self._plan.target(pointer, key)
            if target is not None:
                found.append(target)
        return self._plan.expand(found)

    def is_unique(self, nodes: Sequence[str]) -> bool:
        """Whether the items of an array under `nodes` must differ."""
        return any(pointer in self._unique for pointer in nodes)

    def to_check(self, nodes: Sequence[str]) -> list[str]:
        return [pointer for pointer in nodes if pointer in self._plan.checked]


def _validator(document: Json, formats: bool) -> jsonschema_rs.Validator:
    try:
        assert isinstance(document, dict | bool)
        return jsonschema_rs.validator_for(document, validate_formats=formats, retriever=_nothing)
    except jsonschema_rs.ValidationError as error:
        pointer = "".join(f"/{escape(str(part))}" for part in error.instance_path)
        raise GrammarError(f"not a valid schema: {error.message[:300]}", pointer=pointer) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise GrammarError(f"not a valid schema: {str(error)[:300]}", pointer="") from None


def _nothing(uri: str) -> Json:
    """Remote schemas are never fetched; those that matter were refused before."""
    return {}


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("beyond a double")
    return value


def _clamped(text: str) -> float:
    """What is beyond a double stands where no value is checked, and may be written there."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _integer(text: str) -> int:
    """Beyond what Python reads: another one of the same sign that is as large as can be."""
    return int(text[:_MAX_DIGITS])


def _to_text(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _canonical(text: bytes) -> str:
    """Equal for values that JSON Schema calls equal: 1 and 1.0, keys in any order."""
    value = json.loads(text, parse_float=_as_integer, parse_int=_integer)
    return json.dumps(value, sort_keys=True)


def _as_integer(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


@dataclass(slots=True)
class _Frame:
    """An open object or array."""

    is_object: bool
    start: int
    nodes: tuple[str, ...]
    key: str | int = 0
    items: set[str] | None = None  # of an array whose items must differ, canonical

    def fork(self) -> _Frame:
        items = None if self.items is None else set(self.items)
        return _Frame(self.is_object, self.start, self.nodes, self.key, items)


@dataclass(slots=True)
class _Scan:
    """Where a cursor stands in the text."""

    mode: str = "value"  # value, string, scalar, after, key, key_string, colon
    start: int = 0  # of the open string or scalar
    nodes: tuple[str, ...] = ()  # of the open string or scalar
    is_escaped: bool = False
    stack: list[_Frame] = field(default_factory=list)

    def fork(self) -> _Scan:
        stack = [frame.fork() for frame in self.stack]
        return _Scan(self.mode, self.start, self.nodes, self.is_escaped, stack)


class ResidualCursor:
    """Reads JSON text as it grows; the grammar has made sure that it is JSON."""

    def __init__(self, check: SchemaCheck):
        self._check = check
        self._text = bytearray()
        self._scan = _Scan()

    @property
    def held_from(self) -> int | None:
        """Where the outermost open value that is still to be checked begins; None: nowhere."""
        scan = self._scan
        for frame in scan.stack:
            if self._check.to_check(frame.nodes):
                return frame.start
        if scan.mode in ("string", "scalar") and self._check.to_check(scan.nodes):
            return scan.start
        return None

    @property
    def is_in_string(self) -> bool:
        return self._scan.mode in ("string", "key_string")

    @property
    def is_complete(self) -> bool:
        """Whether the value has closed; a number closes with what follows it."""
        return self._scan.mode == "after" and not self._scan.stack

    @property
    def is_number(self) -> bool:
        """Whether the value is a number so far."""
        return self._scan.mode == "scalar" and not self._scan.stack and self._text[-1] in _NUMBER

    @property
    def text(self) -> bytes:
        return bytes(self._text)

    @property
    def shape(self) -> object:
        """Where two are equal, the same is checked of the text to come."""
        # A key in the making, or one more of an object, may be what a known end repeats.
        in_key = len(self._text) if self._scan.mode == "key_string" else None
        return (in_key, *((frame.nodes, frame.key) for frame in self._scan.stack))

    def ends_well(self, data: bytes) -> bool:
        """Whether the text is valid when `data` is its rest."""
        if data and self.fork().push(data) is not None:
            return False
        return self._check.is_valid(bytes(self._text) + data)

    def proposals(self) -> list[bytes]:
        """The rests of known texts that pass, for the value that begins here or has begun."""
        start, scan = self.held_from, self._scan
        if start is None:
            nodes = self._next_nodes() if scan.mode == "value" else ()
            return self._check.witnesses(nodes) if nodes else []
        held = [frame.nodes for frame in scan.stack if self._check.to_check(frame.nodes)]
        begun = bytes(self._text[start:])
        known = self._check.witnesses(held[0] if held else scan.nodes)
        return [
            text[len(begun) :]
            for text in known
            if text.startswith(begun) and len(text) > len(begun)
        ]

    def fork(self) -> ResidualCursor:
        """An independent copy."""
        copy = ResidualCursor(self._check)
        copy._text = self._text[:]
        copy._scan = self._scan.fork()
        return copy

    def push(self, data: bytes) -> int | None:
        """Read on; returns where a value that is complete and not valid begins, if one is."""
        failed: int | None = None
        for byte in data:
            at = len(self._text)
            self._text.append(byte)
            start = self._step(byte, at, checking=failed is None)
            failed = start if failed is None else failed
        return failed

    def truncate(self, num_bytes: int) -> None:
        """Forget what came after the first `num_bytes`."""
        text = bytes(self._text[:num_bytes])
        self._text.clear()
        self._scan = _Scan()
        for byte in text:
            at = len(self._text)
            self._text.append(byte)
            self._step(byte, at, checking=False)

    def _step(self, byte: int, at: int, *, checking: bool) -> int | None:
        scan = self._scan
        if scan.mode in ("string", "key_string"):
            return self._in_string(byte, at, checking)
        failed = None
        if scan.mode == "scalar":
            if byte not in b" \t\r\n,]}":
                return None
            scan.mode = "after"
            failed = self._close(scan.nodes, scan.start, at, checking)
        if byte in b" \t\r\n":
            return failed
        if byte in b"]}":
            frame = scan.stack.pop()
            scan.mode = "after"
            closed = self._close(frame.nodes, frame.start, at + 1, checking and failed is None)
            return closed if failed is None else failed
        if scan.mode == "value":
            self._open(byte, at)
        elif scan.mode == "key":
            scan.mode, scan.start = "key_string", at
        elif scan.mode == "colon":
            scan.mode = "value"
        elif scan.stack:  # after a value: a comma
            frame = scan.stack[-1]
            scan.mode = "key" if frame.is_object else "value"
            if isinstance(frame.key, int) and not frame.is_object:
                frame.key += 1
        return failed

    def _in_string(self, byte: int, at: int, checking: bool) -> int | None:
        scan = self._scan
        if scan.is_escaped:
            scan.is_escaped = False
        elif byte == 0x5C:
            scan.is_escaped = True
        elif byte == 0x22:
            if scan.mode == "key_string":
                scan.stack[-1].key = str(json.loads(self._text[scan.start : at + 1]))
                scan.mode = "colon"
                return None
            scan.mode = "after"
            return self._close(scan.nodes, scan.start, at + 1, checking)
        return None

    def _next_nodes(self) -> tuple[str, ...]:
        if not self._scan.stack:
            return self._check.root_nodes
        frame = self._scan.stack[-1]
        return self._check.inside(frame.nodes, frame.key) if frame.nodes else ()

    def _open(self, byte: int, at: int) -> None:
        scan = self._scan
        nodes = self._next_nodes()
        if byte in b"{[":
            frame = _Frame(byte == 0x7B, at, nodes)
            if byte == 0x5B and self._check.is_unique(nodes):
                frame.items = set()
            scan.stack.append(frame)
            scan.mode = "key" if byte == 0x7B else "value"
        else:
            scan.mode = "string" if byte == 0x22 else "scalar"
            scan.start, scan.nodes = at, nodes

    def _close(self, nodes: tuple[str, ...], start: int, end: int, checking: bool) -> int | None:
        stack = self._scan.stack
        if stack and stack[-1].items is not None:
            item = _canonical(bytes(self._text[start:end]))
            if item in stack[-1].items:  # no need to wait for the end of the array
                return start
            stack[-1].items.add(item)
        pointers = self._check.to_check(nodes) if checking and nodes else ()
        if not pointers or self._check.is_valid_part(pointers, bytes(self._text[start:end])):
            return None
        return start
