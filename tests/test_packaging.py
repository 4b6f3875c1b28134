"""What is built and installed: declared packages, wheel contents, extras."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("constrained", "kernels", "lang", "radix_cache", "runtime", "server")


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_declared_packages_are_the_folders(project: dict[str, object]) -> None:
    folders = {
        "palmette." + str(init.parent.relative_to(ROOT)).replace("/", ".")
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    declared = project["tool"]["setuptools"]["packages"]  # type: ignore[index]
    assert set(declared) == folders | {"palmette"}


def test_the_pytest_plugin_is_declared_under_its_module_s_name(project: dict[str, object]) -> None:
    points = project["project"]["entry-points"]["pytest11"]  # type: ignore[index]
    assert points == {"palmette.lang.pytest_plugin": "palmette.lang.pytest_plugin"}
    assert (ROOT / "lang" / "pytest_plugin.py").exists()


def test_every_folder_with_modules_is_a_package() -> None:
    missing = {
        str(path.parent.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert missing == set()


def test_the_root_holds_no_module_but_init() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


def test_the_core_does_not_bring_torch_or_the_server(project: dict[str, object]) -> None:
    core = " ".join(project["project"]["dependencies"])  # type: ignore[index]
    assert not any(name in core for name in ("torch", "triton", "flashinfer", "fastapi", "uvicorn"))


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        *FOLDERS,
        "examples",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "__init__.py",
        "py.typed",
    ):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("palmette-*.whl")
    assert wheel.stat().st_size < 1_000_000
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert all(folder == "palmette" or folder.endswith(".dist-info") for folder in top)
    assert {"palmette/py.typed", "palmette/examples/demo.py"} <= set(names)
    modules = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".cpp", ".h"}
    }
    assert {f"palmette/{name}" for name in modules} <= set(names)
