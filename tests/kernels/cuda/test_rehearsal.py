"""The CUDA path's host code as it runs on a GPU, in a process of its own where none is: see
`tests/rehearsal`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

TESTS = Path(__file__).parents[2]
TABLE = TESTS.parent / "benchmarks" / "machine_code"
Scene = dict[str, Any]


def rehearse(*arguments: str, given: str = "") -> str:
    """What a process prints that compiles kernels, or would, instead of interpreting them."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [str(TESTS), str(TABLE), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def scenes_of(*arguments: str) -> dict[str, Scene]:
    lines = rehearse("-m", "rehearsal.scenes", *arguments).splitlines()
    return {scene.pop("scene"): scene for scene in map(json.loads, lines)}


@pytest.fixture(scope="module")
def scenes() -> dict[str, Scene]:
    return scenes_of()


def test_nothing_is_done_that_cuda_would_refuse_or_wait_for(scenes: dict[str, Scene]) -> None:
    """No mixed devices, no value of a device asked for, nothing pinned or pageable in a step;
    nothing but launches in a capture; no graph over memory that was freed; grids in bounds."""
    assert {name: scene["faults"] for name, scene in scenes.items() if scene["faults"]} == {}


def test_no_step_compiles_a_kernel(scenes: dict[str, Scene]) -> None:
    """All are compiled before the first request: prompts, decodes, all sorts of choices."""
    late = {name: scene["late"] for name, scene in scenes.items() if scene.get("late")}
    assert late == {}


def test_what_is_launched_is_in_the_table_of_compiled_kernels(scenes: dict[str, Scene]) -> None:
    """With the same types, constants, options, and divisibility of sizes, strides, addresses."""
    assert {name: s["lacking"] for name, s in scenes.items() if s.get("lacking")} == {}


def test_launches_of_a_step(scenes: dict[str, Scene]) -> None:
    """Two layers. Ten a layer in a decode, nine in a prompt; six beside them, and the choice."""
    bf16 = scenes["llama 8b sm_90"]
    assert bf16["graph launches"] == [2 * 10 + 6]
    steps = bf16["steps"]
    assert steps["one decode"]["launches"] == 2  # random numbers, choice
    assert steps["short prefill"]["launches"] == 2 * 9 + 7 + 2
    assert steps["mixed"]["launches"] == 2 * 11 + 7 + 2
    assert steps["4 masked"]["launches"] == 2
    assert steps["4 with edits"]["launches"] == 4
    assert scenes["qwen3 int8 sm_90"]["graph launches"] == [2 * 14 + 12]
    assert scenes["smollm2 fp8 sm_90"]["graph launches"] == [2 * 14 + 6]


def test_a_decode_is_one_upload_and_one_replay(scenes: dict[str, Scene]) -> None:
    for name, scene in scenes.items():
        if "steps" not in scene or name in ("overlapped", "flashinfer sm_90"):
            continue
        for step in ("one decode", "two decodes", "5 sharing", "4 drawn"):
            calls = scene["steps"][step]
            assert [c for c in calls["launch"] if c != "event waited for"] == [
                *("main upload", "main event", "replay"),
            ], (name, step)
            assert calls["choice"][-2:] == ["main event", "event waited for"]
            assert calls["choice"].count("main download") == 1


def test_answers_come_from_files_by_the_way_of_a_user(scenes: dict[str, Scene]) -> None:
    found = {name: scene["tokens"] for name, scene in scenes.items() if name.startswith("files")}
    assert len(found) == 3 and set(found.values()) == {80}


def test_steady_steps_of_an_engine(scenes: dict[str, Scene]) -> None:
    """A step ahead: one upload, one replay, one wait, and one copy back, many steps long."""
    upload = ["event waited for", "main upload", "main event"]  # the buffer's last copy is over
    choice = ["main uniforms_kernel", "main sample_kernel", "main download", "main event"]
    scene = scenes["overlapped"]
    assert scene["overlapped"] > 40
    for calls in scene["steps"]:
        assert calls == [*upload, "replay", "event waited for", *choice]


def test_pages_move_beside_the_kernels(scenes: dict[str, Scene]) -> None:
    """Out: copied on the side while kernels go on; in: kernels wait on the device, not the host."""
    steps = scenes["llama 8b sm_90"]["steps"]
    out, back = steps["export"]["launch"], steps["import"]["launch"]
    pinned = "wait: pinned memory is made"
    assert [c for c in out if "wait" in c and "event" not in c] == [
        *("side waits for main", pinned, "main waits for side"),
    ]
    assert out.index("main waits for side") < out.index("side download")
    assert [c for c in back if "wait" in c and "event" not in c] == [
        *(pinned, "side waits for main", "main waits for side"),
    ]
    assert [calls.count("event waited for") for calls in (out[-1:], back[4:])] == [1, 0]
    for calls in (out, back):
        assert [c for c in calls if c.startswith("main ")] == ["main event", "main waits for side"]


PLANTED = """
import warnings; warnings.simplefilter("ignore")
from rehearsal import launches, streams, tensors
from rehearsal.log import LOG
for part in (tensors, streams, launches):
    part.install()
import numpy as np
import torch
from palmette.kernels.cuda.add_rms_norm import add_rms_norm
from palmette.kernels.cuda.device import CudaDevice

device = CudaDevice()
rows = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
weight = torch.empty(64, dtype=torch.bfloat16, device="cuda")
pinned = torch.empty(8, dtype=torch.int32, pin_memory=True)
numbers = torch.empty(8, dtype=torch.int32, device="cuda")


def seen(what, work):
    LOG.faults.clear()
    try:
        work()
    except RuntimeError as error:
        LOG.faults.append(f"raised {error}")
    print(what, "|", "; ".join(LOG.faults))


def freed():
    kept = [torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")]
    graph = device.capture(lambda: add_rms_norm(kept[0], weight, 1e-6))
    kept.clear()
    graph.replay()


LOG.mode = "steady"
seen("mixed", lambda: numbers + torch.ones(8, dtype=torch.int32))
seen("value", lambda: int(numbers.sum()))
seen("branch", lambda: bool((numbers > 0).all()))
seen("mask index", lambda: numbers[numbers > 0])
seen("pageable", lambda: numbers.copy_(torch.ones(8, dtype=torch.int32), non_blocking=True))
seen("blocking", lambda: numbers.copy_(pinned))
seen("download", lambda: numbers.cpu())
seen("from numpy", lambda: torch.from_numpy(np.zeros(3)).to(device.torch_device))
seen("tensor", lambda: torch.tensor([1, 2], device=device.torch_device))
seen("pinned", lambda: device.host_buffer(4))
seen("converted", lambda: numbers.copy_(pinned.float(), non_blocking=True))
seen("strided", lambda: torch.empty(4, 2, dtype=torch.int32, device="cuda")[:, 0].copy_(
    pinned[:4], non_blocking=True))
seen("compiled", lambda: add_rms_norm(rows, weight, 1e-6))
seen("compiled before", lambda: add_rms_norm(rows, weight, 1e-6))
seen("other alignment", lambda: add_rms_norm(rows[:, 2:], weight[2:], 1e-6))
LOG.mode = "run"
add_rms_norm(rows.float(), weight.float(), 1e-6)
seen("host argument", lambda: add_rms_norm(rows, torch.ones(64, dtype=torch.bfloat16), 1e-6))
seen("capture", lambda: device.capture(lambda: add_rms_norm(rows, weight, 1e-6)))
seen("upload in a capture", lambda: device.capture(lambda: device.copy(numbers, pinned)))
seen("event in a capture", lambda: device.capture(lambda: device.event().record()))
seen("compiled in a capture", lambda: device.capture(lambda: add_rms_norm(rows[1:], weight[1:],
    1e-6)))
seen("library in a capture", lambda: device.capture(lambda: rows @ rows.T))
seen("freed", freed)
kept = []
device.capture(lambda: kept.append(add_rms_norm(rows, weight, 1e-6)))
seen("memory of a graph", lambda: add_rms_norm(kept[0], weight, 1e-6))
from palmette.kernels.cuda.silu_mul import silu_mul
seen("grid", lambda: silu_mul(torch.empty(1, 2**28, dtype=torch.bfloat16, device="cuda")))
"""


def test_what_is_amiss_is_seen(tmp_path: Path) -> None:
    """Each kind of fault, planted."""
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    seen = dict(line.split(" |", 1) for line in rehearse(str(tmp_path / "planted.py")).splitlines())
    expected = {
        "mixed": "tensors on cuda:0 and on the cpu",
        "value": "value of a tensor",
        "branch": "value of a tensor",
        "mask index": "a mask as an index",
        "pageable": "upload of pageable memory in a steady step",
        "blocking": "upload that is waited for in a steady step",
        "download": "download of pageable memory in a steady step",
        "from numpy": "upload of pageable memory",
        "tensor": "upload of pageable memory",
        "pinned": "pinned memory is made in a steady step",
        "converted": "upload that converts torch.float32 (8,) on the way in a steady step",
        "strided": "upload of what is not dense",
        "compiled": "add_rms_norm_kernel is compiled in a steady step",
        "compiled before": "",
        "other alignment": "add_rms_norm_kernel is compiled in a steady step",
        "host argument": "weight is on the host",
        "capture": "",
        "upload in a capture": "upload between host and device while a graph is captured",
        "event in a capture": "an event while a graph is captured",
        "compiled in a capture": "add_rms_norm_kernel is compiled while a graph is captured",
        "library in a capture": "mm runs for the first time while a graph is captured",
        "freed": "a graph uses 512 bytes that were freed",
        "memory of a graph": "memory of a graph is used outside of it",
        "grid": "silu_mul_kernel: a grid of 1 x 131072 x 1",
    }
    for what, fault in expected.items():
        assert fault in seen[what] if fault else seen[what].strip() == "", (what, seen[what])


PARTS = ("model", "attention", "prefix", "sampling", "price", "identity", "transformers")


@pytest.mark.parametrize(
    "part", ["host", *(pytest.param(p, marks=pytest.mark.slow) for p in PARTS)]
)
def test_a_part_of_the_gpu_script_runs_to_its_end(part: str, tmp_path: Path) -> None:
    """Not dry: as on the day a GPU is there, but for times, numbers and most of the layers."""
    out = tmp_path / "out.json"
    printed = rehearse("-m", "rehearsal.part", f"{part}_part.py", "--out", str(out))
    assert "FAULT" not in printed and "FAILED" not in printed
    assert len(json.loads(out.read_text())["rows"]) > 2


@pytest.mark.slow
def test_what_is_launched_compiles_well() -> None:
    """Each specialisation of all scenes as it is launched, for its GPU: no spill, no atomic."""
    scenes = scenes_of("--all")
    for part in ("faults", "late", "lacking"):
        assert {name: scene[part] for name, scene in scenes.items() if scene.get(part)} == {}
    lines = {
        json.dumps([scene["capability"], kernel], sort_keys=True)
        for scene in scenes.values()
        for kernel in scene.get("kernels", ())
    }
    reports = [
        json.loads(line)
        for line in rehearse(
            "-m", "rehearsal.compiles", given="\n".join(sorted(lines))
        ).splitlines()
    ]
    assert len(reports) == len(lines) > 100
    assert [(r["name"], r["capability"], r["problems"]) for r in reports if r["problems"]] == []
