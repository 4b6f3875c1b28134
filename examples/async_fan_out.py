"""Async fan-out: `async def` programs beside other work of an event loop, with a deadline.

One program starts many others and takes the answers as they come; what is late is cancelled, and
its pages go back.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import palmette as pm

Continent = Literal["Europe", "Asia", "Africa", "America"]
COUNTRIES = ["France", "Japan", "Kenya", "Brazil", "Italy", "China"]


@pm.function
async def locate(s: pm.AsyncState, country: str) -> Continent:
    s += "Spain lies in Europe. India lies in Asia. Egypt lies in Africa. Peru lies in America. "
    s += f"{country} lies in "
    s["continent"] = pm.gen(Continent, temperature=0)
    return await s["continent"]


@pm.function
async def atlas(s: pm.AsyncState, countries: list[str]) -> dict[str, Continent]:
    states = await asyncio.gather(*(locate(country) for country in countries))
    found = {one: state["continent"] for one, state in zip(countries, states, strict=True)}
    s += "\n".join(f"{country} lies in {continent}." for country, continent in found.items())
    s += "\nThe African country is " + pm.select("african", countries)
    return found


async def run(backend) -> None:
    async with asyncio.timeout(300):
        state = await atlas.run_async(COUNTRIES, backend=backend)
    for country, continent in state.ret_value.items():
        print(f"{country:7} {continent}")
    print("in Africa:", state["african"])


def main(backend) -> None:
    asyncio.run(run(backend))


if __name__ == "__main__":
    main(pm.Engine.load(pm.EngineConfig()))
