"""Random programs for differential tests: drawn as data, run by `plain` and, awaited, by `awaited`.

`draw(seed, on_fake=...)` gives the operations of one program. Every gen is greedy or has a seed, so
that a program means one text, whichever reading runs it.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

import palmette as pm

Op = tuple[Any, ...]
Names = dict[str, str]  # variable -> what it holds: text, list (of texts), typed, other
Body = Generator[Op, Any, None]


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=99)


@dataclass
class Point:
    x: bool
    y: Literal["a", "b"]


TYPES: dict[str, Any] = {
    "int": int,
    "bool": bool,
    "literal": Literal["yes", "no", "yesterday"],
    "dataclass": Point,
    "pydantic": Person,
    "list": list[Literal[1, 22]],
}
METHODS = (
    pm.token_length_normalized,
    pm.greedy_token_selection,
    pm.unconditional_likelihood_normalized,
    pm.constrained_likelihood,
)
ARGUMENTS: dict[str, Any] = {"text": "the <|im_end|>dog", "count": 4, "heat": 0.7}
TEXTS = (
    "a ",
    " b",
    "word",
    "\n",
    "",
    "the cat sat",
    "<|im_end|>",
    "\u00e9\u4e2d",
    "ha ha ha",
    "{}",
)
CHOICES = (["a", " b"], [" long one", "s"], ["the cat", "the dog"], ["\u00e9", "\u4e2d", "e"])
PREFIXED = (["x", "xy", "xyz"], ["ha", "haha"], ["the", "the cat"])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
OPTIONS: dict[str, tuple[object, ...]] = {  # of a gen without a constraint
    "min_tokens": (1,),
    "stop": ("a", ["\n", " "], "th", ["e", "\u00e9"], "{text}", ["x", "{text}!"]),
    "stop_regex": ("[aeiou]t?", ["x+y", "\\s"]),
    "top_p": (0.5, 0.9),
    "top_k": (1, 5, -1),
    "min_p": (0.1,),
    "frequency_penalty": (0.5, -0.5),
    "presence_penalty": (1.0,),
    "repetition_penalty": (1.3,),
    "n": (2, 3),
    "priority": (1, -1),
    "max_tokens": ("{count}",),
    "temperature": ("{heat}",),
}
ID_OPTIONS: dict[str, tuple[object, ...]] = {  # a FakeModel gives out ids as texts appear
    "stop_token_ids": ([5, 70, 100],),
    "logit_bias": ({"40": 5.0, "80": -100.0},),
    "ignore_eos": (True,),
    "skip_special_tokens": (False,),
}
CONSTRAINTS: tuple[dict[str, object], ...] = (
    {"regex": "(ab|cd)+", "max_tokens": 8},
    {"regex": "[0-9]{2,4}", "max_tokens": 8},
    {"dtype": "bool", "max_tokens": 8},
    {"json_schema": SCHEMA, "max_tokens": 24},
    {"ebnf": 'root ::= "a" [0-9] ("b" | "cc")', "max_tokens": 12},
    *({"type": name, "max_tokens": 60} for name in TYPES),
)


class _Drawing:
    def __init__(self, seed: int, *, on_fake: bool) -> None:
        self._random = random.Random(seed)
        self._on_fake = on_fake
        self._left = 6 + seed % 14  # operations still to draw

    def ops(self, names: Names, depth: int, in_role: bool = False) -> list[Op]:
        drawn = []
        for _ in range(self._random.randint(1, 5)):
            if self._left > 0:
                self._left -= 1
                drawn += self._op(names, depth, in_role)
        return drawn

    def _op(self, names: Names, depth: int, in_role: bool) -> list[Op]:
        kinds = ["text", "gen", "gen", "gen", "set", "select", "read", "argument", "call", "bind"]
        kinds += ["scope", "nested", "inner", "sum"]
        kinds += [] if in_role else ["role", "with", "halves"]
        kinds += ["fork", "fork", "group", "copy"] if depth < 3 else []
        kind = self._random.choice(kinds)
        return self._leaf(kind, names) or self._part(kind, names, depth, in_role)

    def _leaf(self, kind: str, names: Names) -> list[Op]:
        choose = self._random.choice
        match kind:
            case "text":
                return [("text", choose(TEXTS))]
            case "argument":
                return [("argument", choose(["text", "count"]))]
            case "gen" | "set" | "sum":
                return [(kind, *self._gen(names), choose(TEXTS))]
            case "select":
                method = self._random.randrange(len(METHODS))
                name = self._name(names, "text")
                return [("select", name, choose((*CHOICES, *PREFIXED, ["{text}", "b"])), method)]
            case "read":
                known = [name for name, kind in names.items() if kind != "other"]
                return [("read", name, names[name]) for name in known[-1:]]
            case "call":
                known = choose(list(names)) if names else None
                if known is not None:
                    names["length"] = "other"
                return [] if known is None else [("call", "length", known)]
            case "bind":
                names["bound"] = "other"
                return [("bind", "bound", choose([1, "v", [1, 2]]))]
            case "role":
                return [("role", choose(["user", "assistant"]), choose(TEXTS), *self._gen(names))]
        return []

    def _part(self, kind: str, names: Names, depth: int, in_role: bool) -> list[Op]:
        match kind:
            case "scope":
                inside = self.ops(names, depth, in_role)
                names["scope"] = "text"
                return [("scope", inside)]
            case "nested":
                return [("nested", self.ops(names, depth + 1, in_role))]
            case "inner":
                return [("inner", self.ops({}, 3))]
            case "with" | "halves":
                role = self._random.choice(["user", "assistant"])
                return [(kind, role, self.ops(names, depth + 1, True))]
            case "fork" | "group" | "copy":
                return [self._fork(kind, names, depth, in_role)]
        return []

    def _fork(self, kind: str, names: Names, depth: int, in_role: bool) -> Op:
        mode = self._random.choice(["gather_variable", "concate_and_append", None])
        if kind == "group":
            name, options = self._gen(known := dict(names))
            if mode == "gather_variable" and name not in names:
                names[name] = "list" if known[name] == "text" else "other"
            text = self._random.choice(TEXTS)
            return ("group", self._random.randint(1, 3), text, name, options, mode)
        inside = [dict(names) for _ in range(1 if kind == "copy" else self._random.randint(1, 3))]
        branches = [self.ops(one, depth + 1, in_role) for one in inside]
        if kind == "copy" or mode == "gather_variable":
            for name in [name for one in inside for name in one if name not in names]:
                names[name] = "other"
        return ("copy", branches[0]) if kind == "copy" else ("fork", branches, mode)

    def _name(self, names: Names, kind: str) -> str:
        name = self._random.choice("pqrst")
        names[name] = kind
        return name

    def _gen(self, names: Names) -> tuple[str, dict[str, object]]:
        draw = self._random
        options: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 3, 5, 8]), "temperature": 0}
        if draw.random() < 0.5:
            options |= {"temperature": draw.choice([0.3, 1.0, 1.7]), "seed": draw.randrange(5)}
        if draw.random() < 0.3:
            options |= draw.choice(CONSTRAINTS)
            if self._on_fake and "ebnf" in options:
                del options["ebnf"]
        else:
            possible = OPTIONS if self._on_fake else OPTIONS | ID_OPTIONS
            for name in possible:
                if draw.random() < 0.1:
                    options[name] = draw.choice(possible[name])
        if options["temperature"] != 0:
            options.setdefault("seed", 1)
        if not self._on_fake and draw.random() < 0.2:
            options |= {"return_logprob": True, "logprob_start_len": 0}
            options |= {"top_logprobs_num": draw.choice([0, 2]), "return_text_in_logprobs": True}
        if "type" not in options and draw.random() < 0.05:  # thinking may leave no tokens for it
            options["reasoning_end"] = "a"
        kind = "list" if "n" in options else "typed" if "type" in options else "text"
        return self._name(names, kind), options


def draw(seed: int, *, on_fake: bool) -> list[Op]:
    """The operations of a program. `on_fake`: without what a FakeModel has no answer for."""
    drawing, names = _Drawing(seed, on_fake=on_fake), Names()
    return drawing.ops(names, 0) + drawing.ops(names, 0)


def _filled(value: object, given: Mapping[str, object]) -> Any:
    """`value` with arguments of the program, which a compilation gives as placeholders."""
    match value:
        case str() if value[:1] == "{" and value.strip("{}!") in given:
            argument = given[value.strip("{}!")]
            return f"{argument}!" if value.endswith("!") else argument
        case list():
            return [_filled(item, given) for item in value]
        case _:
            return value


def _gen(name: str | None, options: Mapping[str, object], given: Mapping[str, object]) -> Any:
    filled = {key: _filled(value, given) for key, value in options.items()}
    if "type" in filled:
        filled["type"] = TYPES[filled["type"]]
    return pm.gen(name, **filled)


def _append(s: Any, op: Op, given: Mapping[str, object]) -> None:
    """Operations that read nothing and have no parts."""
    match op:
        case ("text", text):
            s += text
        case ("argument", name):
            s += f"[{given[name]}]"
        case ("gen", name, options, _):
            s += _gen(name, options, given)
        case ("set", name, options, _):
            s[name] = _gen(None, options, given)
        case ("sum", name, options, text):
            s += text + _gen(name, options, given) + text
        case ("select", name, choices, method):
            s += pm.select(name, _filled(choices, given), choices_method=METHODS[method])
        case ("call", name, argument):
            s.call(name, repr, argument)
        case ("bind", name, value):
            s[name] = value
        case ("role", role, text, name, options):
            s += getattr(pm, role)(text + _gen(name, options, given))


def _write(s: Any, ops: list[Op], given: Mapping[str, object]) -> Body:
    """Run operations; what must be read, or run by another program, is yielded."""
    for op in ops:
        _append(s, op, given)
        match op:
            case ("read", name, "list"):
                s += ", ".join((yield ("value", s, name)))
            case ("read", name, kind):
                s += "<" + (yield ("text" if kind == "typed" else "value", s, name)) + ">"
            case ("scope", inside):
                with s.var_scope("scope"):
                    yield from _write(s, inside, given)
            case ("nested", inside):
                yield ("nested", s, inside)
            case ("inner", inside):
                s += yield ("inner", inside)
            case ("with", role, inside):
                with getattr(s, role)():
                    yield from _write(s, inside, given)
            case ("halves", role, inside):
                getattr(s, f"{role}_begin")()
                yield from _write(s, inside, given)
                getattr(s, f"{role}_end")()
            case ("copy", inside):
                with s.copy() as copied:
                    yield from _write(copied, inside, given)
            case ("fork", branches, mode):
                forks = s.fork(len(branches))
                for fork, inside in zip(forks, branches, strict=True):
                    yield from _write(fork, inside, given)
                if mode is not None:
                    forks.join(mode)
            case ("group", size, text, name, options, mode):
                forks = s.fork(size)
                expr = _gen(name, options, given)
                forks += [f"{text}{i}" + expr for i in range(size)]
                if mode is not None:
                    forks.join(mode)


@pm.function
def plain(s: pm.ProgramState, ops: list[Op], text: str, count: int, heat: float) -> None:
    given = {"text": text, "count": count, "heat": heat}
    body, answer = _write(s, ops, given), None
    while True:
        try:
            question = body.send(answer)
        except StopIteration:
            return
        match question:
            case ("value", state, name):
                answer = state[name]
            case ("text", state, name):
                answer = state.get_text(name)
            case ("nested", state, inside):
                answer = plain(state, inside, **given)
            case ("inner", inside):
                answer = plain.run(inside, **given).text()


@pm.function
async def awaited(s: pm.AsyncState, ops: list[Op], text: str, count: int, heat: float) -> None:
    given = {"text": text, "count": count, "heat": heat}
    body, answer = _write(s, ops, given), None
    while True:
        try:
            question = body.send(answer)
        except StopIteration:
            return
        match question:
            case ("value", state, name):
                answer = await state[name]
            case ("text", state, name):
                answer = await state.get_text(name)
            case ("nested", state, inside):
                answer = await awaited(state, inside, **given)
            case ("inner", inside):
                answer = (await awaited(inside, **given)).text()
