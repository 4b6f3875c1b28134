"""Floor 1: the radix tree of prefixes, page ownership, eviction and token accounting.

Pure Python over ints: no torch, no model, no request. May import `palmette.kernels` only.

Public: `tree.RadixTree`, `tree.Lease`, `tree.TreeNode`, `tree.PagesExhausted`,
`pages.PageAllocator`, `ledger.TokenCounts`, `ledger.MissReason`.
"""
