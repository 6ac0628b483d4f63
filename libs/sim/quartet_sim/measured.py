"""Rows of the hardware tables in ``data/hardware``, as the fit wants them: prefill times, step times, served times.

Every table spells models and cards its own way; here they get the catalogue's names, and rows that cannot be used are
left out with the reason beside the test.
"""

import csv
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from quartet_core.catalogue import ProfileKey


class PrefillRow(NamedTuple):
    """``prompts`` fresh prompts of ``tokens`` each, prefilled in one iteration, took ``ms``."""

    tokens: int
    prompts: int
    ms: float


class StepRow(NamedTuple):
    """One decode step of ``batch`` sequences of ``context`` tokens each took ``ms``."""

    batch: int
    context: int
    ms: float


class ServedRow(NamedTuple):
    """``concurrency`` clients, each at once sending the next request, saw ``tpot_ms`` per output token, and the first
    one after ``ttft_ms``."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    tpot_ms: float
    ttft_ms: float = 0.0


class Rows(NamedTuple):
    """What one table knows about one profile."""

    prefill: list[PrefillRow]
    step: list[StepRow]


_MODELS = {
    "meta-llama/Meta-Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "qwen2_5_7b": "qwen2.5-7b",
    "llama2-70b": "llama-2-70b",
}
_HARDWARE = {
    "h100_sxm": "H100_SXM5",
    "l40s": "L40S_PCIE",
    "H100": "H100_SXM5",
    "A100": "A100",
    "h100-80gb": "H100_SXM5",
    "a100-80gb": "A100",
}
_PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8", "": "bf16"}


def kernel_rows() -> dict[ProfileKey, Rows]:
    """Times computed from measured kernels (aiconfigurator): exact, and without any engine around the kernels."""
    found: dict[ProfileKey, Rows] = {}
    for row in _table("aiconfigurator_h100_l40s_estimates.csv"):
        if row["fits_gpu_memory"] != "1":
            continue  # a time that no such card can show
        key = _HARDWARE[row["system"]], _MODELS[row["model"]], _PRECISIONS[row["weights"]], int(row["tp"])
        rows = found.setdefault(key, Rows([], []))
        tokens, batch, ms = int(row["isl"]), int(row["batch"]), float(row["latency_ms"])
        if row["phase"] == "prefill":
            rows.prefill.append(PrefillRow(tokens, batch, ms))
        else:
            rows.step.append(StepRow(batch, tokens, ms))
    return found


def aegaeon_rows() -> dict[ProfileKey, Rows]:
    """Times of a running engine (Aegaeon) on one card in BF16."""
    found: dict[ProfileKey, Rows] = {}
    for row in _table("aegaeon_measured_profiles.csv"):
        if row["model"] not in _MODELS or row["gpu"] not in _HARDWARE:
            continue  # a model or card that the catalogue does not have
        rows = found.setdefault((_HARDWARE[row["gpu"]], _MODELS[row["model"]], "bf16", 1), Rows([], []))
        tokens, batch = int(row["input_len"]), int(row["batch"])
        rows.prefill.append(PrefillRow(tokens, batch, float(row["prefill_ms"])))
        rows.step.append(StepRow(batch, tokens, float(row["decode_ms_per_step"])))
    return found


def splitwise_rows() -> dict[ProfileKey, Rows]:
    """Times of a running engine (Splitwise), FP16, which costs what BF16 costs."""
    found: dict[ProfileKey, Rows] = {}
    for row in _table("splitwise_sim_h100_a100_medians.csv"):
        tp = int(row["tensor_parallel"])
        if row["model"] not in _MODELS or tp == 2:
            continue  # two cards hold the 70B's weights and no KV to speak of
        rows = found.setdefault((_HARDWARE[row["hardware"]], _MODELS[row["model"]], "bf16", tp), Rows([], []))
        tokens, batch = int(row["prompt_size"]), int(row["batch_size"])
        if batch == 1 and row["token_size"] == "128":
            # one prompt: with more the engine splits the prefill and the column no longer means one iteration;
            # longer outputs repeat the same prompt
            rows.prefill.append(PrefillRow(tokens, 1, float(row["prompt_time"])))
        # a step is the mean over the output, so its context is in the middle of it
        rows.step.append(StepRow(batch, tokens + int(row["token_size"]) // 2, float(row["token_time"])))
    return found


def served_rows() -> dict[ProfileKey, list[ServedRow]]:
    """vLLM under closed-loop load on H100: the check on times computed from kernels, and the source of overhead."""
    found: dict[ProfileKey, list[ServedRow]] = {}
    for row in _table("h100_measured_serving.csv"):
        if row["backend"] != "vllm" or row["model_path"] not in _MODELS:
            continue
        key = _HARDWARE[row["system"]], _MODELS[row["model_path"]], _PRECISIONS[row["precision"]]
        found.setdefault((*key, int(float(row["tp_size"]))), []).append(
            ServedRow(
                int(row["isl"]),
                int(row["osl"]),
                int(float(row["concurrency"])),
                float(row["silicon_tpot_ms"]),
                float(row["silicon_ttft_ms"]),
            )
        )
    return found


def _table(name: str) -> Iterator[dict[str, str]]:
    path = resources.files("quartet_sim") / "data" / "hardware" / name
    with path.open("r", encoding="utf-8") as lines:
        yield from csv.DictReader(lines)
