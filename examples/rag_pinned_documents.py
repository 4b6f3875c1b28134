"""RAG with pinned documents: documents stand first and stay in the cache, questions follow.

A pinned prefix is not evicted, whatever else the engine serves meanwhile, so a question about it
costs its own tokens only.
"""

from __future__ import annotations

import re

import palmette as pm

DOCUMENTS = {
    "opening": "The museum is open from 9 to 17 o'clock, on Thursday until 20 o'clock.",
    "tickets": "A ticket costs 12 euros. Children under 6 years pay nothing.",
    "parking": "The car park has 80 places. Parking costs 3 euros an hour.",
}
QUESTIONS = {
    "How many euros is a ticket?": " [0-9]{1,3} euros",
    "How many places has the car park?": " [0-9]{1,3} places",
    "How many euros is an hour of parking?": " [0-9]{1,3} euros",
}


def retrieve(question: str) -> str:
    """The document that has most words of the question."""
    words = set(re.findall("[a-z]{4,}", question.lower()))
    return max(DOCUMENTS, key=lambda name: sum(word in DOCUMENTS[name].lower() for word in words))


def context(name: str) -> str:
    return f"Information for visitors of the museum:\n{DOCUMENTS[name]}\n\n"


@pm.function
def answer(s: pm.ProgramState, question: str, pattern: str) -> None:
    s += context(retrieve(question))
    s += f"Question: {question}\nAnswer:" + pm.gen("answer", regex=pattern, temperature=0)


@pm.function
def read(s: pm.ProgramState, name: str) -> None:
    s += context(name) + pm.gen(max_tokens=0)  # only computes the prompt


def main(backend) -> None:
    for state in read.run_batch([(name,) for name in DOCUMENTS], backend=backend):
        state.sync()
    if isinstance(backend, pm.Engine):  # a server: POST /cache/pin
        ids = [backend.tokenizer.encode(context(name)) for name in DOCUMENTS]
        print(sum(backend.pin(one, seconds=3600) for one in ids), "tokens pinned")
    for question, pattern in QUESTIONS.items():
        state = answer.run(question, pattern, backend=backend)
        print(f"{question}{state['answer']}  [{retrieve(question)}]")
        meta = state.get_meta_info("answer")
        print(f"  {meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig(page_size=4)))
