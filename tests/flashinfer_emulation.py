"""FlashInfer's planned attention in torch on the CPU, after the documentation of 0.6.13.

Stands for the package where none runs: what a wrapper is given is checked as the original checks
it, and computed in float32 from the buffers that its kernels would read at that time.
`test_flashinfer.py` compares its signatures with the original's source, where that is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _lengths(indptr: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last_page_len


class _Wrapper:
    """What both kinds share: buffers of a page table, and attention over it."""

    calls: list[str]

    def _check(self, batch_size: int, indices: Tensor) -> None:
        if not self._use_cuda_graph:
            return
        if batch_size != self._fixed_batch_size:
            raise ValueError(f"batch size {batch_size} is not {self._fixed_batch_size}")
        if len(indices) > len(self._indices):
            raise ValueError("The size of indices should be at most the allocated buffer")

    def _table(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        for array in (indptr, indices, last_page_len):
            assert array.dtype == torch.int32
        assert int(indptr[-1]) >= len(indices)  # padding may lie behind them
        if self._use_cuda_graph:
            self._indptr.copy_(indptr)
            self._last.copy_(last_page_len)
            self._indices[: len(indices)].copy_(indices)
        else:
            self._indptr, self._indices, self._last = indptr, indices, last_page_len

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._workspace = float_workspace_buffer

    def _attend(
        self, q: Tensor, cache: tuple[Tensor, Tensor], qo_indptr: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """(out, log2 of the sum of exp) of every row; 0 and -inf where an entry has no pages."""
        keys, values = cache
        heads, kv_heads, page_size = q.shape[1], keys.shape[2], keys.shape[1]
        assert keys.dtype == self._kv_dtype and q.dtype == self._q_dtype
        out = torch.zeros_like(q)
        weight = torch.full(q.shape[:2], float("-inf"))
        lengths = _lengths(self._indptr, self._last, page_size)
        for entry in range(len(self._last)):
            first, stop = int(qo_indptr[entry]), int(qo_indptr[entry + 1])
            length = int(lengths[entry])
            if first == stop or length == 0:
                continue
            pages = self._indices[self._indptr[entry] : self._indptr[entry + 1]].long()
            k, v = (
                side[pages].flatten(0, 1)[:length].float().repeat_interleave(heads // kv_heads, 1)
                for side in (keys, values)
            )
            scores = torch.einsum("qhd,lhd->qhl", q[first:stop].float(), k) * q.shape[2] ** -0.5
            at, end = torch.arange(length), length - (stop - first) + torch.arange(stop - first)
            seen = torch.ones(stop - first, length, dtype=torch.bool)
            if causal:
                seen &= at[None] <= end[:, None]
            if self._window_left >= 0:
                seen &= at[None] >= end[:, None] - self._window_left
            scores = scores.masked_fill(~seen[:, None], float("-inf"))
            out[first:stop] = torch.einsum("qhl,lhd->qhd", scores.softmax(-1), v).to(q.dtype)
            weight[first:stop] = scores.logsumexp(-1) * 1.4426950408889634
        return out, weight


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert kv_layout == "NHD" and not float_workspace_buffer.any()
        self.calls = []
        self._use_cuda_graph, self._use_tensor_cores = use_cuda_graph, use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self._fixed_batch_size + 1
            self._indptr, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self._last = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        self._check(len(last_page_len), indices)
        if not self._use_tensor_cores and num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 8):
            raise ValueError("Unsupported group_size")
        self._table(indptr, indices, last_page_len)
        self._window_left, self._q_dtype = window_left, q_data_type
        self._kv_dtype = kv_data_type or q_data_type
        self.calls.append("plan")

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> Any:
        self.calls.append("run")
        assert len(q) == len(self._last)
        out, weight = self._attend(q, paged_kv_cache, torch.arange(len(q) + 1), causal=True)
        return (out, weight) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend in ("auto", "fa2", "fa3")
        self.calls = []
        self._use_cuda_graph = use_cuda_graph
        self._max_rows: int | None = None
        if use_cuda_graph:
            assert qo_indptr_buf is not None and paged_kv_indptr_buf is not None
            assert paged_kv_indices_buf is not None and paged_kv_last_page_len_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            assert len(paged_kv_indptr_buf) == self._fixed_batch_size + 1
            assert len(paged_kv_last_page_len_buf) == self._fixed_batch_size
            self._qo_indptr, self._indptr = qo_indptr_buf, paged_kv_indptr_buf
            self._indices, self._last = paged_kv_indices_buf, paged_kv_last_page_len_buf

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert (qo_indptr.diff() >= 0).all() and (paged_kv_indptr.diff() >= 0).all()
        self._check(len(qo_indptr) - 1, paged_kv_indices)
        if self._use_cuda_graph:
            self._max_rows = self._max_rows or int(qo_indptr[-1])
            if int(qo_indptr[-1]) > self._max_rows:
                raise ValueError("more rows than at the first plan")
            self._qo_indptr.copy_(qo_indptr)
        else:
            self._qo_indptr = qo_indptr
        self._table(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._window_left, self._q_dtype = window_left, q_data_type
        self._kv_dtype, self._causal = kv_data_type or q_data_type, causal
        self.calls.append("plan")

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> Any:
        self.calls.append("run")
        assert len(q) == int(self._qo_indptr[-1])
        out, weight = self._attend(q, paged_kv_cache, self._qo_indptr, causal=self._causal)
        return (out, weight) if return_lse else out


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    peak = torch.maximum(s, s_other)
    left, right = torch.exp2(s - peak), torch.exp2(s_other - peak)
    total = left + right
    merged = (v.float() * left[..., None] + v_other.float() * right[..., None]) / total[..., None]
    v.copy_(merged)
    s.copy_(peak + torch.log2(total))


class sampling:
    """The part of the package of that name."""

    @staticmethod
    def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
        assert logits.dtype == temperature.dtype == torch.float32
        return torch.softmax(logits / temperature[:, None], dim=-1)

    @staticmethod
    def top_k_top_p_sampling_from_probs(
        probs: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        *,
        filter_apply_order: str = "top_k_first",
        seed: int | None = None,
        offset: int | None = None,
    ) -> Tensor:
        assert filter_apply_order == "joint" and seed is not None and offset is not None
        kept = top_p_renorm_probs(top_k_renorm_probs(probs, top_k), top_p)
        return torch.multinomial(kept, 1)[:, 0].to(torch.int32)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    assert ((top_k > 0) & (top_k <= probs.shape[1])).all()
    ranked = probs.sort(dim=-1, descending=True).values
    kept = torch.where(probs >= ranked.gather(1, top_k[:, None].long() - 1), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    ranked = probs.sort(dim=-1, descending=True)
    before = ranked.values.cumsum(-1) - ranked.values
    kept = torch.where(before < top_p[:, None], ranked.values, 0.0)
    kept = torch.zeros_like(probs).scatter(1, ranked.indices, kept)
    return kept / kept.sum(-1, keepdim=True)
