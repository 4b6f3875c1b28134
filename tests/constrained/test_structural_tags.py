"""Structural tags: both forms, every format, and what is checked inside of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from palmette.constrained.compiler import GrammarCompiler
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarError, GrammarSpec, Whitespace
from palmette.constrained.tag_cursor import TagCheck, TagCursor
from palmette.constrained.vocabulary import Vocabulary

Accepts = Callable[[GrammarSpec, str], bool]
Form = dict[str, Any]


def closed(**properties: Any) -> Form:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


X, Y = closed(x={"type": "integer"}), closed(y={"type": "string"})
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def tree(form: Form) -> GrammarSpec:
    return GrammarSpec.structural_tag({"type": "structural_tag", "format": form})


def text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def js(schema: Any, **options: Any) -> Form:
    return {"type": "json_schema", "json_schema": schema, **options}


def tag(begin: str, content: Form, end: Any) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def either(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}


def row(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


ANY: Form = {"type": "any_text"}
TOOLS = [tag("<tool=f>", js(X), "</tool>"), tag("<tool=g>", js(Y), "</tool>")]
TRIGGERED: Form = {"type": "triggered_tags", "triggers": ["<tool="], "tags": TOOLS}
F, G = '<tool=f>{"x":1}</tool>', '<tool=g>{"y":"<tool=f>"}</tool>'
SEPARATED: Form = {"type": "tags_with_separator", "separator": ",", "tags": TOOLS}
CASES: dict[str, tuple[Form, list[str], list[str]]] = {
    "const_string": (text("abc"), ["abc"], ["", "ab", "abcd"]),
    "any_text": (ANY, ["", "any <tool=\n"], []),
    "any_text excludes": ({**ANY, "excludes": ["<f", "x"]}, ["", "<<", "日"], ["<f", "ax", "<<f"]),
    "any_text max_chars": ({**ANY, "max_chars": 3}, ["", "日本日"], ["abcd"]),
    "any_text max_chars in a tag": (
        tag("<r>", {**ANY, "max_chars": 3}, "</r>"),
        ["<r></r>", "<r>日本日</r>", "<r></</r>"],
        ["<r>abcd</r>", "<r>abc"],
    ),
    "json_schema": (js(X), ['{"x":1}', '{ "x": 1 }'], ['{"x":"1"}', ' {"x":1}']),
    "a constant beyond a double": (
        tag("<n>", js({"enum": [2**60, "a"]}), "</n>"),
        [f"<n>{2**60}</n>", '<n>"a"</n>'],
        [f"<n>{2**60 + 1}</n>"],
    ),
    "keys in any order": (
        tag("<o>", js(closed(x={"type": "integer"}, y={"type": "string"}), any_order=True), "</o>"),
        ['<o>{"x":1,"y":""}</o>', '<o>{"y":"","x":1}</o>'],
        [
            *('<o>{"x":1}</o>', '<o>{"x":1,"x":1,"y":""}</o>', '<o>{"y":"","x":"1"}</o>'),
            *('<o> {"y":"","x":1}</o>', '<o>{"y":"","x":1} </o>'),
        ],
    ),
    "many keys in any order": (
        tag("<o>", js(closed(**{k: {"type": "integer"} for k in "abcdefgh"}), any_order=True), ";"),
        ['<o>{"a":1,"b":1,"d":1,"c":1,"h":1,"e":1,"f":1,"g":1};'],
        ['<o>{"a":1,"b":1,"d":1,"c":1,"h":1,"e":1,"f":1,"f":1};', '<o>{"a":1};'],
    ),
    "regex": (regex("a|bc*"), ["a", "b", "bcc"], ["", "ac"]),
    "regex with a look-ahead in a tag": (
        tag("<r>", regex(r"(?=.*\d)[a-z\d]+"), "</r>"),
        ["<r>a1</r>", "<r>1</r>"],
        ["<r>a</r>", "<r></r>"],
    ),
    "an empty regex": (row(regex(""), text("a")), ["a"], [""]),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes"], ["maybe"]),
    "grammar in a tag": (
        tag("<g>", {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-z]+'}, "</g>"),
        ["<g>((ab))</g>", "<g>a</g>"],
        ["<g>(a</g>", "<g></g>"],
    ),
    "regular neighbours are cut anywhere": (
        row(regex("[a-z]*"), text("ab"), {"type": "grammar", "grammar": "root ::= b?\nb ::= [b]"}),
        ["ab", "xab", "abab", "abb"],
        ["a", "abx"],
    ),
    "sequence": (row(text("A: "), js(X)), ['A: {"x":3}'], ['A:{"x":3}', 'A: {"x":3} ']),
    "sequence of a regex and JSON": (row(regex("[a-z]*"), js(X)), ['b{"x":1}', '{"x":1}'], ["b"]),
    "or": (either(text("ab"), js(X), text("abc")), ["ab", "abc", '{"x":1}'], ["a", "c"]),
    "or of schemas": (either(js(X), js(Y)), ['{"x":1}', '{"y":"1"}'], ['{"x":"1"}']),
    "or of tags that share their begin": (
        either(tag("<a>", js(X), "</a>"), tag("<ab>", js(X), "</ab>"), tag("<a>", js(Y), "</a>")),
        ['<a>{"x":1}</a>', '<ab>{"x":1}</ab>', '<a>{"y":"a"}</a>'],
        ['<ab>{"y":"a"}</ab>', '<a>{"x":1}</ab>'],
    ),
    "optional": ({"type": "optional", "content": js(X)}, ["", '{"x":1}'], ['{"x":1}{"x":1}']),
    "optional after a text": (
        row(text("a"), {"type": "optional", "content": js(X)}, text("b")),
        ["ab", 'a{"x":1}b'],
        ["a b", 'a {"x":1}b', 'a{"x":1} b'],
    ),
    "plus": ({"type": "plus", "content": TOOLS[0]}, [F, F + F], ["", f"{F} {F}"]),
    "star": ({"type": "star", "content": TOOLS[0]}, ["", F + F], ["<"]),
    "repeat": (
        {"type": "repeat", "min": 1, "max": 2, "content": text("ab")},
        ["ab", "abab"],
        ["", "ababab"],
    ),
    "repeat without a bound": (
        {"type": "repeat", "min": 2, "max": -1, "content": TOOLS[0]},
        [F + F, F + F + F],
        [F],
    ),
    "tag with several ends": (
        tag("<r>", ANY, ["</r>", "</s>"]),
        ["<r></r>", "<r>a<b</s>"],
        ["<r>a</r>b</s>", "<r>a</r></s>", "<r>a"],
    ),
    "tag of a number": (tag("<n>", js({"type": "integer"}), "</n>"), ["<n>12</n>"], ["<n>1.5</n>"]),
    "triggered_tags": (
        TRIGGERED,
        [f"hello {F} done", "plain", "", G + F, "<tool"],
        ['<tool=f>{"y":1}</tool>', "<tool=h>{}</tool>", "a <tool=", F[:-1]],
    ),
    "at_least_one": ({**TRIGGERED, "at_least_one": True}, [F, f"{F} x {G}"], ["", "x", f" {F}"]),
    "stop_after_first": (
        {**TRIGGERED, "stop_after_first": True},
        [F, "", "abc", f"a {G}"],
        [f"{F} ", F + F],
    ),
    "exactly one": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        [F, G],
        ["", f"{F} ", f" {F}"],
    ),
    "triggered_tags excludes": (
        {**TRIGGERED, "excludes": ["no"]},
        [f"{F} yes"],
        ["no", f"n no {F}", f"{F}no"],
    ),
    "triggered_tags in a tag": (
        tag("<resp>", TRIGGERED, "</resp>"),
        ["<resp></resp>", f"<resp>a{F}b</resp>"],
        ["<resp>a</resp>b</resp>", "<resp>a", f"<resp>{F}"],
    ),
    "thinking before tags": (
        row(tag("<think>", ANY, "</think>"), TRIGGERED),
        [f"<think>a</think>x{F}", "<think><tool=</think>"],
        ["x", "<think></think><tool="],
    ),
    "tags_with_separator": (SEPARATED, ["", F, f"{F},{G},{F}"], [f"{F},", f"{F}{G}", " "]),
    "tags_with_separator, at least one": ({**SEPARATED, "at_least_one": True}, [F], [""]),
    "tags_with_separator, one": ({**SEPARATED, "stop_after_first": True}, ["", F], [f"{F},{F}"]),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f>", js(X)], ["<g>", text("!")]]},
        ["", 'a<f>{"x":1}b<g>!', '<f>{"x":1}<f>{"x":1}'],
        ["<f>", "<g>?"],
    ),
    "dispatch once": (
        {"type": "dispatch", "rules": [["<f>", js(X)]], "loop": False},
        ["", 'a<f>{"x":1}'],
        ['a<f>{"x":1}b'],
    ),
    "qwen_xml_parameter": (
        {
            "type": "qwen_xml_parameter",
            "json_schema": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "count": {"type": "integer"},
                    "unit": {"enum": ["c", "f"]},
                    "other": {"$ref": "#/$defs/x"},
                },
                "required": ["place", "unit"],
                "$defs": {"x": X},
            },
        },
        [
            "<parameter=place>a b\nc</parameter><parameter=unit>c</parameter>",
            "<parameter=place>\na\n</parameter>\n<parameter=count>\n5\n</parameter>\n"
            '<parameter=unit>\nf\n</parameter>\n<parameter=other>{"x":1}</parameter>\n',
        ],
        [
            "<parameter=unit>c</parameter>",
            "<parameter=place>a</parameter><parameter=unit>k</parameter>",
        ],
    ),
    "qwen_xml of nothing": (js({}, style="qwen_xml"), [""], ["{}"]),
    "qwen_xml of optional parameters": (
        js(
            {
                "type": "object",
                "properties": {
                    "days": {"type": "integer"},
                    "unit": {"enum": ["c", "f"]},
                    "mode": {"enum": ["a", "b"]},
                    "tags": {"type": "array", "items": {"type": "integer"}},
                    "unix": {"type": "boolean"},
                },
            },
            style="qwen_xml",
        ),
        [
            "",
            "<parameter=unit>c</parameter>\n<parameter=tags>[1]</parameter>",
            "<parameter=days>\n2\n</parameter>\n<parameter=mode>\nb\n</parameter>\n",
            "<parameter=unix>true</parameter>",
        ],
        ["<parameter=unit>1</parameter>", "<parameter=unix>true</parameter><parameter=days>1"],
    ),
    "a check in a tag": (
        {**TRIGGERED, "tags": [tag("<tool=f>", js(closed(l=UNIQUE)), "</tool>"), TOOLS[1]]},
        ['a <tool=f>{"l":[1,2]}</tool>', f'<tool=f>{{"l":[1,12]}}</tool> {G}', ""],
        ['<tool=f>{"l":[1,1]}</tool>', '<tool=f>{"l":[1]}</tool><tool=f>{"l":[1,1]}</tool>'],
    ),
    "one of two checks suffices": (
        either(
            tag("<a>", js(UNIQUE), "</a>"),
            tag("<a>", js({**UNIQUE, "uniqueItems": False, "contains": {"const": 3}}), "</a>"),
        ),
        ["<a>[1,2]</a>", "<a>[1,1,1,1,1,1,1,3]</a>"],
        ["<a>[1,1,1,1,1,1,1,1]</a>"],
    ),
    "a checked number ends with what follows": (
        row(js({"type": "integer", "not": {"multipleOf": 3}}), text(";")),
        ["4;", "31;"],
        ["3;", "9;", "33;"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_format_is_exact(name: str, accepts: Accepts) -> None:
    form, valid, invalid = CASES[name]
    assert [t for t in valid if not accepts(tree(form), t)] == []
    assert [t for t in invalid if accepts(tree(form), t)] == []


@pytest.mark.parametrize("name", CASES)
def test_a_shortest_text_is_known(name: str, compiler: GrammarCompiler) -> None:
    grammar = compiler.get(tree(CASES[name][0]))
    assert grammar.shortest is not None
    state = grammar.start()
    assert all(state.accept(token_id) for token_id in grammar.shortest) and state.may_end


def test_tag_two_tools_in_both_forms(accepts: Accepts) -> None:
    """Case tag-two-tools: one meaning, whichever form it is written in."""
    tags = [
        {"begin": f"<tool={name}>", "schema": schema, "end": "</tool>"}
        for name, schema in (("f", X), ("g", Y))
    ]
    listed = GrammarSpec.structural_tag({"triggers": ["<tool="], "tags": tags})
    for spec in (listed, tree(TRIGGERED)):
        assert accepts(spec, 'hello <tool=f>{"x":1}</tool> done')
        assert accepts(spec, "plain text only")
        assert accepts(spec, '<tool=g>{"y":"a"}</tool><tool=f>{"x":2}</tool>')
        assert not accepts(spec, '<tool=f>{"y":1}</tool>')
        assert not accepts(spec, "<tool=h>{}</tool>")


REFUSED: dict[str, tuple[Form, str, str]] = {
    "unknown": ({"type": "foo"}, "/format", "unknown format 'foo'"),
    "token": ({"type": "token", "token": 4}, "/format/type", "token ids"),
    "begin of a token": (
        tag({"type": "token", "token": 4}, ANY, "x"),  # type: ignore[arg-type]
        "/format/begin",
        "token ids",
    ),
    "max_tokens": ({**ANY, "max_tokens": 4}, "/format/max_tokens", "use max_chars"),
    "style": (js(X, style="glm_xml"), "/format/style", "glm_xml"),
    "unknown key": ({**ANY, "a": 1}, "/format", "unknown key 'a'"),
    "nothing in it": ({"type": "sequence", "elements": []}, "/format/elements", "list"),
    "regex": (row(ANY, regex("(?<=a)b")), "/format/elements/1/pattern", "look-behind"),
    "regex without a match": (regex("(?=a)"), "/format/pattern", "no text matches"),
    "no type": (tag("<a>", js({"type": 3}), "x"), "/format/content/json_schema/type", "schema"),
    "grammar": ({"type": "grammar", "grammar": "root ::= a"}, "/format/grammar", "not defined"),
    "schema": (
        tag("<a>", js(closed(a={"$ref": "http://x/y"})), "</a>"),
        "/format/content/json_schema/properties/a/$ref",
        "remote",
    ),
    "no trigger": (
        {**TRIGGERED, "triggers": ["<t", "<tool"]},
        "/format/triggers/0",
        "part of another",
    ),
    "begins with no trigger": (
        {**TRIGGERED, "triggers": ["<x"]},
        "/format/tags/0/begin",
        "none of the triggers",
    ),
    "free text before JSON": (row(ANY, js(X)), "/format/elements/0", "can't be told"),
    "regex that goes on": (row(regex("[a-z{]+"), js(X)), "/format/elements/0/pattern", "told"),
    "number before digits": (
        tag("<n>", js({"type": "integer"}), "0</n>"),
        "/format/content/json_schema",
        "number",
    ),
    "JSON after JSON": (
        {"type": "plus", "content": js(X)},
        "/format/content/json_schema",
        "JSON follows JSON",
    ),
    "options alike": (either(ANY, js(X)), "/format/elements/1/json_schema", "begin alike"),
    "check beside a regex": (
        row(regex("[a-z]+"), js(UNIQUE)),
        "/format/elements/1/json_schema/uniqueItems",
        "uniqueItems: can't be checked beside a regex",
    ),
    "qwen_xml keyword": (
        js({"type": "object", "minProperties": 1}, style="qwen_xml"),
        "/format/json_schema/minProperties",
        "minProperties",
    ),
    "qwen_xml text": (
        js(closed(a={"type": "string", "maxLength": 3}), style="qwen_xml"),
        "/format/json_schema/properties/a",
        "limits of a text",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_exact_is_refused_where_it_stands(
    name: str, compiler: GrammarCompiler
) -> None:
    form, pointer, reason = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        compiler.get(tree(form))
    assert caught.value.pointer == pointer
    assert reason in str(caught.value)


def test_json_options_apply_inside(compiler: GrammarCompiler, accepts: Accepts) -> None:
    compact = GrammarSpec.structural_tag(
        {"type": "structural_tag", "format": TRIGGERED}, whitespace=Whitespace.COMPACT
    )
    assert accepts(compact, '<tool=f>{"x":1}</tool>')
    assert not accepts(compact, '<tool=f>{"x": 1}</tool>')


def random_text(spec: GrammarSpec, compiler: GrammarCompiler, seed: int) -> list[int]:
    """Ids drawn along the masks, with the rarer ones as likely as the others."""
    rng, vocabulary = random.Random(seed), compiler.vocabulary
    state, ids = compiler.get(spec).start(), list[int]()
    mask = np.zeros(vocabulary.mask_words, np.int32)
    while len(ids) < 40 and not state.is_done:
        state.fill(mask)
        legal = [i for i in allowed_ids(mask).tolist() if i not in vocabulary.stop_ids]
        if not legal:
            break
        chosen = rng.choice([i for i in legal if i < 128] or legal)
        assert state.accept(chosen)
        ids.append(chosen)
    return ids


@pytest.mark.parametrize(
    "name", [name for name, (form, _, _) in CASES.items() if "regex" not in str(form)]
)
def test_the_cursor_reads_what_the_grammar_takes(
    name: str, compiler: GrammarCompiler, vocabulary: Vocabulary
) -> None:
    """On every prefix of random texts both agree on whether the text is complete."""
    form = CASES[name][0]
    if "grammar" in str(form):
        return
    check = follower(form, compiler)
    for seed in range(20):
        ids = random_text(tree(form), compiler, seed)
        state, cursor = compiler.get(tree(form)).start(), check.cursor()
        assert cursor is not None
        for token_id in ids:
            assert state.accept(token_id)
            if cursor.push(vocabulary.token_bytes[token_id]) is not None:
                break  # a value that is not valid
            assert cursor.may_end == state.may_end
            assert cursor.fork().may_end == cursor.may_end


def follower(form: Form, compiler: GrammarCompiler) -> TagCheck:
    """A check of `form`, also where nothing in it is checked."""
    marked = row(tag("\0", js(UNIQUE), "\0"), form)
    check = compiler.get(tree(marked)).check
    assert isinstance(check, TagCheck)
    cursor = check.cursor()
    assert cursor is not None and cursor.push(b"\0[]\0") is None
    return _Started(check, cursor)


class _Started(TagCheck):
    """The check of what follows the marker."""

    def __init__(self, check: TagCheck, cursor: TagCursor) -> None:
        self._cursor = cursor

    def cursor(self) -> TagCursor | None:
        return self._cursor.fork()


def test_a_cursor_holds_a_value_back_and_can_be_cut(compiler: GrammarCompiler) -> None:
    check = compiler.get(tree(CASES["a check in a tag"][0])).check
    assert isinstance(check, TagCheck)
    cursor = check.cursor()
    assert cursor is not None
    assert cursor.push(b'say <tool=f>{"l":[1,') is None
    assert cursor.held_from == len('say <tool=f>{"l":')
    assert cursor.push(b"1") is None
    assert cursor.push(b"]") == len('say <tool=f>{"l":[1,')
    cursor.truncate(len('say <tool=f>{"l":[1,'))
    assert cursor.push(b'2]}</tool> and <tool=g>{"y":"') is None
    assert cursor.held_from is None
    assert not cursor.may_end
    assert cursor.push(b'"}</tool>') is None
    assert cursor.may_end
