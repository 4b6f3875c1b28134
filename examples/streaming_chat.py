"""Streaming chat: answers appear as they are generated; the conversation stays in one program.

python examples/streaming_chat.py          a chat in the terminal; an empty line or Ctrl-D ends it
python examples/streaming_chat.py --demo   three questions
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import palmette as pm

QUESTIONS = ["What is the capital of France?", "And of Italy?", "Thank you!"]


@pm.function
def chat(s: pm.ProgramState, questions: Iterable[str]) -> None:
    """Goes on as long as `questions` gives one."""
    s += pm.system("You answer in one short sentence.")
    for question in questions:
        s += pm.user(question)
        s += pm.assistant(pm.gen("answer", max_tokens=48, stop="\n", temperature=0))
        for piece in s.text_iter("answer"):  # as it is generated
            print(piece, end="", flush=True)
        print()


def typed() -> Iterator[str]:
    try:
        while line := input("> ").strip():
            yield line
    except EOFError:  # Ctrl-D
        print()


def asked() -> Iterator[str]:
    for question in QUESTIONS:
        print(">", question)
        yield question


def main(backend, questions: Iterable[str] | None = None) -> None:
    state = chat.run(asked() if questions is None else questions, backend=backend)
    print(len(state.messages()), "messages")


if __name__ == "__main__":
    engine = pm.Engine.load(pm.EngineConfig())
    main(engine, None if "--demo" in sys.argv else typed())
