"""`palmette cache`: what lies in a directory of pages, without a model.

An archive is a plain tar of layout.txt and page files; every page is checked before it is taken.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palmette.radix_cache import page_file
from palmette.radix_cache.page_file import PageFileError

from .config import UserError

_MEMBER = re.compile(r"([0-9a-f]{32})/(?:layout\.txt|pages/[0-9a-f]{2}/([0-9a-f]{40})\.kv)")
_FOLDER = re.compile(r"[0-9a-f]{32}")
_MAX_MEMBER_BYTES = 1 << 30
_MAX_SHOWN = 200  # characters of a layout.txt that is damaged


@dataclass(frozen=True, slots=True)
class _Layout:
    folder: Path
    text: str  # what its pages are of: of layout.txt, or of the pages; empty: neither tells
    damage: str | None  # of layout.txt; None: it is sound


def list_pages(folder: Path) -> int:
    """Print each layout with its pages and bytes."""
    for layout in _layouts(folder):
        sizes = [path.stat().st_size for _, path in page_file.page_paths(layout.folder)]
        mib = sum(sizes) / 2**20
        print(f"{layout.folder.name}  {len(sizes)} pages, {mib:.1f} MiB")
        if layout.text:
            print(f"  {_printable(layout.text)}")
        if layout.damage is not None:
            print(f"  {page_file.LAYOUT_FILE} {layout.damage}")
    return 0


def verify(folder: Path) -> int:
    """Read every page; print what is damaged, pages and layout.txt."""
    num_sound = num_damaged = num_texts = 0
    for layout in _layouts(folder):
        if layout.damage is not None:
            num_texts += 1
            print(
                f"{layout.folder / page_file.LAYOUT_FILE}: {layout.damage}; "
                "a server of this model writes it anew when it starts"
            )
        for digest, path in page_file.page_paths(layout.folder):
            try:
                page_file.decode_page(path.read_bytes(), digest=digest, layout=layout.text)
            except PageFileError as error:
                num_damaged += 1
                print(f"{path}: {error}")
            else:
                num_sound += 1
    texts = f"; {num_texts} {page_file.LAYOUT_FILE} damaged" if num_texts else ""
    print(f"{num_sound} pages are sound, {num_damaged} damaged{texts}")
    return 1 if num_damaged or num_texts else 0


def export_pages(folder: Path, archive: Path) -> int:
    """Write all sound pages to a tar file."""
    count = 0
    with tarfile.open(archive, "w") as tar:
        for layout in _layouts(folder):
            if layout.text:
                text = (layout.text + "\n").encode()
                _add(tar, f"{layout.folder.name}/{page_file.LAYOUT_FILE}", text)
            for digest, path in page_file.page_paths(layout.folder):
                raw = path.read_bytes()
                try:
                    page_file.decode_page(raw, digest=digest, layout=layout.text)
                except PageFileError as error:
                    print(f"{path}: {error}; left out", file=sys.stderr)
                    continue
                name = path.relative_to(layout.folder).as_posix()
                _add(tar, f"{layout.folder.name}/{name}", raw)
                count += 1
    print(f"{count} pages are in {archive}")
    return 0


def import_pages(folder: Path, archive: Path) -> int:
    """Take the pages of a tar file that are what their names say.

    Raises:
        UserError: there is no such file, or a member is no page; what came before it is kept.
    """
    if not archive.exists():
        raise UserError(f"{archive}: no such file; give a tar file of `palmette cache export`")
    layouts: dict[str, str] = {}
    count = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                count += _take(folder, tar, member, layouts)
    except tarfile.TarError as error:
        raise UserError(f"{archive}: is no tar file of pages ({error})") from error
    print(f"{count} pages are in {folder}")
    return 0


def clear(folder: Path) -> int:
    """Delete all pages and what is damaged; the directory and what else is in it stay."""
    count = 0
    for layout in _layouts(folder):
        for _, path in page_file.page_paths(layout.folder):
            path.unlink(missing_ok=True)
            count += 1
        if layout.damage is not None:
            (layout.folder / page_file.LAYOUT_FILE).unlink(missing_ok=True)
    print(f"{count} pages are deleted")
    return 0


def _take(
    folder: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, layouts: dict[str, str]
) -> int:
    """1 when the member was a page that is kept now."""
    match = _MEMBER.fullmatch(member.name)
    file = tar.extractfile(member) if member.isreg() else None
    if match is None or file is None or member.size > _MAX_MEMBER_BYTES:
        raise UserError(f"{member.name!r} in the archive is no page of the prefix cache")
    raw, name = file.read(), match[1]
    if match[2] is None:
        layout = raw.decode(errors="replace").rstrip("\n")
        if page_file.layout_folder(folder, layout).name != name:
            raise UserError(f"{member.name!r} in the archive does not fit its text")
        layouts[name] = layout
        page_file.write_layout(page_file.layout_folder(folder, layout), layout)
        return 0
    if name not in layouts:
        raise UserError(f"{member.name!r} in the archive comes before its layout.txt")
    digest, layout = bytes.fromhex(match[2]), layouts[name]
    try:
        page_file.decode_page(raw, digest=digest, layout=layout)
    except PageFileError as error:
        raise UserError(f"{member.name!r} in the archive: {error}") from error
    target = page_file.layout_folder(folder, layout)
    path = page_file.page_path(target, digest)
    page_file.write_atomically(path, raw, scratch=target / "new")
    return 1


def _layouts(folder: Path) -> Iterator[_Layout]:
    """The folders of `folder` that hold a layout.txt or pages.

    Raises:
        UserError: when `folder` is no directory of pages.
    """
    top = folder / page_file.VERSION
    if not top.is_dir():
        raise UserError(f"{folder}: holds no pages of the prefix cache")
    for layout_folder in sorted(top.iterdir()):
        if _FOLDER.fullmatch(layout_folder.name) is None or not layout_folder.is_dir():
            continue
        text, damage = page_file.read_layout(layout_folder), None
        if text is None:
            about = layout_folder / page_file.LAYOUT_FILE
            if not about.exists() and next(page_file.page_paths(layout_folder), None) is None:
                continue
            text, damage = page_file.layout_of_pages(layout_folder), _damage(about)
        yield _Layout(layout_folder, text or "", damage)


def _damage(about: Path) -> str:
    """What is wrong with a layout.txt that does not fit the name of its folder."""
    try:
        with about.open(encoding="utf-8", errors="replace") as file:
            shown = file.read(_MAX_SHOWN)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"is damaged, its folder's name is not of its text: '{_printable(shown)}'"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    tar.addfile(member, io.BytesIO(raw))
