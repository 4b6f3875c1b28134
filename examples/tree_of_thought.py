"""Tree of thought: every level proposes thoughts in forks, a judge grades them, the best goes on.

Forks of forks share all that stands before them, so a level costs its new tokens only. Here a
thought is the next sentence of a story.
"""

from __future__ import annotations

import palmette as pm


def think(s: pm.ProgramState, width: int) -> list[pm.ProgramState]:
    """Continuations of `s`, each with one more sentence."""
    forks = s.fork(width)
    forks += lambda index: pm.gen(
        "thought", max_tokens=32, stop=[".", "\n"], temperature=0.7, top_p=0.9, seed=index
    )
    forks += "."
    return list(forks)


def grade(s: pm.ProgramState) -> float:
    """The judge's probability that the story is good; `s` stays as it is."""
    with s.copy() as judge:
        judge += "\n\nIs this story good for children, yes or no? Answer:"
        judge += pm.select(
            "grade", [" yes", " no"], choices_method=pm.constrained_likelihood, temperature=0
        )
        yes, _ = judge.get_meta_info("grade")["choice_probabilities"]
    return yes


@pm.function
def tell(s: pm.ProgramState, beginning: str, depth: int, width: int) -> list[list[float]]:
    s += f"A short story for children.\n\n{beginning}"
    best, levels = s, []
    for _ in range(depth):
        thoughts = think(best, width)
        grades = [grade(thought) for thought in thoughts]
        best = thoughts[grades.index(max(grades))]
        levels.append(grades)
    s["story"] = best.text().removeprefix("A short story for children.\n\n")
    return levels


def main(backend) -> None:
    state = tell.run("A little fox found a red ball.", depth=3, width=4, backend=backend)
    for level, grades in enumerate(state.ret_value, start=1):
        print(f"level {level}:", *(f"{value:.3f}" for value in grades), f"best {max(grades):.3f}")
    print(state["story"])


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
