"""What a grammar is, as data: one frozen value that can travel, be compared and be a cache key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

DEFAULT_INDENT = 2
MAX_INDENT = 16


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: a JSON Schema, as JSON text
    JSON_OBJECT = "json_object"  # source: empty; any JSON object
    REGEX = "regex"  # source: the pattern, matched against the whole output
    CHOICE = "choice"  # source: a JSON array of strings
    EBNF = "ebnf"  # source: GBNF text
    LARK = "lark"  # source: Lark text
    STRUCTURAL_TAG = "structural_tag"  # source: JSON


class Whitespace(StrEnum):
    BOUNDED = "bounded"  # at most one short run of blanks between JSON tokens
    COMPACT = "compact"  # none
    FLEXIBLE = "flexible"  # any amount: small models can loop in it
    INDENT = "indent"  # the layout of json.dumps(indent=n) and no other


class Formats(StrEnum):
    """What `format` in a JSON Schema means."""

    KNOWN = "known"  # those of the specifications are enforced, others leave a note
    ANNOTATE = "annotate"  # none is enforced: a note each
    STRICT = "strict"  # an unknown one is refused


class KeyOrder(StrEnum):
    """The order of the keys of an object."""

    DECLARED = "declared"  # as the schema declares them, then others
    ANY = "any"


class Additional(StrEnum):
    """Keys that an object with declared keys may have beside those."""

    SCHEMA = "schema"  # what the schema allows
    FORBID = "forbid"  # none, unless the schema says what they hold


class Policy(StrEnum):
    """What becomes of a part that can't be enforced."""

    STRICT = "strict"  # the constraint is refused
    LENIENT = "lenient"  # the part is weakened, and listed with the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintIssue:
    """A part of a constraint that is refused, weakened or overruled, and why."""

    reason: str
    pointer: str | None = None  # to the keyword in the source (RFC 6901); None: no JSON document
    keyword: str | None = None
    suggestion: str | None = None  # the way out


def told(warnings: Sequence[ConstraintIssue]) -> list[dict[str, str | None]]:
    """Weakened and overruled parts as a client gets them."""
    return [
        {"pointer": issue.pointer, "keyword": issue.keyword, "reason": issue.reason}
        for issue in warnings
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint on the whole of a generated text; the options are of those that are JSON."""

    kind: GrammarKind
    source: str = ""
    whitespace: Whitespace = Whitespace.BOUNDED
    formats: Formats = Formats.KNOWN
    order: KeyOrder = KeyOrder.DECLARED
    additional: Additional = Additional.SCHEMA
    policy: Policy = Policy.STRICT
    indent: int = DEFAULT_INDENT  # blanks for each level, with whitespace "indent"

    def __post_init__(self) -> None:
        if not 0 <= self.indent <= MAX_INDENT:
            raise OptionError("indent", f"{self.indent} is not within 0 and {MAX_INDENT}")

    @property
    def key(self) -> str:
        """A digest of everything that decides which texts are allowed."""
        content = "\0".join(
            (
                self.kind,
                self.whitespace_text,
                self.formats,
                self.order,
                self.additional,
                self.policy,
                self.source,
            )
        )
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def whitespace_text(self) -> str:
        """The option as it is written: "compact", "indent=4"."""
        if self.whitespace is Whitespace.INDENT:
            return f"{self.whitespace}={self.indent}"
        return str(self.whitespace)

    @property
    def is_json(self) -> bool:
        """Whether the options mean something."""
        return self.kind in (
            GrammarKind.JSON_SCHEMA,
            GrammarKind.JSON_OBJECT,
            GrammarKind.STRUCTURAL_TAG,
        )

    def with_options(
        self,
        *,
        whitespace: str | None = None,
        formats: str | None = None,
        order: str | None = None,
        additional: str | None = None,
        policy: str | None = None,
    ) -> GrammarSpec:
        """This constraint with those options that are given, as they are written.

        Raises:
            OptionError: an unknown value, or options for what is no JSON.
        """
        options = {
            "whitespace": whitespace,
            "formats": formats,
            "order": order,
            "additional": additional,
            "policy": policy,
        }
        given = {name: value for name, value in options.items() if value is not None}
        if not given:
            return self
        if not self.is_json:
            name = next(iter(given))
            raise OptionError(name, f"is for JSON and has no meaning for {self.kind}")
        changed: dict[str, object] = {}
        for name, value in given.items():
            if name == "whitespace":
                changed["whitespace"], changed["indent"] = _whitespace(value)
            else:
                changed[name] = _member(_OPTIONS[name], name, value)
        return replace(self, **changed)  # type: ignore[arg-type]

    @classmethod
    def json_schema(
        cls,
        schema: str | bool | Mapping[str, object],
        *,
        whitespace: str = Whitespace.BOUNDED,
        formats: str = Formats.KNOWN,
        order: str = KeyOrder.DECLARED,
        additional: str = Additional.SCHEMA,
        policy: str = Policy.STRICT,
    ) -> GrammarSpec:
        """A JSON text that is valid under `schema`, given as JSON text or as a parsed document.

        With order "declared" properties are generated in the order of the schema's keys.
        `whitespace` is one of `Whitespace`, or "indent=4".
        """
        source = schema if isinstance(schema, str) else _to_json(schema, "schema")
        return cls(kind=GrammarKind.JSON_SCHEMA, source=source).with_options(
            whitespace=whitespace,
            formats=formats,
            order=order,
            additional=additional,
            policy=policy,
        )

    @classmethod
    def json_object(cls, *, whitespace: str = Whitespace.BOUNDED) -> GrammarSpec:
        """Any JSON object."""
        return cls(kind=GrammarKind.JSON_OBJECT).with_options(whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        r"""A text that `pattern` matches as a whole. `\d` and `\w` are ASCII, as in ECMA-262."""
        return cls(kind=GrammarKind.REGEX, source=pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> GrammarSpec:
        """Exactly one of `options`, literally."""
        if isinstance(options, str):
            raise GrammarError("choice: expected a list of strings, got one string")
        return cls(kind=GrammarKind.CHOICE, source=_to_json(list(options), "choice"))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """A text of the GBNF grammar (llama.cpp's EBNF); the start rule is `root`."""
        return cls(kind=GrammarKind.EBNF, source=grammar)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """A text of the Lark grammar; the start rule is `start`."""
        return cls(kind=GrammarKind.LARK, source=grammar)

    @classmethod
    def structural_tag(
        cls, tag: str | Mapping[str, object], *, whitespace: str = Whitespace.BOUNDED
    ) -> GrammarSpec:
        """Free text with constrained parts between tags."""
        source = tag if isinstance(tag, str) else _to_json(tag, "structural_tag")
        spec = cls(kind=GrammarKind.STRUCTURAL_TAG, source=source)
        return spec.with_options(whitespace=whitespace)


class GrammarError(ValueError):
    """A grammar that cannot be enforced.

    `reason` says why, `suggestion` is the way out; the message is both and the pointer. `pointer`
    is the JSON pointer into a schema (RFC 6901), or None for other kinds. `keyword` stands there:
    the last key of the pointer, unless told.
    `can_weaken`: without the keyword the rest can be enforced, see `Policy`.
    """

    def __init__(
        self,
        reason: str,
        *,
        pointer: str | None = None,
        keyword: str | None = None,
        suggestion: str | None = None,
        can_weaken: bool = False,
        root: str = "",
    ):
        message = reason if suggestion is None else f"{reason}; {suggestion}"
        super().__init__(message if pointer is None else f"{message} (at {pointer or '/'})")
        self.reason = reason
        self.pointer = pointer
        self.keyword = keyword or _last_key(pointer)
        self.suggestion = suggestion
        self.can_weaken = can_weaken
        self.root = root  # pointer of the schema, where it is part of a larger document

    @property
    def issue(self) -> ConstraintIssue:
        return ConstraintIssue(
            reason=self.reason,
            pointer=self.pointer,
            keyword=self.keyword,
            suggestion=self.suggestion,
        )

    def below(self, prefix: str) -> GrammarError:
        """The same error of a schema that stands at `prefix` of a larger document."""
        return GrammarError(
            self.reason,
            pointer=prefix + (self.pointer or ""),
            keyword=self.keyword,
            suggestion=self.suggestion,
            can_weaken=self.can_weaken,
            root=prefix + self.root,
        )


def _last_key(pointer: str | None) -> str | None:
    """The key that a pointer ends with, places in lists left out."""
    keys = [key for key in (pointer or "").split("/") if key and not key.isdecimal()]
    return keys[-1].replace("~1", "/").replace("~0", "~") if keys else None


class OptionError(GrammarError):
    """An option of a constraint that is not known, or has no meaning there."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name}: {problem}")
        self.name = name


_OPTIONS: dict[str, type[StrEnum]] = {
    "whitespace": Whitespace,
    "formats": Formats,
    "order": KeyOrder,
    "additional": Additional,
    "policy": Policy,
}
OPTION_NAMES = tuple(_OPTIONS)
_Member = TypeVar("_Member", bound=StrEnum)


def _member(kind: type[_Member], name: str, value: str) -> _Member:
    try:
        return kind(value)
    except ValueError:
        raise OptionError(name, f"{value!r:.60} is not one of {', '.join(kind)}") from None


def _whitespace(value: str) -> tuple[Whitespace, int]:
    """The kind and the blanks for each level of "compact", "indent=4" and the like."""
    indent = re.fullmatch(r"indent=(\d{1,2})", value) if isinstance(value, str) else None
    if indent is None:
        try:
            return Whitespace(value), DEFAULT_INDENT
        except ValueError:
            known = ", ".join(Whitespace)
            raise OptionError(
                "whitespace", f"{value!r:.60} is not one of {known}=n (0 to {MAX_INDENT})"
            ) from None
    if int(indent[1]) > MAX_INDENT:
        raise OptionError("whitespace", f"{value!r}: at most {MAX_INDENT} blanks for each level")
    return Whitespace.INDENT, int(indent[1])


def _to_json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise GrammarError(f"{what}: nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{what}: not JSON: {error}") from None
