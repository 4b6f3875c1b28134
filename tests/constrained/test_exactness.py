"""Places where engines and specifications silently differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.ecma_regex import to_rust
from palmette.constrained.spec import GrammarError, GrammarSpec

Accepts = Callable[[GrammarSpec, str], bool]


def schema(**keywords: Any) -> GrammarSpec:
    return GrammarSpec.json_schema(keywords)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "text",
    ['{"\\u0061":"x"}', '{"\\u0061":1}', '{"a":1,"a":"x"}', '{"b":1,"a":"x"}', '{"\\u0062":"x"}'],
)
def test_a_declared_key_has_no_other_spelling(accepts: Accepts, text: str) -> None:
    assert not accepts(GrammarSpec.json_schema(OPEN), text)


def test_control_characters_have_escapes_where_no_key_can_hide(accepts: Accepts) -> None:
    assert accepts(schema(type="string"), '"\\u0001"')
    assert accepts(schema(const="a\u0000b"), '"a\\u0000b"')


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (".", "\r", False),
        (".", "\u2028", False),
        (".", "\u0085", True),
        ("^\\S$", "\ufeff", False),
        ("^\\S$", "\u0085", True),
        ("^\\s$", "\u0085", False),
        ("^\\s$", "\u3000", True),
        ("^[\\s]$", "\ufeff", True),
        ("^[^\\s]$", "\ufeff", False),
        ("^[^\\S]$", "\ufeff", True),
        ("^\\d$", "٣", False),
        ("^\\w$", "é", False),
        ("^\\W$", "é", True),
        ("^[a&&b]$", "&", True),
        ("^[a&&b]$", "a", True),
        ("^[a[b]$", "[", True),
        ("^[+--]$", ",", True),
        ("^[+--]$", "/", False),
        ("^[~~]$", "~", True),
        ("^[.]$", "a", False),
        ("^\\.$", "a", False),
        ("^[\\]]$", "]", True),
        ("^[^\\]a]$", "]", False),
        ("^\\v$", "\x0b", True),
        ("^[\\s\\S]$", "\u2028", True),
        ("^(?i)ab$", "AB", True),
    ],
)
def test_patterns_are_ecma_262(accepts: Accepts, pattern: str, text: str, matches: bool) -> None:
    spec = GrammarSpec.json_schema(
        {"type": "string", "pattern": pattern, "maxLength": 1 + (text == "AB")}
    )
    raw = json.dumps(text, ensure_ascii=False)
    quoted = json.dumps(text)
    assert (accepts(spec, raw) or accepts(spec, quoted)) == matches


@pytest.mark.parametrize(
    "pattern", ["\\A", "\\z", "(?x)a b", "(?s)a", "(?m)^a$", "[]", "[^]", "\\Qa"]
)
def test_patterns_of_other_dialects_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        to_rust(pattern, "/pattern")
    assert caught.value.pointer == "/pattern"


NUMBERS = (0, -0.0, 1, -1, 2, 5, -10, 0.1, -0.1, 0.5, 1e-5, 0.001, 1.5, -1.5, 99, 1e3, 12345)
TEXTS = (
    "0 -0 0.0 -0.0 1 -1 1.0 2 5 9 10 -10 0.1 -0.1 0.10 0.5 0.05 0.00001 -0.00001 0.000001 1e-5 "
    "1e-6 1e0 0e1 1e3 0.001 -0.001 0.0011 1.5 -1.5 1.49 1.51 99 100 -100 999 1000 1001 12345 "
    "12346"
).split()


def as_decimal(number: float) -> Decimal:
    return Decimal(repr(number))


def is_within(text: str, low: tuple[str, float], high: tuple[str, float]) -> bool:
    value = Decimal(text)
    above = value > as_decimal(low[1]) or (low[0] == "minimum" and value == as_decimal(low[1]))
    below = value < as_decimal(high[1]) or (high[0] == "maximum" and value == as_decimal(high[1]))
    return above and below


def test_no_number_outside_its_bounds(compiler: GrammarCompiler, accepts: Accepts) -> None:
    wrong, num_served = [], 0
    lows = itertools.product(("minimum", "exclusiveMinimum"), NUMBERS)
    highs = list(itertools.product(("maximum", "exclusiveMaximum"), NUMBERS))
    for low, high in itertools.product(lows, highs):
        if low[1] > high[1]:
            continue
        spec = schema(type="number", **dict((low, high)))
        try:
            grammar = compiler.backend.compile(spec, compiler.vocabulary)
        except GrammarError:
            continue
        num_served += 1
        for text in TEXTS:
            state = grammar.start()
            taken = all(state.accept(byte) for byte in text.encode()) and state.may_end
            taken = taken and grammar.check is not None and grammar.check.is_valid(text.encode())
            if taken and not is_within(text, low, high):
                wrong.append((low, high, text))
    assert wrong == []
    assert num_served > 350


def test_bounds_that_meet_through_references_are_judged_together(
    compiler: GrammarCompiler, accepts: Accepts
) -> None:
    pair: list[dict[str, Any]] = [{"exclusiveMinimum": 0}, {"maximum": 0.5}]
    for spec in (
        schema(type="number", allOf=pair),
        schema(type="number", exclusiveMinimum=0, anyOf=[pair[1]]),
        GrammarSpec.json_schema({"$defs": {"p": pair[1]}, "$ref": "#/$defs/p"} | pair[0]),
    ):
        check = compiler.get(spec).check
        assert check is not None and check.residuals
        assert accepts(spec, "0.25") and not accepts(spec, "0")
    assert accepts(schema(type="number", exclusiveMinimum=0, maximum=1), "0.5")


def test_min_properties_is_not_fooled_by_a_repeated_key(accepts: Accepts) -> None:
    spec = schema(type="object", minProperties=1, additionalProperties={"type": "integer"})
    assert not accepts(spec, "{}")
    assert accepts(spec, '{"a":1}')
    required = schema(
        type="object", properties={"a": {}, "b": {}}, required=["a", "b"], minProperties=2
    )
    assert accepts(required, '{"a":1,"b":2}')
    assert not accepts(required, '{"a":1}')


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31"]),
        ("time", ["23:59:60Z", "12:00:00.5+02:00"], ["12:59:60Z", "24:00:00Z", "12:00:00"]),
        ("date-time", ["2016-12-31T23:59:60Z"], ["2016-12-30T23:59:60Z", "2016-12-31 00:00:00Z"]),
        ("hostname", ["a.b-c.de", "x"], ["-a", "a-", "a..b", "xn--x", "a" * 64, "ab.--c"]),
        ("hostname", [".".join(["a" * 49] * 5)], [".".join(["a" * 49] * 6)]),
        ("email", ["a.b+c@d.org"], ["a@", ".a@b", "a..b@c", "a" * 65 + "@b.org"]),
        ("ipv4", ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ],
)
def test_formats(accepts: Accepts, name: str, valid: list[str], invalid: list[str]) -> None:
    spec = schema(type="string", format=name)
    assert [text for text in valid if not accepts(spec, f'"{text}"')] == []
    assert [text for text in invalid if accepts(spec, f'"{text}"')] == []


def test_regexes_keep_their_special_characters(accepts: Accepts) -> None:
    assert accepts(GrammarSpec.regex("a/b\\/c\n\\\nd"), "a/b/c\n\nd")
    assert accepts(GrammarSpec.regex("^a|b$"), "a")
    assert accepts(GrammarSpec.regex("^a|b$"), "b")
    assert not accepts(GrammarSpec.regex("^a|b$"), "ax")
    assert not accepts(GrammarSpec.regex(r"\d"), "٣")


def test_choices_are_literal(accepts: Accepts) -> None:
    options = ["a.c", "/x/", "\\d", "a\nb", "\t", "[z]", "$", "^", "{2}", "#", " ", "日本", "a|b"]
    spec = GrammarSpec.choice(options)
    assert [option for option in options if not accepts(spec, option)] == []
    assert [text for text in ("abc", "x", "1", "z", "a", "") if accepts(spec, text)] == []
    assert accepts(GrammarSpec.choice(["", "a"]), "")


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        ('root ::= [a-z]* "x"', ["x", "abx", "xx"], ["ab", ""]),
        ('root ::= "a" | "ab" | "abc" "d"', ["a", "ab", "abcd"], ["abc"]),
        ('root ::= word ("," word)*\nword ::= [a-z]+ "!"?', ["ab", "a!,b"], ["", "a,"]),
        ("root ::= [\\u00e9\\U0001F600]+", ["é😀"], ["e"]),
        ('root ::= "\\u00e9\\x41\\n\\"\\\\"', ['éA\n"\\'], ["é"]),
        ('root ::= [^"\\\\\\n/]{2,3} # comment\n', ["ab", "日本語"], ['a"', "a/", "a"]),
        ('root ::= "(" root ")" | "x"{2}', ["xx", "((xx))"], ["x", "(xx"]),
        (
            'root ::= sum\nsum ::= num ("+" num)*\nnum ::= [0-9]+ | "(" sum ")"',
            ["1+(23+4)"],
            ["1+"],
        ),
        ('root ::= ("" | "a")', ["", "a"], ["aa"]),
    ],
)
def test_ebnf(accepts: Accepts, grammar: str, valid: list[str], invalid: list[str]) -> None:
    spec = GrammarSpec.ebnf(grammar)
    assert [text for text in valid if not accepts(spec, text)] == []
    assert [text for text in invalid if accepts(spec, text)] == []


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('root ::= ("a"*)*', ["", "a", "aaa"], ["b"]),
        ('root ::= ("a"+)?', ["", "a", "aa"], ["b"]),
        ('root ::= ("a"?)?', ["", "a"], ["aa"]),
        ('root ::= ("a"{2}){3}', ["aaaaaa"], ["aa", "aaa", "aaaaa"]),
        ('root ::= ("a"*)+ "b"', ["b", "aab"], ["", "aa"]),
        ('root ::= (("a" "b")+){2}', ["abab", "ababab"], ["ab", "aabb"]),
        ('root ::= "a"{0}', [""], ["a"]),
        ('root ::= ("a"){0,0} "b" "c"{0}', ["b"], ["ab", "bc", ""]),
        ('root ::= start WHOLE_TEXT\nstart ::= "a"\nWHOLE_TEXT ::= "b"', ["ab"], ["a", "b"]),
        ('root ::= start?\nstart ::= "a" root', ["", "a", "aa"], ["b"]),
        ('root ::= A a\nA ::= "a"\na ::= "b"', ["ab"], ["aa", "bb"]),
        ('root ::= x-y x_y xY\nx-y ::= "a"\nx_y ::= "b"\nxY ::= "c"', ["abc"], ["aaa"]),
        ('root ::= 1x _ \u00e9\n1x ::= "a"\n_ ::= "b"\n\u00e9 ::= "c"', ["abc"], ["ab"]),
        (r'root ::= "\[\]\x41\\"', ["[]A\\"], ["\\[\\]A\\"]),
        ('root ::= "\t" [\t]', ["\t\t"], ["\t"]),
        ("root ::= . .", ["a\n", "\r\u2028"], ["a", "abc"]),
        ('root ::= "a\nb"', ["a\nb"], ["ab"]),
        (r'root ::= "\u0041\u0022\U00000043"', ['A"C'], ["A"]),
        (r"root ::= [a&&b~~c^]", ["a", "&", "b", "~", "c", "^"], ["d"]),
        (r"root ::= [+--a]", ["+", ",", "-", "a"], ["b", "."]),
        (r"root ::= [^\]\n-]", ["a", "["], ["]", "-", "\n"]),
        (r"root ::= [-a/\x41-\u0043]", ["-", "a", "/", "A", "B", "C"], ["D", "b"]),
    ],
)
def test_ebnf_means_what_it_says(
    accepts: Accepts, grammar: str, allowed: list[str], refused: list[str]
) -> None:
    for text in allowed:
        assert accepts(GrammarSpec.ebnf(grammar), text), text
    for text in refused:
        assert not accepts(GrammarSpec.ebnf(grammar), text), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= x\nx ::= "a"\nx ::= "b"', r"^ebnf: rule 'x' is defined twice$"),
        ("root ::= x", r"^ebnf: rule 'x' is not defined$"),
        ('x ::= "a"', r"^ebnf: there is no rule 'root'$"),
        ("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, r"^ebnf, line 1: parentheses nested"),
        ("root ::= " + '("a" ' * 3000, r"^ebnf, line 1: parentheses nested deeper .* 100$"),
        ('root ::= x\nx ::= "a"{3,2}', r"^ebnf, line 2: a repeat of 3 to 2 times is none$"),
        ('root ::= "a"{99999999999}', r"^ebnf, line 1: a repeat counts to 100000 at most$"),
        ("root ::= [z-a]", r"^ebnf, line 1: the range z-a is empty$"),
        ("root ::= []", r"^ebnf, line 1: a class without characters$"),
        ("root ::= [^]", r"^ebnf, line 1: a class without characters$"),
        ('root ::= "\\', r"^ebnf, line 1: the grammar ends inside an escape$"),
        ("root ::= [\\", r"^ebnf, line 1: the grammar ends inside an escape$"),
        ("root ::= 'yes'", r"^ebnf, line 1: 'yes': .* in double quotes; write \"yes\"$"),
        ("root ::= x\nx ::= ( \"a\" | 'b' )", r"^ebnf, line 2: 'b': .* write \"b\"$"),
        ("root ::= 'it", r"^ebnf, line 1: ': a literal stands in double quotes$"),
    ],
)
def test_ebnf_messages_speak_of_the_grammar(
    compiler: GrammarCompiler, grammar: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.check(GrammarSpec.ebnf(grammar))


@pytest.mark.parametrize("grammar", ['root ::= "\\uD800"', "root ::= a b", "", "root = 1"])
def test_ebnf_errors(compiler: GrammarCompiler, grammar: str) -> None:
    with pytest.raises(GrammarError, match="ebnf"):
        compiler.check(GrammarSpec.ebnf(grammar))
