"""Every operation of a decoder in plain torch: the oracle of all kernel tests.

A row's result is the same bits whatever the other rows, their number and order, the chunking and
the page size are. It holds by construction, from four rules:
  sums        over a fixed tree of elementwise additions (`tree_sum`), never a library reduction
  products    GEMMs of one shape: rows in blocks of a fixed number, padded with zeros; that all
              rows of such a block are treated alike is checked per matrix (`row_block`)
  exp         row by row on the CPU, each row aligned and padded: vector and scalar code of a
              library differ in the last bit
  attention   query by query: the same call, shape and strides for the same query
The number of torch's threads must not change between calls that are compared.

Legend: T tokens, H query heads, G kv heads, D head dim, L context length of one query.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .batch import ForwardBatch
from .kv_pool import PagedKVPool

ROW_BLOCK_CPU = 8
ROW_BLOCK_CUDA = 64
_LANES = 16  # float32 numbers in 64 bytes, the widest vector and torch's alignment


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """[T], [V, hidden] -> [T, hidden]."""
    return weight[token_ids]


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, in an order that depends on its length only."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((pairs, x[..., 2 * half :]), dim=-1)  # an odd one waits for the next round
    return x[..., 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., N], [N] -> [..., N]; computed in float32."""
    wide = x.float()
    mean = tree_sum(wide * wide) / x.shape[-1]
    scale = 1.0 / torch.sqrt(mean + eps)
    return weight * (wide * scale.unsqueeze(-1)).to(x.dtype)


def row_block(weight: Tensor) -> int:
    """How many rows `linear` may take at once with this [N, K] matrix.

    A block of equal rows must give equal results; otherwise rows go one at a time.
    """
    block = ROW_BLOCK_CPU if weight.device.type == "cpu" else ROW_BLOCK_CUDA
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(weight.shape[1], generator=generator).to(weight)
    result = functional.linear(row.expand(block, -1).contiguous(), weight)
    return block if torch.equal(result, result[:1].expand_as(result)) else 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, block: int) -> Tensor:
    """[T, K], [N, K], [N] -> [T, N]; `block` is that matrix's `row_block`."""
    num_rows = x.shape[0]
    padded = functional.pad(x, (0, 0, 0, -num_rows % block))
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    for start in range(0, num_rows, block):
        # a block of its own, so that every call sees the same alignment
        rows = padded[start : start + block].clone()
        out[start : start + block] = functional.linear(rows, weight)
    out = out[:num_rows]
    return out if bias is None else out + bias


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] with cos, sin [T, D/2] float32; rotates halves."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, N]."""
    wide = gate.float()
    return (wide / (1.0 + _exp(-wide))).to(gate.dtype) * up


def _exp(x: Tensor) -> Tensor:
    """[T, N] float32."""
    if x.device.type != "cpu":
        return torch.exp(x)
    num_columns = x.shape[1]
    padded = functional.pad(x, (0, -num_columns % _LANES))
    for row in padded:
        row.exp_()
    return padded[:, :num_columns]


def check_batch(batch: ForwardBatch, *, num_pages: int, page_size: int) -> None:
    """Raise ValueError when the arrays contradict each other or leave the pool."""
    num_tokens, num_sequences = batch.num_tokens, batch.num_sequences
    if len(batch.positions) != num_tokens or len(batch.kv_slots) != num_tokens:
        raise ValueError("token_ids, positions and kv_slots differ in length")
    for indptr, end in ((batch.qo_indptr, num_tokens), (batch.kv_indptr, len(batch.kv_page_ids))):
        if indptr[0] != 0 or indptr[-1] != end or (np.diff(indptr) < 0).any():
            raise ValueError("qo_indptr or kv_indptr does not cut its array into sequences")
    last = batch.kv_last_page_len
    if len(batch.kv_indptr) != num_sequences + 1 or len(last) != num_sequences:
        raise ValueError("qo_indptr, kv_indptr and kv_last_page_len differ in sequences")
    if _outside(last - 1, page_size):
        raise ValueError(f"kv_last_page_len is outside of 1..{page_size}")
    if _outside(batch.kv_page_ids, num_pages) or _outside(batch.kv_slots, num_pages * page_size):
        raise ValueError(f"kv_page_ids or kv_slots leave the pool of {num_pages} pages")
    if _outside(batch.sample_rows, num_tokens):
        raise ValueError("sample_rows are outside of the step")
    lengths = (np.diff(batch.kv_indptr) - 1) * page_size + last
    if (batch.positions < 0).any() or (
        batch.positions >= np.repeat(lengths, np.diff(batch.qo_indptr))
    ).any():
        raise ValueError("a position is outside of its sequence's pages")


def _outside(values: np.ndarray, end: int) -> bool:
    return bool(((values < 0) | (values >= end)).any())


class ReferenceAttention:
    """Implements `backend.AttentionBackend` over a `PagedKVPool`.

    `sliding_window` w: a query at position p sees the positions p - w + 1 .. p.
    """

    def __init__(self, pool: PagedKVPool, *, sliding_window: int | None = None) -> None:
        self._pool = pool
        self._window = sliding_window
        self._write_slots = torch.empty(0, dtype=torch.int64)
        # per sequence: slots of positions 0.. [L], first row, positions of its rows
        self._sequences: list[tuple[Tensor, int, list[int]]] = []

    def plan(self, batch: ForwardBatch) -> None:
        page_size = self._pool.page_size
        check_batch(batch, num_pages=self._pool.num_pages, page_size=page_size)
        device = self._pool.keys(0).device
        offsets = np.arange(page_size, dtype=np.int64)
        self._write_slots = torch.from_numpy(batch.kv_slots.astype(np.int64)).to(device)
        self._sequences = []
        for index in range(batch.num_sequences):
            first, stop = int(batch.qo_indptr[index]), int(batch.qo_indptr[index + 1])
            positions = batch.positions[first:stop].tolist()
            if not positions:
                continue
            pages = batch.kv_page_ids[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
            slots = (pages.astype(np.int64)[:, None] * page_size + offsets).reshape(-1)
            slots = slots[: max(positions) + 1]
            self._sequences.append((torch.from_numpy(slots).to(device), first, positions))

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self._write_slots, k, v)
        out = torch.empty_like(q)
        for slots, first, positions in self._sequences:
            context_keys, context_values = self._pool.read(layer, slots)
            for row, position in enumerate(positions, start=first):
                begin = 0 if self._window is None else max(0, position - self._window + 1)
                seen = slice(begin, position + 1)
                out[row] = attend(q[row], context_keys[seen], context_values[seen])
        return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [H, D] over k, v [L, G, D] float32 -> [H, D]; head h reads kv head h // (H/G)."""
    num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = q.float().reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.matmul(grouped, k.permute(1, 2, 0)) * head_dim**-0.5  # [G, H/G, L]
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v.permute(1, 0, 2)).reshape(num_heads, head_dim).to(q.dtype)
