"""The whole engine on the device: the same answers however they are served, and how long the
device stands still between its decode steps."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from engine_setups import SETUPS
from measure import Results
from side_by_side import Row, check_all, rows_of


def setup_rows(index: int) -> list[Row]:
    import engine_cases

    return rows_of(lambda results: engine_cases.check_setup(results, SETUPS[index]), index)


def main() -> int:
    results = Results("engine")
    if find_spec("msgspec") is None:  # what the other parts do without
        results.skip("engine", "msgspec is not installed; bring its wheel, and llguidance's")
        return results.finish()
    import engine_gap

    engine_gap.measure_gaps(results)  # alone on the device
    check_all(results, len(SETUPS), setup_rows)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
