"""Ranks that run one model compile and mask for themselves: they may never differ (rt-tp-ranks)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import hashlib, json, random, sys
import numpy as np
from conftest import make_vocabulary
from palmette.constrained.backend import select_backend
from palmette.constrained.gate import gated
from palmette.constrained.masks import allowed_ids
from palmette.constrained.spec import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "array",
          "items": {"type": "integer"}, "uniqueItems": True}}, "required": ["a", "b"]}
TAG = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t"],
       "tags": [{"type": "tag", "begin": "<t>", "end": "</t>",
                 "content": {"type": "json_schema", "json_schema": SCHEMA}}]}}
vocabulary = make_vocabulary()
told = {}
for spec in (GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex("(ab|abc)*x?[0-9]{2,5}"),
             GrammarSpec.structural_tag(TAG), GrammarSpec.choice(["then", "the", "name"])):
    compiled = gated(select_backend().compile(spec, vocabulary), "</tool>", vocabulary)
    digest, rng, state = hashlib.sha256(), random.Random(7), compiled.start()
    digest.update(repr((compiled.shortest, compiled.exits)).encode())
    row = np.zeros(vocabulary.mask_words, np.int32)
    for token_id in vocabulary.encode("because </tool>"):
        assert state.accept(token_id)
    for _ in range(40):
        if state.is_done:
            break
        state.fill(row)
        digest.update(row.tobytes() + repr(list(state.forced())).encode())
        ids = [i for i in allowed_ids(row).tolist() if i not in vocabulary.stop_ids]
        if not ids or not state.accept(rng.choice(ids)):
            break
    told[spec.kind] = digest.hexdigest()
print(json.dumps(told))
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_rt_tp_ranks(hash_seed: str) -> None:
    """Two processes that share nothing have the same masks, forced ids and ways out."""
    here = Path(__file__).parent
    path = [str(here), *sys.path]
    answers = []
    for seed in ("0", hash_seed):
        run = subprocess.run(
            [sys.executable, "-c", CODE],
            env={"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        answers.append(json.loads(run.stdout))
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]
