"""A whole server with a scripted model, as a process: argv[1] is {"server": ..., "engine": ...}.

Prints one line of JSON when it is ready.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec

from palmette.runtime.config import EngineConfig
from palmette.runtime.fake_runner import ByteTokenizer
from palmette.runtime.request import EngineInfo
from palmette.server.config import ServerConfig
from palmette.server.serve import serve

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "engine_with_fake_model.py"))
FORECAST_COMMAND = (sys.executable, str(HERE / "forecasts_of_fake_model.py"))


def announce(url: str, info: EngineInfo) -> None:
    print(json.dumps({"url": url, "model": info.model}), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    config = msgspec.convert({"port": 0} | options.get("server", {}), ServerConfig)
    engine = msgspec.convert({"model": "script=letters"} | options.get("engine", {}), EngineConfig)
    asyncio.run(serve(config, engine, ByteTokenizer, announce, COMMAND, FORECAST_COMMAND))


if __name__ == "__main__":
    main()
