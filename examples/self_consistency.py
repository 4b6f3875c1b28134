"""Self-consistency: several chains of thought for one question, the most frequent answer wins."""

from __future__ import annotations

from collections import Counter

import palmette as pm


@pm.function
def vote(s: pm.ProgramState, question: str, num_chains: int) -> Counter[int]:
    s += pm.user(question)
    chains = s.fork(num_chains)
    for seed, chain in enumerate(chains):
        with chain.assistant():
            chain += "Let us think. "
            chain += pm.gen("chain", max_tokens=48, stop="\n", temperature=0.7, seed=seed)
            chain += "\nThe answer is "
            chain += pm.gen("answer", type=int, max_tokens=4, temperature=0)
    chains.join()
    return Counter(s["answer"])


def main(backend) -> None:
    state = vote.run("What is 7 plus 5?", num_chains=8, backend=backend)
    for answer, chain in zip(state["answer"], state["chain"], strict=True):
        print(f"{answer:>5}  {chain.strip():.70}")
    answer, votes = state.ret_value.most_common(1)[0]
    print(f"{votes} of {len(state['answer'])} chains say {answer}")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
