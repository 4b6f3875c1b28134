"""An LLM judge: a fork for each criterion, and advice from a judge that has read them all."""

from __future__ import annotations

import palmette as pm

CRITERIA = {
    "clarity": (" clear", " unclear"),
    "style": (" well written", " badly written"),
    "reasons": (" convincing", " unconvincing"),
    "interest": (" interesting", " boring"),
}
ESSAYS = {
    "trees": "Cities should plant more trees. Trees give shade, so streets stay cooler in summer, "
    "and their leaves clean the air. A street with trees is also a nicer place to walk.",
    "dogs": "dogs is good yes. i think because dog. Dog dog and thats why everybody.",
}


@pm.function
def judge(s: pm.ProgramState, essay: str) -> float:
    """The mean share that the judge gives to the better word of each pair."""
    s += f"An essay of a pupil:\n\n{essay}\n\nThe teacher says: "
    forks = s.fork(len(CRITERIA))
    for fork, words in zip(forks, CRITERIA.values(), strict=True):
        fork += "This essay is"
        fork += pm.select("word", list(words), choices_method=pm.constrained_likelihood)
    shares = [fork.get_meta_info("word")["choice_probabilities"][0] for fork in forks]
    forks.join()
    s += f"This essay is{','.join(s['word'])}. My advice is to"
    s += pm.gen("advice", max_tokens=32, stop=["\n", "."], temperature=0)
    return sum(shares) / len(shares)


def main(backend) -> None:
    states = judge.run_batch([(essay,) for essay in ESSAYS.values()], backend=backend)
    for name, state in zip(ESSAYS, states, strict=True):
        print(f"{name}: {state.ret_value:.2f}{','.join(state['word'])}. Advice:{state['advice']}")
    print("better:", max(zip([s.ret_value for s in states], ESSAYS, strict=True))[1])


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
