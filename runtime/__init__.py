"""Floor 2: requests, the scheduler, the engine, models and their runners.

May import `kernels`, `radix_cache` and `constrained`. Torch only in `torch_runner`,
`cuda_runner` and `models/`; everything else works on numpy and native code.

Public: `request.Request`, `request.SamplingParams`, `request.Output`, `config.EngineConfig`,
`engine.Engine`, `client.EngineClient`, `client.LocalClient`.
"""
