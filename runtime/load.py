"""From a configuration to a running engine: files, runner, memory, grammars.

Every choice that depends on the machine is made here, once, and logged with its reason; the
engine below does not know which device it runs on.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from palmette import __version__
from palmette.constrained.backend import GrammarBackend, select_backend
from palmette.constrained.compiler import GrammarCompiler

from .config import EngineConfig
from .engine import Engine
from .fingerprint import fingerprint, kernels_text, layout_text
from .memory import plan_memory
from .model_store import resolve_model
from .models.config import ModelConfig
from .models.shard import shard_config
from .request import EngineInfo
from .runner import ModelRunner, RunnerChoice, select_runner
from .tokenizer import Tokenizer
from .weights import Checkpoint, open_checkpoint

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_DOCTOR = "`palmette doctor` shows what this installation can do"
_REMEDIES = {
    errno.EACCES: "check its permissions and owner",
    errno.EPERM: "check its permissions and owner",
    errno.ENOENT: "check the path, or fetch the model anew with `palmette pull`",
    errno.ENOSPC: "free space on that disk",
    errno.ENOMEM: "free memory, or choose a smaller --kv-tokens",
}


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> Engine:
    """Load the model of `config` and build the engine around it.

    Raises:
        ValueError: for a model or an option that is not supported; says what is.
        RuntimeError: when the model cannot be fetched or no runner fits this machine.
    """
    if isinstance(config, str):
        raise TypeError(f"an engine is loaded with an EngineConfig(model={config!r})")
    backend = select_backend(config.grammar_backend)  # refused before anything is fetched or read
    path = resolve_model(config.model, progress=progress)
    with _explained(path):
        return _load(config, path, backend)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory or GGUF file; needs none of the weights.

    Raises:
        ValueError: it cannot be read; names the file and the way out.
    """
    with _explained(path):
        return Tokenizer.from_gguf(path) if path.is_file() else Tokenizer.from_directory(path)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """An error of the system, which may be no more than "not permitted", as one for the user."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, by name: it may not be here
            raise
        reason = str(error).split(". GPU")[0]  # the rest is about torch's allocator
        raise ValueError(
            f"cannot load {path}: {reason}; choose a smaller --memory-fraction, --kv-tokens or "
            "--max-running, or end what else uses the GPU"
        ) from error
    except OSError as error:
        if error.errno is None:  # has a message of its own, as ctypes' of a damaged library
            raise ValueError(f"cannot load {path}: {error}; {_DOCTOR}") from error
        where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        remedy = _REMEDIES.get(error.errno, _DOCTOR)
        raise ValueError(f"cannot load {path}: {error.strerror}{where}; {remedy}") from error


def _load(config: EngineConfig, path: Path, backend: GrammarBackend) -> Engine:
    checkpoint = open_checkpoint(path)
    tokenizer = open_tokenizer(path)
    context_length = _context_length(config, checkpoint.config)
    suited = config.scheduler.on(select_runner(config).name)
    config = replace(config, scheduler=suited)
    choice = select_runner(config)
    logger.info("runner %s on %s: %s", choice.name, choice.device, choice.reason)
    plan = plan_memory(
        config,
        shard_config(checkpoint.config, choice.num_devices),
        context_length=context_length,
        weight_bytes=choice.weight_bytes(checkpoint),
        kv_dtype=choice.kv_dtype(checkpoint),
        available_bytes=max(0, choice.available_bytes() - choice.workspace_bytes(checkpoint)),
        default_fraction=choice.memory_fraction,
    )
    logger.info("%s", plan.describe())
    runner = choice.build(checkpoint, plan.kv_tokens // config.page_size)
    vocabulary = tokenizer.vocabulary(runner.vocab_size)
    grammars = GrammarCompiler(
        vocabulary,
        backend,
        cache_bytes=config.grammar_cache_bytes,
    )
    info = _engine_info(
        config,
        checkpoint,
        tokenizer,
        runner=runner,
        choice=choice,
        context_length=context_length,
    )
    layout = "" if config.disk_cache_dir is None else _layout(config, path, choice, runner)
    return Engine(
        config=config,
        runner=runner,
        tokenizer=tokenizer,
        grammars=grammars,
        info=info,
        layout=layout,
    )


def _layout(config: EngineConfig, path: Path, choice: RunnerChoice, runner: ModelRunner) -> str:
    """What decides the bits of a page, for those that outlive the process."""
    assert config.disk_cache_dir is not None
    model = fingerprint(path, memo_folder=Path(config.disk_cache_dir).expanduser())
    bits = "deterministic" if config.deterministic else "not deterministic"
    details = f"weights {choice.weights}, attention {config.attention}, {bits}"
    kernels = f"{choice.name} {kernels_text(choice.name, choice.device)}, {details}"
    return layout_text(model, kernels, runner.pool.layout)


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.context_length is None:
        return model.context_length
    if not 1 < config.context_length <= model.context_length:
        raise ValueError(
            f"context_length: {config.context_length} is out of range; {config.model} allows "
            f"2..{model.context_length}"
        )
    return config.context_length


def _engine_info(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    runner: ModelRunner,
    choice: RunnerChoice,
    context_length: int,
) -> EngineInfo:
    return EngineInfo(
        model=config.served_name or config.model,
        vocab_size=runner.vocab_size,
        context_length=context_length,
        page_size=runner.pool.page_size,
        num_pages=runner.pool.num_pages,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token_id=tokenizer.bos_token_id,
        chat_template=tokenizer.chat_template,
        special_tokens=dict(tokenizer.special_tokens),
        architecture=checkpoint.config.architecture,
        device=choice.device,
        runner=runner.name,
        weights=choice.weights_name(checkpoint) if choice.weights_name else choice.weights,
        kv_dtype=choice.kv_dtype(checkpoint),
        version=__version__,
        max_running=config.scheduler.num_rows,
        limits=config.limits,
    )
