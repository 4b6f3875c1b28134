"""A process that makes forecasts: a tokenizer, grammars, and an engine without a model.

Reads a `Begin` and then questions from its standard input, answers each on its standard output,
and ends with its input. `forecasts` is the other end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.lang.chat import ChatFormat
from palmette.lang.content import Encoder
from palmette.lang.errors import BackendError, ProgramError
from palmette.lang.expressions import RunDefaults
from palmette.lang.prediction import Asked, predict
from palmette.lang.program import Program
from palmette.runtime.load import open_tokenizer
from palmette.runtime.parts import GrammarSource, TokenCodec
from palmette.runtime.request import RequestError
from palmette.runtime.simulation import Simulation

from .forecasts import LENGTH, Answer, Begin, Question, Refusal, packed
from .program_store import TextClient

_NICENESS = 10
_MOST_BYTES = 2 << 30  # of memory beyond what the process begins with
_MESSAGES = msgspec.msgpack.Decoder(Begin | Question)


class OutOfTime(BaseException):
    """No fault boundary below stops it."""


@dataclass(frozen=True, slots=True)
class Parts:
    codec: TokenCodec
    grammars: GrammarSource


Load = Callable[[Begin], Parts]


def load_parts(begin: Begin) -> Parts:
    config = begin.config
    tokenizer = open_tokenizer(Path(config.model))
    grammars = GrammarCompiler(
        tokenizer.vocabulary(begin.info.vocab_size),
        select_backend(config.grammar_backend),
        cache_bytes=config.grammar_cache_bytes,
    )
    return Parts(tokenizer, grammars)


def answer(question: Question, begin: Begin, parts: Parts) -> Answer | Refusal:
    """The forecast, or why there is none; within the question's budget."""
    signal.setitimer(signal.ITIMER_PROF, question.budget_s)
    try:
        return Answer(_forecast(question, begin, parts))
    except OutOfTime:
        message = (
            f"the forecast takes more than {question.budget_s:g} s of processor time; ask for "
            "fewer runs at once, or give lengths"
        )
        return Refusal(message, "deadline")
    except MemoryError:
        return Refusal("the forecast needs too much memory; ask for less at once", "invalid_value")
    except (ValueError, TypeError, RequestError, BackendError) as error:
        return Refusal(str(error), "invalid_value")
    except ProgramError as error:
        return Refusal(str(error), error.code, error.line.node)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _forecast(question: Question, begin: Begin, parts: Parts) -> bytes:
    info = begin.info
    simulation = Simulation(
        info,
        begin.config,
        tokenizer=parts.codec,
        grammars=parts.grammars,
        times=question.standing.times,
    )
    simulation.keep(question.standing.prefixes)
    asked = Asked(
        program=Program.from_json(question.program),
        entries=question.entries,
        defaults=RunDefaults(**{name: _plain(value) for name, value in question.defaults.items()}),
        prices=question.prices,
        lengths=question.lengths,
    )
    forecast = predict(
        asked,
        simulation,
        encoder=Encoder(TextClient(parts.codec, info)),
        chat=ChatFormat.from_info(info),
        knows_grammars=True,
        made=question.made,
        is_streamed=False,
    )
    return forecast.to_json(indent=None).encode()


def _plain(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _messages(source: IO[bytes]) -> Iterator[Begin | Question]:
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        yield _MESSAGES.decode(source.read(length))


def _stop(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _limit_memory() -> None:
    """More than that ends a forecast, not the machine (Linux)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MOST_BYTES
    with suppress(ValueError, OSError):  # the system allows less anyway
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main(load: Load = load_parts) -> int:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is no message
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor's; the server ends us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _stop)
    os.nice(_NICENESS)
    begin: Begin | None = None
    parts: Parts | None = None
    for message in _messages(source):
        if isinstance(message, Begin):
            begin, parts = message, load(message)
            _limit_memory()
            continue
        assert begin is not None and parts is not None  # our own parent wrote it
        sink.write(packed(answer(message, begin, parts)))
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
