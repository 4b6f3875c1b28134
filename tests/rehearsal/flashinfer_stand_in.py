"""FlashInfer for a rehearsal: shapes, devices and buffers as in `flashinfer_emulation`.

What its wrappers copy when they plan is theirs; what they are given is ours and checked: index
arrays that the host reads lie on the host, page ids on the device, and a graph's buffers stay.
"""

from __future__ import annotations

from typing import Any

import flashinfer_emulation as emulation
import torch
from torch import Tensor

from .log import LOG
from .tensors import launch

merge_state_in_place = emulation.merge_state_in_place


class _Shapes:
    """In place of `_Wrapper`'s buffers and numbers."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.is_meta
        self._workspace = float_workspace_buffer
        self._integers = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        self._use_cuda_graph = bool(options.get("use_cuda_graph"))
        self._buffers = [value for value in options.values() if isinstance(value, Tensor)]
        if any(not buffer.is_meta for buffer in self._buffers):
            LOG.fault("flashinfer: a buffer of a graph is on the host")

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        self._workspace, self._integers = float_workspace_buffer, int_workspace_buffer

    def plan(self, *arrays: Any, causal: bool = False, window_left: int = -1, **kinds: Any) -> None:
        given = [array for array in arrays if isinstance(array, Tensor)]
        *others, _last = given
        page_ids = others[-1]
        for array in given:
            if array.dtype != torch.int32 or array.is_meta != (array is page_ids):
                LOG.fault(f"flashinfer: {array.dtype} on {array.device} is waited for by a plan")
        if LOG.capture is not None:
            LOG.fault("flashinfer: a plan while a graph is captured")
        LOG.call("flashinfer plan")
        self._rows = len(_last) if len(given) == 3 else int(given[0][-1])
        if not self._use_cuda_graph:
            self._buffers = [page_ids]

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False
    ) -> Any:
        if not q.is_contiguous():
            LOG.fault("flashinfer: q is not dense")
        launch("flashinfer", [q, *paged_kv_cache, self._workspace, self._integers, *self._buffers])
        out = torch.empty_like(q)
        return (out, torch.empty(q.shape[:2], device=q.device)) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Shapes):
    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        super().__init__(workspace, kv_layout, **options)


class BatchPrefillWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    pass


class sampling:
    """The part of the package of that name."""

    @staticmethod
    def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
        assert temperature.is_meta
        return torch.softmax(logits, dim=-1)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    launch("flashinfer", [probs, top_k])
    return torch.empty_like(probs)


top_p_renorm_probs = top_k_renorm_probs
