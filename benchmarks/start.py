"""How soon Palmette answers, what memory it takes, and how large an installation is.

    python benchmarks/start.py [--rounds 5] [--install] [--kv-tokens 8192] [-- options of serve]

Prints one JSON line: seconds from `palmette serve` to the end of the first answer, and of a whole
`palmette run` of a program with one call, as [least, median] over the rounds; MB of the server and
the engine process together after a prompt that fills half of the KV pool (PSS: memory that both
share counts once); the machine's load. --install measures `pip install .[serve]` into a fresh
environment, bytecode that pip makes of the packages apart. The model must be in the cache, see
`palmette pull`. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "palmette.server")
PROGRAM = """
import palmette as pt

@pt.function
def hello(s):
    s += "Once upon a time" + pt.gen("story", max_tokens=8)

print(hello.run()["story"])
"""


class Server:
    """`palmette serve`, from its start to its first answer."""

    def __init__(self, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        start = time.perf_counter()
        command = [*COMMAND, "serve", "--port", str(port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}")
            try:
                if self.client.get("/health/ready").is_success:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.01)
        self.complete("Once upon a time")
        self.start_s = time.perf_counter() - start

    def complete(self, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 8}
        self.client.post("/v1/completions", json=body).raise_for_status()

    def memory_mb(self) -> dict[str, float]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        names = {"server": pid, "engine": int(children[0])}
        return {name: pss_mb(number) for name, number in names.items()}

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.communicate()


def pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError("the kernel does not tell a process's share of memory")


def run_s(options: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "hello.py"
        program.write_text(PROGRAM, encoding="utf-8")
        start = time.perf_counter()
        subprocess.run(
            [*COMMAND, "run", *options, str(program)], check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - start


def install_mb() -> dict[str, object]:
    """Size of a fresh environment with the server, without pip itself."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        [packages] = Path(folder).glob("lib/python*/site-packages")
        before = {path.name for path in packages.iterdir()}
        bytecode_before = sum(size_mb(path) for path in packages.rglob("*.pyc"))
        pip = [str(Path(folder) / "bin" / "pip"), "install", "--quiet", f"{ROOT}[serve]"]
        subprocess.run(pip, check=True)
        installed = [path for path in packages.iterdir() if path.name not in before]
        sizes = {path.name: size_mb(path) for path in installed}
        bytecode = sum(size_mb(path) for path in packages.rglob("*.pyc")) - bytecode_before
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:12]
    return {
        "install_mb": round(sum(sizes.values()) - bytecode, 1),
        "bytecode_mb": round(bytecode, 1),  # that pip makes of them
        "largest_mb": {name: round(size, 1) for name, size in largest},
    }


def size_mb(path: Path) -> float:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 2**20


def summary(values: list[float]) -> list[float]:
    return [round(min(values), 2), round(statistics.median(values), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("options", nargs="*", help="for palmette serve and run")
    args = parser.parse_args()
    options = ["--kv-tokens", str(args.kv_tokens), *args.options]
    starts, runs, memory = [], [], {}
    for _ in range(args.rounds):
        server = Server(options)
        starts.append(server.start_s)
        for i in range(args.kv_tokens // 2 // 1024):
            server.complete(f"{i} " + "and then " * 511)
        memory = server.memory_mb()
        server.close()
        runs.append(run_s(options))
    result: dict[str, object] = {
        "benchmark": "start",
        "machine": platform.processor() or platform.machine(),
        "load": round(os.getloadavg()[0], 2),
        "options": options,
        "serve_s": summary(starts),
        "run_s": summary(runs),
        "memory_mb": memory | {"both": round(sum(memory.values()), 1)},
    }
    print(json.dumps(result | (install_mb() if args.install else {})))


if __name__ == "__main__":
    main()
