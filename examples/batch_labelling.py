"""Batch labelling: a hundred tickets get two labels each, with a progress bar.

All of them are under way together in one thread; a failed one stays in its own state.
"""

from __future__ import annotations

from collections import Counter

import palmette as pm

FAIR = pm.unconditional_likelihood_normalized  # a topic that is likely anyway gains nothing
TOPICS = [" billing", " delivery", " defect"]
EXAMPLES = [
    ("Hello, the bill has a wrong address.", " billing", " no"),
    ("Hi there, the oven is on fire!", " defect", " yes"),
    ("Dear team, my order has not come yet.", " delivery", " no"),
    ("Hello, I paid twice, please give my money back.", " billing", " yes"),
    ("Good morning, the radio makes no sound.", " defect", " no"),
    ("Please help: the postman lost my package.", " delivery", " yes"),
]
OPENINGS = ["Hello,", "Hi there,", "Good morning,", "Dear team,", "Please help:"]
PROBLEMS = [
    "my card was charged twice.",
    "my parcel has not arrived.",
    "the screen stays black.",
    "I need an invoice.",
]
TICKETS = [f"{opening} {problem}" for opening in OPENINGS for problem in PROBLEMS] * 5


@pm.function
def label(s: pm.ProgramState, ticket: str) -> None:
    s += "Tickets of a shop with their labels.\n\n"
    for text, topic, urgent in EXAMPLES:
        s += f"Ticket: {text}\nTopic:{topic}\nUrgent:{urgent}\n\n"
    s += f"Ticket: {ticket}\nTopic:" + pm.select("topic", TOPICS, choices_method=FAIR)
    s += "\nUrgent:" + pm.select("urgent", [" yes", " no"])


def main(backend, tickets: list[str] = TICKETS) -> None:
    states = label.run_batch(
        [{"ticket": ticket} for ticket in tickets], backend=backend, progress_bar=True
    )
    failed = [state for state in states if state.error() is not None]
    topics = Counter(state["topic"].strip() for state in states if state not in failed)
    print(", ".join(f"{topic}: {count}" for topic, count in sorted(topics.items())))
    for ticket, state in list(zip(tickets, states, strict=True))[: len(PROBLEMS)]:
        print(f"{state['topic'].strip():9}{state['urgent'].strip():4} {ticket}")
    print(f"{len(states)} labelled, {len(failed)} failed")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
