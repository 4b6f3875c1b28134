"""What a rehearsal notes, in order."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Log:
    """mode: load (values may be asked for), run, or steady (whatever waits is a fault)."""

    mode: str = "load"
    calls: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stream: str = "main"  # the current one
    capture: Any = None  # the graph that is being captured
    compiled: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # launches by kernel

    def call(self, what: str) -> None:
        self.calls.append(what)

    def fault(self, what: str) -> None:
        line = f"{what}, at {where()}"
        if line not in self.faults:
            self.faults.append(line)

    def waits(self, what: str) -> None:
        """The host stands still, or copies by hand: allowed until steps are steady."""
        self.call(f"wait: {what}")
        if self.capture is not None:
            self.fault(f"{what} while a graph is captured")
        elif self.mode == "steady":
            self.fault(f"{what} in a steady step")

    def refused(self, what: str) -> None:
        """What CUDA fails a capture for."""
        if self.capture is not None:
            self.fault(f"{what} while a graph is captured")


def where() -> str:
    """The innermost lines of the product."""
    frames = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if Path(frame.filename).is_relative_to(ROOT)
        and not Path(frame.filename).is_relative_to(ROOT / "tests" / "rehearsal")
    ]
    return " < ".join(reversed(frames[-3:]))


LOG = Log()
