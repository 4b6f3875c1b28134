"""Triton's interpreter with the checks of `memory_check`, faster than without them.

`install` changes the interpreter of this process, for good:

    each load and store is checked against the tensor that its pointer was computed from
    programs of a launch run in an order that a seed shuffles, as on a device
    int32 sums and products that do not fit raise `MemoryFault`: a device wraps them
    the language is patched once, not at each launch and each call of a helper
    lanes that are off and have no `other` hold NaN or -1
    tensors are used as they are, not copied onto themselves after each launch
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import numpy as np
import triton.language as tl
from memory_check import Argument, Launch, MemoryFault
from triton.runtime import interpreter

LARGEST_GRID = (2**31 - 1, 65535, 65535)  # of CUDA devices
_KEEP_POINTERS = (
    *("create_splat", "create_broadcast", "create_expand_dims", "create_reshape", "create_trans"),
    *("create_bitcast", "create_unsplat"),
)


class CheckedBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """A pointer's handle carries `argument`: the tensor it came from."""

    launch: Launch | None = None

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any
    ) -> Any:
        if self.launch is not None:
            self.launch.load(ptrs.data, mask.data, _item_size(ptrs), _argument(ptrs))
            if other is None and not mask.data.all():
                kind = interpreter._get_np_dtype(ptrs.get_element_ty())
                poison = np.full(ptrs.data.shape, _poison(kind), kind)
                other = interpreter.TensorHandle(poison, ptrs.get_element_ty())
        return super().create_masked_load(ptrs, mask, other, cache_policy, is_volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        if self.launch is not None:
            size = _item_size(ptrs)
            self.launch.store(ptrs.data, mask.data, size, _argument(ptrs), value.data)
        return super().create_masked_store(ptrs, value, mask, cache_policy)

    def create_barrier(self) -> None:
        if self.launch is not None:
            self.launch.barrier()

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        return _from(super().create_addptr(ptr, offset), ptr)

    def create_add(self, lhs: Any, rhs: Any) -> Any:
        result = super().create_add(lhs, rhs)
        if result.data.dtype == np.int32:
            wraps = ((lhs.data ^ result.data) & (rhs.data ^ result.data)) < 0
            self._check_overflow("+", lhs, rhs, wraps)
        return result

    def create_sub(self, lhs: Any, rhs: Any) -> Any:
        result = super().create_sub(lhs, rhs)
        if result.data.dtype == np.int32:
            wraps = ((lhs.data ^ rhs.data) & (lhs.data ^ result.data)) < 0
            self._check_overflow("-", lhs, rhs, wraps)
        return result

    def create_mul(self, lhs: Any, rhs: Any) -> Any:
        result = super().create_mul(lhs, rhs)
        if result.data.dtype == np.int32:
            wraps = np.multiply(lhs.data, rhs.data, dtype=np.int64) != result.data
            self._check_overflow("*", lhs, rhs, wraps)
        return result

    def _check_overflow(self, sign: str, lhs: Any, rhs: Any, wraps: Any) -> None:
        if self.launch is not None and wraps.any():
            left, right, wrong = np.broadcast_arrays(lhs.data, rhs.data, wraps)
            place = int(wrong.reshape(-1).argmax())
            terms = f"{left.reshape(-1)[place]} {sign} {right.reshape(-1)[place]}"
            raise MemoryFault(f"{self.launch.kernel}: {terms} does not fit into int32")


def _poison(kind: Any) -> Any:
    """What lanes that are off have without an `other`: undefined on a device."""
    return np.nan if np.issubdtype(kind, np.floating) else np.array(-1).astype(kind)


def _item_size(pointers: Any) -> int:
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def _argument(handle: Any) -> Argument | None:
    return getattr(handle, "argument", None)


def _from(result: Any, pointer: Any) -> Any:
    if (argument := _argument(pointer)) is not None:
        result.argument = argument
    return result


def _keeping(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose result comes from the argument that the operand comes from."""

    def keep(self: Any, *args: Any) -> Any:
        handle = next(arg for arg in args if isinstance(arg, interpreter.TensorHandle))
        return _from(method(self, *args), handle)

    return keep


for _name in _KEEP_POINTERS:
    setattr(CheckedBuilder, _name, _keeping(getattr(interpreter.InterpreterBuilder, _name)))


class _Executor(interpreter.GridExecutor):  # type: ignore[misc]
    """A launch whose tensors are on the CPU already."""

    def __call__(self, *args: Any, **options: Any) -> None:
        names = inspect.getfullargspec(self.fn)
        known = {k: v for k, v in options.items() if k in (*names.args, *names.kwonlyargs)}
        given = inspect.getcallargs(self.fn, *args, **known)
        tensors = {name: value for name, value in given.items() if hasattr(value, "data_ptr")}
        arguments = {name: Argument.of(name, tensor) for name, tensor in tensors.items()}
        handles = {
            name: value if name in self.constexprs else interpreter._implicit_cvt(value)
            for name, value in given.items()
        }
        for name, argument in arguments.items():
            handles[name].handle.argument = argument
        builder = interpreter.interpreter_builder
        builder.launch = Launch(self.fn.__name__, options.get("num_warps", 4))
        try:
            self._run(builder, handles)
            builder.launch.finish()
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while isinstance(cause, interpreter.InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, MemoryFault):
                raise cause from error
            raise
        finally:
            builder.launch = None

    def _run(self, builder: CheckedBuilder, handles: dict[str, Any]) -> None:
        sizes = self.grid(handles) if callable(self.grid) else self.grid
        grid = (*sizes, 1, 1)[:3]
        if any(not 0 < n <= most for n, most in zip(grid, LARGEST_GRID, strict=True)):
            raise MemoryFault(f"{self.fn.__name__}: grid {grid} is not within {LARGEST_GRID}")
        builder.set_grid_dim(*grid)
        programs = _chosen(grid)
        seed = zlib.crc32(f"{self.fn.__name__} {grid}".encode())
        for index in np.random.default_rng(seed).permutation(len(programs)):
            builder.launch.begin(programs[index])
            builder.set_grid_idx(*programs[index])
            try:
                self.fn(**handles)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error


_last_programs: ContextVar[int | None] = ContextVar("last_programs", default=None)


def _chosen(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    last = _last_programs.get()
    starts = (max(0, n - last) if last else 0 for n in grid)
    return list(product(*(range(start, n) for start, n in zip(starts, grid, strict=True))))


@contextmanager
def last_programs(count: int) -> Iterator[None]:
    """Of each axis of a grid only the last `count` programs run: for what has millions."""
    token = _last_programs.set(count)
    try:
        yield
    finally:
        _last_programs.reset(token)


class _Patched:
    """What a launch undoes when it ends: nothing, the language stays patched."""

    def restore(self) -> None: ...


def _call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _cached_by_name(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, which makes a table at each call, asked once per type."""
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = numpy_type(kind.scalar)
        return known[name]

    return look_up


def install() -> None:
    """Check all launches of this process from here on."""
    builder = interpreter.interpreter_builder
    if isinstance(builder, CheckedBuilder):
        return
    builder.__class__ = CheckedBuilder

    def everything() -> None: ...

    source = type(everything)(everything.__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(source)
    interpreter._patch_lang = lambda _: _Patched()
    interpreter.GridExecutor = _Executor
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
    interpreter.InterpretedFunction.__call__ = _call_helper
