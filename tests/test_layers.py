"""Imports only go down the floors, and the upper floors work without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOOR = {"kernels": 0, "radix_cache": 1, "constrained": 1, "runtime": 2, "lang": 3, "server": 4}
# Heavy packages, and the only places that may import them.
HEAVY = {
    "torch": (
        "kernels/reference.py",
        "kernels/kv_codes.py",
        "kernels/kv_pool.py",
        "kernels/cuda/",
        "runtime/tensor_parallel/",
        "runtime/torch_runner.py",
        "runtime/cuda_graphs.py",
        "runtime/cuda_inputs.py",
        "runtime/cuda_runner.py",
        "runtime/models/",
    ),
    "triton": ("kernels/cuda/",),
    "flashinfer": ("kernels/cuda/",),
    "fastapi": ("server/",),
    "uvicorn": ("server/",),
}


def imported_modules(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violations(source: str, relative_path: str) -> list[str]:
    folder = relative_path.split("/")[0]
    found = []
    for name in imported_modules(ast.parse(source)):
        parts = name.split(".")
        if parts[0] == "palmette" and len(parts) > 1 and parts[1] in FLOOR:
            target = parts[1]
            if target != folder and FLOOR[target] >= FLOOR[folder]:
                found.append(f"{relative_path}: {folder} may not import {name}")
        allowed = HEAVY.get(parts[0])
        if allowed is not None and not relative_path.startswith(allowed):
            found.append(f"{relative_path}: may not import {parts[0]}")
    return found


def sources() -> list[Path]:
    return sorted(path for folder in FLOOR for path in (ROOT / folder).rglob("*.py"))


def test_imports_only_go_down() -> None:
    found = [
        line
        for path in sources()
        for line in violations(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/x.py", "from palmette.runtime.request import Request"),
        ("radix_cache/x.py", "import palmette.constrained.spec"),
        ("constrained/x.py", "def f():\n    from palmette.lang import api"),
        ("lang/x.py", "import torch"),
        ("runtime/engine.py", "import torch.nn"),
        ("runtime/x.py", "import fastapi"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(source, path)) == 1


def test_upper_floors_import_without_torch() -> None:
    floors = ("radix_cache", "constrained", "lang", "server")
    modules = ["palmette"] + [
        "palmette." + str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for floor in floors
        for path in sorted((ROOT / floor).rglob("*.py"))
        if path.name != "__main__.py"
    ]
    program = "\n".join(
        [
            "import sys, importlib",
            "blocked = ('torch', 'triton', 'flashinfer', 'transformers')",
            "sys.modules.update(dict.fromkeys(blocked))",
            f"for module in {modules!r}: importlib.import_module(module.removesuffix('.__init__'))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_palmette_loads_neither_torch_nor_the_server() -> None:
    program = (
        "import sys, palmette; heavy = {'torch', 'fastapi', 'uvicorn', 'pydantic', 'tokenizers', "
        "'outlines', 'httpx'} & set(sys.modules); sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
