"""What SGLang's own benchmark scripts import beside the language, so that they run here.

| in the script | here |
|---|---|
| `import sglang as sgl`, `from sglang import ...`, `from sglang.api import ...` | `palmette` |
| `from sglang.test.test_utils import ...`, `from sglang.utils import ...` | this module |
| `from sglang.lang.choices import ...`, `... sglang.lang.ir import ...` | `palmette.lang...` |
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .state import ProgramState

if TYPE_CHECKING:
    from palmette.runtime.client import EngineClient

_RULE = "=" * 80


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options of every benchmark, and parse the command line.

    They are `--backend` ("srt": a server; "gpt-...": OpenAI), `--host`, `--port`, `--parallel`,
    `--device`, `--result-file` and `--raw-result-file`.
    """
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", default="srt")
    parser.add_argument("--device", default="auto", help="accepted; the server decides")
    parser.add_argument("--result-file", default="result.jsonl")
    parser.add_argument("--raw-result-file")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> EngineClient:
    """The backend that `--backend`, `--host` and `--port` name.

    Raises:
        ValueError: there is no such backend.
    """
    if args.backend.startswith("srt"):
        from .remote import RuntimeEndpoint

        return RuntimeEndpoint(normalize_base_url(args.host, args.port))
    if args.backend.startswith("gpt-"):
        from .openai_api import OpenAI

        return OpenAI(args.backend)
    raise ValueError(f"--backend: {args.backend!r} is neither 'srt' nor the name of a gpt- model")


def normalize_base_url(host: str, port: int) -> str:
    """`host` and `port` as an address; `host` may have a scheme."""
    return f"{host if '://' in host else f'http://{host}'}:{port}"


def read_jsonl(filename: str | os.PathLike[str]) -> list[object]:
    """The values of a file with one JSON value a line; lines that begin with # are skipped."""
    lines = Path(filename).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip() and not line.startswith("#")]


def dump_state_text(
    filename: str | os.PathLike[str], states: Iterable[object], mode: str = "w"
) -> None:
    """Write the texts of states to a file, one below the other."""
    with open(filename, mode, encoding="utf-8") as out:
        for index, state in enumerate(states):
            text = state.text() if isinstance(state, ProgramState) else str(state)
            out.write(f"{'=' * 40} {index} {'=' * 40}\n{text}\n{_RULE}\n\n")


def download_and_cache_file(url: str, filename: str | os.PathLike[str] | None = None) -> str:
    """Download a file once and give its path, by default in the directory for temporary files.

    Raises:
        ValueError: `url` is no address of the web.
        OSError: it cannot be had.
    """
    import tempfile

    if not url.startswith(("https://", "http://")):
        raise ValueError(f"url: {url!r:.200} must begin with https:// or http://")
    path = Path(filename or Path(tempfile.gettempdir(), url.rpartition("/")[2]))
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        urllib.request.urlretrieve(url, part)  # noqa: S310  # the scheme is checked above
        part.replace(path)
    return str(path)
