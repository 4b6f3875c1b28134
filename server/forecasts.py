"""Forecasts of programs: asked here, made in a process of their own.

    Forecaster.ask(question) -> forecast_process: rehearsal -> answer

The process knows the model's vocabulary but has no weights; it starts with the first question,
gives way to whatever else runs, and ends after a minute without one. One forecast is made at a
time, within a budget of processor time; whoever gives up on his ends the process, and the next
question starts another.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from palmette.lang.forecast import Prices
from palmette.lang.prediction import Made
from palmette.runtime.config import EngineConfig
from palmette.runtime.request import EngineInfo
from palmette.runtime.standing import Standing

from .errors import ApiError, invalid

FORECAST_COMMAND = (sys.executable, "-m", "palmette.server.forecast_process")
LENGTH = struct.Struct(">I")  # before each message
_MAX_BYTES = 256 * 1024 * 1024
_MOST_WAITING = 16
_MOST_OF_ONE = 2  # of one key
_IDLE_S = 60.0
_START_S = 60.0  # a vocabulary may be large
_WALL_FACTOR = 3  # the machine may be busy with requests, which go first

Argument = str | int | float | bool | None


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """The first message."""

    config: EngineConfig
    info: EngineInfo


class Question(msgspec.Struct, tag="question", frozen=True, kw_only=True):
    program: bytes  # JSON
    entries: list[dict[str, Argument]]
    defaults: dict[str, Any]  # of RunDefaults, where max_tokens may be None
    prices: Prices | None
    lengths: dict[str, int]
    standing: Standing
    made: Made | None  # the runs that the prediction is to be held against
    budget_s: float  # processor time


class Answer(msgspec.Struct, tag="answer", frozen=True):
    forecast: bytes  # JSON


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    message: str
    code: str
    node: int | None = None  # that fails


_ENCODER = msgspec.msgpack.Encoder()
_ANSWERS = msgspec.msgpack.Decoder(Answer | Refusal)


def packed(message: msgspec.Struct) -> bytes:
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


class Forecaster:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        budget_s: float,
        command: Sequence[str] = FORECAST_COMMAND,
    ) -> None:
        self._config = config
        self._budget_s = budget_s
        self._command = command
        self._lock = asyncio.Lock()  # held by whose forecast is made
        self._waiting: Counter[str] = Counter()  # by owner
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None

    @property
    def budget_s(self) -> float:
        return self._budget_s

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def ask(self, owner: str, info: EngineInfo, question: Question) -> bytes:
        """The forecast as JSON. Cancelling ends what is under way.

        Raises:
            ApiError: 429 where too many wait, 400 where a number has no place, 400 and 408 as the
                process says.
        """
        if self._waiting[owner] >= _MOST_OF_ONE or self._waiting.total() >= _MOST_WAITING:
            raise ApiError(
                429,
                f"too many forecasts wait; at most {_MOST_OF_ONE} of a key and {_MOST_WAITING} in "
                "all",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        try:
            message = packed(question)
        except OverflowError:
            raise invalid("a number has more than 64 bits, which no forecast takes") from None
        self._waiting[owner] += 1
        try:
            async with self._lock:
                return await self._made(info, message)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    async def _made(self, info: EngineInfo, question: bytes) -> bytes:
        if self._idle is not None:
            self._idle.cancel()
        try:
            process = self._process or await self._start(info)
            async with asyncio.timeout(_WALL_FACTOR * self._budget_s + _START_S):
                answer = await _exchange(process, question)
        except TimeoutError:
            self.close()
            raise ApiError(408, "the forecast took too long", code="deadline") from None
        except (OSError, EOFError):
            self.close()
            raise ApiError(
                503, "the forecast ended its process; ask for less at once", code="out_of_memory"
            ) from None
        except BaseException:
            self.close()  # in the middle of something
            raise
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self.close)
        if isinstance(answer, Answer):
            return answer.forecast
        if answer.code == "deadline":
            raise ApiError(408, answer.message, code=answer.code)
        node = None if answer.node is None else f"nodes[{answer.node}]"
        raise invalid(answer.message, node, answer.code)

    async def _start(self, info: EngineInfo) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(packed(Begin(self._config, info)))
        return process

    def close(self) -> None:
        """End the process, whatever it does; the next question starts another."""
        process, self._process = self._process, None
        if self._idle is not None:
            self._idle.cancel()
        if process is not None and process.returncode is None:
            process.kill()


async def _exchange(process: asyncio.subprocess.Process, message: bytes) -> Answer | Refusal:
    """
    Raises:
        OSError, EOFError: the process is dead.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > _MAX_BYTES:
        raise EOFError
    return _ANSWERS.decode(await process.stdout.readexactly(length))
