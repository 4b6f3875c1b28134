"""Tensors that say they are on cuda:0, on a torch without CUDA: meta tensors with addresses.

Below python they are meta tensors, so torch's own rules give shapes, strides and views. What torch
on CUDA refuses is refused (a device mixed with another), and what it does by waiting is noted.
Host tensors are what they are: real memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .log import LOG

CUDA = torch.device("cuda", 0)
_ALIGNMENT = 512  # of the caching allocator, bytes
_real_device = torch._C.TensorBase.device  # type: ignore[attr-defined]
_real_data_ptr = torch._C.TensorBase.data_ptr
_is_inside = [False]  # of torch: there they are meta tensors


@dataclass(slots=True)
class Block:
    """Memory of the device."""

    ref: StorageWeakRef
    address: int
    num_bytes: int
    stream: str  # that was current when it was made
    made_in: Any = None  # the graph whose capture made it

    @property
    def is_free(self) -> bool:
        return bool(self.ref.expired())


class Memory:
    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._next = 1 << 32
        self._pinned: dict[int, StorageWeakRef] = {}
        self.live: list[Block] = []
        self.is_measuring = False
        self.peak = 0  # bytes that were held while it was measured

    def block(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage()
        known = self._blocks.get(storage._cdata)
        if known is not None:
            return known
        num_bytes = storage.nbytes()
        block = Block(StorageWeakRef(storage), self._next, num_bytes, LOG.stream, LOG.capture)
        self._next += -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT
        self._blocks[storage._cdata] = block
        self.live.append(block)
        if self.is_measuring:
            self.peak = max(self.peak, self.used())
        return block

    def used(self) -> int:
        """Bytes that are held."""
        self.live = [block for block in self.live if not block.is_free]
        return sum(block.num_bytes for block in self.live)

    def pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


MEMORY = Memory()


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def address(tensor: torch.Tensor) -> int:
    return MEMORY.block(tensor).address + tensor.storage_offset() * tensor.element_size()


def _device(tensor: torch.Tensor) -> torch.device:
    if tensor.is_meta and not _is_inside[0]:
        return CUDA
    device: torch.device = _real_device.__get__(tensor)
    return device


def _data_ptr(tensor: torch.Tensor) -> int:
    return address(tensor) if tensor.is_meta else int(_real_data_ptr(tensor))


def install() -> None:
    torch.Tensor.device = property(_device)  # type: ignore[assignment,method-assign]
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)  # type: ignore[assignment]
    torch.Tensor.data_ptr = _data_ptr  # type: ignore[method-assign,assignment]
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device=) by way of the host
    Rehearsal().__enter__()


_COPIES = {"aten.copy_.default", "aten._to_copy.default"}
_TO = {"aten.to.dtype_layout", "aten.to.device", "aten.to.dtype", "aten.to.other"}
_VALUES = {
    "aten._local_scalar_dense.default": "the value of a tensor",
    "aten.nonzero.default": "a number of elements",
    "aten.masked_select.default": "a number of elements",
    "aten._unique2.default": "a number of elements",
    "aten.equal.default": "a comparison",
    "aten.is_nonzero.default": "the value of a tensor",
    "aten.item.default": "the value of a tensor",
}
_ANSWERED = ("aten._local", "aten.item", "aten.is_", "aten.equal")  # while models load
_MAKES_NOTHING = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}
_MAKES_NOTHING |= {"aten.empty_strided.default", "aten.detach.default", "aten.lift_fresh.default"}


class Rehearsal(TorchDispatchMode):
    """Every operation of torch, on the way to its device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func)
        targets = [kwargs.get("device"), *(v for v in args if isinstance(v, torch.device))]
        to_cuda = any(v is not None and torch.device(v).type == "cuda" for v in targets)
        tensors = list(_tensors((*args, *kwargs.values())))
        on_cuda = [tensor for tensor in tensors if tensor.is_meta]
        if not on_cuda and not to_cuda:
            return _on_host(func, args, kwargs)
        if name in _TO or name == "aten._to_copy.default":
            return _converted(func, args, kwargs)
        if name == "aten.copy_.default":
            return _copied(args[0], args[1], is_async=bool(_at(args, kwargs, 2, "non_blocking")))
        if name in _VALUES:
            LOG.waits(f"{_VALUES[name]} on the device is asked for")
            if LOG.mode != "load" or not name.startswith(_ANSWERED):
                raise RuntimeError(f"{name}: {_VALUES[name]} that is on the device")
            return int(args[0].dtype.is_floating_point or args[0].dtype == torch.bool)
        _check_one_device(name, tensors, on_cuda)
        if to_cuda:
            kwargs["device"] = "meta"
        if "generator" in kwargs:
            kwargs["generator"] = None
        args = tuple(None if isinstance(value, torch.Generator) else value for value in args)
        _note(func, name, args, kwargs, on_cuda)
        return _below(func, args, kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among arguments, lists of them included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _is_inside[0] = True
    try:
        result = func(*args, **kwargs)
    finally:
        _is_inside[0] = False
    for tensor in _tensors((result,)):
        if tensor.is_meta:
            MEMORY.block(tensor)
    return result


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_pinned = bool(kwargs.pop("pin_memory", False))
    result = func(*args, **kwargs)
    if is_pinned:
        LOG.waits("pinned memory is made")
        MEMORY.pin(result)
    return result


def _converted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`to` and `_to_copy`, where a side is on the device."""
    source = args[0]
    target = next((v for v in args[1:] if isinstance(v, torch.device)), kwargs.get("device"))
    if len(args) > 1 and isinstance(args[1], torch.Tensor):  # like another
        target = CUDA if args[1].is_meta else torch.device("cpu")
    target = source.device if target is None else torch.device(target)
    dtype = next((v for v in args[1:] if isinstance(v, torch.dtype)), kwargs.get("dtype"))
    is_async = bool(kwargs.get("non_blocking"))
    if source.is_meta and target.type == "cuda":
        kwargs = {**kwargs, "device": None} if "device" in kwargs else kwargs
        args = tuple(None if isinstance(v, torch.device) else v for v in args)
        kind = source.dtype if dtype is None else dtype
        wants_copy = str(func) == "aten._to_copy.default" or bool(kwargs.get("copy"))
        if kind == source.dtype and not wants_copy and kwargs.get("memory_format") is None:
            return source
        with _quiet():
            out = torch.empty_like(source, dtype=kind, memory_format=kwargs.get("memory_format"))
        launch("convert", [source, out])
        return out
    pinned = target.type == "cpu" and is_async  # torch gives pinned memory for such a copy
    with _quiet():
        shape = {"size": source.shape, "dtype": dtype or source.dtype}
        out = torch.empty(
            **shape, device="meta" if target.type == "cuda" else "cpu", pin_memory=False
        )
        if pinned:
            MEMORY.pin(out)
    _copied(out, source, is_async=is_async)
    return out


class _quiet:
    """Operations in here are the rehearsal's own."""

    def __enter__(self) -> None:
        self._mode = torch.utils._python_dispatch._disable_current_modes()
        self._mode.__enter__()
        _is_inside[0] = True

    def __exit__(self, *error: object) -> None:
        _is_inside[0] = False
        self._mode.__exit__(*error)


def _copied(target: torch.Tensor, source: torch.Tensor, *, is_async: bool) -> torch.Tensor:
    if target.is_meta and source.is_meta:
        with _quiet():
            target.expand_as(target).copy_(source)  # checks the shapes
        launch("copy", [target, source])
        return target
    host, device = (source, target) if target.is_meta else (target, source)
    way = "upload" if target.is_meta else "download"
    if source.dim() == 0 and target.is_meta:
        launch("fill", [target])
        return target
    if source.shape != target.shape or source.dtype != target.dtype:
        LOG.waits(f"{way} that converts {source.dtype} {tuple(source.shape)} on the way")
    if not (source.is_contiguous() and target.is_contiguous()):
        LOG.waits(f"{way} of what is not dense")
    LOG.refused(f"{way} between host and device")
    _use(device)
    LOG.call(f"{LOG.stream} {way}")
    if not MEMORY.is_pinned(host):
        LOG.waits(f"{way} of pageable memory")
    elif not is_async:
        LOG.waits(f"{way} that is waited for")
    if not target.is_meta:
        with _quiet():
            target.zero_()
    return target


def _check_one_device(name: str, tensors: list[torch.Tensor], on_cuda: list[torch.Tensor]) -> None:
    others = [t for t in tensors if not t.is_meta and t.dim() > 0]
    if not others:
        return
    if name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):
        LOG.waits("an index on the host, copied to the device")
        return
    raise RuntimeError(f"{name}: tensors on cuda:0 and on the cpu")


def _note(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], on_cuda: list[torch.Tensor]
) -> None:
    if name.startswith(("aten.index.", "aten.index_put", "aten._index_put")):
        if any(t.dtype == torch.bool for t in _tensors(args[1])):
            LOG.waits("a mask as an index: how many elements it has")
    if func.is_view or name in _MAKES_NOTHING or name.startswith(("aten.view", "aten.unflatten")):
        return
    if name.startswith(("aten.resolve", "aten.alias", "aten._reshape_alias")):
        return
    kind = name.split(".")[1]
    shapes = " ".join(f"{tuple(t.shape)} {t.dtype}" for t in on_cuda)
    if LOG.capture is None:
        _library_calls.add(f"{kind} {shapes}")
    elif f"{kind} {shapes}" not in _library_calls:
        LOG.fault(f"{kind} runs for the first time while a graph is captured")
    launch(kind, on_cuda)


_library_calls: set[str] = set()


def launch(kind: str, tensors: list[torch.Tensor]) -> None:
    """Something runs on the current stream and reads or writes them."""
    LOG.call(f"{LOG.stream} {kind}")
    LOG.counts[kind] += 1
    for tensor in tensors:
        _use(tensor)


def _use(tensor: torch.Tensor) -> None:
    use(MEMORY.block(tensor))


def use(block: Block) -> None:
    """Something on the current stream reads or writes it."""
    if LOG.capture is not None:
        LOG.capture.blocks[block.address] = block
    if block.made_in is not LOG.capture and block.made_in is not None:
        LOG.fault("memory of a graph is used outside of it")
