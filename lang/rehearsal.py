"""Runs of compiled programs on an engine without a model, to see what they will take.

nodes -> Recorder -> Session -> simulated engine: the executor, the scheduler and the cache are
those of a real run; only the texts are assumed, or known from a run that was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec

from palmette.constrained.backend import CompiledGrammar
from palmette.constrained.spec import GrammarError, GrammarSpec
from palmette.constrained.vocabulary import Vocabulary
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.config import EngineConfig
from palmette.runtime.request import EngineInfo, Output, Request
from palmette.runtime.simulation import Answer, Simulation, twin

from .choices import ChoiceScores, Decision, needs_unconditional
from .content import Encoder
from .executor import Answered, CallRecord, name_of
from .ir import Call, Gen, Node, Select
from .outlook import BatchStart
from .passes import critical_path
from .session import Session
from .trace import Recorder

# Words of one token in most vocabularies; else letters. Texts of them are encoded as they were.
_WORDS = " time year people way day man thing woman life child world school state family student"
_LETTERS = "abcdefghijklmnop"
_MOST_TOKENS = 1 << 16  # of a sequence, where the engine is not in this process
_NO_STOPS = {"stop": (), "stop_regex": (), "stop_token_ids": (), "ignore_eos": True}


class Scripted(NamedTuple):
    """A request as it is to be simulated, and its answer; `told`: what its sender is to see."""

    request: Request
    answer: Answer
    told: Answered | None = None


class Script(Protocol):
    """What requests get."""

    @property
    def chosen(self) -> Mapping[tuple[int, int], int]:
        """Of (which program, value of a select) its choice."""
        ...

    def answer(self, run: int, request: Request) -> Scripted:
        """`run` counts the programs."""
        ...


class Rehearsal:
    """Programs on one simulation. `records[i]` are those of the i-th."""

    def __init__(self, simulation: Simulation, script: Script, *, is_streamed: bool) -> None:
        """`is_streamed`: whether the texts would be read as they come."""
        self.simulation = simulation
        self._script = script
        self._client = _Client(simulation, script, is_streamed)
        self._session = Session(self._client)

    def run(self, programs: Sequence[Sequence[Node]]) -> list[list[CallRecord]]:
        """All of them together, as `run_batch` runs them.

        Raises:
            ProgramError: a call fails.
        """
        batch = BatchStart(len(programs)) if len(programs) > 1 else None
        readings: list[Recorder] = []
        for index, nodes in enumerate(programs):
            reading = Recorder(self._session, batch, critical_path(nodes))
            self._client.runs[reading.run.run_id] = index
            for node in nodes:
                reading.append(self._decided(index, node))
            reading.close()
            readings.append(reading)
        for reading in readings:
            reading.finish()
            if reading.error is not None:
                raise reading.error
        return [reading.records for reading in readings]

    def _decided(self, run: int, node: Node) -> Node:
        """A select that takes what the script says, whatever its method makes of the scores."""
        index = self._script.chosen.get((run, node.value)) if isinstance(node, Select) else None
        if index is None:
            return node
        assert isinstance(node, Select)
        return node._replace(method=_Taken(index, needs_unconditional(node.method)))


@dataclass(frozen=True, slots=True)
class _Taken:
    """A ChoicesMethod that has decided."""

    index: int
    needs_unconditional: bool

    def __call__(self, scores: ChoiceScores, /) -> Decision:
        return Decision(index=self.index, meta={})


class _Client:
    """An EngineClient that gives requests the answers of a script."""

    def __init__(self, simulation: Simulation, script: Script, is_streamed: bool) -> None:
        self.runs: dict[str, int] = {}
        self._is_streamed = is_streamed
        self._told: dict[str, Answered] = {}
        self._simulation = simulation
        self._script = script
        self._local = LocalClient(simulation.engine)
        self.abort = self._local.abort
        self.encode = self._local.encode
        self.decode = self._local.decode
        self.info = self._local.info
        self.flush_cache = self._local.flush_cache
        self.close = self._local.close
        self.release = self._local.release

    def submit(self, requests: Sequence[Request]) -> None:
        rewritten = []
        for request in requests:
            answers = self._simulation.runner.answers
            changed, answer, told = self._script.answer(self.runs[request.program], request)
            seed = len(answers)
            answers[seed] = answer
            if told is not None:
                self._told[request.request_id] = told
            sampling = replace(changed.sampling, seed=seed)
            rewritten.append(replace(changed, sampling=sampling, is_streamed=self._is_streamed))
        self._local.submit(rewritten)

    def poll(self) -> list[Output]:
        return [self._as_told(output) for output in self._local.poll()]

    def _as_told(self, output: Output) -> Output:
        told = self._told.get(output.request_id)
        if told is None or output.error is not None:
            return output
        if output.finish is None:
            return msgspec.structs.replace(output, token_ids=(), text="")
        usage = msgspec.structs.replace(output.usage, completion_tokens=len(told.token_ids))
        return msgspec.structs.replace(
            output, token_ids=told.token_ids, text=told.text, finish=told.finish, usage=usage
        )


class Guess:
    """Gens run to their limit, constrained ones give their shortest text, selects the longest."""

    def __init__(
        self,
        simulation: Simulation,
        programs: Sequence[Sequence[Node]],
        *,
        encoder: Encoder,
        lengths: Mapping[str, int],
        knows_grammars: bool,
    ) -> None:
        self._simulation = simulation
        self._lengths = lengths
        self._knows_grammars = knows_grammars
        self._words = word_ids(encoder)
        self.chosen: dict[tuple[int, int], int] = {}
        self._names: dict[tuple[int, int], str | None] = {}
        for run, nodes in enumerate(programs):
            for node in nodes:
                if isinstance(node, Gen | Select):
                    self._names[run, node.value] = node.name
                if isinstance(node, Select):
                    sizes = [len(encoder.encode(c, trusted=node.trusted)) for c in node.choices]
                    self.chosen[run, node.value] = sizes.index(max(sizes))

    def answer(self, run: int, request: Request) -> Scripted:
        num_prompt, sampling = len(request.prompt_ids), request.sampling
        value = _value_of(request)
        if (run, value) in self.chosen:
            return Scripted(request, Answer(num_prompt))
        grammar = self._shortest(request)
        if grammar is not None:
            end = self._simulation.engine.info.eos_token_ids
            return Scripted(request, Answer(num_prompt, grammar, end))
        room = self._simulation.engine.info.context_length - num_prompt
        limit = sampling.max_new_tokens
        length = self._lengths.get(self._names[run, value] or "")
        if length is None:
            length = room if limit is None else limit
        sampling = replace(sampling, max_new_tokens=length, min_new_tokens=0, **_NO_STOPS)  # type: ignore[arg-type]
        ids = self._text(request, min(length, room), run)  # more is refused by the engine
        changed = replace(request, sampling=sampling, grammar=None)
        return Scripted(changed, Answer(num_prompt, ids))

    def _shortest(self, request: Request) -> Sequence[int] | None:
        spec = request.grammar
        if spec is None or not self._knows_grammars:
            return None
        try:
            compiled: CompiledGrammar = self._simulation.grammars.get(spec)
        except GrammarError:
            return ()  # the engine says so too
        return compiled.shortest

    def _text(self, request: Request, length: int, run: int) -> list[int]:
        """Different for different requests, and equal where a model would say the same."""
        words = self._words
        is_fixed = request.sampling.temperature == 0 or request.sampling.seed is not None
        key = "" if is_fixed else f"{run} {request.request_id}"
        said = f"{key} {request.prompt_ids} {request.sampling.seed} {request.choice_index}"
        number = int.from_bytes(hashlib.blake2b(said.encode()).digest(), "big")
        ids: list[int] = []
        for _ in range(length):
            number, digit = divmod(number or len(ids) + 1, len(words))
            ids.append(words[digit])
        return ids


class Known:
    """The texts of runs that were made."""

    def __init__(
        self,
        programs: Sequence[Sequence[Node]],
        records: Sequence[Sequence[CallRecord]],
        chosen: Sequence[Mapping[int, str]],
        *,
        encoder: Encoder,
        knows_grammars: bool,
    ) -> None:
        """`chosen`: of each run the texts of selects, by their value."""
        self._encoder = encoder
        self._knows_grammars = knows_grammars
        self._answers: dict[tuple[int, str], Answered] = {
            (run, answered.name): answered
            for run, made in enumerate(records)
            for record in made
            for answered in record.answers
        }
        self.chosen = {
            (run, int(node.value)): node.choices.index(chosen[run][node.value])
            for run, nodes in enumerate(programs)
            for node in nodes
            if isinstance(node, Select) and chosen[run].get(node.value) in node.choices
        }

    def answer(self, run: int, request: Request) -> Scripted:
        num_prompt = len(request.prompt_ids)
        answered = self._answers.get((run, name_of(request)))
        if answered is None or answered.finish is None:
            return Scripted(request, Answer(num_prompt))
        ids, matched = answered.token_ids, answered.finish.matched
        if request.grammar is not None and self._knows_grammars and not isinstance(matched, str):
            return Scripted(request, Answer(num_prompt, ids, [] if matched is None else [matched]))
        # The tokens that a stop string took are not told, so the grammar cannot go along.
        # Whatever ended it, a stop that was met is a token more than it shows, and not computed.
        length = len(ids) + (matched is not None)
        sampling = replace(
            request.sampling,
            max_new_tokens=length,
            min_new_tokens=0,
            **_NO_STOPS,  # type: ignore[arg-type]
        )
        changed = replace(request, grammar=None, sampling=sampling)
        return Scripted(changed, Answer(num_prompt, ids), answered)


def _value_of(request: Request) -> int:
    return int(name_of(request).partition(".")[0].partition("~")[0])


def word_ids(encoder: Encoder) -> list[int]:
    """Ids of texts that are one token each, also one after the other."""
    words = [f" {word}" for word in _WORDS.split()]
    for texts in (words, list(_LETTERS)):
        ids = [encoder.encode(text, trusted=False) for text in texts]
        found = [one[0] for one in ids if len(one) == 1]
        if len(found) == len(texts):
            return found
    return [encoder.encode("a", trusted=False)[0]]


def assumed(nodes: Sequence[Node]) -> list[Node]:
    """Nodes as they are rehearsed before a run: host functions and types are not asked."""
    changed: list[Node] = []
    for node in nodes:
        if isinstance(node, Call):
            node = node._replace(function=_one_word)
        elif isinstance(node, Gen) and (node.options.type is not None or node.options.retry):
            node = node._replace(options=replace(node.options, type=None, retry=0))
        changed.append(node)
    return changed


def _one_word(*_: object) -> str:
    return " time"


def simulation_of(client: EngineClient, encoder: Encoder, *, is_warm: bool) -> Simulation:
    """A simulation of the client's engine, or of what is known of it."""
    engine = getattr(client, "engine", None)
    if engine is not None:
        simulation = twin(engine)
        if is_warm:
            simulation.fill_cache(engine.snapshot())
        return simulation
    info = client.info()
    size = info.page_size
    info = replace(
        info,
        context_length=min(info.context_length, _MOST_TOKENS),
        num_pages=min(info.num_pages, 2 * _MOST_TOKENS // size),
    )
    config = EngineConfig(eviction_policy="lru")
    codec = _Codec(client, encoder, info)
    return Simulation(info, config, tokenizer=codec, grammars=_NoGrammars(), times=None)


def knows_grammars(client: EngineClient) -> bool:
    return getattr(client, "engine", None) is not None


class _Codec:
    """A client's tokenizer, with the bytes of the ids that a rehearsal writes."""

    def __init__(self, client: EngineClient, encoder: Encoder, info: EngineInfo) -> None:
        self._client = client
        self._encoder = encoder
        self._info = info

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self._encoder.encode(text, trusted=parse_special)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)

    def vocabulary(self, size: int) -> Vocabulary:
        table = _Bytes(size, self._encoder)
        return Vocabulary(
            token_bytes=table,  # type: ignore[arg-type]  # looked up, never walked
            special_ids=frozenset(),
            stop_ids=self._info.eos_token_ids,
            encode=self.encode,
        )


class _Bytes(Sequence[bytes]):
    """The bytes of ids, each asked for when it is needed."""

    def __init__(self, size: int, encoder: Encoder) -> None:
        self._size = size
        self._encoder = encoder

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._encoder.token_text(index).encode()


class _NoGrammars:
    """Grammars need the vocabulary, which a server does not tell."""

    on_done: Callable[[str], object] | None = None

    def request(self, spec: GrammarSpec) -> object:
        raise GrammarError("not known here")

    def cancel(self, spec: GrammarSpec) -> None:
        """Nothing was started."""

    def ready(self, spec: GrammarSpec) -> bool:
        return True

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        raise GrammarError("not known here")

    def close(self) -> None:
        """Nothing to close."""
