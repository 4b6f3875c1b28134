"""Floor 1: grammars and token masks.

What output may look like (`spec`), what an engine of grammars must offer (`backend`), the
vocabulary as bytes (`vocabulary`), and the compile service (`compiler`). No torch.
May import `palmette.kernels` only.

Public: `spec.GrammarSpec`, `backend.GrammarBackend`, `compiler.GrammarCompiler`,
`vocabulary.Vocabulary`.
"""
