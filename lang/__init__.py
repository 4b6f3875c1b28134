"""Floor 3: the language of multi-call programs, and how they become requests.

May import every floor below it; never torch, fastapi or the server.

Public: the names of `api` and `roles`, re-exported by `import palmette`.
"""
