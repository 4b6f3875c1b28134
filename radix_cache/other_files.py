"""Page files that are not this store's: of other layouts, and of other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from . import page_file


@dataclass(frozen=True, slots=True, order=True)
class PageFile:
    used_ns: int  # the file's time of modification, which a use renews
    path: Path
    num_bytes: int
    digest: bytes
    is_of_layout: bool


def scan(folder: Path, layout_folder: Path) -> list[PageFile]:
    """All page files of all layouts and versions below `folder`, the longest unused first.

    Raises:
        OSError: when a folder cannot be read.
    """
    found: list[PageFile] = []
    for each in page_file.layout_folders(folder):
        for digest, path in page_file.page_paths(each):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process has just deleted it
                continue
            found.append(
                PageFile(stat.st_mtime_ns, path, stat.st_size, digest, each == layout_folder)
            )
    return sorted(found)


class OtherFiles:
    """What counts within the bound of a folder and is not in a store's own books."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._files: deque[PageFile] = deque()  # the longest unused first

    def note(self, files: list[PageFile], own: Container[bytes]) -> None:
        """Take in what a scan has found; `own` are the digests of the layout in the books."""
        others = [file for file in files if not (file.is_of_layout and file.digest in own)]
        self._files = deque(others)
        self.num_bytes = sum(file.num_bytes for file in others)

    def remove_oldest(self, than: Path | None) -> bool:
        """Forget the file unused for the longest, if it is so for longer than the file `than`.

        It is deleted, unless it was used or written anew since the scan.

        Raises:
            OSError: when it cannot be deleted; it is not counted any more.
        """
        if not self._files or (than is not None and _used_ns(than) < self._files[0].used_ns):
            return False
        file = self._files.popleft()
        self.num_bytes -= file.num_bytes
        if _used_ns(file.path) == file.used_ns:
            file.path.unlink(missing_ok=True)
        return True


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it is gone, and costs nothing to forget
        return 0
