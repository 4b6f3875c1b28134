"""The table of what each backend serves exactly only gets better; xgrammar is held to its list."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palmette.constrained import masks
from palmette.constrained.backend import GrammarBackend, GrammarState, select_backend
from palmette.constrained.capabilities import shape, table_path, verified
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
TABLE: dict[str, Any] = json.loads(table_path().read_text(encoding="utf-8"))
NEEDS_XGRAMMAR = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None
    or importlib.metadata.version("xgrammar") != verified("xgrammar").version,
    reason="the verified version of xgrammar is not installed",
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a"]}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def xgrammar() -> Iterator[GrammarBackend]:
    backend = select_backend("xgrammar")
    yield backend
    backend.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name",
    ["llguidance", "outlines_core", "pure", pytest.param("xgrammar", marks=NEEDS_XGRAMMAR)],
)
def test_no_case_got_worse(
    vocabulary: Vocabulary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from grammar_capabilities import OUTCOMES, run_cases

    backend = select_backend(name)
    found = run_cases(backend, vocabulary)
    if hasattr(backend, "close"):
        backend.close()
    known = TABLE["cases"][name]
    worse = {
        case: (known[case], outcome)
        for case, outcome in found.items()
        if OUTCOMES.index(outcome) > OUTCOMES.index(known.get(case, "refused"))
    }
    assert worse == {}
    assert "under" not in found.values()


def test_shapes() -> None:
    assert shape({}) == "any"
    assert shape({"type": ["string", "null"], "title": "t"}) == "null|string"
    assert shape({"enum": ["a", 1, None], "$defs": {}}) == "any enum:null|number|text"
    assert shape({"type": "object", "additionalProperties": False, "properties": {}}) == (
        "object additionalProperties=false properties"
    )
    assert shape({"const": "\n"}) == "any const:odd text"


@NEEDS_XGRAMMAR
def test_xgrammar_serves_verified_shapes_soundly(
    vocabulary: Vocabulary, xgrammar: GrammarBackend
) -> None:
    grammar = xgrammar.compile(GrammarSpec.json_schema(PERSON), vocabulary)
    state = grammar.start()
    text = b'{"name": "\xc3\xa9\\n", "tags": ["a"]}'
    assert [state.accept(byte) for byte in text] == [True] * len(text)
    assert state.may_end
    assert state.is_done
    row = masks.allocate(1, vocabulary.size)[0]
    state.fill(row)
    assert masks.allowed_ids(row).tolist() == sorted(vocabulary.stop_ids)
    state.rollback(len(text) - len(b'{"name": "'))
    walk(state, vocabulary)
    assert state.accept(ord("\\"))
    fork = state.fork()
    assert not state.accept(ord("u")), "half a surrogate pair could be spelt so"
    assert fork.accept(ord("n"))
    assert grammar.shortest is not None
    assert grammar.check is not None


def walk(state: GrammarState, vocabulary: Vocabulary) -> None:
    """The mask is what `accept` takes, without special ids."""
    row = masks.allocate(1, vocabulary.size)[0]
    state.fill(row)
    allowed = masks.allowed_ids(row).tolist()
    assert allowed == [i for i in range(vocabulary.size) if state.fork().accept(i)]
    assert not set(allowed) & vocabulary.special_ids


@NEEDS_XGRAMMAR
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string", "maxLength": 5}, ""),
        (
            {"type": "array", "items": {"type": "string", "pattern": "^a$", "minLength": 1}},
            "/items",
        ),
        ({"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]}, ""),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ""),
    ],
)
def test_xgrammar_refuses_what_was_not_verified(
    vocabulary: Vocabulary, xgrammar: GrammarBackend, schema: Any, pointer: str
) -> None:
    with pytest.raises(GrammarError, match="use grammar_backend 'auto'") as caught:
        xgrammar.compile(GrammarSpec.json_schema(schema), vocabulary)
    assert caught.value.pointer == pointer
