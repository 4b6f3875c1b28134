"""Lines of code by folder, so that growth is seen: `make sizes`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "radix_cache", "constrained", "runtime", "lang", "server", "tests")
SUFFIXES = {".py", ".cpp", ".h"}


def main() -> None:
    total = 0
    for folder in FOLDERS:
        files = sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES)
        counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
        lines = sum(counts.values())
        total += lines
        longest = max(counts, key=lambda path: counts[path], default=None)
        note = f"longest {longest.name} {counts[longest]}" if longest else ""
        print(f"{folder:12} {len(files):4} files {lines:7} lines  {note}")
    print(f"{'all':12} {'':10} {total:7} lines")


if __name__ == "__main__":
    main()
