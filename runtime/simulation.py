"""An engine without a model: the real scheduler, cache and grammars over answers that are given.

    engine = twin(real)              as another engine, or what is known of a server
    engine.submit(...), engine.step()

What such an engine counts - tokens found in the cache, steps, pages - is what the real one counts
for the same requests and answers, because the same code counts it. Its clock is moved by the
model of step times that the real engine has fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from palmette.constrained.backend import CompiledGrammar
from palmette.constrained.spec import GrammarSpec
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult
from palmette.radix_cache.node import KeptPrefix, decode
from palmette.radix_cache.tree import RadixTree, TreeNode

from .config import EngineConfig
from .engine import Engine
from .parts import GrammarSource, TokenCodec
from .request import EngineInfo
from .step_time import StepTimeModel, StepWork, chunk_attention

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gets. `end` comes when the ids are used up."""

    num_prompt: int
    token_ids: Sequence[int] = ()
    end: Sequence[int] = ()

    def token(self, position: int) -> int:
        place = position - self.num_prompt
        if place < len(self.token_ids):
            return self.token_ids[place]
        return self.end[min(place - len(self.token_ids), len(self.end) - 1)] if self.end else 0


class EmptyPool:
    """Pages that hold nothing."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = 1
        self.layout = "empty"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """Nothing to copy."""

    def export(self, page_ids: Sequence[int]) -> bytes:
        return bytes(len(page_ids))

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Nothing to write."""


class AnsweringRunner:
    """A ModelRunner that computes nothing. `answers` are by the seed of the request."""

    name = "simulation"
    is_async = False
    depth = 1

    def __init__(
        self,
        pool: EmptyPool,
        *,
        vocab_size: int,
        on_launch: Callable[[StepWork], None],
    ) -> None:
        self.pool = pool
        self.vocab_size = vocab_size
        self.answers: dict[int, Answer] = {}
        self.num_launches = 0
        self._on_launch = on_launch

    def launch(self, batch: ForwardBatch) -> AnsweringRunner:
        self.num_launches += 1
        self._on_launch(_work(batch, self.pool.page_size))
        return self

    def sample(self, params: SampleBatch) -> SampleResult:
        count = len(params.seeds)
        token_ids = np.array(params.targets, np.int32)
        tops = [max(int(wanted), 0) for wanted in params.num_top]
        for row in np.flatnonzero(token_ids < 0):
            answer = self.answers[int(params.seeds[row])]
            token_ids[row] = answer.token(int(params.positions[row]))
        return SampleResult(
            token_ids=token_ids,
            logprobs=np.zeros(count, np.float32),
            top_ids=tuple(np.arange(k, dtype=np.int32) if k else _NO_IDS for k in tops),
            top_logprobs=tuple(np.zeros(k, np.float32) if k else _NO_VALUES for k in tops),
        )

    def close(self) -> None:
        """Nothing to let go of."""


def _work(batch: ForwardBatch, page_size: int) -> StepWork:
    """What the step has to do, as `chunk_budget` counts it."""
    new = np.diff(batch.qo_indptr)
    whole = (np.diff(batch.kv_indptr) - 1) * page_size + batch.kv_last_page_len
    is_decode = new == 1
    chunks = zip((whole - new)[~is_decode].tolist(), whole[~is_decode].tolist(), strict=True)
    return StepWork(
        int(is_decode.sum()),
        int(whole[is_decode].sum()),
        int(new[~is_decode].sum()),
        sum(chunk_attention(start, end) for start, end in chunks),
    )


class _Shared:
    """A GrammarSource over another's grammars; compiles where it is asked."""

    def __init__(self, source: GrammarSource) -> None:
        self.on_done: Callable[[str], object] | None = None
        self._source = source

    def request(self, spec: GrammarSpec) -> None:
        """`get` will."""

    def cancel(self, spec: GrammarSpec) -> None:
        """Nothing was started."""

    def ready(self, spec: GrammarSpec) -> bool:
        return True

    def get(self, spec: GrammarSpec) -> CompiledGrammar:
        self._source.request(spec)
        return self._source.get(spec)

    def close(self) -> None:
        """They are the other's."""


class Simulation:
    """An engine without a model, its clock, and what it took."""

    def __init__(
        self,
        info: EngineInfo,
        config: EngineConfig,
        *,
        tokenizer: TokenCodec,
        grammars: GrammarSource,
        times: StepTimeModel | None,
    ) -> None:
        self.grammars = _Shared(grammars)
        self.has_times = times is not None
        self.now_s = 0.0
        self.peak_pages = 0
        self._times = times
        self.runner = AnsweringRunner(
            EmptyPool(num_pages=info.num_pages, page_size=info.page_size),
            vocab_size=info.vocab_size,
            on_launch=self._note,
        )
        self.engine = Engine(
            config=replace(config, host_cache_bytes=0, disk_cache_dir=None),
            runner=self.runner,
            tokenizer=tokenizer,
            grammars=self.grammars,
            info=info,
            clock=lambda: self.now_s,
        )

    def _note(self, work: StepWork) -> None:
        stats = self.engine.stats()
        self.peak_pages = max(self.peak_pages, stats.used_pages)
        if self._times is not None:
            self.now_s += self._times.predict(work)

    def fill_cache(self, snapshot: TreeNode) -> None:
        """Begin with the prefixes of another engine, the least used first."""
        self._keep(_paths(snapshot))

    def keep(self, prefixes: Sequence[KeptPrefix]) -> None:
        """Begin with these, in the namespace of whoever names none."""
        whole: list[bytes] = []
        is_leaf = [True] * len(prefixes)
        for prefix in prefixes:
            before = b"" if prefix.parent is None else whole[prefix.parent]
            whole.append(before + prefix.ids)
            if prefix.parent is not None:
                is_leaf[prefix.parent] = False
        self._keep(
            (prefix.last_use, (), decode(ids))
            for prefix, ids, is_last in zip(prefixes, whole, is_leaf, strict=True)
            if is_last
        )

    def _keep(self, paths: Iterable[tuple[int, tuple[str, ...], tuple[int, ...]]]) -> None:
        tree = self.engine.cache.tree
        for _, namespace, ids in sorted(paths, key=lambda path: path[0]):
            _insert(tree, ids, namespace)


def twin(engine: Engine) -> Simulation:
    """A simulation of an engine of this process, with an empty cache."""
    times = engine._scheduler.budget.model  # nobody else needs the parts of an engine
    return Simulation(
        engine.info,
        engine.config,
        tokenizer=engine.tokenizer,
        grammars=engine._grammars,
        times=times if times.is_ready else None,
    )


def _paths(root: TreeNode) -> list[tuple[int, tuple[str, ...], tuple[int, ...]]]:
    """(last use, namespace, ids that are ready) of all leaves."""
    found = []
    stack: list[tuple[TreeNode, tuple[int, ...]]] = [(child, ()) for child in root.children]
    while stack:
        node, before = stack.pop()
        ids = (*before, *node.token_ids[: node.num_ready])
        is_whole = node.num_ready == len(node.token_ids)
        if node.children and is_whole:
            stack.extend((child, ids) for child in node.children)
        elif ids:
            found.append((node.last_use, node.namespace, ids))
    return found


def _insert(tree: RadixTree, ids: tuple[int, ...], namespace: tuple[str, ...]) -> None:
    lease = tree.acquire((*ids, 0), namespace)  # one more: the last token is never matched
    missing = len(ids) - tree.frontier(lease)
    if missing > 0:
        tree.claim(lease, missing)
        tree.publish(lease, len(ids))
    tree.release(lease)
