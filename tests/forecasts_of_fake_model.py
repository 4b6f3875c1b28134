"""The process that makes forecasts, for `engine_with_fake_model`."""

from __future__ import annotations

import sys

from palmette.constrained.backend import select_backend
from palmette.constrained.compiler import GrammarCompiler
from palmette.runtime.fake_runner import ByteTokenizer
from palmette.server.forecast_process import Parts, main
from palmette.server.forecasts import Begin


def load(begin: Begin) -> Parts:
    tokenizer = ByteTokenizer()
    return Parts(
        tokenizer,
        GrammarCompiler(tokenizer.vocabulary(begin.info.vocab_size), select_backend()),
    )


if __name__ == "__main__":
    sys.exit(main(load))
