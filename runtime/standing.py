"""What another process must know of an engine at work, to simulate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palmette.radix_cache.node import KeptPrefix
from palmette.radix_cache.tree import RadixTree

from .step_time import StepTimeModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    prefixes: Sequence[KeptPrefix] = ()  # of one namespace
    weights: tuple[float, ...] | None = None  # of its model of step times; None: not fitted yet

    @classmethod
    def of(
        cls, tree: RadixTree, times: StepTimeModel, namespace: tuple[str, ...] | None
    ) -> Standing:
        """`namespace`: whose prefixes; None: nobody's."""
        kept = () if namespace is None else tree.kept_prefixes(namespace)
        return cls(prefixes=kept, weights=times.weights if times.is_ready else None)

    @property
    def times(self) -> StepTimeModel | None:
        return None if self.weights is None else StepTimeModel.of(self.weights)
