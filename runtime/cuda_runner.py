"""The CUDA runner: one upload and one graph launch per decode step, tokens chosen on the device.

    upload n | graph n | choice n | copy of the ids to the host
                                  | upload n+1 | graph n+1, fed by choice n | ...

The host waits for the copied ids of a step and for nothing else; it may launch the next one
before. A step of decodes only replays a graph (`cuda_graphs`), others launch kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.cuda.device import CudaDevice, Device, DeviceLost
from palmette.kernels.cuda.feed import feed_tokens
from palmette.kernels.cuda.flashinfer import FlashInferAttention
from palmette.kernels.cuda.flashinfer_filters import FlashInferFilters
from palmette.kernels.cuda.logits import MAX_ROWS, DeviceLogits, DeviceSampler, StepOutput
from palmette.kernels.cuda.staging import Staging, layout_of
from palmette.kernels.cuda.streamed_pool import StreamedKVPool
from palmette.kernels.cuda.triton_attention import AttentionPlan, TritonAttention

from .cuda_graphs import GRAPH_ROWS, CaptureProgress, DecodeGraphs
from .cuda_warmup import warm_up
from .models.decoder import LoadTensor
from .models.fused_decoder import FusedDecoder
from .models.matrix_loader import LoadMatrix, matrices_of, numbers_of
from .models.shard import ALONE, Group
from .rank_weights import rank_checkpoint

if TYPE_CHECKING:  # readers of files, which random weights do not need
    from .cuda_weights import CudaWeights
    from .weights import Checkpoint

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class CudaRunner:
    """Implements `runner.AheadRunner`; `launch` does not wait for the device.

    dtype is that of activations, and of weights that are not quantised; weights: how matrices are
    kept (`cuda_weights`), None as numbers of dtype; kv_dtype that of K and V: auto is dtype, int8
    and fp8 keep a scale for each token and kv head. deterministic: a row's bits do not depend on
    batch, chunks, pages or cache. graph_rows: numbers of rows to capture graphs for, ascending;
    the graphs of shared pages are captured when they are first needed. load: gives the weights by
    name, on the device in dtype; None reads the checkpoint's; load_matrix: gives matrices instead.
    attention: triton or flashinfer. sampling: triton or flashinfer, whose kernels filter by top_k
    and top_p. progress: told how many graphs are captured, of how many. group: whose rank this is.
    warm: launch every kernel once, so that none is compiled while requests wait.

    Raises:
        ValueError: a weight is not finite or a shape is not supported by the kernels.
    """

    name = "cuda"
    is_async = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        dtype: str = "bf16",
        weights: CudaWeights | None = None,
        kv_dtype: str = "auto",
        deterministic: bool = True,
        share_pages: bool = True,
        attention: str = "triton",
        sampling: str = "triton",
        graph_rows: Sequence[int] = GRAPH_ROWS,
        device: Device | None = None,
        load: LoadTensor | None = None,
        load_matrix: LoadMatrix | None = None,
        progress: CaptureProgress | None = None,
        group: Group = ALONE,
        warm: bool = False,
    ) -> None:
        checkpoint = rank_checkpoint(checkpoint, group)
        config = checkpoint.config
        self._group = group
        self._device: Device = CudaDevice() if device is None else device
        target, kind = self._device.torch_device, _DTYPES[dtype]

        def load_file(name: str) -> Tensor:
            return numbers_of(checkpoint.weights.get(name), target, kind)

        if load_matrix is None and weights is not None:
            load_matrix = matrices_of(checkpoint, load or load_file, weights, target)
        self.vocab_size = config.vocab_size
        self._max_positions = min(config.context_length, num_pages * page_size)
        with torch.inference_mode():
            self._model = FusedDecoder(
                config,
                load_file if load is None else load,
                self._max_positions,
                deterministic=deterministic,
                group=group,
                load_matrix=load_matrix,
            )
        self.pool = StreamedKVPool(  # last of what is large: loading takes room for a while
            self._device,
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kind if kv_dtype == "auto" else _KV_DTYPES[kv_dtype],
        )
        with torch.inference_mode():
            self._attention: TritonAttention | FlashInferAttention
            if attention == "flashinfer":
                self._attention = FlashInferAttention(
                    self.pool,
                    num_heads=config.num_heads,
                    sliding_window=config.sliding_window,
                    share=share_pages,
                )
            else:
                self._attention = TritonAttention(
                    self.pool,
                    num_heads=config.num_heads,
                    sliding_window=config.sliding_window,
                    deterministic=deterministic,
                    share=share_pages,
                    query_dtype=kind,
                )
            self._sampler = DeviceSampler(
                self._device,
                self.vocab_size,
                filters=FlashInferFilters() if sampling == "flashinfer" else None,
                num_rows=max(graph_rows, default=16),
            )
            self._eager = Staging(self._device, 1 << 16)
            group.meet()  # from here on, what one rank waits for is near
            self.graphs = DecodeGraphs(
                self._device,
                self._model,
                self._attention,
                chosen=self._sampler.chosen,
                rows=graph_rows,
                max_positions=self._max_positions,
                progress=progress,
                is_alone=group.size == 1,
            )
        self.eager_steps = 0
        self._lost: DeviceLost | None = None
        if warm:
            self.graphs.capture_shared()
            warm_up(self, max_positions=self._max_positions, progress=progress)
            self.eager_steps = self.graphs.num_replays = 0

    @property
    def graph_replays(self) -> int:
        """Steps that were one graph."""
        return self.graphs.num_replays

    @property
    def graph_bytes(self) -> int:
        """Device memory that the graphs took when they were captured."""
        return self.graphs.num_bytes

    def launch(self, batch: ForwardBatch) -> DeviceLogits:
        """Enqueues the step. ValueError when the arrays are inconsistent: nothing was computed."""
        return self.launch_ahead(batch, None)

    def launch_ahead(self, batch: ForwardBatch, sources: Int32Array | None) -> DeviceLogits:
        """As `launch`, with the ids of some rows from the newest choice: see `AheadRunner`.

        Raises DeviceLost once an error has ended all work on the device, whosever step it was.
        """
        if self._lost is not None:
            raise self._lost
        if sources is None:
            sources = np.full(batch.num_tokens, -1, np.int32)
        self._check(batch, sources)
        plan = self._attention.prepare(batch)
        try:
            return self._enqueue(batch, plan, sources)
        except Exception as error:
            if self._device.is_lost():
                logger.critical("cuda: the device was lost: %s", error)
                self._lost = DeviceLost()
                raise self._lost from error
            raise

    def _enqueue(
        self, batch: ForwardBatch, plan: AttentionPlan, sources: Int32Array
    ) -> DeviceLogits:
        with torch.inference_mode():
            if self._group.size > 1:
                self._share_choice(sources)
            found = self.graphs.replay(batch, plan, sources)
            if found is None:
                step = self._launch_eager(batch, plan, sources)
            else:
                step = StepOutput(found[0], batch, positions=found[1])
        return DeviceLogits(step, self._sampler)

    def close(self) -> None:
        """Drops the graphs; other memory goes with the object."""
        self.graphs.close()

    def _share_choice(self, sources: Int32Array) -> None:
        """Rank 0 alone chooses; what it chose feeds all ranks."""
        num_fed = int(sources.max(initial=-1)) + 1
        if num_fed:
            chosen = self._sampler.chosen[:num_fed]
            self._device.submit(lambda: self._group.share(chosen))

    def _check(self, batch: ForwardBatch, sources: Int32Array) -> None:
        for name, values, end in (
            ("token id", batch.token_ids, self.vocab_size),
            ("position", batch.positions, self._max_positions),
        ):
            # Negative ones are the largest as uint32.
            if len(values) and np.maximum.reduce(values.view(np.uint32)) >= end:
                raise ValueError(
                    f"a {name} is outside of 0..{end - 1}: {values.min()}..{values.max()}"
                )
        is_chosen_here = self._group.rank == 0
        num_chosen = self._sampler.num_chosen if is_chosen_here else MAX_ROWS
        most = np.maximum.reduce(sources) if len(sources) else -1
        if len(sources) != batch.num_tokens or most >= num_chosen:
            raise ValueError(
                f"sources: {len(sources)} up to {most} for {batch.num_tokens} tokens; "
                f"one each, below the {num_chosen} rows of the newest choice"
            )

    def _launch_eager(
        self, batch: ForwardBatch, plan: AttentionPlan, sources: Int32Array
    ) -> StepOutput:
        self.eager_steps += 1
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": batch.token_ids,
            "sources": sources,
            "sample_rows": batch.sample_rows,
            **plan.arrays,
        }
        layout = layout_of(arrays)
        self._eager.upload(arrays, layout)
        views = self._eager.views(layout)
        step = StepOutput(None, batch, views["positions"], views["sample_rows"])
        num_tokens = batch.num_tokens

        def forward() -> None:
            self._attention.bind(plan, views)
            if num_tokens == 0:
                step.logits = torch.empty(0, self.vocab_size, device=self._device.torch_device)
                return
            token_ids = feed_tokens(views["token_ids"], views["sources"], self._sampler.chosen)
            step.logits = self._model.forward(
                token_ids, views["positions"], views["sample_rows"], self._attention
            )

        self._device.submit(forward)
        return step
