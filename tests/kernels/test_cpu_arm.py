"""The kernels for ARM pass the tests of the kernels: cross-compiled, run by an emulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from cross import remote_library

from palmette.kernels.cpu import build, ops

TESTS = Path(__file__).resolve().parent.parent
KERNELS = ("test_cpu_ops.py", "test_cpu_weights.py", "test_cpu_attention.py")
MODEL = "logits_equal_transformers or bits_do_not_depend or narrow_weights or share_a_prefix"


def passed(instruction_set: str, *arguments: str) -> int:
    """How many tests passed with this instruction set; all of them, or this one fails."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "cross.arm_plugin", *arguments],
        env=os.environ
        | {
            "CROSS_INSTRUCTION_SET": instruction_set,
            "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))),
        },
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    counted = re.search(r"(\d+) passed", result.stdout)
    assert counted is not None
    return int(counted[1])


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["neon", "neon-dot"])
def test_linears_have_the_bits_of_this_machine(
    instruction_set: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := remote_library.missing():
        pytest.skip(missing)
    here = build.instruction_sets()[0]
    if here == "portable":
        pytest.skip("the portable kernels do not fuse a multiply and an add")
    arm = remote_library.compile_for_arm(instruction_set, tmp_path)
    remote_library.install(arm, instruction_set, monkeypatch)
    pools = [ops.Pool(2, instruction_set=name) for name in (here, instruction_set)]
    assert pools[1].library.instruction_set == instruction_set
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((75, 96), dtype=np.float32)
    x = rng.standard_normal((13, 96), dtype=np.float32)
    for kind in ops.MatrixKind:
        matrices = [ops.Matrix(pool, weights.shape, kind) for pool in pools]
        for matrix in matrices:
            if "UINT4" in kind.name:
                data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
                matrix.fill_encoded(0, "q4_1", data)
            else:
                matrix.fill(0, weights)
        for rows in range(1, 14):
            mine, theirs = (
                pool.linear(matrix, x[:rows]) for pool, matrix in zip(pools, matrices, strict=True)
            )
            np.testing.assert_array_equal(mine, theirs)
    arm.close()


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["neon", "neon-dot"])
def test_kernels_and_a_whole_model_pass_their_tests(instruction_set: str) -> None:
    if missing := remote_library.missing():
        pytest.skip(missing)
    assert passed(instruction_set, *(f"tests/kernels/{name}" for name in KERNELS)) > 100
    assert passed(instruction_set, "tests/runtime/test_cpu_runner.py", "-k", MODEL) >= 10
