"""Triton's kernels on CPU tensors: the interpreter, chosen before a kernel is first imported.

A process either interprets or compiles; these tests interpret, also where a device is.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
