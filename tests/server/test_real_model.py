"""`palmette serve` as a user starts it: the command, a real model, its tokenizer and template."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import openai
import pytest


@contextmanager
def served(model: Path) -> Iterator[openai.OpenAI]:
    """A client of `palmette serve`; the server must end with 0 and say nothing more."""
    command = [sys.executable, "-m", "palmette.server", "serve", "--model", str(model)]
    command += ["--weights", "stored"]  # as sure of Paris as the file's weights are
    process = subprocess.Popen(
        [*command, "--port", "0", "--kv-tokens", "2048", "--served-name", "real"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"serves real at (http://127\.0\.0\.1:\d+)", line)
        assert found is not None, line + process.stderr.read()
        assert "KV pool of 2048 tokens" in process.stdout.readline()
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "visited": {"type": "boolean"},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "visited", "stars"],
    "additionalProperties": False,
}


def ask_for_json(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="real",
        messages=[{"role": "user", "content": "Describe a city as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        max_tokens=100,
        seed=1,
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


def test_a_tiny_model(tiny_files: Path) -> None:
    with served(tiny_files) as client:
        ask_for_json(client)
        texts = []
        for stream in (False, True):
            answer = client.chat.completions.create(
                model="real",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=12,
                temperature=0,
                stream=stream,
            )
            if isinstance(answer, openai.Stream):
                texts.append("".join(c.choices[0].delta.content or "" for c in answer))
            else:
                texts.append(answer.choices[0].message.content or "")
        assert texts[0] == texts[1]
        many = client.completions.create(model="real", prompt="hello", n=4, seed=3, max_tokens=8)
        again = client.completions.create(model="real", prompt="hello", n=4, seed=3, max_tokens=8)
        assert [c.text for c in many.choices] == [c.text for c in again.choices]
        assert len({c.text for c in many.choices}) > 1


@pytest.mark.model
def test_the_default_model(default_model: Path) -> None:
    with served(default_model) as client:
        answer = client.chat.completions.create(
            model="real",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=20,
            temperature=0,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        ask_for_json(client)
