"""A compiled program: operations with places for arguments, and what can be read at its end.

    program = judge.compile()
    state = program.run(essay="...")     # as judge.run, without running the function again
    Program.from_json(program.to_json())

A value of this type never changes and knows no model: roles are marks that a run reads from its
backend's chat template. `id` is a digest of the content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from .ir import ROOT, Gen, Node, Select, StateId, ValueId, format_node
from .variables import Bound, Span, Turn

if TYPE_CHECKING:
    from .backends import Backend
    from .forecast import Forecast, Prices
    from .state import ProgramState


MAX_DEPTH = 64  # of lists and dicts in each other


def check_depth(depth: int, place: str) -> None:
    """
    Raises:
        ValueError: what stands at `place` lies too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{place}: lists and dicts in each other; at most {MAX_DEPTH} deep, and one that "
            "holds itself has no end"
        )


class Parameter(NamedTuple):
    name: str
    is_required: bool
    default: object


@dataclass(frozen=True, kw_only=True)
class Program:
    """Operations in SSA order; made by `Function.compile`, and to be run many times."""

    name: str
    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...] = field(default=(), hash=False)  # defaults may be lists
    tip: StateId = ROOT  # where the program's own state ends
    turns: tuple[Turn, ...] = ()
    # Bound, Span, Given, ...
    variables: Mapping[str, object] = field(default_factory=dict, hash=False)
    result: object = field(default=None, hash=False)  # of the function, in the same terms
    # which fork, for `explain`
    branches: Mapping[ValueId, str] = field(default_factory=dict, hash=False)
    reads: tuple[Bound | Span, ...] = ()  # what the function itself read, in order
    inner: frozenset[ValueId] = frozenset()  # of programs that it ran: their failures are theirs

    def __str__(self) -> str:
        given = ", ".join(parameter.name for parameter in self.parameters)
        head = f"program {self.name}({given})" if given else f"program {self.name}"
        return "\n".join([head, *map(format_node, self.nodes)])

    def print_graph(self) -> None:
        """Print the operations; SGLang's name for it."""
        print(self)

    @property
    def last_node(self) -> Program:
        """This program; SGLang prints a trace by `tracer.last_node.print_graph_dfs()`."""
        return self

    def print_graph_dfs(self) -> str:
        """The operations as text; SGLang's name for `str(program)`."""
        return str(self)

    @property
    def arg_names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]

    @property
    def calls(self) -> list[Gen | Select]:
        """The operations that ask a model."""
        return [node for node in self.nodes if isinstance(node, Gen | Select)]

    @cached_property
    def id(self) -> str:
        """A digest of the content: equal programs have equal ids."""
        return hashlib.sha256(self.to_json()).hexdigest()[:32]

    def run(
        self,
        *,
        backend: Backend | None = None,
        stream: bool = False,
        eager: bool = False,
        **kwargs: Any,
    ) -> ProgramState:
        """Start the program; as `Function.run`.

        On a server that runs programs this is one HTTP call. `stream`: it sends texts as they
        grow, for `text_iter`, and not only when they are complete.

        >>> judge = ask.compile()
        >>> answer = judge.run(question="Which planet is the largest?")["answer"]

        Raises:
            TypeError: an argument is missing, or nothing takes it.
        """
        from .compiled import run_program  # it needs programs to be defined

        return run_program(self, kwargs, backend=backend, stream=stream, eager=eager)

    async def run_async(self, *, backend: Backend | None = None, **kwargs: Any) -> ProgramState:
        """Run in the event loop, which goes on meanwhile; all can then be read without waiting.

        Cancelling aborts the run.
        """
        from .compiled import run_program_async

        return await run_program_async(self, kwargs, backend=backend)

    def stream(self, *, backend: Backend | None = None, **kwargs: Any) -> Iterator[str]:
        """The text of the program's state as it comes."""
        return self.run(backend=backend, stream=True, **kwargs).text_iter()

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: Literal[False] = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: Literal[True],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> Iterator[ProgramState]: ...

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, object] | Sequence[object]],
        *,
        generator_style: bool = False,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        backend: Backend | None = None,
        **sampling: object,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run it once per entry, all together; as `Function.run_batch`.

        >>> states = ask.compile().run_batch([{"question": "1+1?"}, {"question": "2+2?"}])
        """
        from .compiled import run_program_batch

        states = run_program_batch(
            self,
            batch_kwargs,
            sampling=sampling,
            backend=backend,
            max_active=1024 if num_threads == "auto" else max(1, int(num_threads)),
            progress_bar=progress_bar,
        )
        return states if generator_style else list(states)

    def explain(
        self,
        *,
        backend: Backend | None = None,
        batch: Sequence[Mapping[str, object]] | None = None,
        analyze: bool = False,
        is_warm: bool = False,
        prices: Prices | None = None,
        lengths: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> Forecast:
        """What a run with these arguments takes, or one run per entry of `batch`.

        Tokens, cached and computed, of each call; forward passes, pages, the longest chain, and
        seconds and money where step times and `prices` are known. `is_warm`: given what the
        engine's cache holds now. `lengths`: tokens of named gens, where max_tokens is too many.
        `analyze`: run it, and show what was measured beside the prediction for these texts.

        >>> costs = ask.compile().explain(question="1+1?")  # print(costs) shows a table
        >>> is_less = costs.cached_tokens < costs.prompt_tokens
        """
        from .prediction import explain_program

        return explain_program(
            self,
            kwargs,
            backend=backend,
            batch=batch,
            analyze=analyze,
            is_warm=is_warm,
            prices=prices,
            lengths=lengths or {},
        )

    def to_json(self) -> bytes:
        """The program as JSON, for `from_json` here or on another machine.

        Raises:
            ValueError: something in it has no form outside of this process; names it.
        """
        return self._json

    @cached_property
    def _json(self) -> bytes:
        from .program_json import encode  # it needs this class

        return encode(self)

    @cached_property
    def sent(self) -> Program:
        """The program as a server is given it: without Python types."""
        if all(node.options.type is None for node in self.nodes if isinstance(node, Gen)):
            return self
        from .passes import untyped

        return untyped(self)

    @staticmethod
    def from_json(data: bytes | str) -> Program:
        """The program that `to_json` wrote.

        Raises:
            ValueError: it is none; names the place.
        """
        from .program_reader import decode

        return decode(data)
