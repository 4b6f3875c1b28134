"""What runs a model: the seam between the engine and a device.

launch(batch) -> handle        CPU: computes now; CUDA: enqueues
handle.sample(params) -> ids   waits for the device, the one synchronisation of a step

A runner whose device keeps the ids it has chosen (`AheadRunner`) is a step ahead of the host:

    device   forward n | sample n | forward n+1 ........ | sample n+1 | forward n+2
    host          ids of n: commit n, masks of n+1 ^, launch n+2 ^
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Literal, Protocol, runtime_checkable

import msgspec

from palmette.kernels.backend import KVPool
from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.kv_dtype import FLOAT_DTYPES, SCALED_KV_DTYPES, FloatDtype, KVDtype
from palmette.kernels.sampling import SampleBatch, SampleResult

from .attention import for_model, refuse_named, resolve, resolve_sampling
from .capture_bar import capture_bar
from .config import EngineConfig
from .memory import OWN_FRACTION, SHARED_FRACTION, available_bytes, workspace_bytes
from .models.shard import Alone, shard_config
from .rank_weights import rank_checkpoint
from .weights import Checkpoint

logger = logging.getLogger(__name__)

MIN_CAPABILITY = 80  # of a CUDA device: bf16 in its matrix instructions
_NO_DRIVER = "no driver is installed"
COMMUNICATOR_BYTES = 512 << 20  # of a rank's device, for what NCCL sends and receives: a guess


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
    def is_async(self) -> bool:
        """Whether `launch` returns before the step is computed: masks are filled meanwhile."""
        ...

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        ...

    @property
    def pool(self) -> KVPool: ...

    def launch(self, batch: ForwardBatch) -> StepHandle: ...

    def close(self) -> None: ...


class PendingSample(Protocol):
    """Chosen tokens on their way to the host."""

    def result(self) -> SampleResult | None:
        """Waits for them, None when none were asked for; raises what went wrong in the step.

        To be called once.
        """
        ...


class AheadHandle(StepHandle, Protocol):
    def start(self, params: SampleBatch | None) -> PendingSample:
        """Enqueue the choice of a token per sampled row; `params` is read before this returns.

        None: the step samples none.
        """
        ...


@runtime_checkable
class AheadRunner(ModelRunner, Protocol):
    """A runner that computes in order what was enqueued, pool operations included."""

    def launch_ahead(self, batch: ForwardBatch, sources: Int32Array | None) -> AheadHandle:
        """Enqueue a step; `batch` is read before this returns.

        sources [T]: the row of the choice that was started last whose id is this row's token, or
        -1: the id is in the batch; None: all are. Where that choice failed, the row's K and V are
        undefined and nothing else.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """Which runner was chosen, why, and what memory sizing must know about it."""

    name: str  # native, torch, cuda
    device: str  # cpu, cuda
    weights: str  # fp32, bf16, ...
    reason: str
    weight_bytes: Callable[[Checkpoint], int]  # memory of the weights as the runner keeps them
    kv_dtype: Callable[[Checkpoint], KVDtype]  # of the pool, for that model
    build: Callable[[Checkpoint, int], ModelRunner]  # checkpoint, number of pages
    weights_name: Callable[[Checkpoint], str] | None = None  # more than `weights`, for /server_info
    available_bytes: Callable[[], int] = available_bytes  # memory of the device
    workspace_bytes: Callable[[Checkpoint], int] = lambda _: 0  # beside the weights and the pool
    memory_fraction: float = SHARED_FRACTION  # of what is left, for K and V
    num_devices: int = 1  # that hold a part of the weights and of K and V each


def select_runner(config: EngineConfig) -> RunnerChoice:
    """Choose device and runner: CUDA when there is one, else native code, else torch.

    On CUDA the attention is FlashInfer's, else ours in Triton, else torch's reference. As the
    bits of FlashInfer depend on the batch, it is taken only when `deterministic` is off.

    Raises:
        ValueError: for a device or runner that does not exist here or do not go together.
        NativeError: when nothing can run on this machine; says what to install.
    """
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: {config.device!r} is unknown; use auto, cpu or cuda")
    if config.runner not in ("auto", "native", "torch", "cuda"):
        raise ValueError(f"runner: {config.runner!r} is unknown; use auto, native, torch or cuda")
    if config.attention not in ("auto", "flashinfer", "triton"):
        raise ValueError(
            f"attention: {config.attention!r} is unknown; use auto, flashinfer or triton"
        )
    choice = _one_rank(config)
    if choice.name != "cuda":
        refuse_named(config, f"the {choice.name} runner on {choice.device} ({choice.reason})")
    return choice if config.tensor_parallel == 1 else _sharded(config, choice)


def _one_rank(config: EngineConfig) -> RunnerChoice:
    has_cuda = config.device != "cpu" and _cuda_available()
    if config.device == "cuda" and not has_cuda:
        raise ValueError(
            f"device: cuda was asked for, but torch sees no CUDA device: {why_no_cuda()}; "
            "install 'palmette[cuda]' and a driver, or use --device cpu"
        )
    if has_cuda:
        if config.runner == "native":
            raise ValueError("runner: native runs on the CPU; use --device cpu or --runner torch")
        if config.runner == "torch":
            return _torch_choice(config, device="cuda", reason="as given")
        return _cuda_choice(config)
    if config.runner == "cuda":
        amiss = "--device cpu was given" if config.device == "cpu" else why_no_cuda()
        raise ValueError(f"runner: cuda needs a CUDA device, and there is none: {amiss}")
    if config.runner == "torch":
        return _torch_choice(config, device="cpu", reason="as given")
    if config.tensor_parallel > 1 and config.runner == "auto":
        return _torch_choice(
            config,
            device="cpu",
            reason="the native runner has one rank, and ranks on a CPU are for tests",
        )
    return _cpu_choice(config)


def _sharded(config: EngineConfig, choice: RunnerChoice) -> RunnerChoice:
    """The same choice, each layer cut over several ranks."""
    size = config.tensor_parallel
    if choice.name == "native":
        raise ValueError(
            f"tensor_parallel: {size} ranks, but the native runner has one, whose threads share "
            "the cores; use --runner torch, or CUDA devices"
        )
    is_cuda = choice.device == "cuda"
    if is_cuda and _num_cuda_devices() < size:
        raise ValueError(
            f"tensor_parallel: {size} ranks, but torch sees {_num_cuda_devices()} CUDA devices"
        )
    if is_cuda and not _has_nccl():
        raise ValueError("tensor_parallel: this torch has no NCCL, which ranks on CUDA need")

    def attention(checkpoint: Checkpoint) -> str:
        return for_model(resolve(config, has=_is_installed), config, checkpoint.config).name

    def build(checkpoint: Checkpoint, num_pages: int) -> ModelRunner:
        from .tensor_parallel.frames import RankOptions
        from .tensor_parallel.runner import tensor_parallel_runner

        if checkpoint.architecture.build is not None:
            raise ValueError(
                f"tensor_parallel: a {checkpoint.config.architecture} model cannot be cut into "
                f"{size} parts; use 1"
            )
        options = RankOptions(
            model=str(checkpoint.path),
            num_pages=num_pages,
            page_size=config.page_size,
            size=size,
            runner=choice.name,
            device=choice.device,
            weights=choice.weights,
            kv_dtype=choice.kv_dtype(checkpoint),
            deterministic=config.deterministic,
            may_shrink=is_cuda and config.kv_tokens is None,
        )
        if choice.name != "cuda":
            return tensor_parallel_runner(options)
        from .cuda_graphs import graph_rows_up_to

        options = msgspec.structs.replace(
            options,
            dtype=_rank_dtype(choice.weights, checkpoint, size),
            attention=attention(checkpoint),
            sampling=resolve_sampling(config, has=_is_installed),
            graph_rows=graph_rows_up_to(config.scheduler.num_rows),
        )
        with capture_bar() as progress:
            return tensor_parallel_runner(options, progress=progress)

    def weight_bytes(checkpoint: Checkpoint) -> int:
        if not is_cuda:  # ranks share the machine's memory
            return choice.weight_bytes(checkpoint)
        return choice.weight_bytes(_rank_outline(checkpoint, size))

    def workspace(checkpoint: Checkpoint) -> int:
        return choice.workspace_bytes(checkpoint) + (COMMUNICATOR_BYTES if is_cuda else 0)

    return replace(
        choice,
        reason=f"{choice.reason}; {size} ranks",
        weight_bytes=weight_bytes,
        workspace_bytes=workspace,
        build=build,
        num_devices=size if is_cuda else 1,
    )


def _rank_outline(checkpoint: Checkpoint, size: int) -> Checkpoint:
    """Shapes and encodings of what one of `size` ranks holds."""
    return rank_checkpoint(checkpoint, Alone(0, size), is_outline=True)


def _rank_dtype(wanted: str, checkpoint: Checkpoint, size: int) -> FloatDtype:
    """Of activations. ValueError where a rank cannot keep its part of the matrices as `wanted`."""
    from .cuda_weights import activations_of, check_rank_weights, check_weights, cuda_weights

    weights = cuda_weights(wanted)
    check_weights(weights, checkpoint)
    check_rank_weights(weights, checkpoint, _rank_outline(checkpoint, size))
    return activations_of(weights)


def _cpu_choice(config: EngineConfig) -> RunnerChoice:
    from palmette.kernels.cpu.build import NativeError, load

    try:
        load()
    except NativeError as error:
        reason, *details = str(error).splitlines()
        if find_spec("torch") is None:
            way = "install torch, which is slower: pip install 'palmette[torch]'"
        elif config.runner == "native":
            way = "use --runner torch, which is slower"
        else:
            return _torch_choice(config, device="cpu", reason=reason)
        raise NativeError("\n".join((f"{reason}; or {way}", *details))) from error
    return _native_choice(config)


def _native_choice(config: EngineConfig) -> RunnerChoice:
    from .cpu_weights import kept_bytes, kept_name, kv_dtype_of

    weights = config.weights

    def build(checkpoint: Checkpoint, num_pages: int) -> ModelRunner:
        from .cpu_runner import CpuRunner

        return CpuRunner(
            checkpoint,
            num_pages=num_pages,
            page_size=config.page_size,
            threads=config.threads,
            weights=weights,
            kv_dtype=config.kv_dtype,
        )

    return RunnerChoice(
        name="native",
        device="cpu",
        weights=weights,
        reason=_why_cpu() if config.device == "auto" else "as given",
        weight_bytes=partial(kept_bytes, weights),
        weights_name=partial(kept_name, weights),
        kv_dtype=partial(kv_dtype_of, config.kv_dtype, weights),
        build=build,
    )


def _cuda_choice(config: EngineConfig) -> RunnerChoice:
    from .cuda_weights import activations_of, check_weights, cuda_weights, kept_bytes, kept_name

    capability = _cuda_capability()
    if capability < MIN_CAPABILITY:
        reason = f"the device is sm_{capability}, and the kernels need sm_{MIN_CAPABILITY}"
        if config.runner == "cuda":
            raise ValueError(f"runner: {reason}; use --runner torch, or --device cpu")
        return _torch_choice(config, device="cuda", reason=reason)
    attention = resolve(config, has=_is_installed)
    sampling = resolve_sampling(config, has=_is_installed)
    if attention.name == "reference":
        reason = f"{attention.reason}, so attention is torch's reference, which is slow"
        if config.runner == "cuda":
            raise ValueError(f"attention: {attention.reason}")
        return _torch_choice(config, device="cuda", reason=reason)
    weights = cuda_weights(config.weights)
    dtype = activations_of(weights)
    kv_dtype = _cuda_kv_dtype(config.kv_dtype, dtype)

    def build(checkpoint: Checkpoint, num_pages: int) -> ModelRunner:
        if checkpoint.architecture.build is not None:  # its own model: torch, no fused kernels
            choice = _torch_choice(config, device="cuda", reason="an architecture of its own")
            return choice.build(checkpoint, num_pages)
        from .cuda_graphs import graph_rows_up_to
        from .cuda_runner import CudaRunner

        check_weights(weights, checkpoint)
        chosen = for_model(attention, config, checkpoint.config)
        if chosen != attention:
            logger.info("attention %s: %s", chosen.name, chosen.reason)
        with capture_bar() as progress:
            return CudaRunner(
                checkpoint,
                num_pages=num_pages,
                page_size=config.page_size,
                dtype=dtype,
                weights=None if weights == dtype else weights,
                kv_dtype=kv_dtype,
                deterministic=config.deterministic,
                progress=progress,
                attention=chosen.name,
                sampling=sampling,
                graph_rows=graph_rows_up_to(config.scheduler.num_rows),
                warm=True,
            )

    def workspace(checkpoint: Checkpoint) -> int:
        from palmette.kernels.cuda.streamed_pool import CHUNK_BYTES

        from .cuda_graphs import graph_bytes, graph_rows_up_to

        scheduler = config.scheduler
        model = shard_config(checkpoint.config, config.tensor_parallel)
        step = workspace_bytes(
            model, token_budget=scheduler.step_tokens, max_running=scheduler.num_rows
        )
        graphs = graph_bytes(model, graph_rows_up_to(scheduler.num_rows))
        wrappers = 0
        if attention.name == "flashinfer":
            from palmette.kernels.cuda.flashinfer import flashinfer_bytes

            wrappers = flashinfer_bytes(model.num_heads, model.num_kv_heads, model.head_dim)
        return step + graphs + wrappers + 2 * CHUNK_BYTES  # a chunk is gathered, then in order

    return RunnerChoice(
        name="cuda",
        device="cuda",
        weights=weights,
        reason=f"a CUDA device is there; attention {attention.name}: {attention.reason}",
        weight_bytes=partial(kept_bytes, weights),
        weights_name=partial(kept_name, weights),
        kv_dtype=lambda _: kv_dtype,
        build=build,
        available_bytes=_cuda_bytes(),
        workspace_bytes=workspace,
        memory_fraction=OWN_FRACTION,
    )


def _cuda_kv_dtype(wanted: str, dtype: FloatDtype) -> KVDtype:
    """How the cuda runner keeps K and V beside activations of `dtype`."""
    if wanted in ("auto", dtype):
        return dtype
    for known in SCALED_KV_DTYPES:
        if known == wanted:
            return known
    raise ValueError(
        f"kv_dtype: the kernels of cuda keep K and V as the activations, {dtype}, or as "
        f"{' or '.join(SCALED_KV_DTYPES)}, not {wanted}; use auto"
    )


def _torch_choice(
    config: EngineConfig, *, device: Literal["cpu", "cuda"], reason: str
) -> RunnerChoice:
    if find_spec("torch") is None:
        raise ValueError("runner: torch is not installed; pip install 'palmette[torch]'")
    default = "bf16" if device == "cuda" else "fp32"
    wanted = default if config.weights == "auto" else config.weights
    if wanted not in ("fp32", "bf16"):
        raise ValueError(f"weights: {wanted!r} is not supported by torch; use fp32 or bf16")
    weights: Literal["fp32", "bf16"] = "fp32" if wanted == "fp32" else "bf16"
    kv_dtype = weights if config.kv_dtype == "auto" else _as_float(config.kv_dtype)
    if kv_dtype is None:
        raise ValueError(
            f"kv_dtype: {config.kv_dtype!r} is not supported by torch; use one of auto, "
            f"{', '.join(FLOAT_DTYPES)}"
        )

    def build(checkpoint: Checkpoint, num_pages: int) -> ModelRunner:
        from .torch_runner import TorchRunner

        return TorchRunner(
            checkpoint,
            num_pages=num_pages,
            page_size=config.page_size,
            device=device,
            dtype=weights,
            kv_dtype=kv_dtype,
        )

    return RunnerChoice(
        name="torch",
        device=device,
        weights=weights,
        reason=reason,
        weight_bytes=partial(_uniform_bytes, 4 if weights == "fp32" else 2),
        kv_dtype=lambda _: kv_dtype,
        build=build,
        available_bytes=available_bytes if device == "cpu" else _cuda_bytes(),
    )


def _uniform_bytes(element_bytes: int, checkpoint: Checkpoint) -> int:
    weights = checkpoint.weights
    return element_bytes * sum(math.prod(weights.get(name).shape) for name in weights.names())


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _as_float(dtype: str) -> FloatDtype | None:
    return next((known for known in FLOAT_DTYPES if known == dtype), None)


def _cuda_bytes() -> Callable[[], int]:
    from .torch_runner import cuda_available_bytes

    return cuda_available_bytes


def _cuda_capability() -> int:
    from .torch_runner import cuda_capability

    return cuda_capability()


def _num_cuda_devices() -> int:
    from .torch_runner import cuda_num_devices

    return cuda_num_devices()


def _has_nccl() -> bool:
    from .torch_runner import has_nccl

    return has_nccl()


def _cuda_available() -> bool:
    return why_no_cuda() is None


def _why_cpu() -> str:
    """Of a machine with a driver, why its device is not taken."""
    why = why_no_cuda()
    return "no CUDA device was found" + ("" if why in (None, _NO_DRIVER) else f": {why}")


def why_no_cuda() -> str | None:
    """None where there is a device. The driver is asked for before torch: importing torch costs
    seconds where there is none."""
    if find_spec("torch") is None:
        return "torch is not installed"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _NO_DRIVER
    from .torch_runner import cuda_obstacle

    return cuda_obstacle()
