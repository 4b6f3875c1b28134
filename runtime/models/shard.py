"""One rank's part of a model, and what ranks do together: heads, inner values and the vocabulary
are cut, norms are kept whole.

    q, k, v, gate, up      rows of the matrix      each rank its heads, its inner values
    o, down                columns                 partial sums, added over the ranks
    embedding, lm_head     rows                    each rank its ids; logits are joined
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from .config import ModelConfig
from .layout import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    from torch import Tensor


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

    def share(self, x: Tensor) -> None:
        """Rank 0's `x` into that of the others."""
        ...

    def meet(self) -> None:
        """Wait until all ranks have come so far, as long as the loading of weights may take."""
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

    def share(self, x: Tensor) -> None:
        """There is nobody else."""

    def meet(self) -> None:
        """There is nobody else."""


ALONE = Alone()


def shard_config(model: ModelConfig, size: int) -> ModelConfig:
    """What one of `size` ranks holds of heads and layers: kv heads are not cut below one.

    Raises:
        ValueError: the model cannot be cut into so many parts; says why.
    """
    if not _fits(model, size):
        sizes = (n for n in range(1, model.num_heads + 1) if _fits(model, n))
        raise ValueError(
            f"tensor parallel: {size} does not divide {model.num_heads} heads, "
            f"{model.num_kv_heads} kv heads and {model.intermediate_size} intermediate values; "
            f"this model can be cut into {', '.join(map(str, sizes))}"
        )
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=max(1, model.num_kv_heads // size),
        intermediate_size=model.intermediate_size // size,
    )


def _fits(model: ModelConfig, size: int) -> bool:
    """Kv heads may also be fewer than ranks, which hold copies of one then."""
    is_even = model.num_heads % size == model.intermediate_size % size == 0
    return is_even and (model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0)


def vocab_part(vocab_size: int, size: int) -> int:
    """Ids of each rank; the last one's part may reach beyond the vocabulary."""
    return -(-vocab_size // size)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What of a weight a rank holds: rows, or the numbers of a vector; columns; zeros below."""

    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    num_padded: int = 0  # rows of zeros after these: of ids beyond the vocabulary


WHOLE = WeightPart()


def weight_part(name: str, shape: tuple[int, ...], model: ModelConfig, group: Group) -> WeightPart:
    """The part of a weight of the whole `model` that `group.rank` holds."""
    rank, size = group.rank, group.size
    part = name.rsplit(".", 2)[-2]
    if size == 1:
        return WHOLE
    if name in (EMBEDDING, LM_HEAD):
        count = vocab_part(model.vocab_size, size)
        first = min(rank * count, model.vocab_size)
        end = min(first + count, model.vocab_size)
        return WeightPart(rows=slice(first, end), num_padded=count - (end - first))
    if part in ("k_proj", "v_proj"):
        heads = max(1, model.num_kv_heads // size)
        start = rank * model.num_kv_heads // size
        return WeightPart(slice(start * model.head_dim, (start + heads) * model.head_dim))
    if part in ("q_proj", "gate_proj", "up_proj"):
        return WeightPart(_slice(shape[0], rank, size))
    if part in ("o_proj", "down_proj"):
        return WeightPart(columns=_slice(shape[1], rank, size))
    return WHOLE


def _slice(count: int, rank: int, size: int) -> slice:
    return slice(rank * (count // size), (rank + 1) * (count // size))


def embedding(
    look_up: Callable[[Tensor], Tensor], ids: Tensor, group: Group, *, num_rows: int
) -> Tensor:
    """look_up(ids) over the whole vocabulary, where it knows `num_rows` rows of this rank."""
    if group.size == 1:
        return look_up(ids)
    own = ids - group.rank * num_rows
    is_own = (own >= 0) & (own < num_rows)
    return group.sum(look_up(own * is_own) * is_own[:, None])
