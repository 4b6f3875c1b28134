"""What an engine tells a forecast in another process."""

from __future__ import annotations

import msgspec

from palmette.runtime.fake_runner import fake_engine, run_all
from palmette.runtime.request import Request, SamplingParams
from palmette.runtime.simulation import twin
from palmette.runtime.standing import Standing


def request(name: str, ids: tuple[int, ...], namespace: tuple[str, ...] = ()) -> Request:
    sampling = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)
    return Request(request_id=name, prompt_ids=ids, sampling=sampling, namespace=namespace)


def test_a_simulation_keeps_what_the_engine_keeps_of_one_namespace() -> None:
    engine = fake_engine(page_size=4)
    common = tuple(range(10, 22))
    prompts = [(*common, *range(i, i + 9)) for i in (30, 60, 90)]
    run_all(engine, [request(f"a{i}", ids, ("a",)) for i, ids in enumerate(prompts)])
    run_all(engine, [request("b", tuple(range(200, 220)), ("b",))])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.standing(("a",))), type=Standing)
    assert [one.parent for one in sent.prefixes].count(None) == 1
    simulation = twin(engine)
    simulation.keep(sent.prefixes)
    tree, found = engine.cache.tree, simulation.engine.cache.tree
    for ids in prompts:
        assert found.match((*ids, 1, 2)) == tree.match((*ids, 1, 2), ("a",)) > len(common)
    assert found.match(tuple(range(200, 220))) == 0
    found.check()
    assert engine.standing(None).prefixes == ()
    assert engine.standing(("nobody",)).prefixes == []


def test_times_are_told_when_they_are_known() -> None:
    engine = fake_engine()
    assert engine.standing(None).times is None
    run_all(engine, [request(f"{i}", tuple(range(i + 1, i + 20))) for i in range(12)])
    times = engine.standing(None).times
    own = engine._scheduler.budget.model
    assert own.is_ready == (times is not None)
    if times is not None:
        assert times.weights == own.weights and times.is_ready
