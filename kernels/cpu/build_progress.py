"""What is told of the compilation: a line that counts on a terminal, else one plain line."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import TextIO

logger = logging.getLogger(__name__)

_PROCESSOR_S = 20.0  # of all files together, about


class Progress:
    """Counts files; `stream` is where a terminal may be."""

    def __init__(self, num_files: int, num_threads: int, *, stream: TextIO | None = None) -> None:
        self._num_files = num_files
        self._num_done = 0
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream is not None and self._stream.isatty()
        seconds = _PROCESSOR_S / min(num_threads, num_files)
        about = max(5, 5 * round(seconds / 5))
        self._text = (
            f"native kernels: compiling for this machine, once; this takes about {about} s, up to "
            "a minute on a busy machine"
        )

    def __enter__(self) -> Progress:
        if self._is_terminal:
            self._show()
        else:
            logger.warning("%s", self._text)
        return self

    def advance(self) -> None:
        """One more file is compiled."""
        self._num_done += 1
        if self._is_terminal:
            self._show()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            print(file=self._stream, flush=True)

    def _show(self) -> None:
        done = f"{self._num_done} of {self._num_files} files"
        print(f"\r{self._text}: {done}", end="", file=self._stream, flush=True)
