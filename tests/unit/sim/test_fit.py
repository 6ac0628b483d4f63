"""The fit: it finds what made the rows, its errors are small and honest, and what is committed is what it gives."""

from importlib import resources

import pytest

from quartet_core.catalogue import builtin
from quartet_sim import fit, measured
from quartet_sim.curves import fit_prefill, kv_slope, step_table
from quartet_sim.measured import PrefillRow, StepRow


@pytest.fixture(scope="module")
def fits():
    return fit.fit_all(builtin())


def test_the_committed_profiles_are_what_the_tables_give(fits):
    committed = (resources.files("quartet_core") / "data" / "profiles.json").read_bytes()
    assert fit.encode(fits) == committed


def test_check_fails_on_other_profiles_and_writes_nothing(tmp_path, monkeypatch, capsys):
    real = resources.files("quartet_core") / "data"
    for name in ("hardware.toml", "models.toml", "profiles.json"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).write_bytes((real / name).read_bytes())
    original = fit.resources.files
    monkeypatch.setattr(fit.resources, "files", lambda name: tmp_path if name == "quartet_core" else original(name))
    assert fit.main(["--check"]) == 0
    (tmp_path / "data" / "profiles.json").write_bytes(b"[]")
    assert fit.main(["--check"]) == 1
    assert (tmp_path / "data" / "profiles.json").read_bytes() == b"[]"
    assert "python -m quartet_sim.fit" in capsys.readouterr().err


def test_prefill_is_found_again_from_rows_that_it_made():
    rows = [PrefillRow(n, 1, 4.0 + 0.03 * n + 2e-6 * n * n) for n in (128, 512, 2048, 8192, 32_768)]
    found = fit_prefill(rows)
    assert (found.a_ms, found.b_ms_per_token, found.c_ms_per_token2) == pytest.approx((4.0, 0.03, 2e-6), rel=1e-6)
    assert max(found.errors) < 1e-9


def test_no_coefficient_goes_below_zero_even_where_that_would_fit_better():
    rows = [PrefillRow(n, 1, 0.05 * n - 1e-7 * n * n) for n in (256, 1024, 4096, 16_384)]
    found = fit_prefill(rows)
    assert min(found.a_ms, found.b_ms_per_token, found.c_ms_per_token2) >= 0


def test_prompts_prefilled_together_attend_each_to_itself():
    rows = [PrefillRow(n, k, 1.0 + 0.01 * n * k + 1e-6 * n * n * k) for n in (64, 512, 4096) for k in (1, 4, 8)]
    assert fit_prefill(rows).c_ms_per_token2 == pytest.approx(1e-6, rel=1e-6)
    assert fit_prefill(rows, c_given=1e-6).b_ms_per_token == pytest.approx(0.01, rel=1e-6)


def test_missing_cells_are_filled_along_the_context_and_known_ones_kept():
    def truth(batch, context):
        return 10.0 + 0.1 * batch + 1e-4 * batch * context

    rows = [StepRow(b, c, truth(b, c)) for b in (1, 8, 64) for c in (1024, 4096) if b * c < 100_000]
    slope = kv_slope(rows)
    assert slope == pytest.approx(1e-4, rel=1e-6)
    table = step_table(rows, (0, 1024, 4096), slope, pooled=False)
    for batch, line in zip(table.batches, table.ms, strict=True):
        assert line == pytest.approx([truth(batch, context) for context in (0, 1024, 4096)])


def test_timer_noise_does_not_make_more_work_faster():
    table = step_table([StepRow(1, 100, 10.0), StepRow(2, 100, 9.9)], (0, 100), 0.0, pooled=False)
    assert table.ms == ((10.0, 10.0), (10.0, 10.0))


def test_kernel_profiles_are_within_a_tenth_and_no_worse_than_when_they_were_committed(fits):
    for key, found in fits.items():
        if found.kind == "kernels":
            error = found.profile.error
            assert error.prefill_median_pct < 7, key
            assert error.prefill_p90_pct < 12, key
            assert error.step_median_pct < 5, key
            assert error.step_p90_pct < 11, key


def test_served_models_answer_at_the_speed_predicted_from_kernels(fits):
    served = {key: found.served for key, found in fits.items() if len(found.served) > 5}
    assert len(served) == 3
    for errors in served.values():
        assert sorted(errors)[len(errors) // 2] < 0.04


def test_rows_that_no_such_card_can_hold_are_left_out():
    rows = measured.kernel_rows()["L40S_PCIE", "qwen3-32b", "fp8", 1]
    assert max(row.tokens for row in rows.prefill) == 16_384
    assert all(row.batch * row.context <= 32 * 1024 for row in rows.step)


def test_the_report_names_every_profile_and_marks_the_scaled_ones(fits):
    lines = fit.report(fits).splitlines()
    assert len(lines) == 1 + len(fits)
    assert any(line.startswith("H200/llama-3.1-70b/fp8/tp4") and "scaled from H100_SXM5" in line for line in lines)
    assert "A100/qwen2.5-7b/bf16" in fit.scaling_check(builtin(), fits)
