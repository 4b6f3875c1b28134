"""Triton's launch, all of it up to the compiler: its own rules say what would be compiled.

Arguments are bound and specialised by triton (types, divisibility by 16, ones), and what its cache
of kernels has not seen becomes a `Kernel` here, where triton would compile for seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from .log import LOG
from .streams import capability
from .tensors import MEMORY, use

_GRID = (2**31 - 1, 65535, 65535)  # CUDA programming guide


@dataclass(slots=True)
class Kernel:
    """One specialisation; stands for the compiled one."""

    function: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]  # arguments that are multiples of 16
    options: dict[str, Any]
    packed_metadata: Any = None
    num_launches: int = 0
    grids: set[tuple[int, int, int]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.function.fn.__name__)

    @property
    def ones(self) -> tuple[str, ...]:
        """Arguments that are 1, which triton compiles in."""
        return tuple(
            name
            for name, kind in self.signature.items()
            if kind == "constexpr" and not self.function.params[self._place(name)].is_constexpr
        )

    def _place(self, name: str) -> int:
        return int(self.function.arg_names.index(name))

    def describe(self) -> dict[str, Any]:
        return {
            "kernel": self.name,
            "types": {k: v for k, v in self.signature.items() if v != "constexpr"},
            "constants": self.constants,
            "divisible": sorted(self.divisible),
            "ones": sorted(self.ones),
            "options": self.options,
        }

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: Any, *rest: Any) -> None:
        """CUDA's launch; the last of `rest` are the kernel's arguments in order."""
        arguments = rest[-len(self.function.arg_names) :]
        for size, limit in zip((x, y, z), _GRID, strict=True):
            if not 0 < size <= limit:
                LOG.fault(f"{self.name}: a grid of {x} x {y} x {z}")
        for name, value in zip(self.function.arg_names, arguments, strict=True):
            if isinstance(value, torch.Tensor):
                if not value.is_meta:
                    LOG.fault(f"{self.name}: {name} is on the host")
                    continue
                use(MEMORY.block(value))
        LOG.counts[self.name] += 1
        LOG.call(f"{LOG.stream} {self.name}")
        self.num_launches += 1
        self.grids.add((x, y, z))


KERNELS: list[Kernel] = []
_functions: set[JITFunction[Any]] = set()


def forget() -> None:
    """As in a new process: nothing is compiled."""
    for function in _functions:
        function.device_caches.clear()
    KERNELS.clear()


class _Driver:
    """As much of a driver as a launch asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        major, minor = capability()
        return GPUTarget("cuda", 10 * major + minor, 32)


def _compile(
    self: JITFunction[Any], key: str, signature: Any, device: Any, constants: Any, options: Any,
    attributes: Any, warmup: bool,
) -> Kernel:  # fmt: skip
    names = self.arg_names
    given = json.loads(json.dumps(options.__dict__, default=str))
    kernel = Kernel(
        function=self,
        signature=dict(signature),
        constants={names[place]: value for (place,), value in constants.items()},
        divisible=tuple(
            names[place]
            for (place,), pairs in attributes.items()
            if ["tt.divisibility", 16] in pairs
        ),
        options={name: given[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")},
    )
    KERNELS.append(kernel)
    _functions.add(self)
    LOG.compiled += 1
    LOG.call(f"compiles {kernel.name}")
    if LOG.capture is not None:
        LOG.fault(f"{kernel.name} is compiled while a graph is captured")
    elif LOG.mode == "steady":
        LOG.fault(f"{kernel.name} is compiled in a steady step: {kernel.describe()}")
    self.device_caches[device][0][key] = kernel
    return kernel


def install() -> None:
    triton.runtime.driver.set_active(_Driver())
    JITFunction._do_compile = _compile
