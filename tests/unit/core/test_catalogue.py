"""Classes and models are data: what ships is complete, and a table in a configuration makes a new kind of card."""

import msgspec
import pytest

from quartet_core.catalogue import RUNTIME_BYTES_PER_GPU, UnknownProfile, WrongEntry, builtin, decode

ASIC = """
[hardware.ASIC_X1]
memory_gb = 96
memory_bandwidth_gb_s = 2400
bf16_tflops = 500
fp8_tflops = 1000
host_link = { pcie_gen = 5, gb_per_s = 56 }
gpu_link = { kind = "pcie", gb_per_s = 50 }
tdp_w = 300
idle_w = 40
price_per_hour = 1.75
long_context = true
source = "made up"

[[hardware.ASIC_X1.profiles]]
model = "llama-3.1-8b"
precision = "fp8"
tp = 1
[hardware.ASIC_X1.profiles.profile]
a_ms = 2.0
b_ms_per_token = 0.02
c_ms_per_token2 = 1e-6
batches = [1, 64]
contexts = [0, 4096]
step_ms = [[6.0, 6.5], [9.0, 30.0]]
source = "made up"
"""

CATALOGUE = builtin()


@pytest.mark.parametrize(
    ("hardware", "model", "precision", "tp"),
    [
        ("H100_SXM5", "llama-3.1-8b", "fp8", 1),
        ("H100_SXM5", "llama-3.1-8b", "bf16", 1),
        ("L40S_PCIE", "llama-3.1-8b", "fp8", 1),
        ("L40S_PCIE", "llama-3.1-8b", "bf16", 1),
        ("H100_SXM5", "llama-3.1-70b", "fp8", 2),
        ("H100_SXM5", "llama-3.1-70b", "fp8", 4),
        ("L40S_PCIE", "llama-3.1-70b", "fp8", 4),
        ("H100_SXM5", "qwen3-32b", "fp8", 1),
        ("L40S_PCIE", "qwen3-32b", "fp8", 2),
        ("A100", "qwen2.5-7b", "bf16", 1),
        ("A100", "llama-2-70b", "bf16", 8),
        ("H200", "llama-3.1-70b", "fp8", 4),
        ("L40", "llama-3.1-8b", "fp8", 1),
    ],
)
def test_the_combinations_that_fleets_use_have_times_and_room(hardware, model, precision, tp):
    profile = CATALOGUE.profile(hardware, model, precision, tp)
    assert profile.prefill_ms(0, 2048) > profile.step_ms_at(1, 2048) > 0
    assert CATALOGUE.kv_capacity_tokens(hardware, model, precision, tp) > 8192


def test_every_profile_is_of_a_known_class_and_model_and_says_where_it_comes_from():
    for (hardware, model, precision, _), profile in CATALOGUE.profiles.items():
        assert CATALOGUE.hardware_class(hardware).source
        assert CATALOGUE.model(model).weights(precision) > 0
        assert profile.source
        assert profile.estimated is (profile.error is None)


def test_classes_without_measurements_and_all_their_times_are_marked_estimated():
    for name in ("H200", "L40"):
        assert CATALOGUE.hardware_class(name).estimated
        assert all(profile.estimated for key, profile in CATALOGUE.profiles.items() if key[0] == name)
    assert not CATALOGUE.hardware_class("H100_SXM5").estimated


@pytest.mark.parametrize(
    ("precision", "tokens", "h100_ms", "l40s_ms"),
    [
        ("bf16", 2048, 43.5, 144.9),
        ("bf16", 8192, 199.7, 699.8),
        ("fp8", 2048, 34.0, 105.7),
        ("fp8", 8192, 145.1, 499.2),
    ],
)
def test_an_8b_prefills_as_published_to_a_tenth(precision, tokens, h100_ms, l40s_ms):
    h100 = CATALOGUE.profile("H100_SXM5", "llama-3.1-8b", precision, 1)
    l40s = CATALOGUE.profile("L40S_PCIE", "llama-3.1-8b", precision, 1)
    assert h100.prefill_ms(0, tokens) - h100.overhead_ms == pytest.approx(h100_ms, rel=0.1)
    assert l40s.prefill_ms(0, tokens) - l40s.overhead_ms == pytest.approx(l40s_ms, rel=0.1)


def test_tensor_parallel_prefill_over_pcie_is_some_twenty_times_slower_than_over_nvlink():
    h100 = CATALOGUE.profile("H100_SXM5", "llama-3.1-70b", "fp8", 4)
    l40s = CATALOGUE.profile("L40S_PCIE", "llama-3.1-70b", "fp8", 4)
    assert 18 < l40s.prefill_ms(0, 2048) / h100.prefill_ms(0, 2048) < 26
    assert 2.5 < l40s.step_ms_at(1, 4096) / h100.step_ms_at(1, 4096) < 6


@pytest.mark.parametrize(
    ("model", "kv_bytes"),
    [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("qwen3-32b", 262_144), ("qwen2.5-7b", 57_344)],
)
def test_kv_bytes_follow_from_the_shape(model, kv_bytes):
    assert CATALOGUE.model(model).kv_bytes_per_token == kv_bytes


def test_kv_capacity_is_memory_less_weights_less_runtime_in_whole_blocks():
    tokens = CATALOGUE.kv_capacity_tokens("L40S_PCIE", "llama-3.1-8b", "fp8", 1, memory_utilisation=0.9)
    free = 45 * 2**30 * 0.9 - 9_080_000_000 - RUNTIME_BYTES_PER_GPU
    assert tokens % 16 == 0
    assert 0 <= free / 131_072 - tokens < 16


def test_weights_that_do_not_fit_leave_no_room():
    assert CATALOGUE.kv_capacity_tokens("L40S_PCIE", "llama-3.1-70b", "bf16", 1) == 0


def test_kv_heads_limit_over_how_many_gpus_kv_is_divided():
    one_head = CATALOGUE.merge({"models": {"llama-3.1-8b": {"kv_heads": 1, "kv_bytes_per_token": 131_072}}})
    divided = CATALOGUE.kv_capacity_tokens("H100_SXM5", "llama-3.1-8b", "fp8", 2)
    repeated = one_head.kv_capacity_tokens("H100_SXM5", "llama-3.1-8b", "fp8", 2)
    assert divided == pytest.approx(2 * repeated, abs=32)


def test_a_made_up_asic_in_a_configuration_is_a_class_like_any_other():
    merged = CATALOGUE.merge(msgspec.toml.decode(ASIC))
    profile = merged.profile("ASIC_X1", "llama-3.1-8b", "fp8", 1)
    assert profile.prefill_ms(0, 1000) == pytest.approx(2.0 + 20.0 + 1.0)
    assert profile.step_ms_at(64, 4096) == 30.0
    assert merged.kv_capacity_tokens("ASIC_X1", "llama-3.1-8b", "fp8", 1) > 400_000
    assert merged.hardware_class("ASIC_X1").long_context
    assert "ASIC_X1" not in CATALOGUE.hardware


def test_a_class_without_times_borrows_those_of_a_like_one_by_their_ratios():
    table = msgspec.toml.decode(ASIC)["hardware"]["ASIC_X1"] | {"profiles_like": "L40S_PCIE"}
    merged = CATALOGUE.merge({"hardware": {"ASIC_X1": table}})
    base = CATALOGUE.profile("L40S_PCIE", "qwen3-32b", "fp8", 1)
    borrowed = merged.profile("ASIC_X1", "qwen3-32b", "fp8", 1)
    assert borrowed.estimated
    assert "L40S_PCIE" in borrowed.source
    assert base.b_ms_per_token / borrowed.b_ms_per_token == pytest.approx(1000 / 733)
    own = merged.profile("ASIC_X1", "llama-3.1-8b", "fp8", 1)
    assert not own.estimated


def test_precisions_that_a_card_cannot_compute_are_not_borrowed():
    assert not any(key[0] == "A100" and key[2] == "fp8" for key in CATALOGUE.profiles)


def test_a_known_class_changes_in_the_keys_given_and_no_others():
    merged = CATALOGUE.merge({"hardware": {"H100_SXM5": {"price_per_hour": 2.0, "host_link": {"gb_per_s": 50}}}})
    before, after = CATALOGUE.hardware_class("H100_SXM5"), merged.hardware_class("H100_SXM5")
    assert after.price_per_hour == 2.0
    assert (after.host_link.pcie_gen, after.host_link.gb_per_s) == (5, 50.0)
    assert after.tdp_w == before.tdp_w
    assert before.price_per_hour == 3.5
    assert merged.profile("H100_SXM5", "llama-3.1-8b", "fp8", 1) == CATALOGUE.profile(
        "H100_SXM5", "llama-3.1-8b", "fp8", 1
    )


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ({"hardware": {"H100_SXM5": {"prise_per_hour": 2}}}, "hardware.H100_SXM5", "prise_per_hour"),
        ({"hardware": {"H100_SXM5": {"price_per_hour": "cheap"}}}, "hardware.H100_SXM5", "price_per_hour"),
        ({"hardware": {"NEW": {"memory_gb": 80}}}, "hardware.NEW", "missing required field"),
        ({"hardware": {"L40": {"profiles_like": "B9000"}}}, "hardware.L40.profiles_like", "B9000"),
        ({"hardware": {"L40": {"profiles": {}}}}, "hardware.L40.profiles", "array of tables"),
        ({"hardware": {"L40": {"profiles": [{"model": "m"}]}}}, "hardware.L40.profiles", "missing required field"),
        ({"models": {"llama-3.1-8b": {"layers": 1.5}}}, "models.llama-3.1-8b", "layers"),
        ({"models": {"new": {"layers": 2}}}, "models.new", "missing required field"),
        ({"cards": {}}, "cards", "unknown table"),
    ],
)
def test_a_wrong_table_is_named_with_what_is_allowed(overrides, key, reason):
    with pytest.raises(WrongEntry, match=reason) as wrong:
        CATALOGUE.merge(overrides)
    assert wrong.value.key == key
    assert wrong.value.allowed


def test_what_is_not_there_is_named_with_what_is():
    with pytest.raises(UnknownProfile) as unknown:
        CATALOGUE.profile("L40S_PCIE", "llama-3.1-70b", "fp8", 1)
    assert "L40S_PCIE/llama-3.1-70b/fp8/tp1" in unknown.value.what
    assert "L40S_PCIE/llama-3.1-70b/fp8/tp4" in unknown.value.allowed
    with pytest.raises(UnknownProfile) as unknown:
        CATALOGUE.hardware_class("TPU")
    assert "H100_SXM5" in unknown.value.allowed
    with pytest.raises(UnknownProfile, match=r"llama-3\.1-8b"):
        CATALOGUE.model("gpt-2")
    with pytest.raises(UnknownProfile, match="bf16, fp8"):
        CATALOGUE.model("llama-3.1-8b").weights("int4")


def test_texts_that_are_no_catalogue_are_refused():
    with pytest.raises(msgspec.DecodeError):
        decode("[hardware", "", b"[]")
    with pytest.raises(msgspec.DecodeError):
        decode("", "", b'[{"hardware": "H100_SXM5"}]')
