"""The tier on disk: bounded, content-addressed, written by one thread that nobody waits for.

A read is made by whoever asks for it, see `read_ahead`; a write is queued, up to a bound, and
dropped beyond it: the cache loses a page, a step never waits. Whatever the disk refuses costs
pages, never a request: one warning, then silence and a new try a minute later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

from . import page_file
from .other_files import OtherFiles, PageFile, scan
from .page_file import PageFileError
from .store import StoredPage, total_bytes
from .tenants import tenant_of

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 1024 * 1024
RETRY_S = 60.0  # after the disk refused a write
CLOSE_TIMEOUT_S = 30.0
LOOK_SHARE = 1 / 16


class DiskStore:
    """Implements `store.PageStore` over FOLDER for one layout.

    `max_bytes` bounds the page files of all layouts in FOLDER, the longest unused go first. What
    other processes write is seen at the start, and whenever a `LOOK_SHARE` of that was written.
    `page_bytes` of tokens are a page. Nothing is raised for what the disk does or holds. In a
    forked child, which has none of the threads, it holds nothing and takes nothing.
    """

    name = "disk"

    def __init__(self, folder: Path, *, layout: str, page_bytes: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_corrupt = 0
        self.num_dropped = 0  # pages that were not written
        self._layout = layout
        self._page_bytes = page_bytes
        self._top = folder
        self._others = OtherFiles()  # the writer's, once it runs
        self._num_unseen = 0  # bytes written since the last look
        self._folder = page_file.layout_folder(folder, layout)
        self._scratch = self._folder / "new"
        self._pid = os.getpid()
        self._lock = threading.Condition()  # held for moments only: steps wait for it
        self._replacing = threading.Lock()  # held while a file is put in place, or a bad one goes
        self._files: OrderedDict[bytes, int] = OrderedDict()  # sizes, least recently used first
        self._num_bytes = 0
        self._damaged: set[bytes] = set()  # were found so, and are not written anew
        self._queue: deque[list[StoredPage]] = deque()
        self._queued: dict[bytes, StoredPage] = {}
        self._queued_bytes = 0
        self._to_forget: dict[tuple[str, ...], None] = {}  # tenants, until their files are gone
        self._closing = False
        self._has_warned = False
        self._retry_at = 0.0
        self._open()
        self._writer = threading.Thread(target=self._run, name="palmette-cache", daemon=True)
        self._writer.start()

    @property
    def is_ours(self) -> bool:
        """False in a forked child: no thread writes there, and the lock may be held for ever."""
        return os.getpid() == self._pid

    @property
    def num_pages(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def contains(self, digest: bytes) -> bool:
        if not self.is_ours:
            return False
        with self._lock:
            return digest in self._files or digest in self._queued

    def get(self, digest: bytes, namespace: tuple[str, ...], tokens: bytes) -> bytes | None:
        page = self.load(digest)
        if page is None or page.namespace != namespace or page.tokens != tokens:
            return None
        return page.data

    def load(self, digest: bytes) -> StoredPage | None:
        """Read a page; its namespace and tokens are for the caller to compare."""
        if not self.is_ours:
            return None
        with self._lock:
            page = self._queued.get(digest)
            if page is not None or digest not in self._files:
                return page
            self._files.move_to_end(digest)
        page = self._read(digest)
        with self._lock:  # it may have been forgotten, and its file be gone, while it was read
            is_there = digest in self._files
            if page is None or tenant_of(page.namespace) in self._to_forget or not is_there:
                self._num_bytes -= self._files.pop(digest, 0)
                return None
        self._note_use(digest)
        return page

    def suspect(self, digests: Sequence[bytes]) -> None:
        """Count pages as not there, until they are checked or written anew."""
        if self.is_ours:
            with self._lock:
                for digest in digests:
                    self._num_bytes -= self._files.pop(digest, 0)

    def was_damaged(self, digest: bytes) -> bool:
        return digest in self._damaged

    def check(self, digest: bytes) -> None:
        """Read a page that is suspected: a sound one is there again, a damaged one goes."""
        if not self.is_ours or self._read(digest) is None:
            return
        with contextlib.suppress(OSError):
            size = page_file.page_path(self._folder, digest).stat().st_size
            with self._lock:
                if digest not in self._files:
                    self._files[digest] = size
                    self._num_bytes += size

    def put(self, pages: Sequence[StoredPage]) -> None:
        if not self.is_ours:
            return
        with self._lock:
            if time.monotonic() < self._retry_at:
                self.num_dropped += len(pages)
                return
            new = [
                page
                for page in pages
                if page.digest not in self._files and page.digest not in self._queued
            ]
            room = QUEUE_BYTES - self._queued_bytes
            while new and total_bytes(new) > room:
                new.pop()  # from the end: a path without its start is of no use
                self.num_dropped += 1
            if not new:
                return
            self._queue.append(new)
            self._queued.update((page.digest, page) for page in new)
            self._queued_bytes += total_bytes(new)
            self._lock.notify_all()

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much can be queued now."""
        if not self.is_ours:
            return False
        with self._lock:
            return self._queued_bytes + num_bytes <= QUEUE_BYTES

    def touch(self, digests: Sequence[bytes]) -> None:
        """Mark a path as used: its root last, for it is wanted longest."""
        if not self.is_ours:
            return
        with self._lock:
            for digest in reversed(digests):
                if digest in self._files:
                    self._files.move_to_end(digest)

    def wait(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Until everything that was queued is written, or dropped; False after the timeout."""
        if not self.is_ours:
            return True
        with self._lock:
            return self._lock.wait_for(lambda: not (self._queued or self._to_forget), timeout_s)

    def clear(self, tenant: tuple[str, ...] | None = None) -> None:
        """Forget all pages; those of a tenant at once, though its files go a little later."""
        if not self.is_ours:
            return
        if tenant is not None:
            with self._lock:
                for page in list(self._queued.values()):
                    if tenant_of(page.namespace) == tenant:
                        self._drop_queued(page)
                self._to_forget[tenant] = None
                self._lock.notify_all()
            return
        with self._lock:
            digests = list(self._files)
            self._forget_queue()
            self._files.clear()
            self._num_bytes = 0
        for digest in digests:
            self._unlink(digest)

    def close(self) -> None:
        """Write what is queued, for a while, and end the writer."""
        if not self.is_ours:
            return
        self.wait()
        with self._lock:
            self._closing = True
            self._forget_queue()
            self._lock.notify_all()
        self._writer.join(CLOSE_TIMEOUT_S)

    def _open(self) -> None:
        try:
            for each in page_file.layout_folders(self._top):
                page_file.remove_leftovers(each / "new")
            (self._folder / "pages").mkdir(parents=True, exist_ok=True)
            page_file.write_layout(self._folder, self._layout)
        except OSError as error:
            self._refused(error)
        files = self._scan() or []
        for file in files:
            if file.is_of_layout:
                self._files[file.digest] = file.num_bytes
                self._num_bytes += file.num_bytes
        self._others.note(files, self._files)
        self._shrink()

    def _scan(self) -> list[PageFile] | None:
        try:
            return scan(self._top, self._folder)
        except OSError as error:
            self._refused(error)
            return None

    def _look(self) -> None:
        """See what other processes have written and deleted."""
        self._num_unseen = 0
        with self._lock:
            known = set(self._files)
        files = self._scan()
        if files is None:
            return
        there = {file.digest for file in files if file.is_of_layout}
        self.suspect([digest for digest in known if digest not in there])
        self._others.note(files, known)

    def _read(self, digest: bytes) -> StoredPage | None:
        """None when it is damaged, and then it goes; or gone, or unreadable."""
        path = page_file.page_path(self._folder, digest)
        try:
            with path.open("rb") as file:
                try:
                    raw = file.read()
                    return page_file.decode_page(raw, digest=digest, layout=self._layout)
                except PageFileError as error:
                    with self._replacing:
                        # what has been written anew meanwhile is another file: this one is open
                        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                            logger.warning("prefix cache: %s is not used: %s", path, error)
                            self.num_corrupt += 1
                            self._damaged.add(digest)
                            self._unlink(digest)
        except OSError:
            return None
        return None

    def _note_use(self, digest: bytes) -> None:
        """The order of use outlives the process as the files' times."""
        with contextlib.suppress(OSError):
            os.utime(page_file.page_path(self._folder, digest))

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._to_forget or self._closing)
                tenant = next(iter(self._to_forget), None)
                if tenant is None and not self._queue:
                    return
                pages = [] if tenant is not None else self._queue.popleft()
            try:
                if tenant is not None:
                    self._forget(tenant)
                for page in pages:
                    self._write(page)
                self.touch([page.digest for page in pages])
            except OSError as error:
                self._refused(error)
                with self._lock:
                    self._forget_queue()
            finally:
                with self._lock:
                    if tenant is not None:
                        self._to_forget.pop(tenant, None)
                    for page in pages:
                        self._drop_queued(page)
                    self._lock.notify_all()

    def _forget(self, tenant: tuple[str, ...]) -> None:
        """Delete all files of a tenant; nothing of it is written meanwhile."""
        for digest, path in page_file.page_paths(self._folder):
            try:
                namespace = page_file.read_namespace(path)
            except OSError:  # nobody gets it either; the others go all the same
                self.suspect([digest])
                continue
            if namespace is not None and tenant_of(namespace) == tenant:
                self.suspect([digest])
                self._unlink(digest)

    def _write(self, page: StoredPage) -> None:
        with self._lock:
            if page.digest not in self._queued:  # cleared meanwhile
                return
        path = page_file.page_path(self._folder, page.digest)
        raw = page_file.encode_page(page, layout=self._layout, page_bytes=self._page_bytes)
        if len(raw) > self.max_bytes:
            return
        with self._replacing:
            page_file.write_atomically(path, raw, scratch=self._scratch)
            page_file.sync_folder(path.parent)
            with self._lock:
                kept = page.digest in self._queued
                if kept:
                    self._num_bytes += len(raw) - self._files.pop(page.digest, 0)
                    self._files[page.digest] = len(raw)
                    self._damaged.discard(page.digest)
            if not kept:
                self._unlink(page.digest)
        self._num_unseen += len(raw)
        if self._num_unseen > LOOK_SHARE * self.max_bytes:
            self._look()
        self._shrink()

    def _shrink(self) -> None:
        while self._num_bytes + self._others.num_bytes > self.max_bytes:
            with self._lock:
                oldest = next(iter(self._files), None)
            path = None if oldest is None else page_file.page_path(self._folder, oldest)
            try:
                if self._others.remove_oldest(path):
                    continue
            except OSError as error:
                self._refused(error)
                continue
            if oldest is None:
                return
            self.suspect([oldest])
            self._unlink(oldest)

    def _unlink(self, digest: bytes) -> None:
        try:
            page_file.page_path(self._folder, digest).unlink(missing_ok=True)
        except OSError as error:
            self._refused(error)

    def _drop_queued(self, page: StoredPage) -> None:
        if self._queued.pop(page.digest, None) is not None:
            self._queued_bytes -= total_bytes([page])

    def _forget_queue(self) -> None:
        self.num_dropped += len(self._queued)
        self._queue.clear()
        self._queued.clear()
        self._queued_bytes = 0
        self._lock.notify_all()

    def _refused(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "prefix cache: %s cannot be written (%s); requests are served without it",
                self._folder,
                error.strerror or error,
            )
