"""Floor 4: HTTP, limits, the engine process and the command line.

May import every floor. No torch: the engine process gets it through the runtime.

Public: `app.create_app`, `__main__.main`.
"""
