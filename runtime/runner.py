"""What runs a model: the seam between the engine and a device.

launch(batch) -> handle        CPU: computes now; CUDA: enqueues
handle.sample(params) -> ids   waits for the device, the one synchronisation of a step
"""

from __future__ import annotations

from typing import Protocol

from palmette.kernels.backend import KVPool
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch, SampleResult


class StepHandle(Protocol):
    def sample(self, params: SampleBatch) -> SampleResult:
        """Choose or score one token per sampled row. Masks may be made after `launch`."""
        ...


class ModelRunner(Protocol):
    """A loaded model with its KV pool. A failing `launch` raises and leaves the pool usable."""

    @property
    def name(self) -> str:
        """Which runner this is, for logs and /server_info: native, torch, cuda, fake."""
        ...

    @property
    def depth(self) -> int:
        """Steps in flight: 1 computes in `launch`, 2 overlaps with the host."""
        ...

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        ...

    @property
    def pool(self) -> KVPool: ...

    def launch(self, batch: ForwardBatch) -> StepHandle: ...

    def close(self) -> None: ...
