"""pytest plugin (`-p cross.arm_plugin`): native kernels are those for ARM, run by an emulator.

The environment variable CROSS_INSTRUCTION_SET says which.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from cross import remote_library

from palmette.kernels.cpu import build


def pytest_configure(config: pytest.Config) -> None:
    name = os.environ["CROSS_INSTRUCTION_SET"]
    folder = tempfile.TemporaryDirectory(prefix="palmette-cross-")
    library = remote_library.compile_for_arm(name, Path(folder.name))
    patch = pytest.MonkeyPatch()
    remote_library.install(library, name, patch)
    patch.setattr(build, "instruction_sets", lambda: (name,))
    config.add_cleanup(patch.undo)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(library.close)
