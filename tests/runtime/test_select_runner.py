"""Which runner and attention are chosen, and why, for every mix of what a machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palmette.kernels.cuda import needs
from palmette.runtime import runner
from palmette.runtime.attention import AttentionChoice, for_model
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.models.config import ModelConfig
from palmette.runtime.weights import open_checkpoint

PRESET = ModelConfig(
    architecture="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    context_length=8,
    rms_eps=1e-5,
    rope_theta=1e4,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a CUDA device; `having` says which packages it has."""
    monkeypatch.setattr(runner, "_cuda_available", lambda: True)
    monkeypatch.setattr(runner, "_cuda_bytes", lambda: lambda: 10**9)
    monkeypatch.setattr(runner, "_cuda_capability", lambda: 90)
    monkeypatch.setattr(needs, "has_c_compiler", lambda: True)
    return monkeypatch


def having(machine: pytest.MonkeyPatch, *packages: str) -> None:
    machine.setattr(runner, "find_spec", lambda name: name if name in packages else None)
    machine.setattr(needs, "has_compiler", lambda: "nvcc" in packages)


def test_triton_where_bits_must_not_depend_on_the_batch(machine: pytest.MonkeyPatch) -> None:
    having(machine, "torch", "triton", "flashinfer")
    choice = runner.select_runner(EngineConfig())
    assert (choice.name, choice.device, choice.weights) == ("cuda", "cuda", "bf16")
    assert "triton" in choice.reason and "bits" in choice.reason
    assert choice.available_bytes() == 10**9
    assert choice.memory_fraction == 0.85  # nobody else's memory


@pytest.mark.parametrize("name", ["attention", "sampling"])
@pytest.mark.parametrize("kernels", ["triton", "flashinfer"])
def test_kernels_of_another_runner_are_refused(name: str, kernels: str) -> None:
    config = replace(EngineConfig(device="cpu"), **{name: kernels})
    with pytest.raises(
        ValueError, match=f"{name}: {kernels} is for the cuda runner, and the .* was chosen"
    ):
        runner.select_runner(config)


def test_the_cuda_runner_without_a_device_says_why() -> None:
    config = EngineConfig(device="cpu", runner="cuda")
    with pytest.raises(ValueError, match="--device cpu was given"):
        runner.select_runner(config)


def test_devices_before_ampere_take_torch(machine: pytest.MonkeyPatch) -> None:
    having(machine, "torch", "triton")
    machine.setattr(runner, "_cuda_capability", lambda: 75)
    choice = runner.select_runner(EngineConfig())
    assert (choice.name, choice.device) == ("torch", "cuda")
    assert choice.reason == "the device is sm_75, and the kernels need sm_80"
    with pytest.raises(ValueError, match="sm_75, and the kernels need sm_80; use --runner torch"):
        runner.select_runner(EngineConfig(runner="cuda"))


def test_triton_needs_a_compiler(machine: pytest.MonkeyPatch) -> None:
    having(machine, "torch", "triton")
    machine.setattr(needs, "has_c_compiler", lambda: False)
    choice = runner.select_runner(EngineConfig())
    assert (choice.name, choice.device) == ("torch", "cuda")
    assert "triton needs a C compiler" in choice.reason
    for wanted in ({"runner": "cuda"}, {"attention": "triton"}):
        with pytest.raises(ValueError, match="attention: triton needs a C compiler"):
            runner.select_runner(EngineConfig(**wanted))


def test_a_c_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(needs.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    assert not needs.has_c_compiler()
    compiler = tmp_path / "clang"
    compiler.touch(mode=0o755)
    assert needs.has_c_compiler()
    (tmp_path / "Python.h").unlink()
    assert not needs.has_c_compiler()


def test_why_a_device_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver too old for torch is no reason to take the CPU in silence."""
    monkeypatch.setattr(runner, "why_no_cuda", lambda: "The NVIDIA driver is too old")
    with pytest.raises(ValueError, match="no CUDA device: The NVIDIA driver is too old; install"):
        runner.select_runner(EngineConfig(device="cuda"))
    assert runner._why_cpu() == "no CUDA device was found: The NVIDIA driver is too old"
    monkeypatch.setattr(runner, "why_no_cuda", lambda: runner._NO_DRIVER)
    assert runner._why_cpu() == "no CUDA device was found"


@pytest.mark.parametrize(
    ("built_for", "error", "expected"),
    [
        (None, None, "is built without CUDA"),
        ("13.0", RuntimeError("The NVIDIA driver is too old\nPlease update"), "driver is too old"),
        ("13.0", None, "see CUDA_VISIBLE_DEVICES"),
    ],
)
def test_torch_tells_why_it_sees_no_device(
    built_for: str | None,
    error: Exception | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from palmette.runtime.torch_runner import cuda_obstacle

    def init() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found = cuda_obstacle()
    assert found is not None and expected in found and "\n" not in found


def test_flashinfer_first_where_they_may(machine: pytest.MonkeyPatch) -> None:
    for packages, reason in (
        (("flashinfer", "nvcc"), "attention flashinfer: it is installed"),
        (("flashinfer", "flashinfer_jit_cache"), "attention flashinfer: it is installed"),
        (("flashinfer",), "attention triton: flashinfer compiles its kernels"),
        ((), "attention triton: flashinfer is not installed"),
    ):
        having(machine, "torch", "triton", *packages)
        choice = runner.select_runner(EngineConfig(deterministic=False))
        assert choice.reason.startswith(f"a CUDA device is there; {reason}")
    having(machine, "torch", "triton", "flashinfer", "nvcc")
    choice = runner.select_runner(EngineConfig(deterministic=False, weights="fp32"))
    assert "attention triton: flashinfer has no kernels for fp32" in choice.reason


def test_heads_that_flashinfer_has_no_kernels_for_take_tritons() -> None:
    chosen = AttentionChoice(name="flashinfer", reason="it is installed")
    config = EngineConfig(deterministic=False)
    small = replace(PRESET, head_dim=96)
    assert for_model(chosen, config, replace(PRESET, head_dim=128)) == chosen
    found = for_model(chosen, config, small)
    assert (found.name, "head size 96" in found.reason) == ("triton", True)
    with pytest.raises(ValueError, match="head size 96; use --attention triton"):
        for_model(chosen, replace(config, attention="flashinfer"), small)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_codes_of_k_and_v_take_tritons_attention(
    kv_dtype: str, machine: pytest.MonkeyPatch
) -> None:
    having(machine, "torch", "triton", "flashinfer")
    choice = runner.select_runner(EngineConfig(deterministic=False, kv_dtype=kv_dtype))
    assert f"attention triton: K and V are {kv_dtype}" in choice.reason
    assert choice.kv_dtype(None) == kv_dtype
    wanted = EngineConfig(deterministic=False, kv_dtype=kv_dtype, attention="flashinfer")
    with pytest.raises(ValueError, match="use --attention triton"):
        runner.select_runner(wanted)


def test_torch_where_triton_is_not(machine: pytest.MonkeyPatch) -> None:
    having(machine, "torch")
    choice = runner.select_runner(EngineConfig())
    assert (choice.name, choice.device) == ("torch", "cuda")
    assert "triton is not installed" in choice.reason


@pytest.mark.parametrize(
    ("config", "packages", "message"),
    [
        ({"attention": "x"}, ("torch", "triton"), "attention: 'x' is unknown"),
        ({"runner": "x"}, ("torch", "triton"), "runner: 'x' is unknown"),
        ({"runner": "native"}, ("torch", "triton"), "native runs on the CPU"),
        ({"runner": "cuda"}, ("torch",), "triton is not installed"),
        ({"attention": "triton"}, ("torch",), "triton is not installed"),
        ({"attention": "flashinfer"}, ("torch", "triton"), "flashinfer is not installed"),
        (
            {"attention": "flashinfer"},
            ("torch", "triton", "flashinfer"),
            "bits of flashinfer depend",
        ),
        ({"sampling": "x"}, ("torch", "triton"), "sampling: 'x' is unknown"),
        ({"sampling": "flashinfer"}, ("torch", "triton"), "sampling: flashinfer keeps other ties"),
        (
            {"sampling": "flashinfer", "deterministic": False},
            ("torch", "triton"),
            "flashinfer is not installed; use --sampling triton",
        ),
        (
            {"attention": "flashinfer", "deterministic": False},
            ("torch", "triton", "flashinfer"),
            "nvcc is not here; use --attention triton",
        ),
        ({"weights": "stored"}, ("torch", "triton"), "int4 and int8 keep the integers of a GGUF"),
        ({"weights": "int3"}, ("torch", "triton"), "'int3' is not supported on cuda; use one of"),
        ({"weights": "int8"}, ("torch",), "'int8' is not supported by torch"),
        ({"kv_dtype": "fp16"}, ("torch", "triton"), "bf16, or as int8 or fp8, not fp16; use auto"),
        ({"kv_dtype": "int8", "runner": "torch"}, ("torch",), "'int8' is not supported by torch"),
    ],
)
def test_what_does_not_go_together_is_refused(
    config: dict[str, str], packages: tuple[str, ...], message: str, machine: pytest.MonkeyPatch
) -> None:
    having(machine, *packages)
    with pytest.raises(ValueError, match=message):
        runner.select_runner(EngineConfig(**config))


def test_the_cuda_runner_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_cuda_available", lambda: False)
    with pytest.raises(ValueError, match="cuda needs a CUDA device"):
        runner.select_runner(EngineConfig(runner="cuda"))


@pytest.fixture
def two_devices(machine: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    having(machine, "torch", "triton")
    machine.setattr(runner, "_num_cuda_devices", lambda: 2)
    machine.setattr(runner, "_has_nccl", lambda: True)
    return machine


def test_ranks_hold_whole_numbers_of_devices(two_devices: pytest.MonkeyPatch) -> None:
    choice = runner.select_runner(EngineConfig(tensor_parallel=2))
    assert (choice.name, choice.num_devices) == ("cuda", 2)
    assert choice.reason.endswith("; 2 ranks")
    with pytest.raises(ValueError, match="4 ranks, but torch sees 2 CUDA devices"):
        runner.select_runner(EngineConfig(tensor_parallel=4))
    two_devices.setattr(runner, "_has_nccl", lambda: False)
    with pytest.raises(ValueError, match="this torch has no NCCL"):
        runner.select_runner(EngineConfig(tensor_parallel=2))


def test_ranks_are_built_with_their_part_of_codes(
    two_devices: pytest.MonkeyPatch, tiny_models: Any
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from palmette.runtime.tensor_parallel import runner as ranks

    built: list[Any] = []
    two_devices.setattr(ranks, "tensor_parallel_runner", lambda options, **_: built.append(options))
    config = EngineConfig(
        tensor_parallel=2,
        weights="int8",
        kv_dtype="fp8",
        scheduler=SchedulerConfig(max_running=3),
    )
    choice = runner.select_runner(config)
    alone = runner.select_runner(replace(config, tensor_parallel=1))
    checkpoint = open_checkpoint(tiny_models.gguf("wide", "q8_0"))
    half = choice.weight_bytes(checkpoint) / alone.weight_bytes(checkpoint)
    assert 0.5 <= half < 0.53
    assert choice.workspace_bytes(checkpoint) > runner.COMMUNICATOR_BYTES
    choice.build(checkpoint, 40)
    (options,) = built
    assert (options.size, options.num_pages, options.runner, options.device) == (
        2,
        40,
        "cuda",
        "cuda",
    )
    assert (options.weights, options.dtype, options.kv_dtype) == ("int8", "bf16", "fp8")
    assert (options.attention, options.sampling) == ("triton", "triton")
    assert (options.graph_rows, options.may_shrink) == ((1, 2, 4), True)
    llama = open_checkpoint(tiny_models.gguf("llama", "q8_0"))
    with pytest.raises(ValueError, match=r"tensor_parallel: .*down_proj.* use fewer ranks"):
        choice.build(llama, 40)
    given = runner.select_runner(replace(config, kv_tokens=640))
    given.build(checkpoint, 40)
    assert not built[-1].may_shrink


def test_without_a_gpu_ranks_are_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_cuda_available", lambda: False)
    monkeypatch.setattr(runner, "why_no_cuda", lambda: "no driver is installed")
    choice = runner.select_runner(EngineConfig(tensor_parallel=2))
    assert (choice.name, choice.device, choice.num_devices) == ("torch", "cpu", 1)
    assert "ranks on a CPU are for tests; 2 ranks" in choice.reason
    with pytest.raises(ValueError, match=r"cuda was asked for, .* no driver is installed"):
        runner.select_runner(EngineConfig(tensor_parallel=2, device="cuda"))


def test_a_gpu_takes_larger_steps_than_a_cpu() -> None:
    def numbers(config: SchedulerConfig) -> tuple[int, int, int]:
        return config.step_tokens, config.chunk_tokens, config.num_rows

    plain = SchedulerConfig()
    assert numbers(plain) == numbers(plain.on("native")) == numbers(plain.on("")) == (512, 64, 64)
    assert numbers(plain.on("cuda")) == numbers(plain.on("cuda x 2")) == (4096, 512, 256)
    assert plain.on("native").on("cuda").num_rows == 64  # decided once
    given = SchedulerConfig(token_budget=512, mixed_chunk_tokens=64, max_running=64)
    assert given.on("cuda") == given
