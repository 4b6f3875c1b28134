"""Map-reduce summary: each part of a long text is summed up by itself, then the summaries are.

`part` is a program of its own that the outer one starts once for each part; all are under way
together.
"""

from __future__ import annotations

import palmette as pm

PARTS = [
    "On Monday the team moved the library to a new building. The move took nine hours, because "
    "the lift was broken and every box had to be carried up the stairs.",
    "On Tuesday the shelves were filled again. Children of the school next door helped, and every "
    "child was allowed to keep one old book.",
    "On Wednesday the mayor opened the library. More than two hundred people came, and the choir "
    "sang in the reading room.",
]


@pm.function
def part(s: pm.ProgramState, text: str) -> None:
    s += pm.user(f"Sum up this text in one short sentence.\n\n{text}")
    s += pm.assistant(pm.gen("summary", max_tokens=40, stop=["\n", "."], temperature=0))


@pm.function
def summarise(s: pm.ProgramState, texts: list[str]) -> None:
    parts = [part.run(text) for text in texts]  # on the backend of this program
    s["notes"] = [one["summary"].strip() for one in parts]
    s += pm.user("Sum up this text in one short sentence.\n\n" + ". ".join(s["notes"]) + ".")
    s += pm.assistant(pm.gen("summary", max_tokens=48, stop=["\n", "."], temperature=0))
    s += pm.user("What is the text about?")
    s += pm.assistant("It is about a " + pm.select("topic", ["library", "school", "choir"]))


def main(backend) -> None:
    state = summarise.run(PARTS, backend=backend, temperature=0)
    for note in state["notes"]:
        print("-", note)
    print(f"{state['topic']}: {state['summary'].strip()}")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
