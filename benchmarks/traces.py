"""Programs whose requests share prefixes, as generators from a seed: the traces of `hit_rate.py`.

A trace is a function that runs programs of the language on a backend; nothing is kept in files.
Texts are random letters, and what programs do next depends on the seed alone, so that every
backend sees the same prompts. `size` scales the number of programs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import palmette as pm
from palmette.runtime.client import EngineClient

Trace = Callable[[EngineClient, random.Random, int], None]
LETTERS = "abcdefghijklmnopqrstuvwxyz     "


def text(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))


def gen(name: str, tokens: int) -> pm.Expr:
    return pm.gen(name, max_tokens=tokens, temperature=0, ignore_eos=True)


@pm.function
def answer(s: pm.ProgramState, shots: str, question: str) -> None:
    s += shots + "\nQ: " + question + "\nA:" + gen("answer", 16)


@pm.function
def evaluate(s: pm.ProgramState, shots: str, questions: list[str]) -> None:
    answer.run_batch([(shots, question) for question in questions], num_threads=4)


def few_shot(client: EngineClient, rng: random.Random, size: int) -> None:
    """Tasks of 24 questions behind the same examples, several tasks at once, 4 questions each."""
    tasks = [
        (text(rng, 500, 1000), [text(rng, 40, 160) for _ in range(24)]) for _ in range(4 * size)
    ]
    evaluate.run_batch(tasks, backend=client, num_threads=8)


@pm.function
def talk(s: pm.ProgramState, system: str, questions: list[str], lengths: list[int]) -> None:
    s += pm.system(system)
    for question, length in zip(questions, lengths, strict=True):
        s += pm.user(question)
        s += pm.assistant(gen("reply", length))
        assert s["reply"] is not None  # the next question comes when the reply was read


def chat(client: EngineClient, rng: random.Random, size: int) -> None:
    """Conversations of 3 to 8 turns under 3 system prompts; each waits for the reply."""
    systems = [text(rng, 300, 500) for _ in range(3)]
    talks = []
    for _ in range(20 * size):
        turns = rng.randint(3, 8)
        questions = [text(rng, 60, 200) for _ in range(turns)]
        talks.append((rng.choice(systems), questions, [rng.randint(16, 40) for _ in range(turns)]))
    talk.run_batch(talks, backend=client, num_threads=24)


@pm.function
def search(s: pm.ProgramState, problem: str, ideas: list[list[str]], best: list[int]) -> None:
    s += problem
    for names, kept in zip(ideas, best, strict=True):
        forks = s.fork(len(names))
        forks += [f"\n{name}:" for name in names]
        forks += gen("thought", 24)
        forks += "\nvalue:" + gen("value", 4)
        forks.join()
        assert s["value"]
        s += f"\n{names[kept]}:" + s["thought"][kept]


def tree_of_thought(client: EngineClient, rng: random.Random, size: int) -> None:
    """Problems searched 3 to 5 levels deep: 4 thoughts each, all valued, one goes on."""
    search_problems(client, rng, 8 * size)


def search_problems(client: EngineClient, rng: random.Random, count: int) -> None:
    problems = []
    for _ in range(count):
        levels = rng.randint(3, 5)
        ideas = [[text(rng, 20, 60) for _ in range(4)] for _ in range(levels)]
        problems.append((text(rng, 300, 600), ideas, [rng.randrange(4) for _ in range(levels)]))
    search.run_batch(problems, backend=client, num_threads=8)


@pm.function
def act(s: pm.ProgramState, tools: str, task: str, results: list[str]) -> None:
    s += tools + "\nTask: " + task
    for result in results:
        s += "\nThought:" + gen("thought", 24) + "\nAction:" + gen("action", 8)
        assert s["action"]  # the tool runs
        s += "\nResult: " + result
    s += "\nAnswer:" + gen("answer", 16)


def agents(client: EngineClient, rng: random.Random, size: int) -> None:
    """Agents of 4 kinds, each kind with its tools, that call 2 to 7 of them."""
    kinds = [text(rng, 500, 900) for _ in range(4)]
    tasks = [
        (
            rng.choice(kinds),
            text(rng, 60, 200),
            [text(rng, 40, 300) for _ in range(rng.randint(2, 7))],
        )
        for _ in range(16 * size)
    ]
    act.run_batch(tasks, backend=client, num_threads=16)


TRACES: Mapping[str, Trace] = MappingProxyType(
    {"few-shot": few_shot, "chat": chat, "tree of thought": tree_of_thought, "agents": agents}
)
