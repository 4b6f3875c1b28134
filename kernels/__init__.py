"""Floor 0: device operations, the KV pool and the arrays of one step.

May import: numpy, native code; torch, triton and flashinfer only in `reference.py`,
`kv_pool.py` and `cuda/`. Imports no other floor.

Public: `batch.ForwardBatch`, `sampling.SampleBatch`, `sampling.SampleResult`.
"""
