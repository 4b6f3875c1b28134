"""The engine process with a scripted model: the real loop, engine and socket, no weights.

Run as a script by the tests. `EngineConfig.model` says what the model does, as a query string:
    script=letters|hash|echo   what it generates          delay=0.02   seconds per forward pass
    poison=ID                  a forward pass with this token raises
    template=NAME              one of `TEMPLATES`
    version=TEXT               what it says it is: clients tell hints to a server with a version
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import parse_qsl

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import ByteTokenizer, FakeRunner, fake_engine
from palmette.server.engine_process import main

VOCAB_SIZE = 300


def letters(ids: Sequence[int]) -> int:
    """a, b, ..., z, a, ... by position: every continuation can be told from the prompt's length."""
    return ord("a") + len(ids) % 26


_TURNS = "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}<assistant>"
TEMPLATES = {
    "plain": _TURNS,
    "thinks": _TURNS + "<think>\n{# </think> #}",
    "may think": _TURNS + "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}",
    "hermes": _TURNS + """{# <tool_call>{"name": "f", "arguments": {}}</tool_call> #}""",
    "qwen_coder": _TURNS + "{# <tool_call><function=f><parameter=x></function></tool_call> #}",
}


def echo(ids: Sequence[int]) -> int:
    """What the user said, behind <assistant>; then the end."""
    text = b"".join(bytes([i]) for i in ids if i < 256)
    start = text.rfind(b"<assistant>")
    said = text[text.rfind(b"<user>", 0, start) + len(b"<user>") : text.rfind(b"</user>", 0, start)]
    place = len(text) - start - len(b"<assistant>")
    return said[place] if place < len(said) else 256


SCRIPTS = {"letters": letters, "echo": echo, "hash": None}


def load(config: EngineConfig) -> Engine:
    options = dict(parse_qsl(config.model))
    if "missing" in options:
        raise FileNotFoundError("no such model; run palmette pull")
    num_pages = (config.kv_tokens or 4096) // config.page_size
    delay = float(options.get("delay", 0))
    poison = int(options.get("poison", -1))

    def on_launch(batch: ForwardBatch) -> None:
        if poison in batch.token_ids:
            raise RuntimeError("secret-word /etc/passwd at 0x7f0012345678")
        if delay:
            time.sleep(delay)

    runner = FakeRunner(
        SCRIPTS[options.get("script", "letters")],
        num_pages=num_pages,
        page_size=config.page_size,
        vocab_size=VOCAB_SIZE,
        on_launch=on_launch,
    )
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = TEMPLATES.get(options.get("template", ""))
    engine = fake_engine(
        runner=runner,
        context_length=config.context_length or 2048,
        scheduler=config.scheduler,
        limits=config.limits,
        tokenizer=tokenizer,
        seed=config.seed,
        config=config,
    )
    engine.info = replace(engine.info, version=options.get("version", ""))
    return engine


if __name__ == "__main__":
    sys.exit(main(load))
