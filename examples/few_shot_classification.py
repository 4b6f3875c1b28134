"""Few-shot classification: worked examples in front, a choice behind, all texts in one batch.

The examples are the prefix of every prompt; the model computes it once.
"""

from __future__ import annotations

import palmette as pm

EXAMPLES = [
    ("The battery died after two days.", " negative"),
    ("It arrived early and works perfectly.", " positive"),
    ("Terrible support, nobody answers.", " negative"),
    ("I bought a second one for my mother.", " positive"),
]
REVIEWS = [
    "Wonderful sound, I use it every day.",
    "It broke in the first week and they refused to pay.",
    "My kids love it.",
    "A waste of money.",
]


@pm.function
def classify(s: pm.ProgramState, review: str) -> None:
    for text, label in EXAMPLES:
        s += f"Review: {text}\nSentiment:{label}\n\n"
    s += f"Review: {review}\nSentiment:"
    s += pm.select("label", [" positive", " negative"])


def main(backend) -> None:
    states = classify.run_batch([{"review": review} for review in REVIEWS], backend=backend)
    for review, state in zip(REVIEWS, states, strict=True):
        print(f"{state['label'].strip():9} {review}")
    explained = pm.explain(states)
    print(f"{explained.computed_tokens} of {explained.prompt_tokens} prompt tokens computed")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
