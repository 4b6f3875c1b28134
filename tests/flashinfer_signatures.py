"""Names of the parameters of what is called of FlashInfer, read from its source.

    python tests/flashinfer_signatures.py VERSION=FOLDER... > tests/flashinfer_signatures.json

FOLDER holds the package's decode.py, prefill.py, cascade.py and sampling.py.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

_WRAPPERS = {
    "decode.py": "BatchDecodeWithPagedKVCacheWrapper",
    "prefill.py": "BatchPrefillWithPagedKVCacheWrapper",
}
_METHODS = ("__init__", "plan", "run", "reset_workspace_buffer")
_SAMPLING = (
    *("softmax", "top_k_renorm_probs", "top_p_renorm_probs"),
    "top_k_top_p_sampling_from_probs",
)
CALLED: tuple[tuple[str, str | None, str], ...] = (  # file, class, function
    *((file, name, method) for file, name in _WRAPPERS.items() for method in _METHODS),
    ("cascade.py", None, "merge_state_in_place"),
    *(("sampling.py", None, name) for name in _SAMPLING),
)


def signature(path: Path, class_name: str | None, name: str) -> dict[str, list[str]]:
    """positional and keyword names in order, and those of both without a default."""
    body: Any = ast.parse(path.read_text(encoding="utf-8")).body
    if class_name is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    functions = [n for n in body if isinstance(n, ast.FunctionDef)]
    arguments = [n.args for n in functions if n.name == name][-1:]  # the body of overloads
    if not arguments:
        raise LookupError(f"{path.name}: there is no {name}")
    # 0.7's plan takes keywords as they are and hands them on
    arguments += [n.args for n in functions if n.name == f"_{name}_impl"]
    positional = [a.arg for a in arguments[0].args if a.arg != "self"]
    keyword = [a.arg for one in arguments for a in one.kwonlyargs]
    num_defaults = len(arguments[0].defaults)
    required = positional[: len(positional) - num_defaults]
    for one in arguments:
        pairs = zip(one.kwonlyargs, one.kw_defaults, strict=True)
        required += [a.arg for a, default in pairs if default is None]
    return {"positional": positional, "keyword": keyword, "required": required}


def signatures(folder: Path) -> dict[str, dict[str, list[str]]]:
    return {
        ".".join(filter(None, (file.removesuffix(".py"), class_name, name))): signature(
            folder / file, class_name, name
        )
        for file, class_name, name in CALLED
    }


def main() -> None:
    pairs = [argument.split("=", 1) for argument in sys.argv[1:]]
    found = {version: signatures(Path(folder)) for version, folder in pairs}
    lines = []
    for version, called in found.items():
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in called.items())
        lines.append(f" {json.dumps(version)}: {{\n{rows}\n }}")
    print("{\n" + ",\n".join(lines) + "\n}")


if __name__ == "__main__":
    main()
