"""Who compiles for long gives way: the threads of steps, and light grammars, go first.

In steps, and not at once: on a machine that steps keep busy, what has the lowest priority hardly
gets on at all. Linux only; elsewhere nothing changes.
"""

from __future__ import annotations

import os
import sys

_STAGES = ((0.15, 10), (0.5, 19))  # seconds after which, and the nice value from then on
NUM_STAGES = len(_STAGES)


def give_way(thread: int, spent_s: float, stage: int) -> int:
    """Lower a thread that has compiled for `spent_s`, once for each stage; returns its stage.

    `thread` is as the system counts them; `stage` 0 is that of a light compile. There is no way
    back: who has left it is to be replaced.
    """
    if stage == NUM_STAGES or spent_s <= _STAGES[stage][0]:
        return stage
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, thread, _STAGES[stage][1])
        except OSError:
            pass  # it has ended, or may not
    return stage + 1


def be_idle(process: int) -> None:
    """A process runs when nothing else wants to."""
    if sys.platform == "linux":
        try:
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
        except OSError:
            pass
