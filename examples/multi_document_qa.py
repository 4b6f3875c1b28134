"""Multi-document QA: each document is read in a fork of its own, then all join one prompt.

The forks run side by side, and `concate_and_append` brings what they wrote into the conversation
token for token, in their order.
"""

from __future__ import annotations

import palmette as pm

DOCUMENTS = [
    "The bridge at Ulm was opened in 1907. It is 140 metres long.",
    "The bridge at Linz was opened in 1940. It is 250 metres long.",
    "The bridge at Graz was opened in 1993. It is 90 metres long.",
]


@pm.function
def answer(s: pm.ProgramState, documents: list[str], question: str) -> None:
    s += "Facts about bridges.\n"
    forks = s.fork(len(documents))
    forks += lambda index: (
        f"\nDocument {index + 1}: {documents[index]}\nThe year it was opened:"
        + pm.gen("year", regex=" (1[89]|20)[0-9]{2}", temperature=0)
    )
    forks.join("concate_and_append")
    s += f"\n\n{question}"
    s += pm.select(
        "place",
        [" Ulm", " Linz", " Graz"],
        choices_method=pm.unconditional_likelihood_normalized,
    )


def main(backend) -> None:
    for question in ("In 1940 they opened the bridge at", "In 1993 they opened the bridge at"):
        state = answer.run(DOCUMENTS, question, backend=backend)
        print(question + state["place"])
    print(state.text())


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
