"""The README's program runs as printed and gives the output as printed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from palmette.kernels.cpu.build import instruction_sets

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.mark.model
def test_the_program_gives_its_printed_output(default_model: Path, tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(
        r"```python\n(import palmette as pm\n.*?)```\n\n[^`]*```text\n(.*?)```", text, re.S
    )
    assert found is not None
    program = tmp_path / "program.py"
    program.write_text(found[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if instruction_sets()[0] == "avx512":
        assert done.stdout == found[2]
    known_for, tips, days = done.stdout.splitlines()
    assert known_for.startswith("Paris is a city")
    assert len(ast.literal_eval(tips)) == 2
    assert days in ("1", "2", "3")
