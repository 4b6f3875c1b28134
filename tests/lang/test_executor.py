"""The executor alone: nodes in, requests out, outputs in, requests out."""

from __future__ import annotations

from palmette.lang import content
from palmette.lang.content import Encoder, text_of
from palmette.lang.errors import ProgramError
from palmette.lang.executor import ProgramRun
from palmette.lang.ir import (
    ROOT,
    Call,
    Extend,
    Gen,
    GenOptions,
    Insert,
    Line,
    Splice,
    StateId,
    Text,
    ValueId,
    format_node,
)
from palmette.lang.testing import FakeModel
from palmette.lang.variables import Bound
from palmette.runtime.request import ErrorInfo, Finish, FinishReason, Output, Request

LINE = Line("file.py", 1, "program")


def extend(source: int, target: int, text: str) -> Extend:
    return Extend(StateId(source), StateId(target), Text(text, True), LINE)


def gen(source: int, target: int, value: int, name: str = "x") -> Gen:
    options = GenOptions()
    return Gen(StateId(source), StateId(target), ValueId(value), name, options, True, LINE)


def new_run(model: FakeModel) -> ProgramRun:
    return ProgramRun(root=content.start(model.info()), encoder=Encoder(model), run_id="r")


def answered(request: Request, model: FakeModel, text: str) -> Output:
    finish = Finish(reason=FinishReason.LENGTH)
    ids = tuple(model.encode(text))
    return Output(request_id=request.request_id, token_ids=ids, text=text, finish=finish)


def failed(request: Request) -> Output:
    error = ErrorInfo(code="out_of_memory", message="no pages")
    finish = Finish(reason=FinishReason.ERROR)
    return Output(request_id=request.request_id, finish=finish, error=error)


def shown(run: ProgramRun, state: int) -> str:
    found = run.content(StateId(state))
    assert isinstance(found, content.Content)
    return text_of(found)


def test_what_can_run_goes_out_at_once_and_the_rest_when_it_can() -> None:
    model = FakeModel()
    run = new_run(model)
    for node in (extend(0, 1, "p"), gen(1, 2, 0), gen(1, 3, 1), extend(2, 4, "q"), gen(4, 5, 2)):
        run.append(node)
    first = run.start()
    assert [request.prompt_ids for request in first] == [tuple(model.encode("p"))] * 2
    assert run.start() == []
    assert run.on_output(answered(first[1], model, " b")) == []
    [last] = run.on_output(answered(first[0], model, " a"))
    assert model.decode(last.prompt_ids) == "p aq"
    assert not run.is_done
    assert run.on_output(answered(last, model, " c")) == []
    assert run.is_done
    assert (shown(run, 5), shown(run, 3)) == ("p aq c", "p b")


def test_nodes_can_be_added_while_it_runs() -> None:
    model = FakeModel()
    run = new_run(model)
    run.append(extend(0, 1, "p"))
    run.append(gen(1, 2, 0))
    [request] = run.start()
    run.append(gen(2, 3, 1))
    assert run.start() == []
    [following] = run.on_output(answered(request, model, " a"))
    assert model.decode(following.prompt_ids) == "p a"


def test_a_failure_marks_what_depends_on_it_and_nothing_else() -> None:
    model = FakeModel()
    run = new_run(model)
    nodes = (
        extend(0, 1, "p"),
        gen(1, 2, 0, "bad"),
        gen(1, 3, 1, "good"),
        Extend(StateId(3), StateId(4), Insert(ValueId(0), True), LINE),
        Extend(StateId(3), StateId(5), Splice(StateId(1), StateId(2)), LINE),
        Call(ValueId(2), "c", len, (Bound(ValueId(0)),), LINE),
        Call(ValueId(3), "d", len, (Bound(ValueId(1)),), LINE),
    )
    for node in nodes:
        run.append(node)
    bad, good = run.start()
    run.on_output(failed(bad))
    run.on_output(answered(good, model, " yes"))
    assert run.is_done
    error = run.result(ValueId(0))
    assert isinstance(error, ProgramError) and error.code == "out_of_memory"
    for state in (2, 4, 5):
        assert run.content(StateId(state)) is error
    assert run.result(ValueId(2)) is error
    assert shown(run, 3) == "p yes"
    result = run.result(ValueId(3))
    assert not isinstance(result, ProgramError) and result is not None and result.value == 4
    assert run.error is error


def test_calls_under_way_can_be_ended_from_outside() -> None:
    run = new_run(FakeModel())
    run.append(extend(0, 1, "p"))
    run.append(gen(1, 2, 0))
    run.append(gen(2, 3, 1))
    run.start()
    assert run.fail_calls("the backend is gone") == []
    assert run.is_done
    assert "the backend is gone" in str(run.result(ValueId(1)))


def test_text_alone_needs_no_requests() -> None:
    run = new_run(FakeModel())
    run.append(extend(0, 1, "a"))
    run.append(extend(1, 2, "b"))
    assert run.start() == []
    assert run.is_done and shown(run, 2) == "ab"


def test_every_node_prints() -> None:
    nodes = (
        Extend(ROOT, StateId(1), Text("long " * 40, True), LINE),
        Extend(ROOT, StateId(1), Insert(ValueId(3), True), LINE),
        Extend(ROOT, StateId(1), Splice(StateId(2), StateId(5)), LINE),
        Call(ValueId(1), "n", len, (Bound(ValueId(0)),), LINE),
    )
    shortened, insert, spliced, call = map(format_node, nodes)
    assert len(shortened) < 100 and "..." in shortened
    assert insert == "  %1 = extend %0 v3"
    assert spliced == "  %1 = extend %0 %2..%5"
    assert call == "  v1 = call 'n' len(v0)"
