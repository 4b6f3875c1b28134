"""Programs are typed for their users: mypy --strict, and the types it infers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROGRAMS = sorted(Path(__file__).parent.glob("typed_*.py"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_mypy_strict_accepts_a_program_and_infers_its_types(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mypy import api

    program = tmp_path / path.name  # outside of the package that the repository's root is
    program.write_text(path.read_text())
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "palmette").symlink_to(ROOT, target_is_directory=True)
    monkeypatch.setenv("MYPYPATH", str(packages))
    config = ROOT / "pyproject.toml"
    told, errors, status = api.run(["--strict", "--config-file", str(config), str(program)])
    assert (status, errors) == (0, ""), told
    revealed = re.findall(r'^.*:(\d+): note: Revealed type is "(.*)"$', told, re.M)
    found = {int(line): re.sub(r"\b[a-z_]\w*\.(?=\w)", "", name) for line, name in revealed}
    wanted = {
        number: line.rpartition("# ")[2]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith("reveal_type(")
    }
    assert found == wanted
