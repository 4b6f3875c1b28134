"""What a backend cannot do, said where the program asks for it and not when its turn comes.

A hosted API is a `Judge`: it knows from an operation's options, its place in the conversation and
answers of before that it will refuse.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from palmette.runtime.request import ErrorInfo, Request, RequestError, ReuseHint

from .calls import gen_request, scoring
from .errors import ProgramError
from .executor import program_error
from .ir import Gen, GenOptions, Line, Select


@runtime_checkable
class Judge(Protocol):
    """A client whose backend cannot do all."""

    def check_asked(self, request: Request) -> None:
        """Judge a request by all but its prompt, of which only the first id counts.

        Raises:
            RequestError: the backend cannot do it.
        """
        ...

    def check_gen(self, role: str | None, has_text: bool, options: GenOptions) -> None:
        """Judge where a gen stands: in which role, and whether text is before it there.

        Raises:
            RequestError: the backend cannot generate there.
        """
        ...

    def check_text(self, text: str) -> None:
        """Judge text outside of roles.

        Raises:
            RequestError: the backend takes none.
        """
        ...


def check_node(judge: Judge | None, node: Gen | Select, start_ids: tuple[int, ...]) -> None:
    """
    Raises:
        ProgramError: the backend cannot do the operation, whatever stands before it.
    """
    if judge is None:
        return
    if isinstance(node, Gen):
        requests = [gen_request(node, (0,))]
    else:
        requests = [scoring("", (0, 0), 1, ReuseHint())]
        if node.method.needs_unconditional:
            requests.append(scoring("", (*start_ids, 0), len(start_ids), ReuseHint()))
    try:
        for request in requests:
            judge.check_asked(request)
    except RequestError as error:
        failure = ErrorInfo(code=error.code, message=str(error), field=error.field)
        raise program_error(node, failure) from None


def misplaced(
    operation: str, variable: str | None, line: Line, error: RequestError
) -> ProgramError:
    """What a judge said of the place of an operation."""
    return ProgramError(
        str(error), operation=operation, variable=variable, line=line, code=error.code
    )
