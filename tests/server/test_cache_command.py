"""`palmette cache`: list, verify, export, import, clear."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from palmette.radix_cache.disk import DiskStore
from palmette.radix_cache.store import StoredPage, chain_digest
from palmette.server.__main__ import main

LAYOUT = "model abc; pool xyz"


def fill(folder: Path, count: int = 3) -> list[StoredPage]:
    texts = [bytes(range(8 * (i + 1))) for i in range(count)]
    pages = [
        StoredPage(chain_digest(LAYOUT, ("a",), text, 8), ("a",), text, text * 9) for text in texts
    ]
    disk = DiskStore(folder, layout=LAYOUT, page_bytes=8, max_bytes=10**6)
    disk.put(pages)
    disk.close()
    return pages


def damage(folder: Path) -> Path:
    path = sorted(folder.rglob("*.kv"))[0]
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    return path


def test_ls_names_layout_pages_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3 pages" in out and LAYOUT in out


def test_verify_finds_the_damaged_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    assert main(["cache", "verify", str(tmp_path)]) == 0
    path = damage(tmp_path)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert str(path) in out and "2 pages are sound, 1 damaged" in out


def test_what_is_exported_and_imported_is_found(tmp_path: Path) -> None:
    pages = fill(tmp_path / "a")
    damage(tmp_path / "a")
    archive = str(tmp_path / "pages.tar")
    assert main(["cache", "export", str(tmp_path / "a"), archive]) == 0
    assert main(["cache", "import", str(tmp_path / "b"), archive]) == 0
    disk = DiskStore(tmp_path / "b", layout=LAYOUT, page_bytes=8, max_bytes=10**6)
    found = [disk.get(page.digest, page.namespace, page.tokens) for page in pages]
    assert sorted(map(bool, found)) == [False, True, True]
    assert all(data in (None, page.data) for data, page in zip(found, pages, strict=True))
    disk.close()


def test_clear_deletes_pages_only(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert list(tmp_path.rglob("*.kv")) == [] and (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/pages/00/x.kv", "layout.txt"])
def test_an_archive_cannot_write_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 4
        tar.addfile(member, io.BytesIO(b"evil"))
    assert main(["cache", "import", str(tmp_path / "b"), str(tmp_path / "evil.tar")]) == 2
    assert "no page of the prefix cache" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("what", ["ls", "verify", "clear"])
def test_another_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    assert main(["cache", what, str(tmp_path)]) == 2
    assert "holds no pages" in capsys.readouterr().err


NULS = bytes(19) + b"\x1b[31m"


@pytest.mark.parametrize("raw", [NULS, b"", b"model abc; pool xy", None])
def test_a_damaged_layout_txt_is_told_and_no_page_is_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], raw: bytes | None
) -> None:
    pages = fill(tmp_path / "a")
    [about] = tmp_path.rglob("layout.txt")
    about.unlink() if raw is None else about.write_bytes(raw)
    assert main(["cache", "verify", str(tmp_path / "a")]) == 1
    told = capsys.readouterr().out
    assert f"{about}: is {'missing' if raw is None else 'damaged'}" in told
    assert "3 pages are sound, 0 damaged; 1 layout.txt damaged" in told and ".kv" not in told
    assert main(["cache", "ls", str(tmp_path / "a")]) == 0
    listed = capsys.readouterr().out
    assert "3 pages" in listed and f"\n  {LAYOUT}\n" in listed
    assert listed.replace("\n", "").isprintable()
    assert (raw != NULS) or r"'\x00\x00" in listed
    archive = str(tmp_path / "pages.tar")
    assert main(["cache", "export", str(tmp_path / "a"), archive]) == 0
    assert main(["cache", "import", str(tmp_path / "b"), archive]) == 0
    for folder in (tmp_path / "a", tmp_path / "b"):
        disk = DiskStore(folder, layout=LAYOUT, page_bytes=8, max_bytes=10**6)
        found = [disk.get(page.digest, page.namespace, page.tokens) for page in pages]
        disk.close()
        assert found == [page.data for page in pages]
        [text] = folder.rglob("layout.txt")
        assert text.read_text() == LAYOUT + "\n"
        assert main(["cache", "verify", str(folder)]) == 0


def test_clear_deletes_a_damaged_layout_txt_with_its_pages(tmp_path: Path) -> None:
    fill(tmp_path)
    [about] = tmp_path.rglob("layout.txt")
    about.write_bytes(NULS)
    assert main(["cache", "clear", str(tmp_path)]) == 0
    assert not about.exists() and list(tmp_path.rglob("*.kv")) == []
    assert main(["cache", "verify", str(tmp_path)]) == 0
