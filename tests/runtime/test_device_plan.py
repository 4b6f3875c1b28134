"""Plans of a device's memory: public sizes, the arithmetic, and what a started engine has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palmette.runtime.config import EngineConfig
from palmette.runtime.device_plan import PlanOptions, num_parameters, plan_device
from palmette.runtime.engine import Engine
from palmette.runtime.memory import kv_bytes_per_token, plan_memory
from palmette.runtime.model_store import MODELS
from palmette.runtime.models.presets import PRESETS
from palmette.server.__main__ import main
from palmette.server.plan_options import parse_size

GB = 10**9

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def test_presets_have_the_published_numbers_of_parameters() -> None:
    assert {name: num_parameters(model) for name, model in PRESETS.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [
        ("llama-2-70b", 327_680),
        ("llama-3-70b", 327_680),
        ("llama-3-8b", 131_072),
        ("llama-2-7b", 524_288),
        ("mistral-7b", 131_072),
        ("qwen2.5-7b", 57_344),
    ],
)
def test_bytes_of_a_token(model: str, num_bytes: int) -> None:
    plan = plan_device(PRESETS[model], PlanOptions(memory_bytes=200 * GB))
    assert plan.kv_bytes_per_token == num_bytes


def test_seventy_billion_parameters_in_eighty_gigabytes() -> None:
    """4 bits: 35 GB of weights, 40 of K and V, 3 of workspace, 2 of overhead; 125k tokens."""
    options = PlanOptions(
        memory_bytes=80 * GB, weights="int4", workspace_bytes=3 * GB, overhead_bytes=2 * GB
    )
    for model in ("llama-2-70b", "llama-3-70b"):
        plan = plan_device(PRESETS[model], options)
        assert round(plan.weight_bytes / GB) in (34, 35)
        assert plan.kv_bytes / GB == pytest.approx(40, abs=0.6)
        assert plan.kv_tokens == pytest.approx(125_000, rel=0.04)
        assert plan.num_sequences(1000) == pytest.approx(125, abs=5)
        assert plan.num_sequences(5000) == pytest.approx(25, abs=1)
        parts = plan.weight_bytes + plan.workspace_bytes + plan.overhead_bytes + plan.kv_bytes
        assert parts + plan.left_bytes == 80 * GB
        assert 0 <= plan.left_bytes < 16 * 327_680


def test_forty_gigabytes_hold_a_hundred_and_twenty_two_thousand_tokens() -> None:
    options = PlanOptions(
        memory_bytes=40 * GB, weight_bytes=0, workspace_bytes=0, overhead_bytes=0, page_size=1
    )
    plan = plan_device(PRESETS["llama-2-70b"], options)
    assert plan.kv_tokens == 40 * GB // 327_680 == 122_070


def test_int8_halves_what_a_token_takes() -> None:
    options = PlanOptions(memory_bytes=200 * GB, kv_dtype="int8")
    plan = plan_device(PRESETS["llama-3-70b"], options)
    assert plan.kv_bytes_per_token == 327_680 // 2 + 2 * 80 * 8 * 4  # and a scale for each head


def test_scales_are_counted_when_their_groups_are_told() -> None:
    bare = plan_device(PRESETS["llama-3-8b"], PlanOptions(memory_bytes=80 * GB, weights="int4"))
    options = PlanOptions(memory_bytes=80 * GB, weights="int4", group_size=32)
    scaled = plan_device(PRESETS["llama-3-8b"], options)
    assert scaled.weight_bytes / bare.weight_bytes == pytest.approx(5 / 4, abs=0.001)


def test_fp8_leaves_embedding_and_head_at_16_bits() -> None:
    """Llama 3 8B: 2 * 128256 * 4096 numbers in 16 bits, the rest in 8, 4 bytes an output."""
    made = plan_device(
        PRESETS["llama-3-8b"], PlanOptions(memory_bytes=80 * GB, weights="fp8", kv_dtype="fp8")
    )
    wide = 2 * 128256 * 4096
    norms = (2 * 32 + 1) * 4096
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert made.weight_bytes == 8_030_261_248 + wide + norms + 4 * outputs
    assert made.kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)


def test_devices_share_weights_and_heads() -> None:
    model = PRESETS["llama-3-70b"]
    one = plan_device(model, PlanOptions(memory_bytes=200 * GB))
    four = plan_device(model, PlanOptions(memory_bytes=80 * GB, tp=4))
    sixteen = plan_device(model, PlanOptions(memory_bytes=80 * GB, tp=16))
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-4)
    assert four.kv_bytes_per_token == one.kv_bytes_per_token // 4
    assert sixteen.kv_bytes_per_token == one.kv_bytes_per_token // 8  # a kv head each
    with pytest.raises(ValueError, match="tensor parallel: 3 does not divide 64 heads"):
        plan_device(model, PlanOptions(memory_bytes=80 * GB, tp=3))


def test_concurrency_sizes_the_pool_and_leaves_the_rest() -> None:
    model = PRESETS["llama-3-8b"]
    options = PlanOptions(memory_bytes=80 * GB, context=1000, concurrency=10)
    plan = plan_device(model, options)
    assert plan.num_pages == 10 * 63
    assert plan.left_bytes > 50 * GB
    with pytest.raises(ValueError, match=r"concurrency: 1000 sequences of 8192 tokens need 1073"):
        plan_device(model, PlanOptions(memory_bytes=80 * GB, concurrency=1000))
    with pytest.raises(ValueError, match=r"lower --concurrency or --context$"):
        plan_device(model, PlanOptions(memory_bytes=80 * GB, concurrency=1000, kv_dtype="int8"))


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"weights of 141\.11 GB.*--weights int4.*--tp"):
        plan_device(PRESETS["llama-3-70b"], PlanOptions(memory_bytes=80 * GB))
    with pytest.raises(ValueError, match=r"bytes; use more devices \(--tp\) or more memory each"):
        plan_device(PRESETS["llama-3-70b"], PlanOptions(memory_bytes=20 * GB, weights="int4"))
    with pytest.raises(ValueError, match=r"context: 9000 is out of range.*1\.\.8192"):
        plan_device(PRESETS["llama-3-8b"], PlanOptions(memory_bytes=80 * GB, context=9000))
    with pytest.raises(ValueError, match="weights: 'int3' is not known"):
        PlanOptions(memory_bytes=1, weights="int3")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * GB),
        ("80 gb", 80 * GB),
        ("1.5GiB", 3 << 29),
        ("24G", 24 * GB),
        ("2048", 2048),
        ("77B", 77),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "80GX", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size: .* is not understood"):
        parse_size(text)


@pytest.mark.parametrize("flag", ["memory", "token-budget", "concurrency", "group-size"])
def test_numbers_beyond_all_devices_are_told(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "llama-2-7b", "--memory", "80GB", f"--{flag}", "9" * 400]
    assert main(command) == (0 if flag == "group-size" else 2)
    printed = capsys.readouterr()
    assert flag == "group-size" or "a number is far beyond any device" in printed.err


@pytest.mark.parametrize(
    ("kv_tokens", "available", "way"),
    [(10, GB, "give at least 32"), (None, 1000, "free memory or choose a smaller model")],
)
def test_too_small_a_pool_names_its_way_out(
    kv_tokens: int | None, available: int, way: str
) -> None:
    with pytest.raises(ValueError, match=f"tokens is less than two pages of 16; {way}$"):
        plan_memory(
            EngineConfig(kv_tokens=kv_tokens),
            PRESETS["smollm2-135m"],
            weight_bytes=0,
            kv_dtype="bf16",
            context_length=2048,
            available_bytes=available,
        )


@pytest.mark.parametrize(("given", "share"), [(None, 0.85), (0.5, 0.5)])
def test_a_share_that_is_not_given_is_the_devices(given: float | None, share: float) -> None:
    model = PRESETS["smollm2-135m"]
    plan = plan_memory(
        EngineConfig(memory_fraction=given),
        model,
        weight_bytes=GB,
        kv_dtype="bf16",
        context_length=2**20,
        available_bytes=2 * GB,
        default_fraction=0.85,
    )
    pages = int(GB * share) // (16 * kv_bytes_per_token(model, kv_dtype="bf16"))
    assert plan.kv_tokens == 16 * pages
    assert plan.reason == f"{share:.0%} of the free memory"


@pytest.mark.parametrize("text", ["2", "1023", "1.5"])
def test_a_forgotten_unit_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=f"size: {text} needs a unit, as in {text}GB"):
        parse_size(text)


def test_the_command_prints_the_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "llama-2-70b", "--memory", "80GB", "--weights", "int4"]
    assert main([*command, "--workspace", "3GB", "--overhead", "2GB"]) == 0
    printed = capsys.readouterr().out
    assert "weights, int4, scales not counted      34.49 GB" in printed
    assert "KV pool, bf16                          40.51 GB" in printed
    assert "a token takes 327,680 bytes of K and V (320 KiB)" in printed
    assert printed.endswith("in that pool: 122 of 1,000 tokens, 30 of 4,096 tokens\n")


def test_all_figures_are_of_the_pool_that_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "llama-3-8b", "--memory", "40GB"]
    command += ["--context", "8192", "--concurrency", "16"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "the pool holds 131,072 tokens in 8,192 pages of 16 (--kv-tokens 131072)" in printed
    told = "in that pool: 130 of 1,000 tokens, 26 of 5,000 tokens, 16 of 8,192 tokens\n"
    assert told in printed  # in whole pages: 63 for 1,000 tokens
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["kv_tokens"], plan["sequences"]) == (131_072, 16)
    free = 40 * GB - plan["weight_bytes"] - plan["workspace_bytes"] - plan["overhead_bytes"]
    assert plan["max_kv_tokens"] == free // (16 * 131_072) * 16
    assert plan["max_sequences"] == plan["max_kv_tokens"] // 8192 > 16
    assert (
        f"if the pool took what is left too: {plan['max_kv_tokens']:,} tokens "
        f"(--kv-tokens {plan['max_kv_tokens']}), {plan['max_sequences']} sequences of 8,192 tokens"
    ) in printed


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    options = ["--memory", "80GB", "--weights", "int4", "--json"]
    plans = []
    for model in (str(tmp_path), str(tmp_path / "config.json"), "llama-3-70b"):
        assert main(["plan", "--model", model, *options]) == 0
        plans.append(json.loads(capsys.readouterr().out) | {"model": ""})
    assert plans[0] == plans[1] == plans[2]


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-9", "--memory", "80GB"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("palmette plan: model: llama-9 is neither a directory")
    assert told.count("\n") == 1
    assert "for a hub id, give the path that `palmette pull` prints" in told


def test_help_lists_every_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert f"or one of {', '.join((*MODELS, *PRESETS))}\n" in capsys.readouterr().out


@pytest.mark.model
def test_an_engine_that_starts_has_what_was_planned(
    default_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--model", str(default_model), "--memory", "400MB", "--json"]
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)
    engine = Engine.load(EngineConfig(model=str(default_model), kv_tokens=plan["kv_tokens"]))
    try:
        pool = engine._runner.pool
        assert pool.num_pages == plan["pages"]
        assert pool.page_bytes == plan["kv_bytes_per_token"] * plan["page_size"]
    finally:
        engine.close()
