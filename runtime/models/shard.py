"""One rank's part of a model, and what ranks do together: heads, inner values and the vocabulary
are cut, norms are kept whole.

    q, k, v, gate, up      rows of the matrix      each rank its heads, its inner values
    o, down                columns                 partial sums, added over the ranks
    embedding, lm_head     rows                    each rank its ids; logits are joined
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from .config import ModelConfig
from .layout import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Array = TypeVar("Array")


class Group(Protocol):
    """The ranks of one model. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, which may take the place of `x`."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """[S, n] of each rank -> [S, n * size], in order of rank."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A whole model in one process."""

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


def shard_config(model: ModelConfig, size: int) -> ModelConfig:
    """What one of `size` ranks holds of heads and layers: kv heads are not cut below one.

    Raises:
        ValueError: the model cannot be cut into so many parts; says why.
    """
    if model.num_heads % size or model.intermediate_size % size:
        raise ValueError(
            f"tp: {size} does not divide {model.num_heads} heads and "
            f"{model.intermediate_size} intermediate values evenly"
        )
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise ValueError(f"tp: {size} and {model.num_kv_heads} kv heads do not divide each other")
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        intermediate_size=model.intermediate_size // size,
    )


def vocab_part(vocab_size: int, size: int) -> int:
    """Ids of each rank; the last one's part may reach beyond the vocabulary."""
    return -(-vocab_size // size)


def _slice(count: int, rank: int, size: int) -> slice:
    return slice(rank * (count // size), (rank + 1) * (count // size))


def cut_weight(
    name: str, weight: NDArray[np.float32], model: ModelConfig, group: Group
) -> NDArray[np.float32]:
    """The part of a weight of the whole `model` that `group.rank` holds."""
    rank, size = group.rank, group.size
    part = name.rsplit(".", 2)[-2]
    if size == 1:
        return weight
    if name in (EMBEDDING, LM_HEAD):
        count = vocab_part(model.vocab_size, size)
        own = weight[rank * count : (rank + 1) * count]
        import numpy as np  # slow to import; whoever only plans cuts no weights

        return np.pad(own, ((0, count - len(own)), (0, 0)))
    if part in ("k_proj", "v_proj"):
        heads = max(1, model.num_kv_heads // size)
        first = rank * model.num_kv_heads // size
        return weight[first * model.head_dim : (first + heads) * model.head_dim]
    if part in ("q_proj", "gate_proj", "up_proj"):
        return weight[_slice(weight.shape[0], rank, size)]
    if part in ("o_proj", "down_proj"):
        return weight[:, _slice(weight.shape[1], rank, size)]
    return weight


def embedding(
    look_up: Callable[[Tensor, Tensor], Tensor], ids: Tensor, weight: Tensor, group: Group
) -> Tensor:
    """look_up(ids, weight) over the whole vocabulary, of which `weight` is this rank's part."""
    if group.size == 1:
        return look_up(ids, weight)
    own = ids - group.rank * len(weight)
    is_own = (own >= 0) & (own < len(weight))
    return group.sum(look_up(own * is_own, weight) * is_own[:, None])
