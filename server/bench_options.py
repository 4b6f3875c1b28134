"""The flags of `palmette bench`, what `bench serve` measures. Light: every command imports it."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from palmette.runtime.config import EngineConfig

from .bench_workloads import WORKLOADS, Scale, select
from .config import UserError

DEFAULT_URL = "http://127.0.0.1:30000"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is measured, and where."""

    url: str = DEFAULT_URL
    api_key: str | None = None
    model: str | None = None  # None: the first of /v1/models
    workloads: tuple[str, ...] = WORKLOADS
    scale: Scale = Scale.FULL
    rounds: int = 1
    seed: int = 0
    timeout_s: float = 600.0
    has_flush: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> BenchOptions:
        """What the flags say.

        Raises:
            UserError: a value is out of range, or a workload not known.
        """
        try:
            names = args.workloads.split(",")
            workloads = WORKLOADS if args.workloads == "all" else select(names)
        except ValueError as error:
            raise UserError(f"--{error}") from error
        return cls(
            url=args.url,
            api_key=args.api_key,
            model=args.model,
            workloads=workloads,
            scale=args.scale,
            rounds=args.rounds,
            seed=_clock_seed() if args.seed is None else args.seed,
            timeout_s=args.timeout_s,
            has_flush=args.flush_cache,
        )

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UserError(f"rounds: {self.rounds} is out of range; must be >= 1")
        if not self.timeout_s > 0:
            raise UserError(f"timeout_s: {self.timeout_s} is out of range; must be > 0")


def _clock_seed() -> int:
    """Another one every millisecond, short enough to be typed."""
    return time.time_ns() // 1_000_000 % 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `palmette bench serve`."""
    parser.add_argument("--url", default=DEFAULT_URL, help="default: %(default)s")
    parser.add_argument("--api-key", default=os.environ.get("PALMETTE_API_KEY"))
    parser.add_argument("--model", help="default: the first that the endpoint names")
    parser.add_argument(
        "--workloads",
        default="all",
        help=f"comma-separated, of {', '.join(WORKLOADS)}; W2 and W3 mean both of theirs",
    )
    parser.add_argument(
        "--scale",
        type=Scale,
        choices=list(Scale),
        default=Scale.FULL,
        help="small: about a quarter of the requests and lengths",
    )
    parser.add_argument("--rounds", type=int, default=1, help="report medians of so many")
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the prompts; default: from the clock, as a server that has seen the prompts of a "
        "seed has them in its cache",
    )
    parser.add_argument(
        "--tokenizer",
        help="to count tokens with: a directory, a .gguf file or a pulled model; default: that of "
        "the endpoint's model where it is here, else a word counts as a token",
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one call without news")
    parser.add_argument(
        "--flush-cache", action="store_true", help="POST /flush_cache before each round"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `palmette bench kernels`."""
    defaults = EngineConfig()
    parser.add_argument("--model", default=defaults.model, help="default: %(default)s")
    parser.add_argument("--weights", default=defaults.weights, help="default: %(default)s")
    parser.add_argument("--kv-dtype", default=defaults.kv_dtype, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--quick", action="store_true", help="fewer points, some 10 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
