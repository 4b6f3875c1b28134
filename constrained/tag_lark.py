"""A structural tag as Lark text for llguidance.

The engine cuts a text into lexemes, always the longest, and never cuts anew. So whatever is
regular is put together into one terminal, whose matches are exact whatever its parts are:

    free text up to "<t>" + "<t>" + "x="     one terminal     then %json {...}, then the next

Where a terminal meets a part that is no regular set (JSON, a recursive grammar), the cut must be
clear: the terminal is closed (no match can go on), or no match can go on with the first character
of what follows. That is decided here, if need be by the engine; else the part is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

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
)
from .tag_pieces import (
    ANY,
    JSON_STARTS,
    NUMBER_CHARS,
    OPAQUE_OR_NAME,
    SOME,
    Ends,
    Piece,
    Rule,
    Terminal,
    any_text,
    check_ends,
    class_of,
    common_head,
    concatenated,
    const,
    first_of,
    free_text,
    one_of,
    prefixed,
    start_of,
    tail_of,
    types_of,
    up_to_trigger,
)


class TagWriter:
    """Writes one document. `embed` turns a schema into a part of Lark text, `regex` a pattern
    and `ebnf` a grammar into Lark text; `is_empty` tells whether a terminal has no
    match."""

    def __init__(
        self,
        *,
        embed: Callable[[JsonPart], str],
        regex: Callable[[Regex], str],
        ebnf: Callable[[Ebnf], str],
        is_empty: Callable[[str], bool],
    ):
        self._embed = embed
        self._regex = regex
        self._ebnf = ebnf
        self._is_empty = is_empty
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._num_parts = 0
        self.grammars: list[str] = []  # Lark, referred to as @grammar_0, ...

    def write(self, root: Part) -> str:
        """Lark text.

        Raises:
            GrammarError: a place where two parts meet and the cut is not clear.
        """
        pieces = self._pieces(root, ())
        start = self._joined(pieces, root.pointer)
        return "\n".join([f"start: {self._in_rule(start)}", *self._lines])

    def _pieces(self, part: Part, ends: Ends) -> list[Piece]:
        """What matches `part` and, if there are any, one of the `ends` behind it."""
        if isinstance(part, AnyText):
            return [any_text(part, ends)]
        if isinstance(part, Tag):
            return [const(part.pointer, part.begin), *self._content(part, ends)]
        if isinstance(part, Triggered):
            return [self._triggered(part, ends)]
        if isinstance(part, Sequence):
            pieces: list[Piece] = []
            for i, element in enumerate(part.elements):
                is_last = i == len(part.elements) - 1
                pieces += self._pieces(element, ends if is_last else ())
            return pieces if part.elements or not ends else [one_of(part.pointer, ends)]
        if isinstance(part, Choice):
            options = [
                self._joined(self._pieces(element, ends), element.pointer)
                for element in part.elements
            ]
            return [self._choice(options, part.pointer)]
        return [self._single(part), *([one_of(part.pointer, ends)] if ends else [])]

    def _content(self, tag: Tag, ends: Ends) -> list[Piece]:
        """The content of a tag and its end; an empty end is the one around it."""
        own: dict[str, None] = {}
        for end in tag.ends:
            own.update(dict.fromkeys(ends if end == "" and ends else (end,)))
        if set(own) == {""}:
            return self._pieces(tag.content, ())
        if "" in own:
            raise GrammarError("end: an empty one beside others", pointer=f"{tag.pointer}/end")
        if any(a != b and a.startswith(b) for a in own for b in own):
            raise GrammarError("end: one is the beginning of another", pointer=f"{tag.pointer}/end")
        pieces = self._pieces(tag.content, tuple(own))
        if ends and "" not in tag.ends:
            pieces.append(one_of(tag.pointer, ends))
        return pieces

    def _single(self, part: Part) -> Piece:
        if isinstance(part, Const):
            return const(part.pointer, part.text)
        if isinstance(part, Regex):
            if not part.pattern:
                return const(part.pointer, "")
            return self._terminal_of(self._regex(part), part.pointer)
        if isinstance(part, Ebnf):
            return self._grammar(part)
        if isinstance(part, Repeat):
            return self._repeat(part)
        assert isinstance(part, JsonPart)
        embedded = self._embed(part)  # judges the schema
        if not embedded.startswith("%json"):
            self.grammars.append(embedded)
            embedded = f"@grammar_{len(self.grammars) - 1}"
        types = types_of(part.schema)
        first = "".join(dict.fromkeys("".join(JSON_STARTS[name] for name in types)))
        last = NUMBER_CHARS if types & {"integer", "number"} else ""
        return Rule(
            pointer=part.pointer,
            source=embedded,
            first=first,
            last=last,
            after=first,
            is_json=True,
            starts_json=True,
            ends_json=True,
        )

    def _grammar(self, part: Ebnf) -> Piece:
        lark = self._ebnf(part).replace("%llguidance {}", "")
        if "start: WHOLE_TEXT" in lark:
            return self._terminal_of(lark, part.pointer)
        self.grammars.append(lark)  # recursive
        return Rule(pointer=part.pointer, source=f"@grammar_{len(self.grammars) - 1}", first=None)

    def _terminal_of(self, lark: str, pointer: str) -> Terminal:
        """A grammar that is one terminal; what it is made of gets names of its own."""
        prefix = f"G{self._num_parts}_"
        self._num_parts += 1
        lark = OPAQUE_OR_NAME.sub(lambda match: prefixed(match, prefix), lark.strip())
        start, _, rest = lark.partition("\n")
        source = f"({start.removeprefix('start:').strip()})"
        if rest.strip():
            self._lines.append(rest)
        is_closed = self._has_none(f"{source} & ({source} {SOME})")
        if is_closed and self._has_none(source):
            raise GrammarError("no text matches it", pointer=pointer)
        return Terminal(
            pointer=pointer,
            source=source,
            is_closed=is_closed,
            is_empty_too=not is_closed and not self._has_none(f'{source} & ""'),
        )

    def _repeat(self, part: Repeat) -> Piece:
        body = self._joined(self._pieces(part.content, ()), part.pointer)
        count = f"{{{part.least},{'' if part.most is None else part.most}}}"
        count = {"{0,1}": "?", "{0,}": "*", "{1,}": "+"}.get(count, count)
        if part.most == 0:
            return const(part.pointer, "")
        is_empty_too = part.least == 0 or body.is_empty_too
        if isinstance(body, Terminal):
            is_closed = body.is_closed and part.least == part.most
            source = f"({body.source}){count}"
            return Terminal(
                pointer=part.pointer,
                source=source,
                is_closed=is_closed,
                is_empty_too=is_empty_too,
                first=body.first,
                head=body.head,
                after=body.after,
                option=body if (part.least, part.most) == (0, 1) else None,
            )
        if part.most != 1:
            self._check_border(body, body)
        return replace(
            body,
            pointer=part.pointer,
            source=f"({body.source}){count}",
            is_empty_too=is_empty_too,
            repeats=part.most != 1,
        )

    def _triggered(self, part: Triggered, ends: Ends) -> Piece:
        check_ends(part, ends)
        free = free_text(part, ends)
        closing = [one_of(part.pointer, ends)] if ends else []
        if part.is_single:
            single = self._dispatch(part, ends, needs_tag=part.needs_tag)
            single = self._joined([single, *closing], part.pointer)
            return single if part.needs_tag else self._either(part.pointer, [single, free])
        loop = self._dispatch(part, ends, needs_tag=False)
        if isinstance(loop, Terminal):
            source = f"({loop.source})*"
            rest: Piece = concatenated(
                Terminal(pointer=part.pointer, source=source, is_closed=False, is_empty_too=True),
                free,
            )
        else:
            anything = Terminal(pointer=part.pointer, source=ANY, is_closed=False)
            self._check_border(loop, anything)
            rest = Rule(
                pointer=part.pointer,
                source=f"(({loop.source})* {self._in_rule(free)})",
                first=None,
                is_empty_too=free.is_empty_too,
                tail=tail_of(free),
            )
        if not part.needs_tag:
            return rest
        return self._joined([self._dispatch(part, ends, needs_tag=True), rest], part.pointer)

    def _dispatch(self, part: Triggered, ends: Ends, *, needs_tag: bool) -> Piece:
        """One tag; without `needs_tag` the free text before it as well."""
        options: list[Piece] = []
        for trigger in part.triggers:
            head = const(part.pointer, trigger)
            if not needs_tag:
                head = up_to_trigger(part, trigger, ends)
            rests: list[Piece] = []
            for tag in part.tags:
                if part.trigger_of(tag) == trigger:
                    rest = const(tag.pointer, tag.begin[len(trigger) :])
                    rests.append(self._joined([rest, *self._content(tag, ())], tag.pointer))
            options.append(self._joined([head, self._choice(rests, part.pointer)], part.pointer))
        return self._either(part.pointer, options)

    def _choice(self, options: list[Piece], pointer: str) -> Piece:
        """One of the options, whose lexemes the engine looks for at the same time."""
        if any(isinstance(option, Rule) for option in options):
            for i, option in enumerate(options):
                for other in options[:i]:
                    self._check_beside(option, other)
        return self._either(pointer, options)

    def _either(self, pointer: str, options: list[Piece]) -> Piece:
        if len(options) == 1:
            return options[0]
        firsts = [option.first for option in options]
        first = None if None in firsts else "".join(dict.fromkeys("".join(map(str, firsts))))
        is_empty_too = any(option.is_empty_too for option in options)
        head, after, is_json = common_head(options)
        terminals = [option for option in options if isinstance(option, Terminal)]
        if len(terminals) == len(options):
            source = "(" + " | ".join(f"({option.source})" for option in terminals) + ")"
            return Terminal(
                pointer=pointer,
                source=source,
                is_closed=self._is_closed_choice(terminals, source),
                is_empty_too=is_empty_too,
                first=first,
                head=head,
                after=after,
            )
        tails = [tail for option in options if (tail := tail_of(option)) is not None]
        tail = tails[0] if tails else None
        if len(tails) > 1:
            sources = " | ".join(f"({tail.source})" for tail in tails)
            tail = Terminal(pointer=pointer, source=f"({sources})", is_closed=False)
        return Rule(
            pointer=pointer,
            source="(" + " | ".join(self._in_rule(option) for option in options) + ")",
            first=first,
            is_empty_too=is_empty_too,
            repeats=any(isinstance(option, Rule) and option.repeats for option in options),
            last="".join(option.last for option in options if isinstance(option, Rule)),
            tail=tail,
            head=head,
            after=after,
            is_json=is_json,
            starts_json=any(isinstance(o, Rule) and o.starts_json for o in options),
            ends_json=any(isinstance(o, Rule) and o.ends_json for o in options),
        )

    def _is_closed_choice(self, options: list[Terminal], source: str) -> bool:
        if not all(option.is_closed for option in options):
            return False
        texts = [option.literal for option in options]
        if None not in texts:
            ordered = sorted(set(map(str, texts)))
            return not any(b.startswith(a) for a, b in pairwise(ordered))
        return self._has_none(f"{source} & ({source} {SOME})")

    def _joined(self, pieces: list[Piece], pointer: str) -> Piece:
        """One after the other; neighbours that are terminals become one."""
        merged: list[Piece] = []
        if any(isinstance(piece, Rule) for piece in pieces):
            pieces = [self._apart(piece) for piece in pieces]
        for piece in pieces:
            before = merged[-1] if merged else None
            if isinstance(before, Terminal) and isinstance(piece, Terminal):
                merged[-1] = concatenated(before, piece)
            else:
                merged.append(piece)
        merged = [piece for piece in merged if piece.source != '""']
        if not merged:
            return const(pointer, "")
        if len(merged) == 1:
            return merged[0]
        for i in range(len(merged) - 1):
            left = merged[i]
            for right in merged[i + 1 :]:
                self._check_border(left, right)
                if isinstance(left, Rule) and (left.is_empty_too or left.repeats):
                    self._check_beside(left, right)  # it may come instead
                if not right.is_empty_too:
                    break
        last, tail, starts_json, ends_json = "", None, False, False
        for piece in merged:
            starts_json |= isinstance(piece, Rule) and piece.starts_json
            if not piece.is_empty_too:
                break
        for piece in reversed(merged):
            last += piece.last if isinstance(piece, Rule) else ""
            ends_json |= isinstance(piece, Rule) and piece.ends_json
            tail = tail or tail_of(piece)
            if not piece.is_empty_too:
                break
        head, after, is_json = start_of(merged)
        return Rule(
            pointer=pointer,
            source="(" + " ".join(self._in_rule(piece) for piece in merged) + ")",
            first=first_of(merged),
            is_empty_too=all(piece.is_empty_too for piece in merged),
            last=last,
            tail=tail,
            head=head,
            after=after,
            is_json=is_json,
            starts_json=starts_json,
            ends_json=ends_json,
        )

    def _apart(self, piece: Piece) -> Piece:
        """What may be left out, as a rule: so that it ends where it does, whatever follows."""
        if not isinstance(piece, Terminal) or piece.option is None:
            return piece
        return Rule(
            pointer=piece.pointer,
            source=f"({self._in_rule(piece.option)})?",
            first=piece.first,
            is_empty_too=True,
            tail=tail_of(piece.option),
            head=piece.head,
            after=piece.after,
        )

    def _check_border(self, left: Piece, right: Piece) -> None:
        """Refuse a place where the longest lexeme need not be the right one."""
        if isinstance(left, Rule) and isinstance(right, Rule):
            if left.ends_json and right.starts_json:  # the engine takes blanks between them
                raise GrammarError(
                    "JSON follows JSON",
                    pointer=left.pointer,
                    suggestion="put a text between them",
                )
        if isinstance(left, Rule) and left.last:
            if right.first is None or set(left.last) & set(right.first):
                raise GrammarError(
                    "where a number ends can't be told from what may follow it",
                    suggestion="let the text after it begin otherwise",
                    pointer=left.pointer,
                )
        tail = tail_of(left)
        if tail is None:
            return
        follows = "/(?s:.)/" if right.first is None else class_of(right.first)
        if right.first != "" and not self._has_none(
            f"{tail.source} & ({tail.source} {follows} {ANY})"
        ):
            raise GrammarError(
                "where this ends can't be told from what may follow it", pointer=tail.pointer
            )

    def _check_beside(self, one: Piece, other: Piece) -> None:
        """Refuse options of which the longer lexeme of one could hide the other."""
        if one.first is not None and other.first is not None:
            if not set(one.first) & set(other.first):
                return
        short, long = sorted((one, other), key=lambda piece: len(piece.head))
        if not long.head.startswith(short.head):
            return  # they part before either ends
        rest = long.head[len(short.head) :][:1] or long.after
        both_json = all(isinstance(p, Rule) and p.is_json for p in (short, long))
        if short.head == long.head and both_json:
            return  # the engine reads JSON under several schemas at once
        if rest is not None and short.after is not None and not set(rest) & set(short.after):
            return
        raise GrammarError(
            "this option and another one begin alike",
            pointer=one.pointer,
            suggestion="let them differ from the start, or put what they share before the choice",
        )

    def _has_none(self, source: str) -> bool:
        return self._is_empty("\n".join([f"start: PROBE\nPROBE: {source}", *self._lines]))

    def _in_rule(self, piece: Piece) -> str:
        """A terminal in a rule has a name."""
        if isinstance(piece, Rule):
            return piece.source
        if piece.source == '""':
            return piece.source
        name = self._names.get(piece.source)
        if name is None:
            name = self._names[piece.source] = f"T{len(self._names)}"
            self._lines.append(f"{name}: {piece.source}")
        return name
