"""JSON extraction: free text in, objects of a pydantic model out, typed for the checker too."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

import palmette as pm

Word = Annotated[str, Field(max_length=24)]


class Order(BaseModel):
    customer: Word
    product: Word
    quantity: int = Field(ge=1, le=1000)
    delivery: Literal["standard", "express"]


EXAMPLES = [
    (
        "Hi, this is Mia. Please send 2 lamps, standard delivery.",
        Order(customer="Mia", product="lamps", quantity=2, delivery="standard"),
    ),
    (
        "I want to buy 5 blue cups and I need them tomorrow, so express. Best wishes, Paul",
        Order(customer="Paul", product="blue cups", quantity=5, delivery="express"),
    ),
]


@pm.function
def extract(s: pm.ProgramState, message: str) -> Order:
    for text, example in EXAMPLES:
        s += pm.user(f"Write the order as JSON.\n\n{text}")
        s += pm.assistant(example.model_dump_json())
    s += pm.user(f"Write the order as JSON.\n\n{message}")
    order = pm.gen("order", type=Order, max_tokens=96, temperature=0, retry=1)
    s += pm.assistant(order)
    return s[order]


MESSAGES = [
    "Hello, Tom here. I need 12 chairs by tomorrow, express please!",
    "Dear shop, please send 3 red tables, express delivery. Regards, Anna",
]


def main(backend) -> None:
    for state in extract.run_batch([(message,) for message in MESSAGES], backend=backend):
        order: Order = state.ret_value
        print(f"{order.quantity} {order.product} for {order.customer} ({order.delivery})")


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
