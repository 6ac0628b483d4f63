"""Fits ``profiles.json`` of the catalogue to the hardware tables, and prints how well.

    python -m quartet_sim.fit            write the file, print the table of errors
    python -m quartet_sim.fit --check    write nothing; fail if the committed file is not what the tables give

Profiles come in three kinds. *Kernel* profiles are computed from timed kernels without an engine; the overhead of an
engine is added from served measurements of the same model where there are some, else their median. *Engine* profiles
were timed on a running engine and contain its overhead. *Scaled* ones have no data at all: another class's times moved
by the ratios of compute (prefill) and memory bandwidth (steps), measured ones where known, and marked estimated.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from quartet_core.catalogue import Catalogue, ProfileEntry, ProfileKey, decode, scaled_profiles
from quartet_core.profile import FitError, Profile
from quartet_sim import measured
from quartet_sim.curves import StepTable, fit_prefill, kv_slope, step_table
from quartet_sim.measured import Rows, ServedRow, StepRow

KERNEL_CONTEXTS = (0, 1024, 4096, 16384)
"""The contexts of the kernel table, and 0, where a step is the weight read alone."""

ENGINE_CONTEXTS = (0, 2048, 16384)
"""Engine tables are planes along the context, so three points are two more than needed and keep the shape readable."""

ATTENTION_EFFICIENCY = 0.5
"""Share of peak TFLOPS that prefill attention reaches, for rows too short to tell; the kernel fits give 0.35 to 0.6."""

QUERY_WIDTH = {"qwen2.5-7b": 3584}
"""Query heads x head_dim of models whose quadratic term comes from arithmetic."""

SCALED_FROM = {"H200": "H100_SXM5", "L40": "L40S_PCIE", "A100": "H100_SXM5"}
"""Which class stands in for one without data of its own."""

QUIET_CONCURRENCY = 16
"""Served rows up to this many clients give the overhead: above it, waiting for KV and prefill hides it."""


class Fit(NamedTuple):
    """A profile and what it was fitted to; ``served`` are relative errors against served rows."""

    kind: str
    profile: Profile
    prefill_rows: int
    step_rows: int
    served: list[float]


def fit_all(catalogue: Catalogue) -> dict[ProfileKey, Fit]:
    """Every profile, by key. ``catalogue`` gives hardware and model facts; its own profiles are not looked at."""
    served = measured.served_rows()
    fits: dict[ProfileKey, Fit] = {}
    bare = {key: _kernel_fit(rows) for key, rows in measured.kernel_rows().items()}
    quiet = {key: _quiet(fit.profile, served.get(key, [])) for key, fit in bare.items()}
    overheads = {key: _overhead_ms(bare[key].profile, rows) for key, rows in quiet.items() if rows}
    usual = median(overheads.values())
    for key, fit in bare.items():
        profile = _with_overhead(fit.profile, overheads.get(key, usual))
        fits[key] = fit._replace(profile=profile, served=_served_errors(profile, served.get(key, [])))
    for rows_by_key, source in (
        (measured.aegaeon_rows(), "Aegaeon engine profiles (SOSP 2025)"),
        (measured.splitwise_rows(), "Splitwise engine profiles (ISCA 2024), FP16"),
    ):
        for key, rows in rows_by_key.items():
            fits[key] = _engine_fit(key, rows, catalogue, source)
    for key, profile in _scaled(catalogue, {key: fit.profile for key, fit in fits.items()}):
        fits.setdefault(key, Fit("scaled", _rounded(profile), 0, 0, []))
    return dict(sorted(fits.items()))


def _kernel_fit(rows: Rows) -> Fit:
    """A profile of kernels alone, without overhead."""
    prefill = fit_prefill(rows.prefill)
    slope = kv_slope(rows.step)
    table = step_table(rows.step, KERNEL_CONTEXTS, slope, pooled=False)
    step_errors = _left_out_errors(rows.step, table, pooled=False)
    profile = Profile(
        prefill.a_ms,
        prefill.b_ms_per_token,
        prefill.c_ms_per_token2,
        table.batches,
        table.contexts,
        table.ms,
        source="aiconfigurator 0.12.0, vLLM 0.24 kernels; BF16 KV",
        error=_fit_error(prefill.errors, step_errors),
    )
    return Fit("kernels", profile, len(rows.prefill), len(rows.step), [])


def _engine_fit(key: ProfileKey, rows: Rows, catalogue: Catalogue, source: str) -> Fit:
    """A profile of a running engine. Its rows read so little KV that the slope comes from the memory bandwidth."""
    hardware, model, precision, tp = key
    card = catalogue.hardware_class(hardware)
    spec = catalogue.model(model)
    bandwidth_gb_s = card.measured_bandwidth_gb_s or card.memory_bandwidth_gb_s
    slope = spec.kv_bytes_per_token / min(tp, spec.kv_heads) / (bandwidth_gb_s * 1e6)
    c_given = None
    if max(row.tokens for row in rows.prefill) <= 4096:
        # causal attention of n tokens: 2 * n^2 * width FLOP per layer, width = query heads * head_dim
        flop = 2 * spec.layers * QUERY_WIDTH[model]
        c_given = flop / ((card.tflops(precision) or card.bf16_tflops) * 1e9 * ATTENTION_EFFICIENCY * tp)
    prefill = fit_prefill(rows.prefill, c_given)
    table = step_table(rows.step, ENGINE_CONTEXTS, slope, pooled=True)
    profile = Profile(
        prefill.a_ms,
        prefill.b_ms_per_token,
        prefill.c_ms_per_token2,
        table.batches,
        table.contexts,
        table.ms,
        source=source,
        error=_fit_error(prefill.errors, _left_out_errors(rows.step, table, pooled=True)),
    )
    return Fit("engine", _rounded(profile), len(rows.prefill), len(rows.step), [])


def _left_out_errors(rows: Sequence[StepRow], table: StepTable, *, pooled: bool) -> list[float]:
    """Each row against the table made without it: what the table is worth between its points."""
    errors = []
    for left_out in range(len(rows)):
        others = [row for index, row in enumerate(rows) if index != left_out]
        without = step_table(others, table.contexts, table.ms_per_kv_token, pooled=pooled)
        guess = Profile(0.0, 0.0, 0.0, without.batches, without.contexts, without.ms)
        row = rows[left_out]
        errors.append(abs(guess.step_ms_at(row.batch, row.context) / row.ms - 1.0))
    return errors


def _predicted_tpot_ms(profile: Profile, row: ServedRow) -> float:
    """Time per output token in a closed loop: the step, and the prefills of the other clients that come between.

    While one client receives its output, each of the others sends one prompt; a chunk delays an iteration by what it
    takes above the weight read, which the step pays anyway.
    """
    step = profile.step_ms_at(row.concurrency, row.prompt_tokens + row.output_tokens / 2)
    return step + _interference_ms(profile, row)


def _interference_ms(profile: Profile, row: ServedRow) -> float:
    chunk = max(profile.prefill_ms(0, row.prompt_tokens) - profile.weight_read_ms, 0.0)
    return (row.concurrency - 1) / row.output_tokens * chunk


def _usable(profile: Profile, rows: Sequence[ServedRow]) -> Iterator[ServedRow]:
    """Rows that tell of steps, not of queues: prefills take at most 15 % of each token's time."""
    return (row for row in rows if _interference_ms(profile, row) <= 0.15 * row.tpot_ms)


def _quiet(profile: Profile, rows: Sequence[ServedRow]) -> list[ServedRow]:
    return [row for row in _usable(profile, rows) if row.concurrency <= QUIET_CONCURRENCY]


def _overhead_ms(profile: Profile, rows: Sequence[ServedRow]) -> float:
    """What served tokens take above kernels, per iteration; never negative. ``rows`` must not be empty."""
    return max(median(row.tpot_ms - _predicted_tpot_ms(profile, row) for row in rows), 0.0)


def _served_errors(profile: Profile, rows: Sequence[ServedRow]) -> list[float]:
    return [abs(_predicted_tpot_ms(profile, row) / row.tpot_ms - 1.0) for row in _usable(profile, rows)]


def _with_overhead(kernels: Profile, overhead_ms: float) -> Profile:
    """``kernels`` run by an engine: each iteration, prefill or step, takes ``overhead_ms`` more."""
    return _rounded(
        msgspec.structs.replace(
            kernels,
            a_ms=kernels.a_ms + overhead_ms,
            step_ms=tuple(tuple(step + overhead_ms for step in row) for row in kernels.step_ms),
            overhead_ms=overhead_ms,
            source=f"{kernels.source}; engine overhead from served vLLM on H100",
        )
    )


def _scaled(catalogue: Catalogue, profiles: Mapping[ProfileKey, Profile]) -> Iterator[tuple[ProfileKey, Profile]]:
    for target_name, base_name in SCALED_FROM.items():
        target, base = catalogue.hardware_class(target_name), catalogue.hardware_class(base_name)
        for key, profile in scaled_profiles(target, base, profiles).items():
            if target.gpu_link.kind == "pcie" and key[3] > 1:
                continue  # its prefill is all-reduce over PCIe, which no ratio of compute tells
            if catalogue.kv_capacity_tokens(*key) > 0:
                yield key, profile


def _fit_error(prefill: Sequence[float], step: Sequence[float]) -> FitError:
    def percentile(errors: Sequence[float], share: float) -> float:
        return round(100.0 * float(np.percentile(np.array(errors), share)), 1)

    return FitError(percentile(prefill, 50), percentile(prefill, 90), percentile(step, 50), percentile(step, 90))


def _rounded(profile: Profile) -> Profile:
    """Five significant digits: more than the data has, and the same on every machine."""

    def short(value: float) -> float:
        return float(f"{value:.5g}")

    return msgspec.structs.replace(
        profile,
        a_ms=short(profile.a_ms),
        b_ms_per_token=short(profile.b_ms_per_token),
        c_ms_per_token2=short(profile.c_ms_per_token2),
        step_ms=tuple(tuple(short(step) for step in row) for row in profile.step_ms),
        overhead_ms=short(profile.overhead_ms),
    )


def encode(fits: Mapping[ProfileKey, Fit]) -> bytes:
    """``profiles.json``: one profile per line, so that a change shows as the lines that changed."""
    lines = [msgspec.json.encode(ProfileEntry(*key, fit.profile)) for key, fit in fits.items()]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def report(fits: Mapping[ProfileKey, Fit]) -> str:
    """The table of errors: median and p90 of relative errors in percent, and the rows they are over."""
    lines = [
        f"{'profile':<38} {'kind':<9} {'prefill rows':>12} {'med %':>6} {'p90 %':>6} "
        f"{'step rows':>10} {'med %':>6} {'p90 %':>6} {'overhead ms':>12} {'served rows':>12} {'med %':>6} {'p90 %':>6}"
    ]
    for (hardware, model, precision, tp), fit in fits.items():
        name = f"{hardware}/{model}/{precision}/tp{tp}"
        profile, error = fit.profile, fit.profile.error
        if error is None:
            lines.append(f"{name:<38} {fit.kind:<9} {profile.source}")
            continue
        line = (
            f"{name:<38} {fit.kind:<9} "
            f"{fit.prefill_rows:>12} {error.prefill_median_pct:>6.1f} {error.prefill_p90_pct:>6.1f} "
            f"{fit.step_rows:>10} {error.step_median_pct:>6.1f} {error.step_p90_pct:>6.1f} {profile.overhead_ms:>12.2f}"
        )
        if fit.served:
            middle, high = np.percentile(np.array(fit.served) * 100.0, [50, 90])
            line += f" {len(fit.served):>12} {middle:>6.1f} {high:>6.1f}"
        lines.append(line)
    return "\n".join(lines)


def scaling_check(catalogue: Catalogue, fits: Mapping[ProfileKey, Fit]) -> str:
    """How good the rule behind scaled profiles is, where the truth is known: classes with data of their own."""
    rows = measured.kernel_rows() | measured.aegaeon_rows()
    base = catalogue.hardware_class("H100_SXM5")
    own = {key: fit.profile for key, fit in fits.items()}
    lines = ["scaled from H100_SXM5 against own data, one card, medians, prompts from 512 tokens:"]
    for target in ("L40S_PCIE", "A100"):
        guessed = scaled_profiles(catalogue.hardware_class(target), base, own)
        for key in sorted(guessed):
            if key not in rows or key[3] > 1:
                continue
            guess, overhead_ms = guessed[key], guessed[key].overhead_ms
            prefill = [
                (guess.prefill_ms(0, row.tokens) - overhead_ms) / row.ms - 1.0
                for row in rows[key].prefill
                if row.prompts == 1 and row.tokens >= 512
            ]
            step = [(guess.step_ms_at(row.batch, row.context) - overhead_ms) / row.ms - 1.0 for row in rows[key].step]
            lines.append(
                f"{'/'.join(key[:3]):<38} prefill {100 * median(prefill):+.0f} %, step {100 * median(step):+.0f} %"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quartet_sim.fit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the committed profiles differ; write nothing")
    check: bool = parser.parse_args(arguments).check
    data = Path(str(resources.files("quartet_core") / "data"))
    facts = decode((data / "hardware.toml").read_text("utf-8"), (data / "models.toml").read_text("utf-8"), b"[]")
    fits = fit_all(facts)
    fitted = encode(fits)
    print(report(fits))
    print(scaling_check(facts, fits))
    target = data / "profiles.json"
    if not check:
        target.write_bytes(fitted)
        return 0
    if target.read_bytes() == fitted:
        return 0
    print(f"{target.name} is not what the tables give: run python -m quartet_sim.fit", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
