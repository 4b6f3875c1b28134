"""`palmette cache`: what lies in a directory of pages, without a model.

An archive is a plain tar of layout.txt and page files; every page is checked before it is taken.
"""

from __future__ import annotations

import io
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from palmette.radix_cache import page_file
from palmette.radix_cache.page_file import PageFileError

from .config import UserError

_MEMBER = re.compile(r"([0-9a-f]{32})/(?:layout\.txt|pages/[0-9a-f]{2}/([0-9a-f]{40})\.kv)")
_MAX_MEMBER_BYTES = 1 << 30


def list_pages(folder: Path) -> int:
    """Print each layout with its pages and bytes."""
    for layout_folder, layout in _layouts(folder):
        sizes = [path.stat().st_size for _, path in page_file.page_paths(layout_folder)]
        mib = sum(sizes) / 2**20
        print(f"{layout_folder.name}  {len(sizes)} pages, {mib:.1f} MiB\n  {layout}")
    return 0


def verify(folder: Path) -> int:
    """Read every page; print those that are damaged."""
    num_sound = num_damaged = 0
    for layout_folder, layout in _layouts(folder):
        for digest, path in page_file.page_paths(layout_folder):
            try:
                page_file.decode_page(path.read_bytes(), digest=digest, layout=layout)
            except PageFileError as error:
                num_damaged += 1
                print(f"{path}: {error}")
            else:
                num_sound += 1
    print(f"{num_sound} pages are sound, {num_damaged} damaged")
    return 1 if num_damaged else 0


def export_pages(folder: Path, archive: Path) -> int:
    """Write all sound pages to a tar file."""
    count = 0
    with tarfile.open(archive, "w") as tar:
        for layout_folder, layout in _layouts(folder):
            _add(tar, f"{layout_folder.name}/layout.txt", (layout + "\n").encode())
            for digest, path in page_file.page_paths(layout_folder):
                raw = path.read_bytes()
                try:
                    page_file.decode_page(raw, digest=digest, layout=layout)
                except PageFileError as error:
                    print(f"{path}: {error}; left out", file=sys.stderr)
                    continue
                name = path.relative_to(layout_folder).as_posix()
                _add(tar, f"{layout_folder.name}/{name}", raw)
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
    """Delete all pages; the directory and what else is in it stay."""
    count = 0
    for layout_folder, _ in _layouts(folder):
        for _, path in page_file.page_paths(layout_folder):
            path.unlink(missing_ok=True)
            count += 1
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
        target = page_file.layout_folder(folder, layout)
        page_file.write_atomically(target / "layout.txt", raw, scratch=target / "new")
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


def _layouts(folder: Path) -> Iterator[tuple[Path, str]]:
    """The folders of `folder` and what they are of.

    Raises:
        UserError: when `folder` is no directory of pages.
    """
    top = folder / page_file.VERSION
    if not top.is_dir():
        raise UserError(f"{folder}: holds no pages of the prefix cache")
    for layout_folder in sorted(top.iterdir()):
        about = layout_folder / "layout.txt"
        if about.is_file():
            layout = about.read_text(encoding="utf-8", errors="replace").rstrip("\n")
            yield layout_folder, layout


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    tar.addfile(member, io.BytesIO(raw))
