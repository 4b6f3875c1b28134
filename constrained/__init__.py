"""Floor 1: grammars and token masks.

    types.to_spec(value) -> spec.GrammarSpec -> compiler.GrammarCompiler -> backend.GrammarState
                            limits, preflight      (worker threads, cache)     masks.fill_rows

What output may look like (`spec`, `types`), what is refused before an engine sees it (`limits`,
`preflight` with `schema_*`, `formats`, `ecma_regex`), what an engine of grammars must offer
(`backend`) and those there are (`llguidance_backend`, `pure_backend`), the vocabulary as bytes
(`vocabulary`), the compile service (`compiler`) and mask rows (`masks`). No torch.
May import `palmette.kernels` only.

Public: `spec.GrammarSpec`, `spec.GrammarError`, `types.to_spec`, `backend.select_backend`,
`compiler.GrammarCompiler`, `masks.fill_rows`, `vocabulary.Vocabulary`.
"""
