"""Pages on their way from the disk: threads read them, so that no step does.

    want -> (a thread reads) -> collect -> take

What has come stays until it is taken, up to a bound; what nobody asks for any more is dropped.
A read that takes too long is given up: its page is computed, as if it were not there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from .disk import DiskStore
from .store import StoredPage

logger = logging.getLogger(__name__)

NUM_READERS = 2  # more would only take turns
MAX_BYTES = 64 * 1024 * 1024  # of pages that are read and not taken; at least one page
READ_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
STALE_STEPS = 256  # without being asked for


class ReadAhead:
    """Reads pages of `disk`, `page_bytes` of memory each. For one thread that asks.

    Between two calls of `collect` nothing changes: all requests of a step see the same.
    """

    def __init__(self, disk: DiskStore, *, page_bytes: int) -> None:
        self._disk = disk
        self._max_pages = max(1, MAX_BYTES // page_bytes)
        self._step = 0
        self._pending: dict[bytes, float] = {}  # since when, oldest first
        self._lost: set[bytes] = set()  # given up, and still being read
        self._arrived: OrderedDict[bytes, tuple[StoredPage, int]] = OrderedDict()  # last asked for
        self._lock = threading.Condition()  # of what follows
        self._to_read: deque[bytes] = deque()
        self._to_check: deque[bytes] = deque()
        self._done: deque[tuple[bytes, StoredPage | None]] = deque()
        self._reading: set[bytes] = set()
        self._num_busy = 0
        self._closing = False
        self._readers = [
            threading.Thread(target=self._run, name=f"palmette-read-{i}", daemon=True)
            for i in range(NUM_READERS)
        ]
        for reader in self._readers:
            reader.start()

    def want(self, digests: Sequence[bytes]) -> None:
        """Begin to read pages of one path, in order, as far as memory allows."""
        new: list[bytes] = []
        for digest in digests:
            if digest in self._arrived:
                self._arrived[digest] = self._arrived[digest][0], self._step
                self._arrived.move_to_end(digest)
            elif digest not in self._pending and digest not in self._lost:
                num_held = len(self._pending) + len(self._lost) + len(self._arrived)
                if num_held >= self._max_pages or not self._can_read(digest):
                    break
                self._pending[digest] = time.monotonic()
                new.append(digest)
        if new:
            with self._lock:
                self._to_read.extend(new)
                self._lock.notify_all()

    def take(self, digest: bytes) -> StoredPage | None:
        """The page, if it has come."""
        found = self._arrived.pop(digest, None)
        return None if found is None else found[0]

    def is_coming(self, digest: bytes) -> bool:
        """Whether to wait for a page that has not come."""
        return digest in self._pending or (digest not in self._lost and self._can_read(digest))

    def check(self, digests: Sequence[bytes]) -> None:
        """Have pages read that lie behind a damaged one: until then they count as not there.

        Whatever the order, each ends as sound: read and kept, or computed and written anew.
        """
        self._disk.suspect(digests)
        for digest in digests:
            self._arrived.pop(digest, None)
        with self._lock:
            self._to_check.extend(digests)
            self._lock.notify_all()

    def collect(self) -> None:
        """Take in what has been read, and give up what takes too long. Once a step."""
        self._step += 1
        while self._done:
            digest, page = self._done.popleft()
            self._lost.discard(digest)
            if self._pending.pop(digest, None) is not None and page is not None:
                self._arrived[digest] = page, self._step
        now = time.monotonic()
        while self._pending:
            digest, since = next(iter(self._pending.items()))
            if now - since <= READ_TIMEOUT_S:
                break
            del self._pending[digest]
            self._lost.add(digest)
            logger.warning("prefix cache: a page was not read within %.0f s", READ_TIMEOUT_S)
        while self._arrived:
            digest, (_, step) = next(iter(self._arrived.items()))
            if self._step - step <= STALE_STEPS:
                break
            del self._arrived[digest]

    def wait(self, timeout_s: float) -> None:
        """Until something has been read."""
        with self._lock:
            self._lock.wait_for(lambda: self._done, timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Until nothing is to be read or checked; False after the timeout."""
        with self._lock:
            return self._lock.wait_for(
                lambda: not (self._to_read or self._to_check or self._num_busy), timeout_s
            )

    def clear(self) -> None:
        """Forget what has come, and what is on its way."""
        with self._lock:
            self._to_read.clear()
            self._to_check.clear()
            self._lost = set(self._reading)  # what was only queued will never come
        self._pending.clear()
        self._arrived.clear()

    def close(self) -> None:
        """End the readers; one that hangs is left behind."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _can_read(self, digest: bytes) -> bool:
        """Whether the disk has it, and has not stopped to answer."""
        return len(self._lost) < NUM_READERS and self._disk.contains(digest)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._to_read or self._to_check or self._closing)
                if self._closing:
                    return
                is_wanted = bool(self._to_read)
                digest = (self._to_read or self._to_check).popleft()
                self._num_busy += 1
                if is_wanted:
                    self._reading.add(digest)
            page: StoredPage | None = None
            try:
                if is_wanted:
                    page = self._disk.load(digest)
                else:
                    self._disk.check(digest)
            except Exception:  # fault boundary: one page
                logger.exception("prefix cache: a page could not be read")
                self._disk.suspect([digest])
            with self._lock:
                self._num_busy -= 1
                if is_wanted:
                    self._reading.discard(digest)
                    self._done.append((digest, page))
                self._lock.notify_all()
