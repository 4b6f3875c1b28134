"""What each grammar backend serves exactly: the table, and the list that xgrammar is held to.

    python benchmarks/grammar_capabilities.py [--suite FILE] [--write]

Runs the cases of tests/constrained/cases.json with every backend that is installed. For xgrammar
also probes: small schemas, alone and inside objects and arrays, whose texts are drawn along the
masks of xgrammar (each must be valid) and of llguidance (each must be accepted); a shape is
verified when it occurs in a probe and no probe with it, no case and no schema of the suite went
wrong. --suite is a file as benchmarks/constrained.py describes. --write puts the result into
constrained/capabilities.json and docs/grammar-backends.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema_rs

from palmette.constrained import masks
from palmette.constrained.backend import BACKENDS, GrammarBackend, select_backend
from palmette.constrained.capabilities import shape, shapes_of, table_path, verified
from palmette.constrained.limits import GrammarLimits
from palmette.constrained.preflight import prepare_json_schema
from palmette.constrained.spec import GrammarError, GrammarKind, GrammarSpec, Whitespace
from palmette.constrained.vocabulary import Vocabulary
from palmette.constrained.worker_pool import WorkerPool

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "constrained" / "cases.json"
PAGE = ROOT / "docs" / "grammar-backends.md"
OUTCOMES = ("exact", "refused", "over", "under")  # from right to wrong

NUM_TEXTS = 20
TEXT: dict[str, Any] = {"type": "string"}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
PROBES: list[Any] = [
    *({"type": kind} for kind in ("string", "integer", "boolean", "null", "object", "array")),
    {"type": "number"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "string", "minLength": 3},
    *({"type": "string", "pattern": p} for p in ("^a$", "^[a-c]{1,3}$", "b+", "^x|y$", "^.{2}$")),
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    *({"type": "string", "format": name} for name in ("date", "time", "uuid", "ipv4", "email")),
    *({"type": kind, "minimum": low} for kind in ("integer", "number") for low in (0, -3, 12)),
    *({"type": kind, "maximum": high} for kind in ("integer", "number") for high in (0, 9, -2)),
    *(
        {"type": kind, "minimum": low, "maximum": high}
        for kind in ("integer", "number")
        for low, high in ((0, 9), (-5, 5), (3, 120), (-20, -11))
    ),
    {"type": "integer", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 3},
    {"type": ["string", "null"]},
    {"type": ["integer", "null"]},
    {"type": ["integer", "string", "boolean"]},
    {},
    *({"enum": values} for values in (["a", "b"], [1, 20], [True], ["a", None], [1, "a"])),
    *({"type": "string", "enum": values} for values in (["a", "b"], ["ab", "a"], ["é", "日本"])),
    {"type": "integer", "enum": [1, 20, -3]},
    *({"const": value} for value in ("a", 5, True, None, 'q"', "\n", [1, "a"], {"k": 1})),
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": TEXT, "minItems": 1},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, TEXT], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, TEXT]},
    {**CLOSED, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {**CLOSED, "properties": {"a": {"type": "integer"}, "b": TEXT}, "required": ["a"]},
    {**CLOSED, "properties": {"a": {"type": "integer"}, "b": TEXT}, "required": ["b"]},
    {**CLOSED, "properties": {"a": TEXT, "b": TEXT, "c": TEXT}, "required": ["a", "b", "c"]},
    {**CLOSED, "properties": {"a": TEXT, "b": {"type": "null"}}},
    {**CLOSED, "properties": {"a/b": TEXT, 'q"': {"type": "null"}}, "required": ['q"']},
    CLOSED,
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": TEXT, "required": ["a"]},
    {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"anyOf": [TEXT, {**CLOSED, "properties": {"a": TEXT}, "required": ["a"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    {"allOf": [{"type": "integer"}]},
    {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "integer"}}},
    {
        "$ref": "#/$defs/t",
        "$defs": {
            "t": {**CLOSED, "properties": {"n": {"$ref": "#/$defs/t"}, "v": {"type": "integer"}}}
        },
    },
]


def test_vocabulary() -> Vocabulary:
    texts = [bytes([byte]) for byte in range(256)]
    texts += [b'"a"', b'":', b"},", b"true", b"null", b"12", "é".encode(), b"ab", b"\\n"]
    end = len(texts)
    ids = {text: i for i, text in enumerate(texts)}
    return Vocabulary(
        token_bytes=(*texts, b"<|end|>"),
        special_ids=frozenset({end}),
        stop_ids=(end,),
        encode=lambda text: [ids[bytes([byte])] for byte in text.encode()],
    )


def installed() -> dict[str, GrammarBackend]:
    backends = {}
    for name in BACKENDS:
        try:
            backends[name] = select_backend(name)
        except GrammarError:
            continue
    return backends


def accepts(grammar: Any, text: str) -> bool:
    state, data = grammar.start(), text.encode()
    if not all(state.accept(byte) for byte in data) or not state.may_end:
        return False
    check = grammar.check
    cursor = None if check is None else check.cursor()
    if cursor is not None and cursor.push(data) is not None:
        return False
    return check is None or bool(check.is_valid(data))


def run_case(case: dict[str, Any], backend: GrammarBackend, vocabulary: Vocabulary) -> str:
    """One of `OUTCOMES`; a case that is to be refused is exact when it is."""
    kind = GrammarKind(case.get("kind", "json_schema"))
    source = case["input"]
    if not isinstance(source, str) or kind == GrammarKind.JSON_SCHEMA:
        source = json.dumps(source, ensure_ascii=False)
    spec = GrammarSpec(kind=kind, source=source).with_options(
        **{name: case[name] for name in ("whitespace", "order", "formats") if name in case}
    )
    try:
        grammar = backend.compile(spec, vocabulary)
    except GrammarError:
        return "refused" if "valid" in case else "exact"
    if "valid" not in case or any(accepts(grammar, text) for text in case["invalid"]):
        return "under"
    return "exact" if all(accepts(grammar, text) for text in case["valid"]) else "over"


def run_cases(backend: GrammarBackend, vocabulary: Vocabulary) -> dict[str, str]:
    cases = json.loads(CASES.read_text(encoding="utf-8"))
    return {case["id"]: run_case(case, backend, vocabulary) for case in cases}


def random_text(state: Any, vocabulary: Vocabulary, rng: random.Random) -> bytes | None:
    """A text along the masks that tends to its end; None when it doesn't come to one."""
    row = masks.allocate(1, vocabulary.size)[0]
    text = bytearray()
    for step in range(200):
        state.fill(row)
        ids = [i for i in masks.allowed_ids(row).tolist() if i not in vocabulary.stop_ids]
        if state.may_end and (not ids or rng.random() < 0.3):
            return bytes(text)
        closing = [i for i in ids if vocabulary.token_bytes[i] in (b'"', b"}", b"]")]
        printable = [i for i in ids if vocabulary.token_bytes[i].isascii()]
        if closing and rng.random() < 0.2 + step / 150:
            ids = closing
        elif printable and rng.random() < 0.9:
            ids = printable
        if not ids:
            return None
        chosen = rng.choice(ids)
        if not state.accept(chosen):
            return None
        text += vocabulary.token_bytes[chosen]
    return None


def plain(text: bytes) -> str:
    """The same value as most would write it."""
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))


def is_valid(validator: Any, text: bytes) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text.decode())))
    except ValueError:
        return False


def probe(schema: Any, backend: GrammarBackend, vocabulary: Vocabulary) -> str:
    """One of `OUTCOMES`."""
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    spec = GrammarSpec.json_schema(schema, whitespace=Whitespace.COMPACT)
    trusted = select_backend().compile(spec, vocabulary)
    try:
        grammar = backend.compile(spec, vocabulary)
    except GrammarError:
        return "refused"
    rng = random.Random(1)
    outcome = "exact"
    for _ in range(NUM_TEXTS):
        text = random_text(grammar.start(), vocabulary, rng)
        if text is not None and not is_valid(validator, text):
            return "under"
        text = random_text(trusted.start(), vocabulary, rng)
        if text is not None and not accepts(grammar, plain(text)):
            outcome = "over"
    return outcome


def wrapped(schema: Any) -> list[Any]:
    if "$ref" in schema:
        return [schema]
    inside = {**CLOSED, "properties": {"v": schema, "w": {"type": "null"}}, "required": ["v"]}
    return [schema, inside, {"type": "array", "items": schema}]


def shapes_in(schema: Any) -> set[str]:
    prepared = prepare_json_schema(json.dumps(schema), GrammarLimits())
    return set(shapes_of(prepared.document, prepared.draft))


def verified_shapes(vocabulary: Vocabulary, suite: Iterable[dict[str, Any]]) -> list[str]:
    from palmette.constrained.xgrammar_backend import XGrammarBackend

    around = {shape({**CLOSED, "properties": {}, "required": []}), "array items", "null"}
    every = frozenset().union(*(shapes_in(s) for probed in PROBES for s in wrapped(probed)))
    pool = WorkerPool("xgrammar")
    backend = XGrammarBackend(pool=pool, shapes=every)
    good: set[str] = set()
    bad: set[str] = set()
    alone: set[str] = set()  # found right without any other: not what goes wrong in a larger one
    for probed in PROBES:
        inner = shapes_in(probed)
        for schema in wrapped(probed):
            outcome = probe(schema, backend, vocabulary)
            if outcome == "exact":
                good |= inner
                if len(inner) == 1:
                    alone |= {found for found in inner if not found.startswith(("arr", "obj"))}
            elif outcome != "refused":
                bad |= inner - around if schema is not probed else inner
                print(f"{outcome:8} {json.dumps(schema, ensure_ascii=False)[:90]}")
    entries = [
        case
        for case in json.loads(CASES.read_text(encoding="utf-8"))
        if case.get("kind", "json_schema") == "json_schema" and "valid" in case
    ]
    entries += list(suite)
    for entry in entries:
        held = XGrammarBackend(pool=pool, shapes=frozenset(good - bad))
        outcome = run_case(entry, held, vocabulary)
        if outcome in ("over", "under"):
            bad |= shapes_in(entry["input"]) - alone
            print(f"{outcome:8} {json.dumps(entry['input'], ensure_ascii=False)[:90]}")
    backend.close()
    return sorted(good - bad)


def read_suite(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        texts: dict[bool, list[str]] = {True: [], False: []}
        for test in entry["tests"]:
            texts[test["valid"]].append(json.dumps(test["data"], ensure_ascii=False))
        entries.append({"input": entry["schema"], "valid": texts[True], "invalid": texts[False]})
    return entries


def write(table: dict[str, Any]) -> None:
    text = json.dumps(table, indent=1, ensure_ascii=False, sort_keys=True)
    table_path().write_text(text + "\n", encoding="utf-8")
    names = list(table["cases"])
    lines = [
        "# Grammar backends, case by case",
        "",
        "Written by `benchmarks/grammar_capabilities.py --write`. Each case is a failure that was",
        "reported against some runtime. *exact*: what is valid is accepted and what is not is",
        "rejected, or the constraint is refused where that is right; *refused*: the backend does",
        "not serve it and says so; *over*: something valid is rejected; *under*: something invalid",
        "is accepted.",
        "",
        f"| case | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for case in table["cases"][names[0]]:
        lines.append(f"| {case} | {' | '.join(table['cases'][name][case] for name in names)} |")
    shapes = table["verified"].get("xgrammar", {"version": "", "shapes": []})
    lines += ["", f"Shapes of schemas that xgrammar {shapes['version']} is held to:", ""]
    lines += [f"- `{found}`" for found in shapes["shapes"]]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    vocabulary = test_vocabulary()
    table: dict[str, Any] = json.loads(table_path().read_text(encoding="utf-8"))
    backends = installed()
    if "xgrammar" in backends:
        found = verified_shapes(vocabulary, read_suite(arguments.suite))
        version = importlib.metadata.version("xgrammar")
        table["verified"] = {"xgrammar": {"version": version, "shapes": found}}
        table_path().write_text(json.dumps(table), encoding="utf-8")
        verified.cache_clear()
        backends["xgrammar"] = select_backend("xgrammar")
    table["cases"] = {}
    for name, backend in backends.items():
        table["cases"][name] = run_cases(backend, vocabulary)
        counts = Counter(table["cases"][name].values())
        print(f"{name:16}", *(f"{outcome} {counts[outcome]:3}" for outcome in OUTCOMES))
        close = getattr(backend, "close", None)
        if close is not None:
            close()
    if arguments.write:
        write(table)


if __name__ == "__main__":
    main()
