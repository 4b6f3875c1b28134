"""What a compile has used of its budget: time of the processor, not of a clock on the wall.

On a busy machine a compile gets less than a core, above all as it gives way (see `priority`): no
fault of its grammar. Where the system does not tell, and beyond some budgets, the wall counts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_WAIT = 5.0  # budgets of wall time that a compile may take


def thread_seconds(ident: int) -> float | None:
    """Processor time of a living thread; None where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def process_seconds(pid: int) -> float | None:
    """Processor time of a process; None where the system does not tell, or it has ended."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def is_over(budget_s: float, *, wall_s: float, processor_s: float | None) -> bool:
    """Whether a compile is to be given up."""
    if wall_s <= budget_s:
        return False
    return processor_s is None or processor_s > budget_s or wall_s > MOST_WAIT * budget_s
