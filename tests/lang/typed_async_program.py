"""What a type checker sees of an async program; `test_type_checker.py` asserts the comments."""

from __future__ import annotations

from typing import reveal_type

from pydantic import BaseModel

import palmette as pm


class Person(BaseModel):
    age: int


person = pm.gen("person", type=Person)


@pm.function
async def extract(s: pm.AsyncState, text: str) -> int:
    s += text + person
    reveal_type(await s[person])  # Person
    reveal_type(await s.get_var("person", Person))  # Person
    reveal_type(await s.get_text("person"))  # str
    reveal_type(await s["person"])  # Any
    reveal_type(s.fork(2)[0])  # AsyncState
    return (await s[person]).age


@pm.function
def plain(s: pm.ProgramState) -> None:
    reveal_type(s.fork(2)[0])  # ProgramState


async def main() -> None:
    reveal_type(extract)  # AsyncFunction
    reveal_type(plain)  # Function
    reveal_type(await extract("x"))  # ProgramState
    reveal_type(await plain.run_async())  # ProgramState
    reveal_type(extract.start("x"))  # AsyncState
