"""What some layers on some cards take and need: a roofline per stage, and its memory.

The catalogue's profiles are of whole models on cards of one class. A stage has some layers, in a precision of its own,
so its times are computed from the cards' measured weight-read bandwidth and matrix throughput, with a few constants
chosen so that whole models on one class come out near those profiles; ``accuracy.py`` says how near. Decode reads
weights and KV, prefill multiplies, and a tensor-parallel group adds two all-reduces a layer.
"""

from itertools import pairwise
from math import ceil, log2

from msgspec import Struct

from quartet_core.catalogue import RUNTIME_BYTES_PER_GPU, HardwareClass
from quartet_sim.partition.machines import Hop
from quartet_sim.partition.precision import Precision
from quartet_sim.partition.shape import Shape

CHUNK_TOKENS = 2048
"""Prompt tokens of one iteration: the engines' usual budget, and what activations are sized by."""

MEMORY_SHARE = 0.92
MATMUL_SHARE = 0.90
ATTENTION_SHARE = 0.55
LAYER_MS = 0.02
OVERHEAD_MS = 1.0
"""Shares of the measured rates that whole models reach, launch cost per layer, and the engine's per iteration; chosen
by hand against the kernel profiles of the catalogue (``accuracy.py``)."""

_UNMEASURED_BANDWIDTH = 0.87
_UNMEASURED_TFLOPS = {"bf16": 0.69, "fp8": 0.50}
"""Where a class was never timed: the least share of the vendor's figure that the timed ones reach."""

_ALL_REDUCE_GB_PER_S = {
    "nvlink": {2: 316.0, 8: 199.0},
    "pcie": {2: 20.2, 4: 3.70, 8: 0.745},
}
"""512 MiB over the time of its NCCL all-reduce, H100 SXM and L40S, one host each (aiconfigurator-core 0.12.0)."""

_ALL_REDUCE_SETUP_MS = {"nvlink": 0.012, "pcie": 0.03}
"""Judged: what a small all-reduce takes."""


class Workload(Struct, frozen=True, kw_only=True):
    """What the model is to serve: mean lengths, requests under way at a time, and the longest sequence allowed."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "concurrency", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.prompt_tokens + self.output_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {self.prompt_tokens} and an answer of {self.output_tokens} tokens "
                f"are longer than max_model_len {self.max_model_len}"
            )

    @property
    def kv_tokens(self) -> int:
        """KV that must fit: all requests under way at their full mean length, and at least one of the longest."""
        return max(self.max_model_len, self.concurrency * (self.prompt_tokens + self.output_tokens))

    @property
    def context(self) -> int:
        """Mean context of a decode step."""
        return self.prompt_tokens + self.output_tokens // 2

    def microbatch(self, stages: int) -> int:
        """Sequences of one decode step, when ``stages`` of them are under way at once."""
        return ceil(self.concurrency / stages)


class Cards(Struct, frozen=True, kw_only=True):
    """A tensor-parallel group of ``tp`` cards of one class that keeps its layers in one precision."""

    hardware: HardwareClass
    tp: int
    precision: Precision

    @property
    def read_bytes_per_ms(self) -> float:
        """What the group reads of its memory."""
        hardware = self.hardware
        rate = hardware.measured_bandwidth_gb_s or hardware.memory_bandwidth_gb_s * _UNMEASURED_BANDWIDTH
        return rate * MEMORY_SHARE * self.tp * 1e6

    def flops_per_ms(self, compute: str) -> float:
        """What the group multiplies in ``compute``, which it can (``Precision.runs_on``)."""
        hardware = self.hardware
        measured = hardware.measured_fp8_tflops if compute == "fp8" else hardware.measured_bf16_tflops
        if measured is None:
            measured = (hardware.tflops(compute) or 0.0) * _UNMEASURED_TFLOPS[compute]
        return measured * MATMUL_SHARE * self.tp * 1e9

    def all_reduce_ms(self, size_bytes: float) -> float:
        """One all-reduce of ``size_bytes`` within the group; 0 for a single card."""
        if self.tp == 1:
            return 0.0
        kind = self.hardware.gpu_link.kind
        return _ALL_REDUCE_SETUP_MS[kind] + size_bytes / (all_reduce_gb_per_s(kind, self.tp) * 1e6)


def all_reduce_gb_per_s(kind: str, tp: int) -> float:
    """The rate of an all-reduce over ``tp`` cards; between measured sizes, and beyond them, on a line in log-log."""
    known = sorted(_ALL_REDUCE_GB_PER_S[kind].items())
    (left, left_rate), (right, right_rate) = known[0], known[-1]
    for (a, a_rate), (b, b_rate) in pairwise(known):
        if a <= tp <= b:
            (left, left_rate), (right, right_rate) = (a, a_rate), (b, b_rate)
    share = log2(tp / left) / log2(right / left)
    return float(left_rate * (right_rate / left_rate) ** share)


class StageMemory(Struct, frozen=True, kw_only=True):
    """Bytes of one card of a stage. ``limit`` is what the engine may use of it, ``runtime`` what it uses anyway."""

    weights: int
    kv: int
    activations: int
    runtime: int
    limit: int

    @property
    def used(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.activations + self.runtime

    @property
    def fits(self) -> bool:
        """Whether the card holds it."""
        return self.used <= self.limit


class StageTimes(Struct, frozen=True, kw_only=True):
    """One stage: a whole prompt's prefill, one decode step of a microbatch, and what a request takes of it.

    ``link_prefill_ms`` and ``link_step_ms`` are what came before it on the way in. ``request_ms`` has all of it: the
    prompt once, and for each token of the answer the microbatch's share of a step. ``parts_ms`` says what
    ``request_ms`` consists of: weights, kv, compute, all_reduce, link, overhead.
    """

    prefill_ms: float
    step_ms: float
    link_prefill_ms: float
    link_step_ms: float
    request_ms: float
    parts_ms: dict[str, float]


def layer_bytes(shape: Shape, precision: Precision) -> int:
    """Weights of one layer."""
    return int(shape.layer_weights * precision.bytes_per_weight)


def stage_memory(
    shape: Shape, cards: Cards, work: Workload, layers: int, *,
    first: bool, last: bool, kv_bytes_per_element: int, utilisation: float,
) -> StageMemory:  # fmt: skip
    """What each card of the group must hold for ``layers`` layers, and the embedding or head at the ends."""
    tp = cards.tp
    tables = shape.table_bytes * (first + last)
    kv_token = layers * shape.kv_layer_bytes * kv_bytes_per_element // 2
    wide = 4 * shape.hidden + 2 * shape.intermediate // tp
    activations = min(CHUNK_TOKENS, work.max_model_len) * wide * 2
    if last:
        activations += work.concurrency * shape.vocab * 4  # logits in FP32
    return StageMemory(
        weights=(layers * layer_bytes(shape, cards.precision) + tables) // tp,
        kv=work.kv_tokens * kv_token // min(tp, shape.kv_heads),
        activations=activations,
        runtime=RUNTIME_BYTES_PER_GPU,
        limit=int(cards.hardware.memory_bytes * utilisation),
    )


def stage_times(
    shape: Shape, cards: Cards, work: Workload, layers: int, batch: int, *,
    first: bool, last: bool, way_in: Hop | None, kv_bytes_per_element: int,
) -> StageTimes:  # fmt: skip
    """Times of ``layers`` layers on the group, decoding microbatches of ``batch``; ``way_in`` leads to it.

    The embedding is looked up, which is free; the head multiplies one row for each sequence.
    """
    del first  # it costs memory, not time
    reads = cards.read_bytes_per_ms
    weights_ms = layers * layer_bytes(shape, cards.precision) / reads
    compute = cards.flops_per_ms(cards.precision.compute)
    kv_token = layers * shape.kv_layer_bytes * kv_bytes_per_element / 2
    kv_ms = batch * work.context * kv_token / (reads * min(cards.tp, shape.kv_heads) / cards.tp)
    multiply_ms = 2 * layers * shape.layer_weights * batch / compute
    head_ms = shape.table_bytes / reads if last else 0.0
    reduce_ms = 2 * layers * cards.all_reduce_ms(batch * shape.hidden * 2)
    overhead_ms = OVERHEAD_MS + layers * LAYER_MS
    step_ms = max(weights_ms, multiply_ms) + head_ms + kv_ms + reduce_ms + overhead_ms

    tokens = work.prompt_tokens
    chunks = ceil(tokens / CHUNK_TOKENS)
    matmul_ms = 2 * layers * shape.layer_weights * tokens / compute
    attention = 2 * layers * tokens * tokens * shape.heads * shape.head_dim
    attention_ms = attention / (cards.flops_per_ms("bf16") * ATTENTION_SHARE / MATMUL_SHARE)
    fill_ms = max(matmul_ms, chunks * weights_ms) + attention_ms + (head_ms if last else 0.0)
    fill_reduce_ms = 2 * layers * chunks * cards.all_reduce_ms(tokens / chunks * shape.hidden * 2)
    prefill_ms = fill_ms + fill_reduce_ms + chunks * overhead_ms

    link_step_ms = way_in.ms(batch * shape.hidden * 2) if way_in else 0.0
    link_prefill_ms = (
        chunks * way_in.setup_ms + way_in.ms(tokens * shape.hidden * 2) - way_in.setup_ms if way_in else 0.0
    )
    steps = work.output_tokens / batch  # of which each serves the whole microbatch
    decode_bound = "weights" if weights_ms >= multiply_ms else "compute"
    parts = {
        "weights": steps * head_ms,
        "kv": steps * kv_ms,
        "compute": fill_ms,
        "all_reduce": steps * reduce_ms + fill_reduce_ms,
        "link": steps * link_step_ms + link_prefill_ms,
        "overhead": (steps + chunks) * overhead_ms,
    }
    parts[decode_bound] += steps * max(weights_ms, multiply_ms)
    return StageTimes(
        prefill_ms=prefill_ms,
        step_ms=step_ms,
        link_prefill_ms=link_prefill_ms,
        link_step_ms=link_step_ms,
        request_ms=prefill_ms + link_prefill_ms + steps * (step_ms + link_step_ms),
        parts_ms=parts,
    )
