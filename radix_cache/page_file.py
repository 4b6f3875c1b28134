"""One page in one file, and the folder of a layout.

    FOLDER/v1/LAYOUT/layout.txt          what the pages are of; LAYOUT is a hash of it
    FOLDER/v1/LAYOUT/pages/ab/abcd.kv    named by the digest of `store`
    FOLDER/v1/LAYOUT/new/                files that are being written

A file is magic, length of the header (uint32, little endian), header (JSON), tokens (int32),
data, and a BLAKE2b checksum of all before it. Nothing in it is executed or trusted: a reader
compares checksum, layout, namespace and tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .store import DIGEST_BYTES, StoredPage, chain_digest

VERSION = "v1"
SUFFIX = ".kv"
LAYOUT_FILE = "layout.txt"
_MAGIC = b"PLMKV01\n"
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = 16
_MAX_HEADER_BYTES = 1 << 20
_MAX_LAYOUT_BYTES = 1 << 20


class PageFileError(ValueError):
    """Bytes that are no whole page of this layout."""


def layout_folder(folder: Path, layout: str) -> Path:
    return folder / VERSION / layout_name(layout)


def layout_name(layout: str) -> str:
    """Of its folder, 32 hexadecimal digits."""
    return hashlib.blake2b(layout.encode(), digest_size=16).hexdigest()


def read_layout(layout_folder: Path) -> str | None:
    """What the folder's text says that its pages are of; None unless its name is of that text."""
    try:
        with (layout_folder / LAYOUT_FILE).open("rb") as file:
            raw = file.read(_MAX_LAYOUT_BYTES)
    except OSError:
        return None
    layout = raw.decode(errors="replace").rstrip("\n")
    return layout if layout_name(layout) == layout_folder.name else None


def layout_of_pages(layout_folder: Path) -> str | None:
    """What the first page that fits the folder's name says, for one whose text is damaged."""
    for _, path in page_paths(layout_folder):
        try:
            layout = _read_header(path).get("layout")
            if isinstance(layout, str) and layout_name(layout) == layout_folder.name:
                return layout
        except (OSError, UnicodeEncodeError):  # JSON may name halves of a surrogate pair
            continue
    return None


def write_layout(layout_folder: Path, layout: str) -> None:
    """Unless it is there and sound.

    Raises:
        OSError: it cannot be written.
    """
    if read_layout(layout_folder) != layout:
        raw = (layout + "\n").encode()
        write_atomically(layout_folder / LAYOUT_FILE, raw, scratch=layout_folder / "new")


def layout_folders(folder: Path) -> list[Path]:
    """Of all layouts, those of other versions too."""
    return sorted(path for path in folder.glob("v[0-9]*/*") if path.is_dir())


def page_path(layout_folder: Path, digest: bytes) -> Path:
    name = digest.hex()
    return layout_folder / "pages" / name[:2] / (name + SUFFIX)


def page_paths(layout_folder: Path) -> Iterator[tuple[bytes, Path]]:
    """Digest and path of every file that is named like a page."""
    for path in sorted((layout_folder / "pages").glob(f"??/*{SUFFIX}")):
        try:
            digest = bytes.fromhex(path.stem)
        except ValueError:
            continue
        if len(digest) == DIGEST_BYTES and page_path(layout_folder, digest) == path:
            yield digest, path


def encode_page(page: StoredPage, *, layout: str, page_bytes: int) -> bytes:
    """`page_bytes` of tokens are a page."""
    header = json.dumps(
        {
            "layout": layout,
            "namespace": list(page.namespace),
            "token_bytes": len(page.tokens),
            "page_token_bytes": page_bytes,
            "data_bytes": len(page.data),
        }
    ).encode()
    body = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, page.tokens, page.data))
    return body + _checksum(body)


def read_namespace(path: Path) -> tuple[str, ...] | None:
    """Of the page in a file, without reading it all; None when it is no page.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return tuple(str(part) for part in _read_header(path)["namespace"])
    except (KeyError, TypeError):
        return None


def _read_header(path: Path) -> dict[str, Any]:
    """Of a page, without reading it all; empty when it is no page."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + _LENGTH.size)
        if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _LENGTH.size:
            return {}
        (length,) = _LENGTH.unpack_from(start, len(_MAGIC))
        header = file.read(min(length, _MAX_HEADER_BYTES))
    try:
        values = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def decode_page(raw: bytes, *, digest: bytes, layout: str) -> StoredPage:
    """The page of a file's bytes.

    Raises:
        PageFileError: when anything in it is not as it was written for this digest and layout.
    """
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    start = len(_MAGIC) + _LENGTH.size
    if not body.startswith(_MAGIC) or len(body) < start or _checksum(body) != checksum:
        raise PageFileError("damaged, or cut short")
    (length,) = _LENGTH.unpack_from(body, len(_MAGIC))
    if length > _MAX_HEADER_BYTES:
        raise PageFileError(f"its header has {length} bytes")
    try:
        header = json.loads(body[start : start + length])
        namespace = tuple(str(part) for part in header["namespace"])
        sizes = [int(header[name]) for name in ("token_bytes", "data_bytes", "page_token_bytes")]
        found = header["layout"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PageFileError("its header is not one of a page") from error
    num_tokens, num_data, page_bytes = sizes
    if found != layout:
        raise PageFileError("it is of another model or layout")
    if min(sizes) < 1 or start + length + num_tokens + num_data != len(body):
        raise PageFileError("its parts do not add up")
    tokens = body[start + length : start + length + num_tokens]
    if chain_digest(layout, namespace, tokens, page_bytes) != digest:
        raise PageFileError("its name is not that of its tokens")
    return StoredPage(digest, namespace, tokens, body[start + length + num_tokens :])


def write_atomically(path: Path, raw: bytes, *, scratch: Path) -> None:
    """All of a file or nothing of it, whatever ends the process or the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{os.getpid()}-", dir=scratch)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder last; where the system cannot, they may be lost, not damaged."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        return
    finally:
        os.close(handle)


def remove_leftovers(scratch: Path) -> None:
    """Delete what processes that are gone were writing."""
    for path in scratch.glob("*-*"):
        pid = path.name.partition("-")[0]
        if not pid.isdigit() or not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()
