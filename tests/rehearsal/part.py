"""Runs a part of benchmarks/gpu as on a GPU: `python -m rehearsal.part PART.py [ARGUMENT...]`.

Models have two layers, so that it takes seconds; times are those of nothing.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import flashinfer_stand_in, launches, streams, tensors
from .log import LOG

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def main() -> None:
    warnings.simplefilter("ignore")
    tensors.install()
    streams.install()
    launches.install()
    sys.modules["flashinfer"] = flashinfer_stand_in  # type: ignore[assignment]
    sys.path.insert(0, str(SCRIPTS))
    import measure  # type: ignore[import-not-found]

    measured: Any = measure
    measured.MODELS = {
        name: replace(config, num_layers=2) for name, config in measured.MODELS.items()
    }
    del sys.argv[0]
    try:
        runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")
    finally:
        for fault in LOG.faults:
            print("FAULT", fault)


if __name__ == "__main__":
    main()
