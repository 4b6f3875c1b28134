"""top_k and top_p by FlashInfer's kernels; the draw from what they keep stays ours.

Its samplers draw by one seed for a whole batch and by the row's number in it; ours by a seed,
choice and position per row. So only its filters are taken: they replace the searches of our
sampler, 11 passes over the logits each. Where weights tie or a sum falls on top_p, it may keep
another id than `kernels.sampling.sample_rows`.

Legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bitmask import apply_bitmask


class FlashInferFilters:
    def __init__(self) -> None:
        import flashinfer

        self._library: Any = flashinfer

    def keep(
        self,
        logits: Tensor,
        masks: Tensor | None,
        *,
        has_masks: Tensor,
        temperatures: Tensor,
        top_ks: Tensor | None,
        top_ps: Tensor | None,
    ) -> Tensor:
        """logits [S, V] float32 -> a copy, -inf where the filters or the masks drop an id.

        masks [S, W] int32 of the rows that has_masks; top_ks, top_ps [S], None where no row
        wants them. Rows of temperature 0 are left as they are.
        """
        if masks is not None:
            logits = logits.clone()
            apply_bitmask(logits, torch.where(has_masks[:, None] != 0, masks, -1))
        is_drawn = temperatures > 0
        probs = self._library.sampling.softmax(logits, torch.where(is_drawn, temperatures, 1.0))
        if top_ks is not None:
            limits = torch.where(is_drawn & (top_ks > 0), top_ks, logits.shape[1])
            probs = self._library.top_k_renorm_probs(probs, limits.clamp_max(logits.shape[1]))
        if top_ps is not None:
            probs = self._library.top_p_renorm_probs(probs, torch.where(is_drawn, top_ps, 1.0))
        return torch.where((probs > 0) | ~is_drawn[:, None], logits, float("-inf"))
