"""One prompt, four branches, a choice and a typed object: the tour of Palmette.

make demo                  from a checkout
palmette demo              from an installation
python examples/demo.py    with any --model that Palmette opens
"""

from __future__ import annotations

import argparse
import time

from pydantic import BaseModel, Field

import palmette as pm

ANGLES = ("food", "museums", "parks", "music")


class City(BaseModel):
    """What the model must fill in; its output is valid for this or not given at all."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)
    population: int = Field(ge=1, le=40_000_000)
    famous_for: list[str] = Field(min_length=1, max_length=3)


@pm.function
def city_guide(s, city):
    """(a) Four branches continue one shared conversation; join brings their texts back."""
    s += pm.system("You are a travel guide who answers in one short sentence.")
    s += pm.user(f"What is {city} known for?")
    s += pm.assistant(pm.gen("overview", max_tokens=40, stop=["\n", "."], temperature=0))

    branches = s.fork(len(ANGLES))
    for branch, angle in zip(branches, ANGLES, strict=True):
        branch += pm.user(f"Give me one tip about {angle} in {city}.")
        branch += pm.assistant(pm.gen("tip", max_tokens=32, stop=["\n", "."], temperature=0))
    branches.join()

    s += pm.user("Which should I do first?")
    s += pm.assistant("I would start with the " + pm.select("first", list(ANGLES)))  # (b)


@pm.function
def city_facts(s, city):
    """(c) An object of a pydantic model."""
    s += pm.user(
        f"{city} has two million people and is famous for its museums and its food. "
        f"Write the facts about {city} as JSON."
    )
    s += pm.assistant(pm.gen("facts", max_tokens=160, temperature=0, json_schema=City))


def main(config: pm.EngineConfig) -> None:
    start = time.perf_counter()
    engine = pm.Engine.load(config)
    info = engine.info
    print(
        f"{info.model} ({info.architecture}, {info.weights}) on {info.device}, runner "
        f"{info.runner}, KV pool {info.num_pages * info.page_size} tokens; "
        f"loaded in {time.perf_counter() - start:.1f} s\n"
    )

    guide = city_guide.run("Paris", backend=engine)
    print("overview:", guide["overview"].strip())
    for angle, tip in zip(ANGLES, guide["tip"], strict=True):
        print(f"  {angle + ':':9}", tip.strip())
    print("first:", guide["first"], "\n")

    facts = city_facts.run("Paris", backend=engine)
    print("facts:", City.model_validate_json(facts["facts"]), "\n")

    # (d) what each call cost, and the prefixes the engine holds now
    print(pm.explain([guide, facts]), "\n")
    print(pm.format_tree(engine.snapshot(), engine.tokenizer.decode))
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        default=pm.EngineConfig().model,
        help="a name, a directory, a .gguf file or a hub id",
    )
    main(pm.EngineConfig(model=parser.parse_args().model))
