"""Constrained texts: pieces of JSON by regex, whole objects by schema, stops instead of either."""

from __future__ import annotations

import json
import re
from enum import Enum

import jsonschema
import pytest
from pydantic import BaseModel

import palmette as sgl
from palmette.lang.testing import FakeModel
from palmette.runtime.client import EngineClient

STRING = r"\"[\w\d ]{1,16}\""


@sgl.function
def city_by_parts(s, document):  # type: ignore[no-untyped-def]
    s += "Tell about the city in this text as JSON.\nText: " + document + "\nJSON:\n"
    with s.var_scope("json"):
        s += '{\n  "name": ' + sgl.gen("name", regex=STRING) + ",\n"
        s += '  "people": ' + sgl.gen("people", regex=r"[1-9][0-9]{0,8}") + ",\n"
        s += '  "north": ' + sgl.gen("north", regex=r"(true|false)") + ",\n"
        s += '  "sights": [' + sgl.gen("first", regex=STRING) + ", "
        s += sgl.gen("second", regex=STRING) + "]\n}"


@pytest.mark.parametrize("eager", [False, True])
def test_an_object_piece_by_piece(any_backend: EngineClient, eager: bool) -> None:
    city_by_parts.run("Warm up.").sync()
    state = city_by_parts.run("A town by a river.", temperature=0, eager=eager)
    value = json.loads(state["json"])
    assert list(value) == ["name", "people", "north", "sights"]
    assert len(value["sights"]) == 2


CITY = (
    r'\{"name": "[\w ]{1,12}", "country": "[\w ]{1,12}", '
    r'"latitude": -?[0-9]{1,2}\.[0-9]{2}, "landmarks": \["[\w ]{1,8}", "[\w ]{1,8}"\]\}'
)


@sgl.function
def city_at_once(s, name):  # type: ignore[no-untyped-def]
    s += "Tell about the city " + name + " as JSON.\n"
    s += sgl.gen("json_output", max_tokens=256, regex=CITY)


def test_an_object_by_one_long_regex(any_backend: EngineClient) -> None:
    states = city_at_once.run_batch([{"name": f"City{i}"} for i in range(4)], temperature=0)
    for state in states:
        assert re.fullmatch(CITY, state["json_output"])
        assert set(json.loads(state["json_output"])) == {
            "name",
            "country",
            "latitude",
            "landmarks",
        }


@sgl.function
def by_stops(s, document):  # type: ignore[no-untyped-def]
    s += document + '\n{\n  "title": "' + sgl.gen("title", max_tokens=8, stop='"') + '",\n'
    s += '  "topic": "' + sgl.gen("topic", max_tokens=8, stop='"') + '",\n'
    s += '  "mood": "' + sgl.gen("mood", max_tokens=8, stop='"') + '"\n}\n'


def test_fields_that_end_at_a_quote(fake) -> None:  # type: ignore[no-untyped-def]
    model: FakeModel = fake(
        {'"title": "': 'A day",', '"topic": "': 'Sun and sea"', '"mood": "': 'good" and'}
    )
    state = by_stops.run("It was hot.")
    assert json.loads(state.text().partition("\n")[2]) == {
        "title": "A day",
        "topic": "Sun and sea",
        "mood": "good",
    }
    assert model.calls[1].cached_tokens > len(model.calls[0].request.prompt_ids)


class House(Enum):
    NORTH = "north"
    SOUTH = "south"


class Student(BaseModel):
    name: str
    year: int
    house: House
    friends: list[str]


@sgl.function
def student(s):  # type: ignore[no-untyped-def]
    s += sgl.user("Invent a student.")
    s += sgl.assistant(sgl.gen("student", max_tokens=256, json_schema=Student))


def test_a_pydantic_model_gives_valid_objects(fake) -> None:  # type: ignore[no-untyped-def]
    fake()
    state = student.run()
    assert Student.model_validate_json(state["student"]).house is House.NORTH


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    }
)


@sgl.function
def by_schema(s, text):  # type: ignore[no-untyped-def]
    s += sgl.system("Answer in JSON.")
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("json_output", max_tokens=128, json_schema=SCHEMA))


def test_every_object_of_a_schema_is_valid(any_backend: EngineClient) -> None:
    states = by_schema.run_batch([{"text": f"person {i}"} for i in range(5)], temperature=0)
    for state in states:
        jsonschema.validate(json.loads(state["json_output"]), json.loads(SCHEMA))


@sgl.function
def greeting(s):  # type: ignore[no-untyped-def]
    s += "\u4f60\u597d: " + sgl.gen("name", regex="[\u4e00-\u9fff]{2,4}", max_tokens=12)


def test_a_regex_of_chinese_characters(any_backend: EngineClient) -> None:
    assert re.fullmatch("[\u4e00-\u9fff]{2,4}", greeting.run(temperature=0)["name"])


BYTE = r"(25[0-5]|2[0-4]\d|[01]?\d\d?)"


@sgl.function
def address(s):  # type: ignore[no-untyped-def]
    s += "The address of a local machine is " + sgl.gen(
        "ip",
        temperature=0,
        regex=r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
    )


def test_a_regex_of_an_address(any_backend: EngineClient) -> None:
    assert len(address.run()["ip"]) >= 7
