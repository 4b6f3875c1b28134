"""What a type checker sees of a program; `test_type_checker.py` asserts the comments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, reveal_type

from pydantic import BaseModel

import palmette as pm


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int


class Row(TypedDict):
    key: str


Verdict = Literal["yes", "no"]
named = pm.gen("person", type=Person)

reveal_type(pm.gen(Person))  # GenExpr[Person]
reveal_type(pm.gen(int, max_tokens=4))  # GenExpr[int]
reveal_type(pm.gen(list[Point]))  # GenExpr[list[Point]]
reveal_type(pm.gen(Row))  # GenExpr[TypedDict(Row, {'key': str})]
reveal_type(pm.gen(Verdict))  # GenExpr[Literal['yes'] | Literal['no']]
reveal_type(pm.gen(Person | None))  # GenExpr[Person | None]
reveal_type(named)  # GenExpr[Person]
reveal_type(pm.gen("text", 16, stop="."))  # Expr


@pm.function
def program(s: pm.ProgramState, question: str) -> int:
    s += pm.user(question) + pm.assistant(named)
    s["points"] = pm.gen(list[Point], retry=2, timeout=5.0)
    s["verdict"] = pm.gen(Verdict)
    reveal_type(s[named])  # Person
    reveal_type(s.get_var("points", list[Point]))  # list[Point]
    reveal_type(s.get_var("verdict", Verdict))  # Literal['yes'] | Literal['no']
    reveal_type(s.get_text("points"))  # str
    reveal_type(s["verdict"])  # Any
    return s[named].age
