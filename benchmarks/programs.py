"""Programs over HTTP: compiled, call by call, and written with the `openai` client.

    python benchmarks/programs.py [--rounds 5] [--branch 4] [--levels 4] [--only NAME]
                                  [-- server options]

Starts `palmette serve` with the default model (options after `--` go to it). Prints one JSON line.
`sent`: for programs like those of SGLang's benchmarks, run for several questions, the characters of
text in all requests over the characters that the program writes, each text counted once (its
constants, and each question's arguments), and the HTTP calls of one run: compiled, and call by
call. `seconds`: wall time as [median, spread], spread = (max - min) / median over the rounds, of a
tree of thought, a judge with a fork of 6, and questions over several documents; the ways take turns
and begin with an empty cache. All generate the same number of tokens, greedily. `ahead`: how much
longer than compiled the other ways took in the same round, as [least, median, most] in percent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import openai

import palmette as pm
from palmette.lang.ir import Extend, Select, Template, Text

TOKENS = 8
SHOTS = "".join(
    f"Question: What is {a} plus {b}?\n"
    f"Answer: {a} plus {b} makes {a + b}, so the answer is {a + b}.\n\n"
    for a in range(3, 6)
    for b in range(11, 14)
)
ESSAY = " ".join(
    f"Sentence {i} says that practice makes better what talent began." for i in range(30)
)
ASPECTS = ("clarity", "depth", "style", "logic", "evidence", "tone")
DOCUMENTS = [
    " ".join(
        f"In chapter {j} of book {i} the river floods field number {i * j}." for j in range(12)
    )
    for i in range(1, 7)
]
REQUIRED = {"temperature": 0, "max_tokens": TOKENS}

# Text sent


@pm.function
def hellaswag(s: pm.ProgramState, question: str, choices: list[str]) -> None:
    s += SHOTS + question
    s += pm.select("answer", choices)


@pm.function
def gsm8k(s: pm.ProgramState, question: str) -> None:
    s += SHOTS + "Question: " + question + "\nAnswer:"
    s += pm.gen("answer", stop="Question", ignore_eos=True, **REQUIRED)


@pm.function
def react(s: pm.ProgramState, question: str) -> None:
    s += SHOTS + "Question: " + question
    for step in range(1, 7):
        s += f"\nThought {step}:" + pm.gen(f"thought{step}", ignore_eos=True, **REQUIRED)
        s += f"\nAction {step}:" + pm.gen(f"action{step}", ignore_eos=True, **REQUIRED)
    s += "\nFinish:" + pm.gen("finish", ignore_eos=True, **REQUIRED)


@pm.function
def json_fields(s: pm.ProgramState, city: str) -> None:
    s += SHOTS + "Facts about " + city + ' as JSON:\n{\n  "name": '
    s += pm.gen("name", regex='"[A-Z][a-z]{2,12}"', **REQUIRED)
    for field in ("population", "area", "latitude", "longitude"):
        s += f',\n  "{field}": ' + pm.gen(field, regex="[0-9]{1,6}", **REQUIRED)


SENT: dict[str, tuple[pm.Function, list[dict[str, object]]]] = {
    "hellaswag": (
        hellaswag,
        [
            {"question": f"The cook {verb} and then", "choices": [f" {k}{verb} it" for k in "abcd"]}
            for verb in ("stirs", "salts", "tastes")
        ],
    ),
    "gsm8k": (gsm8k, [{"question": f"What is {n} plus {n + 7}?"} for n in range(3)]),
    "react": (react, [{"question": f"Where does river {n} end?"} for n in "XYZ"]),
    "json": (json_fields, [{"city": city} for city in ("Rome", "Oslo", "Lima")]),
}


class Wire:
    """A client and what it has sent."""

    def __init__(self, url: str) -> None:
        self.client = pm.RuntimeEndpoint(url)
        self.client.info()
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.client._client.event_hooks["request"].append(self._note)

    async def _note(self, request: httpx.Request) -> None:
        body = json.loads(request.content) if request.content else {}
        self.sent.append((request.url.path, body))


def text_sent(url: str, function: pm.Function, runs: list[dict[str, object]]) -> dict[str, object]:
    program = function.compile()
    distinct = sum(map(len, set(constants(program))))
    distinct += sum(len(str(value)) for run in runs for value in run.values())
    compiled, single = Wire(url), Wire(url)
    for run in runs:
        program.run(backend=compiled.client, **run).sync()
        function.run(backend=single.client, **run).sync()
    told = sum(
        sum(map(len, constants(program))) if path == "/v1/programs"
        else sum(len(str(value)) for value in body["arguments"].values())
        for path, body in compiled.sent
    )  # fmt: skip
    prompts = sum(len(single.client.decode(ids)) for ids in prompts_of(single.sent))
    calls = [path for path, _ in single.sent if path == "/generate"]
    tokenized = [body for path, body in single.sent if path == "/tokenize"]
    runs_made = [path for path, _ in compiled.sent if path.endswith("/run")]
    answer = {
        "compiled": round(told / distinct, 2),
        "single": round(prompts / distinct, 2),
        "calls_compiled": len(runs_made) // len(runs),
        "calls_single": (len(calls) + len(tokenized)) / len(runs),
        "bytes_compiled": sum(len(json.dumps(body)) for _, body in compiled.sent),
        "bytes_single": sum(len(json.dumps(body)) for _, body in single.sent),
    }
    compiled.client.close()
    single.client.close()
    return answer


def prompts_of(sent: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    found: list[list[int]] = []
    for path, body in list(sent):
        if path == "/generate":
            ids = body["input_ids"]
            found += ids if isinstance(ids[0], list) else [ids]
    return found


def constants(program: pm.Program) -> list[str]:
    """The texts of a program, as often as it writes them."""
    texts: list[str] = []
    for node in program.nodes:
        if isinstance(node, Extend) and isinstance(node.piece, Text):
            texts.append(node.piece.text)
        elif isinstance(node, Select):
            texts += [choice for choice in node.choices if not isinstance(choice, Template)]
    return texts


# Wall time


def gen(name: str) -> Any:
    return pm.gen(name, ignore_eos=True, **REQUIRED)


def tree_program(branch: int, levels: int) -> pm.Function:
    @pm.function
    def tree_of_thought(s: pm.ProgramState, question: str) -> None:
        s += SHOTS + "Question: " + question + "\n"
        grow(s, 1)

    def grow(state: pm.ProgramState, level: int) -> None:
        forks = state.fork(branch)
        forks += lambda i: f"Step {level}, way {i}:" + gen("step") + "\n"
        if level < levels:
            for fork in forks:
                grow(fork, level + 1)

    return tree_of_thought


@pm.function
def judge(s: pm.ProgramState, essay: str) -> None:
    s += "Judge this essay.\n" + essay + "\n"
    forks = s.fork(len(ASPECTS))
    forks += [f"Its {aspect}:" + gen("view") for aspect in ASPECTS]
    forks.join()
    s += "Views:\n" + "\n".join(s["view"]) + "\nIn all:" + gen("all")


@pm.function
def multi_document(s: pm.ProgramState, question: str) -> None:
    s += "Answer from these documents.\n"
    forks = s.fork(len(DOCUMENTS))
    forks += [f"Document: {text}\nIt says of the question:" + gen("fact") for text in DOCUMENTS]
    forks.join("concate_and_append")
    s += "\nQuestion: " + question + "\nAnswer:" + gen("answer")


class OpenAI:
    """The same programs, written by hand."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: openai.AsyncOpenAI | None = None

    async def complete(self, prompt: str) -> str:
        assert self._client is not None
        answer = await self._client.completions.create(
            model="default", prompt=prompt, max_tokens=TOKENS, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return answer.choices[0].text

    async def tree(self, branch: int, levels: int, question: str) -> None:
        async def grow(prompt: str, level: int) -> None:
            async def one(i: int) -> None:
                whole = f"{prompt}Step {level}, way {i}:"
                whole += await self.complete(whole) + "\n"
                if level < levels:
                    await grow(whole, level + 1)

            await asyncio.gather(*(one(i) for i in range(branch)))

        await grow(SHOTS + "Question: " + question + "\n", 1)

    async def judge(self, essay: str) -> None:
        head = "Judge this essay.\n" + essay + "\n"
        views = await asyncio.gather(*(self.complete(f"{head}Its {one}:") for one in ASPECTS))
        await self.complete(head + "Views:\n" + "\n".join(views) + "\nIn all:")

    async def documents(self, question: str) -> None:
        head = "Answer from these documents.\n"
        asked = [f"Document: {text}\nIt says of the question:" for text in DOCUMENTS]
        facts = await asyncio.gather(*(self.complete(head + one) for one in asked))
        whole = "".join(one + fact for one, fact in zip(asked, facts, strict=True))
        await self.complete(f"{head}{whole}\nQuestion: {question}\nAnswer:")

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="-") as client:
                self._client = client
                await work()

        asyncio.run(main())


def ways(url: str, branch: int, levels: int) -> dict[str, dict[str, Callable[[], object]]]:
    endpoint, other = pm.RuntimeEndpoint(url), OpenAI(url)
    tree = tree_program(branch, levels)
    compiled = {one.__name__: one.compile() for one in (tree, judge, multi_document)}
    question = "Which way leads to the sea?"
    return {
        "tree_of_thought": {
            "compiled": lambda: (
                compiled["tree_of_thought"].run(question=question, backend=endpoint).sync()
            ),
            "single": lambda: tree.run(question, backend=endpoint).sync(),
            "openai": lambda: other.run(lambda: other.tree(branch, levels, question)),
        },
        "judge": {
            "compiled": lambda: compiled["judge"].run(essay=ESSAY, backend=endpoint).sync(),
            "single": lambda: judge.run(ESSAY, backend=endpoint).sync(),
            "openai": lambda: other.run(lambda: other.judge(ESSAY)),
        },
        "multi_document": {
            "compiled": lambda: (
                compiled["multi_document"].run(question=question, backend=endpoint).sync()
            ),
            "single": lambda: multi_document.run(question, backend=endpoint).sync(),
            "openai": lambda: other.run(lambda: other.documents(question)),
        },
    }


def wall_times(
    url: str, rounds: int, branch: int, levels: int, *, only: str | None
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by program and way."""
    found: dict[str, dict[str, list[float]]] = {}
    for program, by_way in ways(url, branch, levels).items():
        if only not in (None, program):
            continue
        times: dict[str, list[float]] = {way: [] for way in by_way}
        order = list(by_way)
        for number in range(rounds + 1):  # the first is a rehearsal
            for way in order[number % len(order) :] + order[: number % len(order)]:
                flush(url)
                start = perf_counter()
                by_way[way]()
                if number:
                    times[way].append(perf_counter() - start)
        found[program] = times
    return found


def middle(samples: list[float]) -> list[float]:
    """[median, spread]."""
    median = statistics.median(samples)
    return [round(median, 3), round((max(samples) - min(samples)) / median, 2)]


def ahead(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """[least, median, most] of what each way took longer than compiled, round by round."""
    found = {}
    for way in ("single", "openai"):
        pairs = zip(times["compiled"], times[way], strict=True)
        longer = [100 * (other / compiled - 1) for compiled, other in pairs]
        found[way] = [round(f(longer), 1) for f in (min, statistics.median, max)]
    return found


def flush(url: str) -> None:
    for _ in range(100):
        if httpx.post(f"{url}/flush_cache").status_code == 200:
            return
    raise RuntimeError("the server does not become idle")


def commit() -> str:
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--branch", type=int, default=4)
    parser.add_argument("--levels", type=int, default=4)
    names = ("tree_of_thought", "judge", "multi_document")
    parser.add_argument("--only", choices=names, help="the times of one program")
    parser.add_argument("--skip-times", action="store_true", help="only what is sent")
    parser.add_argument("server", nargs="*", help="options of palmette serve")
    args = parser.parse_args()
    command = [sys.executable, "-m", "palmette.server", "serve", "--port", "0", *args.server]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    try:
        sent = {name: text_sent(url, *one) for name, one in SENT.items()}
        times = (
            {}
            if args.skip_times
            else wall_times(url, args.rounds, args.branch, args.levels, only=args.only)
        )
    finally:
        process.terminate()
        process.communicate()
    result = {
        "benchmark": "programs",
        "machine": platform.processor() or platform.machine(),
        "commit": commit(),
        "branch": args.branch,
        "levels": args.levels,
        "sent": sent,
        "seconds": {
            program: {way: middle(samples) for way, samples in by_way.items()}
            for program, by_way in times.items()
        },
        "ahead": {program: ahead(by_way) for program, by_way in times.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
