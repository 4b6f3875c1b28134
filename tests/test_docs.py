"""The pages' Python runs as printed, their curl commands succeed, their tables are complete.

The blocks of one page run in order in one namespace. A block of text right after one is what it
prints. `Engine.load` loads a tiny model instead; blocks after `<!-- server -->`, and commands of
curl, meet a tiny server in the place of port 30000.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from fastapi.routing import APIRoute
from tiny_files import write_tiny_model

import palmette as pm
from palmette.constrained import formats
from palmette.constrained.idle_keywords import REWRITTEN
from palmette.constrained.limits import GrammarLimits
from palmette.kernels.kv_dtype import KV_DTYPES, kv_head_bytes
from palmette.lang import backends
from palmette.radix_cache.ledger import MissReason
from palmette.radix_cache.policy import POLICY_NAMES
from palmette.runtime.cpu_weights import WEIGHTS
from palmette.runtime.metrics import EngineStats
from palmette.runtime.models.registry import ARCHITECTURES
from palmette.runtime.request import EngineInfo, Limits
from palmette.runtime.weights import ENCODINGS
from palmette.server import (
    admin_api,
    cache_api,
    explain_api,
    generate_api,
    metrics,
    openai_api,
    programs_api,
)
from palmette.server.config import ServerConfig
from palmette.server.schemas import (
    ChatBody,
    CompletionBody,
    ExplainBody,
    GenerateBody,
    ProgramRunBody,
    SamplingBody,
)

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOC_URL = "http://127.0.0.1:30000"
MODEL = "smollm2-135m-instruct"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_PLACE = re.compile(r"\S+\.(?:py|md):\d+")


INFO = EngineInfo(
    model=MODEL,
    vocab_size=1,
    context_length=1,
    page_size=1,
    num_pages=1,
    eos_token_ids=(),
    bos_token_id=None,
    chat_template=None,
)


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of its first line in the page
    needs_server: bool
    output: str | None  # what it prints


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    blocks = []
    for i, match in enumerate(found):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        following = found[i + 1] if i + 1 < len(found) else None
        is_output = (
            following is not None
            and following[1] == "text"
            and not text[match.end() : following.start()].strip()
        )
        blocks.append(
            Block(
                language=match[1],
                code=match[2],
                line=text.count("\n", 0, match.start(2)) + 1,
                needs_server=before == "<!-- server -->" or DOC_URL in match[2],
                output=following[2] if is_output and following is not None else None,
            )
        )
    return blocks


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("docs") / MODEL, context_length=4096)


@pytest.fixture(scope="module")
def server_url(tiny_model: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "palmette.server", "serve", "--model", str(tiny_model)]
    command += ["--port", "0", "--device", "cpu", "--kv-tokens", "8192", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first_line = process.stdout.readline()  # "palmette serves NAME at URL"
        assert first_line, f"exit status {process.wait(30)} at the start"
        yield first_line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=120)


@pytest.fixture
def tiny_engines(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`Engine.load` of whatever model loads the tiny one; no default backend is left behind."""
    engines: list[pm.Engine] = []
    load = pm.Engine.load

    def load_tiny(config: pm.EngineConfig | None = None) -> pm.Engine:
        config = config or pm.EngineConfig()
        size = min(config.kv_tokens or 4096, 4096)
        tiny = dataclasses.replace(
            config,
            model=str(tiny_model),
            served_name=MODEL,
            device="cpu",
            kv_tokens=size,
            threads=1,
            context_length=None,
        )
        engines.append(load(tiny))
        return engines[-1]

    monkeypatch.setattr(pm.Engine, "load", load_tiny)
    monkeypatch.setattr(backends._Holder, "default", None)
    yield
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, tiny_engines: None, request: pytest.FixtureRequest
) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        code = block.code
        if block.needs_server:
            code = code.replace(DOC_URL, request.getfixturevalue("server_url"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # lines count as in the page
            exec(compile("\n" * (block.line - 1) + code, page, "exec"), namespace)
        if block.output is not None and page.name != "README.md":  # its model: test_readme
            place = f"{page.name}:{block.line}"
            assert _comparable(printed.getvalue()) == _comparable(block.output), place


def _comparable(text: str) -> list[str]:
    """Lines, with places in files and the width of columns left out."""
    lines = text.strip("\n").splitlines()
    return [re.sub(r" {2,}", "  ", _PLACE.sub("PLACE", line)).rstrip() for line in lines]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_curl_succeed(page: Path, request: pytest.FixtureRequest) -> None:
    for block in blocks_of(page):
        if block.language in ("python", "text") or DOC_URL not in block.code:
            continue
        command = block.code.replace(DOC_URL, request.getfixturevalue("server_url"))
        command = re.sub(r"^curl ", "curl --silent --show-error --fail ", command, flags=re.M)
        done = subprocess.run(
            ["sh", "-ec", command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 and done.stdout, (f"{page.name}:{block.line}", done)


# Tables


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    return [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("|")]


def column(page: str, heading: str, index: int = 0) -> list[str]:
    """The names in backticks in one column."""
    return [name for row in rows(page, heading) for name in re.findall(r"`([^`]+)`", row[index])]


def test_every_parameter_of_gen_is_described() -> None:
    assert column("language.md", "gen") == list(inspect.signature(pm.gen).parameters)


def test_every_route_is_described() -> None:
    routes = {
        route.path
        for module in (openai_api, generate_api, admin_api, cache_api, programs_api, explain_api)
        for route in module.router.routes
        if isinstance(route, APIRoute)
    }
    described = column("server.md", "Routes")
    assert {re.sub(r":path}", "}", path) for path in routes} == set(described)


@pytest.mark.parametrize(
    ("heading", "bodies"),
    [
        ("OpenAI's fields", (ChatBody, CompletionBody)),
        ("SGLang's `/generate`", (GenerateBody, SamplingBody)),
        ("Programs", (ProgramRunBody,)),
        ("Forecasts", (ExplainBody,)),
    ],
)
def test_every_field_is_described(heading: str, bodies: tuple[type[msgspec.Struct], ...]) -> None:
    fields = {name for body in bodies for name in body.__struct_fields__}
    assert fields <= set(column("server.md", heading))


def test_every_limit_is_described_with_its_default() -> None:
    described: dict[str, float] = {}
    for name, default, _ in rows("server.md", "Limits"):
        if names := re.findall(r"`(\w+)`", name):
            described |= zip(names, map(float, default.split(",")), strict=True)
    values = dataclasses.asdict(Limits()) | dataclasses.asdict(ServerConfig())
    wanted = {name for name in values if name.startswith(("max_", "header_", "body_", "keep_"))}
    assert described == {name: values[name] for name in wanted}


def test_every_metric_is_described() -> None:
    page = metrics.ServerMetrics().render(EngineStats(), INFO, 0)
    names = re.findall(r"^# TYPE palmette_(\w+)", page, re.M)
    assert sorted(names) == sorted(column("server.md", "Metrics"))


def test_the_tables_of_models_are_those_of_the_code() -> None:
    assert set(column("models.md", "Architectures")) == set(ARCHITECTURES)
    gguf_names = {item.gguf_name for item in ARCHITECTURES.values()} - {None}
    assert set(column("models.md", "Architectures", 1)) == gguf_names
    stored = rows("models.md", "Weights")[3][1].lower().replace(" ", "").split(",")
    assert set(stored) == set(ENCODINGS)
    kept = set(column("models.md", "Weights"))
    assert set(WEIGHTS) <= kept
    assert set(column("models.md", "K and V")) == {"auto", *KV_DTYPES}
    sizes = {row[0].strip(" `"): row[3].strip() for row in rows("models.md", "K and V")}
    for dtype in KV_DTYPES:
        factor, scale = {"D + 4": (1, 4), "2 D": (2, 0), "4 D": (4, 0)}[sizes[dtype]]
        assert kv_head_bytes(dtype, 64) == factor * 64 + scale


def test_the_limits_of_grammars_are_those_of_the_code() -> None:
    limits = GrammarLimits()
    text = "".join(cell for row in rows("constraints.md", "Limits") for cell in row[1:])
    for number in (limits.depth, limits.enum_values, limits.properties, limits.pattern_properties,
                   limits.rules, limits.regex_size, limits.multiple_of):  # fmt: skip
        assert f"{number:,}".replace(",", " ") in text
    assert f"{limits.source_bytes // 1024} KiB" in text
    assert f"{limits.regex_bytes // 1024} KiB" in text


def test_refused_keywords_and_formats_are_described() -> None:
    checked = column("constraints.md", "What is checked")
    assert set(checked) >= REWRITTEN
    assert formats.UNENFORCED <= set(checked)
    text = (ROOT / "docs" / "constraints.md").read_text(encoding="utf-8")
    enforced = text.partition("Formats: ")[2].partition(". ")[0]
    assert set(re.findall(r"`([^`]+)`", enforced)) == formats.ENGINE | set(formats.PATTERNS)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            linked = page.parent / path if path else page
            assert linked.exists(), (page.name, target)
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
                assert anchor in anchors, (page.name, target)


def test_policies_and_reasons_are_those_of_the_code() -> None:
    assert column("cache.md", "What leaves first") == list(POLICY_NAMES)
    assert sorted(column("cache.md", "Accounts")) == sorted(MissReason)
