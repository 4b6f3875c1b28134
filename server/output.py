"""Where commands print their tables and write their figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

from .config import UserError

_PIPED_WIDTH = 160  # columns; rich takes a file for a terminal of 80 and wraps every table


def table_console() -> Console:
    """Standard output: as wide as the terminal or COLUMNS says, in a file wide enough for all."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(highlight=False)
    return Console(highlight=False, width=_PIPED_WIDTH)


def check_writable(path: Path) -> None:
    """Say now what would only show when there is something to write.

    Raises:
        UserError: the file can't be written.
    """
    is_new = not path.exists()
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(
            f"--json {path}: {error.strerror}; give a file that can be written"
        ) from None
    if is_new:
        path.unlink()
