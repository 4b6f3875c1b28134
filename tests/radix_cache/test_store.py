"""The tiers below the device: bounds, exact matches, damage, full and read-only disks."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from palmette.radix_cache import page_file
from palmette.radix_cache.disk import DiskStore
from palmette.radix_cache.page_file import PageFileError, decode_page, encode_page
from palmette.radix_cache.store import HostStore, StoredPage, chain_digest

PAGE = 8  # bytes of the tokens of a page: two tokens
LAYOUT = "model x; pool y"


def page(text: bytes, *, namespace: tuple[str, ...] = ("key", "a"), size: int = 100) -> StoredPage:
    """`text` is all tokens up to the end of the page."""
    digest = chain_digest(LAYOUT, namespace, text, PAGE)
    return StoredPage(digest, namespace, text, (text * size)[:size])


def path_of(count: int, first: bytes = b"A") -> list[StoredPage]:
    text = b"".join(first * PAGE if i == 0 else bytes([i]) * PAGE for i in range(count))
    return [page(text[: (i + 1) * PAGE]) for i in range(count)]


def open_store(folder: Path, *, max_bytes: int = 10**6, layout: str = LAYOUT) -> DiskStore:
    return DiskStore(folder, layout=layout, page_bytes=PAGE, max_bytes=max_bytes)


def get(store: DiskStore | HostStore, wanted: StoredPage) -> bytes | None:
    return store.get(wanted.digest, wanted.namespace, wanted.tokens)


def test_digests_differ_by_layout_namespace_and_every_token() -> None:
    texts = [b"a" * 8, b"a" * 16, b"b" + b"a" * 15, b"a" * 15 + b"b"]
    namespaces = [(), ("a",), ("a", "b"), ("ab",), ("a,b",), ('a","b',), ("", "a", "b")]
    digests = {
        chain_digest(layout, namespace, text, PAGE)
        for layout in ("x", "y")
        for namespace in namespaces
        for text in texts
    }
    assert len(digests) == 2 * len(namespaces) * len(texts)


def test_a_digest_alone_is_not_a_hit(tmp_path: Path) -> None:
    """As if two prefixes had one hash: tokens and namespace decide."""
    host, disk = HostStore(10**6), open_store(tmp_path)
    [stored] = path_of(1)
    for store in (host, disk):
        store.put([stored])
        assert disk.wait()
        assert store.get(stored.digest, stored.namespace, b"x" * PAGE) is None
        assert store.get(stored.digest, ("key", "b"), stored.tokens) is None
        assert get(store, stored) == stored.data
    disk.close()


def test_host_is_bounded_and_pushes_the_oldest_down(tmp_path: Path) -> None:
    disk = open_store(tmp_path)
    host = HostStore(5 * (100 + PAGE), below=disk)
    pages = [page(bytes([i]) * PAGE) for i in range(8)]
    for each in pages:
        host.put([each])
        assert host.num_bytes <= host.max_bytes
    assert [host.contains(each.digest) for each in pages] == [False] * 3 + [True] * 5
    assert disk.wait() and [get(disk, each) == each.data for each in pages[:3]] == [True] * 3
    host.close()
    assert disk.wait() and disk.num_pages == 8
    disk.close()


def test_disk_is_bounded_and_keeps_the_roots_of_paths(tmp_path: Path) -> None:
    pages = path_of(20)
    file_bytes = len(encode_page(pages[-1], layout=LAYOUT, page_bytes=PAGE))
    disk = open_store(tmp_path, max_bytes=10 * file_bytes)
    disk.put(pages[:8])
    assert disk.wait()
    disk.touch([each.digest for each in pages[:8]])
    disk.put([page(bytes([100 + i]) * PAGE) for i in range(8)])
    assert disk.wait() and disk.num_bytes <= disk.max_bytes
    assert disk.contains(pages[0].digest) and not disk.contains(pages[7].digest)
    on_disk = sum(path.stat().st_size for _, path in page_file.page_paths(disk._folder))
    assert on_disk == disk.num_bytes
    disk.close()


def on_disk(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in folder.rglob("*.kv")}


def test_one_bound_is_for_all_layouts_and_the_longest_unused_go_first(tmp_path: Path) -> None:
    pages = path_of(8)
    old = open_store(tmp_path)
    old.put(pages)
    old.close()
    for age, each in enumerate(pages):  # the root was used last
        path = page_file.page_path(old._folder, each.digest)
        os.utime(path, ns=(0, 10**18 - 10**9 * age))
    top = old._folder.parent
    old._folder.rename(top.parent / "v0")  # as an older build would have left it
    (top / "x").mkdir(parents=True)
    (top.parent / "v0").rename(top / "x" / "moved")
    (top / "x").rename(top.parent / "v0")
    sizes = on_disk(tmp_path)
    bound = sum(sizes[each.digest.hex()] for each in pages[:5])
    new = open_store(tmp_path, layout="other", max_bytes=bound)
    assert set(on_disk(tmp_path)) == {each.digest.hex() for each in pages[:5]}
    assert new.num_bytes == 0
    texts = [bytes([50 + i]) * PAGE for i in range(9)]
    mine = [StoredPage(chain_digest("other", (), t, PAGE), (), t, t * 12) for t in texts]
    for each in mine:
        new.put([each])
        assert new.wait() and new.contains(each.digest)
        assert sum(on_disk(tmp_path).values()) <= bound
    assert not set(on_disk(tmp_path)) & {each.digest.hex() for each in pages[1:]}
    new.close()


def test_two_stores_over_one_folder_keep_its_bound_together(tmp_path: Path) -> None:
    bound = 40_000
    stores = [open_store(tmp_path, max_bytes=bound, layout=text) for text in (LAYOUT, "other")]
    for i in range(300):
        text = i.to_bytes(8, "little")
        for store, layout in zip(stores, (LAYOUT, "other"), strict=True):
            store.put([StoredPage(chain_digest(layout, (), text, PAGE), (), text, text * 20)])
            assert store.wait()
        assert sum(on_disk(tmp_path).values()) <= bound * (1 + 3 / 16)
    assert all(store.num_pages > 20 for store in stores)
    kept = on_disk(tmp_path)
    for store in stores:
        store._look()
        assert {digest.hex() for digest in store._files} <= set(kept)
        store.close()


def test_a_new_store_finds_what_was_written_for_its_layout_only(tmp_path: Path) -> None:
    pages = path_of(4)
    first = open_store(tmp_path)
    first.put(pages)
    first.close()
    again = open_store(tmp_path)
    assert [get(again, each) for each in pages] == [each.data for each in pages]
    again.close()
    other = open_store(tmp_path, layout="model z; pool y")
    assert other.num_pages == 0 and get(other, pages[0]) is None
    other.close()


@pytest.mark.parametrize("at", range(0, 300, 7))
def test_every_damaged_byte_is_noticed(at: int) -> None:
    stored = path_of(3)[2]
    raw = encode_page(stored, layout=LAYOUT, page_bytes=PAGE)
    assert decode_page(raw, digest=stored.digest, layout=LAYOUT) == stored
    place = at % len(raw)
    damaged = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    with pytest.raises(PageFileError):
        decode_page(damaged, digest=stored.digest, layout=LAYOUT)
    with pytest.raises(PageFileError):
        decode_page(raw[:place], digest=stored.digest, layout=LAYOUT)


@pytest.mark.parametrize(
    "body",
    [
        b"PLMKV01\n",
        b"PLMKV01\n\0",
        b'PLMKV01\n\x4f\0\0\0{"namespace": [], "token_bytes": Infinity, "data_bytes": 1, '
        b'"layout": "a"     }',
        b"PLMKV01\n\0\0\x0f\0" + b"[" * 0xF0000,
    ],
    ids=["nothing else", "no length", "infinity", "nested"],
)
def test_a_header_with_a_right_checksum_is_not_trusted(body: bytes) -> None:
    raw = body + hashlib.blake2b(body, digest_size=16).digest()
    with pytest.raises(PageFileError):
        decode_page(raw, digest=path_of(1)[0].digest, layout=LAYOUT)


def test_a_sound_page_under_another_name_or_layout_is_refused() -> None:
    first, second = path_of(2)
    raw = encode_page(first, layout=LAYOUT, page_bytes=PAGE)
    with pytest.raises(PageFileError, match="name"):
        decode_page(raw, digest=second.digest, layout=LAYOUT)
    with pytest.raises(PageFileError, match="another model"):
        decode_page(raw, digest=first.digest, layout="other")


def test_a_damaged_file_is_a_miss_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = path_of(2)
    disk = open_store(tmp_path)
    disk.put(pages)
    assert disk.wait()
    path = page_file.page_path(disk._folder, pages[1].digest)
    raw = bytearray(path.read_bytes())
    raw[-30] ^= 0xFF
    path.write_bytes(raw)
    assert get(disk, pages[1]) is None and get(disk, pages[0]) == pages[0].data
    assert (disk.num_corrupt, disk.num_pages, path.exists()) == (1, 1, False)
    assert "damaged" in caplog.text
    disk.put([pages[1]])  # computed again
    assert disk.wait() and get(disk, pages[1]) == pages[1].data
    disk.close()


def test_a_file_that_vanished_is_a_miss(tmp_path: Path) -> None:
    disk = open_store(tmp_path)
    [stored] = path_of(1)
    disk.put([stored])
    assert disk.wait()
    page_file.page_path(disk._folder, stored.digest).unlink()
    assert get(disk, stored) is None and disk.num_pages == 0 and disk.num_bytes == 0
    disk.close()


def test_a_file_that_goes_while_a_store_opens_costs_that_page_only(tmp_path: Path) -> None:
    store, pages = open_store(tmp_path), path_of(3)
    store.put(pages)
    store.close()
    gone = next(tmp_path.glob(f"v1/*/pages/*/{pages[2].digest.hex()}.kv"))
    gone.unlink()
    gone.symlink_to("nowhere")  # it is listed, and is not there
    store = open_store(tmp_path)
    assert [store.contains(each.digest) for each in pages] == [True, True, False]
    assert store.num_bytes == sum(
        p.stat().st_size for p in tmp_path.glob("v1/*/pages/*/*.kv") if p.exists()
    )
    store.put(pages[2:])
    assert store.wait() and get(store, pages[2]) == pages[2].data
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_warns_once_and_costs_pages_only(
    tmp_path: Path,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = open_store(tmp_path)
    kept, *lost = path_of(5)
    disk.put([kept])
    assert disk.wait()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "fsync", refuse)
        for each in lost:
            disk.put([each])
            assert disk.wait()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert disk.num_dropped == len(lost) and disk.num_pages == 1
    assert get(disk, kept) == kept.data
    assert list((disk._folder / "new").iterdir()) == []
    disk._retry_at = 0.0  # a minute later
    disk.put([lost[0]])
    assert disk.wait() and get(disk, lost[0]) == lost[0].data
    disk.close()


def test_a_folder_that_cannot_be_made_serves_nothing_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = open_store(tmp_path / "file" / "below")
    [stored] = path_of(1)
    disk.put([stored])
    assert get(disk, stored) is None
    disk.close()


@pytest.mark.parametrize("tenant", [("key", "a"), None])
def test_a_page_that_is_forgotten_while_it_is_read_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tenant: tuple[str, ...] | None
) -> None:
    disk = open_store(tmp_path)
    mine = page(bytes(PAGE), namespace=("key", "a"))
    disk.put([mine])
    assert disk.wait() and get(disk, mine) == mine.data
    decode = page_file.decode_page

    def forgotten_when_decoded(*args: Any, **options: Any) -> StoredPage:
        decoded = decode(*args, **options)
        disk.clear(tenant)
        assert disk.wait()
        return decoded

    with monkeypatch.context() as patch:
        patch.setattr(page_file, "decode_page", forgotten_when_decoded)
        assert get(disk, mine) is None
    assert (disk.num_pages, disk.num_bytes) == (0, 0)
    disk.close()


def test_a_tenant_is_forgotten_at_once_and_alone(tmp_path: Path) -> None:
    host, disk = HostStore(10**6), open_store(tmp_path)
    mine = [page(bytes([i]) * PAGE, namespace=("key", "a", "salt", str(i))) for i in range(4)]
    others = [page(bytes([i]) * PAGE, namespace=("key", "b")) for i in range(4)]
    for store in (host, disk):
        store.put([*mine[:3], *others[:3]])
    assert disk.wait()
    with disk._replacing:  # the writer does not come to an end
        disk.put([mine[3], others[3]])
        host.clear(("key", "a"))
        disk.clear(("key", "a"))
        for store in (host, disk):
            assert [get(store, each) for each in mine] == [None] * 4
            assert [get(store, each) for each in others[:3]] == [each.data for each in others[:3]]
        disk.put([mine[0]])  # computed again
    assert host.num_bytes == 3 * (100 + PAGE)
    assert disk.wait()
    assert [disk.contains(each.digest) for each in mine] == [True, False, False, False]
    assert set(on_disk(tmp_path)) == {each.digest.hex() for each in (mine[0], *others)}
    assert disk.num_bytes == sum(on_disk(tmp_path).values())
    disk.close()


@pytest.mark.parametrize("fault", ["unreadable", "undeletable"])
def test_one_bad_file_keeps_no_other_of_a_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    disk = open_store(tmp_path)
    mine, other = path_of(8), page(b"o" * PAGE, namespace=("key", "b"))
    disk.put([*mine, other])
    assert disk.wait()
    bad = min(page_file.page_path(disk._folder, each.digest) for each in mine)
    read, unlink = page_file.read_namespace, Path.unlink

    def refuse_to_read(path: Path) -> tuple[str, ...] | None:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    def refuse_to_unlink(path: Path, missing_ok: bool = False) -> None:
        if path == bad:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok)

    if fault == "unreadable":
        monkeypatch.setattr(page_file, "read_namespace", refuse_to_read)
    else:
        monkeypatch.setattr(Path, "unlink", refuse_to_unlink)
    disk.clear(("key", "a"))
    assert disk.wait()
    assert [get(disk, each) for each in mine] == [None] * 8
    assert set(on_disk(tmp_path)) == {bad.stem, other.digest.hex()}
    assert get(disk, other) == other.data
    disk.close()


def test_clear_forgets_files_and_queue(tmp_path: Path) -> None:
    disk = open_store(tmp_path)
    disk.put(path_of(30))
    disk.clear()
    assert disk.wait() and disk.num_pages == 0
    disk.put([])
    disk.close()
    assert list(page_file.page_paths(disk._folder)) == []


WRITE_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_store
disk = test_store.open_store(Path(sys.argv[1]), max_bytes=10**9)
for i in range(10**6):
    disk.put([test_store.page(i.to_bytes(8, "little"), size=200_000)])
    disk.wait()
    print(i, flush=True)
"""


def test_kill_in_the_middle_of_a_write_leaves_whole_pages_only(tmp_path: Path) -> None:
    script = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(Path(__file__).parent)]
    for _ in range(3):
        with subprocess.Popen(script, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            process.kill()
    disk = open_store(tmp_path)
    assert disk.num_pages >= 3
    for digest, path in page_file.page_paths(disk._folder):
        stored = decode_page(path.read_bytes(), digest=digest, layout=LAYOUT)
        assert get(disk, stored) == stored.data
    assert disk.num_corrupt == 0
    assert list((disk._folder / "new").iterdir()) == []
    disk.close()
