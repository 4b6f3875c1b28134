"""The same contracts on the vocabulary of the default model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palmette.constrained import masks
from palmette.constrained.backend import select_backend
from palmette.constrained.spec import GrammarSpec
from palmette.constrained.vocabulary import Vocabulary

pytestmark = pytest.mark.model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "string", "format": "date"},
        "temperature_celsius": {"type": "number", "minimum": -50, "maximum": 50},
    },
    "required": ["name", "temperature_celsius"],
    "additionalProperties": False,
}
VALID = {"name": "Zoé 日本", "born": "2024-02-29", "temperature_celsius": -1.5}


@pytest.fixture(scope="module")
def model_vocabulary(default_model: Path) -> Vocabulary:
    from palmette.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(default_model)
    return tokenizer.vocabulary(tokenizer.size + 64)  # logits are wider than the tokenizer


def test_masks_lead_along_a_valid_text_and_never_to_special_ids(
    model_vocabulary: Vocabulary,
) -> None:
    vocabulary = model_vocabulary
    state = select_backend().compile(GrammarSpec.json_schema(PERSON), vocabulary).start()
    row = masks.allocate(1, vocabulary.size)[0]
    specials = vocabulary.special_ids - set(vocabulary.stop_ids)
    for token_id in vocabulary.encode(json.dumps(VALID, ensure_ascii=False)):
        state.fill(row)
        allowed = set(masks.allowed_ids(row).tolist())
        assert token_id in allowed
        assert not allowed & specials
        assert not allowed & set(vocabulary.stop_ids)
        assert all(vocabulary.token_bytes[i] for i in allowed)
        assert state.accept(token_id)
    assert state.is_done


def test_forced_ids_are_the_models_own_tokens(model_vocabulary: Vocabulary) -> None:
    vocabulary = model_vocabulary
    spec = GrammarSpec.regex('\\{"temperature_celsius": [0-9]+\\}')
    state = select_backend().compile(spec, vocabulary).start()
    forced = list(state.forced())
    text = '{"temperature_celsius": '
    canonical = vocabulary.encode(text)
    assert len(forced) >= 4
    assert forced == canonical[: len(forced)]
