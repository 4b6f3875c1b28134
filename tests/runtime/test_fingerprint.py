"""Models are told apart by their bytes, and hashed once while the files stay as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from palmette.runtime import fingerprint as module
from palmette.runtime.fingerprint import fingerprint


def make(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_same_bytes_elsewhere_are_the_same_model(tmp_path: Path) -> None:
    first = fingerprint(make(tmp_path / "a", b"w" * 1000), memo_folder=tmp_path)
    second = fingerprint(make(tmp_path / "b", b"w" * 1000), memo_folder=tmp_path)
    assert first == second


def test_one_changed_byte_of_the_same_size_and_age_is_another_model(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", b"w" * 1000)
    weights = folder / "model.safetensors"
    before, stat = fingerprint(folder, memo_folder=tmp_path), weights.stat()
    weights.write_bytes(b"w" * 500 + b"x" + b"w" * 499)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fingerprint(folder, memo_folder=tmp_path) != before


def test_files_that_stay_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "a", b"w")
    before = fingerprint(folder, memo_folder=tmp_path / "memo")
    monkeypatch.setattr(module, "_hash", lambda *_: "hashed again")
    assert fingerprint(folder, memo_folder=tmp_path / "memo") == before
    (tmp_path / "memo" / module.MEMO).write_text("{damaged")
    assert fingerprint(folder, memo_folder=tmp_path / "memo") == "hashed again"
