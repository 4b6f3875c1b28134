"""The programs in examples/: what they print with scripted answers, and on the default model."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import palmette as pm
from palmette.lang.testing import FakeModel, Script

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "demo")


@dataclass(frozen=True)
class Case:
    script: Script
    printed: str  # a pattern that the whole output matches
    calls: int
    shape: str  # a pattern that the output on the default model matches


ORDER = '{"customer": "%s", "product": "%s", "quantity": %d, "delivery": "express"}'
STORY = [" He ran", " He slept"]
CASES = {
    "few_shot_classification": Case(
        {"every day": " positive", "first week": " negative", "love it": " positive"},
        r"positive  Wonderful.*\nnegative  It broke.*\npositive  My kids.*\n(.*\n){1}"
        r"\d+ of \d+ prompt tokens computed\n",
        calls=8,
        shape=r"((positive|negative)  ?.*\n){4}[1-9]\d* of \d+ prompt tokens computed\n",
    ),
    "tree_of_thought": Case(
        {
            "red ball": " He ran.",
            "He ran": " He slept.",
            "He slept": " The end.",
            "Answer:": " yes",
        },
        r"level 1:( [01]\.\d{3}){4} best .*\nlevel 2:.*\nlevel 3:.*\n"
        r"A little fox found a red ball\. He ran\. He slept\. The end\.\n",
        calls=36,
        shape=r"(level [1-3]:( [01]\.\d{3}){4} best [01]\.\d{3}\n){3}"
        r"A little fox found a red ball\.[^\0]+\.\n",
    ),
    "self_consistency": Case(
        {"Let us think": "7 and 5\n", "answer is": ["12", "12", "35", "12"]},
        r"( +(12|35)  7 and 5\n){8}6 of 8 chains say 12\n",
        calls=16,
        shape=r"( *-?\d+  .*\n){8}[1-8] of 8 chains say -?\d+\n",
    ),
    "agent_with_tools": Case(
        {
            re.compile(r"plums are there\?\nTool:$"): " look_up",
            re.compile(r"apples are there\?\nTool:$"): " look_up",
            re.compile(r"25\?\nTool:$"): " add",
            re.compile(r"plums are there\?\nTool: look_up\nArguments: $"): '{"product": "plums"}',
            re.compile(r"apples are there\?\nTool: look_up\nArguments: $"): '{"product": "apples"}',
            re.compile(r"25\?\nTool: add\nArguments: $"): '{"a": 17, "b": 25}',
            re.compile(r"Answer:$"): [" It is 42.\n", " Seven.\n", " Twelve.\n"],
        },
        r"add\(a=17 b=25\) = 42: It is 42\.\n"
        r"look_up\(product='plums'\) = 7 plums in stock: Seven\.\n"
        r"look_up\(product='apples'\) = 12 apples in stock: Twelve\.\n",
        calls=18,
        shape=r"((add\(a=-?\d+ b=-?\d+\) = -?\d+|"
        r"look_up\(product='\w+'\) = \d+ \w+ in stock):.*\n){3}",
    ),
    "json_extraction": Case(
        {"Tom": ORDER % ("Tom", "chairs", 12), "Anna": ORDER % ("Anna", "red tables", 3)},
        r"12 chairs for Tom \(express\)\n3 red tables for Anna \(express\)\n",
        calls=2,
        shape=r"(\d{1,4} .{0,24} for .{0,24} \((standard|express)\)\n){2}",
    ),
    "multi_document_qa": Case(
        {
            "Ulm was opened in 1907. It is 140 metres long.\nThe year it was opened:": " 1907",
            "Linz was opened in 1940. It is 250 metres long.\nThe year it was opened:": " 1940",
            "Graz was opened in 1993. It is 90 metres long.\nThe year it was opened:": " 1993",
            "In 1940 they opened the bridge at": " Linz",
            "In 1993 they opened the bridge at": " Graz",
        },
        r"In 1940 .* at Linz\nIn 1993 .* at Graz\n"
        r"Facts about bridges\.\n(\nDocument \d: The bridge.*\nThe year it was opened: \d{4}){3}"
        r"\n\nIn 1993 they opened the bridge at Graz\n",
        calls=18,
        shape=r"(In \d{4} .* at (Ulm|Linz|Graz)\n){2}Facts about bridges\.\n"
        r"(\nDocument .*\nThe year it was opened: \d{4}){3}\n\nIn .*\n",
    ),
    "llm_judge": Case(
        {re.compile("This essay is$"): " clear", "My advice is to": " go on."},
        r"trees: 0\.\d\d .*\. Advice: go on\ndogs: 0\.\d\d .*\. Advice: go on\n"
        r"better: (trees|dogs)\n",
        calls=18,
        shape=r"((trees|dogs): [01]\.\d\d( (un)?clear,).* Advice: .+\n){2}better: (trees|dogs)\n",
    ),
    "map_reduce_summary": Case(
        {
            "moved the library": " They moved.",
            "filled again": " They filled.",
            "opened the library": " They opened.",
            "They moved. They filled. They opened.": " A library week.",
            "It is about a": "library",
        },
        r"- They moved\n- They filled\n- They opened\nlibrary: A library week\n",
        calls=7,
        shape=r"(- .+\n){3}(library|school|choir): .+\n",
    ),
    "rag_pinned_documents": Case(
        {"a ticket?": " 12 euros", "car park?": " 80 places", "of parking?": " 3 euros"},
        r"How many euros is a ticket\? 12 euros  \[tickets\]\n  (\d+) of \d+ prompt tokens cached\n"
        r"How many places has the car park\? 80 places  \[parking\]\n  .*\n"
        r"How many euros is an hour of parking\? 3 euros  \[parking\]\n  .*\n",
        calls=6,
        shape=r"[1-9]\d* tokens pinned\n(How many .* \d+ (euros|places)  \[\w+\]\n"
        r"  [1-9]\d* of \d+ prompt tokens cached\n){3}",
    ),
    "batch_labelling": Case(
        {"charged twice": " billing", "arrived": " delivery", "black": " defect", "Urgent:": " no"},
        r"billing: \d+, (defect|delivery): .*\n"
        r"billing  no   Hello, my card was charged twice\.\n(.*\n){3}100 labelled, 0 failed\n",
        calls=800,
        shape=r"(\w+: \d+,? ?)+\n((billing|delivery|defect) +(yes|no) .*\n){4}"
        r"100 labelled, 0 failed\n",
    ),
    "streaming_chat": Case(
        {"of France?": " Paris.", "of Italy?": " Rome.", "Thank you!": " Gladly."},
        r"> What is .*\n Paris\.\n> And of Italy\?\n Rome\.\n> Thank you!\n Gladly\.\n7 messages\n",
        calls=3,
        shape=r"(> .*\n.*\w.*\n){3}7 messages\n",
    ),
    "async_fan_out": Case(
        {
            "France lies in ": "Europe",
            "Japan lies in ": "Asia",
            "Kenya lies in ": "Africa",
            "Brazil lies in ": "America",
            "Italy lies in ": "Europe",
            "China lies in ": "Asia",
            "African country is": " Kenya",
        },
        r"France  Europe\nJapan   Asia\nKenya   Africa\nBrazil  America\nItaly   Europe\n"
        r"China   Asia\nin Africa: Kenya\n",
        calls=12,
        shape=r"(\w+ +(Europe|Asia|Africa|America)\n){6}in Africa: \w+\n",
    ),
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks annotations up there
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_case_and_a_row_in_the_table() -> None:
    assert sorted(CASES) == NAMES
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", table, re.M)) == sorted(
        [*NAMES, "demo"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_the_script_answers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = FakeModel(CASES[name].script)
    load(name).main(model)
    printed = capsys.readouterr().out
    assert re.fullmatch(CASES[name].printed, printed), printed
    model.assert_calls(CASES[name].calls)


@pytest.fixture(scope="module")
def engine(default_model: Path) -> Iterator[pm.Engine]:
    engine = pm.Engine.load(pm.EngineConfig(model=str(default_model), page_size=4))
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_on_the_default_model(
    name: str, engine: pm.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    load(name).main(engine)
    printed = capsys.readouterr().out
    assert re.fullmatch(CASES[name].shape, printed), printed
