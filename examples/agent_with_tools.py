"""A multi-turn agent: it picks a tool, writes typed arguments, reads the result, and answers.

The conversation only grows, so each turn computes its new tokens alone. A call cannot be
malformed: the tool is one of the choices, and its arguments are of the tool's type.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

import palmette as pm

STOCK = {"apples": 12, "pears": 0, "plums": 7}
EXAMPLES = """Question: How many pears are there?
Tool: look_up
Arguments: {"product": "pears"}
Result: 0 pears in stock
Answer: There are no pears.

Question: What is 2 plus 3?
Tool: add
Arguments: {"a": 2, "b": 3}
Result: 5
Answer: 2 plus 3 is 5.

"""


class Add(BaseModel):
    a: int
    b: int


class LookUp(BaseModel):
    product: Literal["apples", "pears", "plums"]


TOOLS = {" add": Add, " look_up": LookUp}


def call(arguments: Add | LookUp) -> str:
    if isinstance(arguments, Add):
        return str(arguments.a + arguments.b)
    return f"{STOCK[arguments.product]} {arguments.product} in stock"


@pm.function
def agent(s: pm.ProgramState, questions: list[str]) -> list[str]:
    s += EXAMPLES
    log = []
    for question in questions:
        s += f"Question: {question}\nTool:"
        s += pm.select("tool", list(TOOLS), choices_method=pm.unconditional_likelihood_normalized)
        s += "\nArguments: "
        s["arguments"] = pm.gen(TOOLS[s["tool"]], max_tokens=48, temperature=0)
        result = call(s["arguments"])
        s += f"\nResult: {result}\nAnswer:"
        s += pm.gen("answer", max_tokens=32, stop="\n", temperature=0) + "\n\n"
        log.append(f"{s['tool'].strip()}({s['arguments']}) = {result}:{s['answer']}")
    return log


def main(backend) -> None:
    questions = ["What is 17 plus 25?", "How many plums are there?", "How many apples are there?"]
    for line in agent.run(questions, backend=backend).ret_value:
        print(line)


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
