"""Fleets for benches: loaded as real ones are, with many groups of unequal workers."""

import random
from types import SimpleNamespace
from typing import Any

from quartet_core import catalogue
from quartet_core.affinity import rows_of
from quartet_core.ladder import Sketch, rungs_within, sketch_tokens
from quartet_core.linkbook import LinkBook
from quartet_core.plan import Ask
from quartet_core.policy.block_cost import BlockCost
from quartet_core.policy.decision_matrix import DecisionMatrix
from quartet_core.policy.finish_time import FinishTime
from quartet_core.policy.least_loaded import LeastLoaded
from quartet_core.policy.prefix_aware import PrefixAware
from quartet_core.policy.round_robin import RoundRobin
from quartet_core.routing import Routing
from quartet_core.word import batch_level, drift_level, free_kv_level, pack, queue_level

POLICIES: dict[str, Any] = {
    policy.name: policy for policy in (FinishTime, DecisionMatrix, RoundRobin, LeastLoaded, PrefixAware, BlockCost)
}
MODEL = "llama-3.1-8b"
CLASSES = ("H100_SXM5", "L40S_PCIE", "L40S_PCIE", "L40S_PCIE")
AFFINITY_ROWS, AFFINITY_HASHES = 1 << 17, 4
SYSTEM_TOKENS = 1_536
LEDGER_ENTRIES = 4  # of those a worker runs, how many this router knows of


def facts(name: str, hardware: str, model: str = MODEL, *, tp: int = 1, **more: Any) -> Any:
    """Static facts of one worker, as an inventory has them."""
    known = catalogue.builtin()
    layout = SimpleNamespace(
        block_tokens=16, bytes_per_token=known.model(model).kv_bytes_per_token, precision="bf16", revision="", tp=tp
    )
    given = dict(
        id=name, ordinal=0, incarnation=1, hardware=hardware, model=model, precision="fp8", tp=tp,
        kv_tokens=known.kv_capacity_tokens(hardware, model, "fp8", tp), max_context=131_072, max_batch=256,
        chunk_tokens=2048, layout=layout, engine="simulated", engine_version="1",
        capabilities=("export", "import", "reserve", "overlap"), role="both", cordoned=False, adapters=(), root="",
    )  # fmt: skip
    given.update(more)
    return SimpleNamespace(**given)


def routing(workers: list[Any], **more: Any) -> Routing:
    """A routing that knows ``workers``, eight to a node, and has heard no beat yet."""
    known = catalogue.builtin()
    settings: dict[str, Any] = dict(
        policy="finish-time", links=LinkBook(500.0), long_context=("H100_SXM5",), long_prompt_tokens=1 << 20,
        long_context_tokens=1 << 20,
        kappa=1.0, split_margin=0.7, hold_ahead_chunks=2.0, affinity_rows=AFFINITY_ROWS,
        affinity_hashes=AFFINITY_HASHES, max_workers=20_000,
    )  # fmt: skip
    settings.update(more)
    made = Routing(
        lambda f: known.profile(f.hardware, f.model, f.precision, f.tp), known.hardware_class, POLICIES, **settings
    )
    for start in range(0, len(workers), 8):
        vacated, refused = made.learn(f"n{start // 8}", workers[start : start + 8], 0.0, {"RDMA_ROCE": 46.6})
        assert not vacated
        assert not refused
    return made


def loaded(count: int, *, seed: int = 1) -> Routing:
    """A fleet of ``count`` busy workers with full caches: an eighth of each filter is on, as by 4,400 rungs."""
    rng = random.Random(seed)
    made = routing([facts(_name(i), CLASSES[i % len(CLASSES)]) for i in range(count)])
    for slot in range(count):
        _busy(made, slot, rng)
    _fill_caches(made, count, rng)
    return made


def conversations(made: Routing, prompts: int, prompt_tokens: int, *, seed: int = 2) -> list[Sketch]:
    """Prompts that meet the fleet as conversations do.

    All begin with one system prompt, which half of the fleet holds. A fifth are new; the others go on with a
    conversation that one or two workers hold nearly to its end, and up to three more as it was some turns ago.
    """
    rng = random.Random(seed + prompt_tokens)
    count = len(made.fleet)
    # Rungs are hashes: random ones do as well as those of real text, and take no hashing of gigabytes.
    system = tuple(rng.getrandbits(64) for _ in range(rungs_within(min(SYSTEM_TOKENS, prompt_tokens * 3 // 4))))
    for slot in rng.sample(range(count), count // 2):
        _cache(made, slot, system)
    sketches = []
    for number in range(prompts):
        own = rungs_within(prompt_tokens) - len(system)
        sketch = Sketch(system + tuple(rng.getrandbits(64) for _ in range(own)), prompt_tokens)
        sketches.append(sketch)
        if number % 5 == 0:
            continue
        newest, older = rng.randint(1, 2), rng.randint(0, 3)
        for place, slot in enumerate(rng.sample(range(count), newest + older)):
            share = rng.uniform(0.6, 1.0) if place < newest else rng.uniform(0.1, 0.6)
            _cache(made, slot, sketch.rungs[: len(system) + round(own * share)])
    return sketches


def _name(number: int) -> str:
    return f"n{number // 8}-{number % 8}"


def busy_word(rng: random.Random) -> int:
    """A word such as a busy worker sends."""
    return pack(
        free_kv=free_kv_level(rng.uniform(0.2, 1.0)),
        queue=queue_level(rng.expovariate(1 / 300.0)),
        batch=batch_level(rng.randrange(8, 60)),
        drift=drift_level(1.0 if rng.random() < 0.8 else rng.uniform(1.0, 1.5)),
        accepting=rng.random() < 0.99,
    )


def _busy(made: Routing, slot: int, rng: random.Random) -> None:
    """A word such as a busy worker sends, and some of its requests in the ledger."""
    for number in range(LEDGER_ENTRIES):
        key = ("bench", f"r{slot}-{number}", 1, _name(slot), 1)
        made.opened(
            key, slot, prefill_ms=rng.uniform(20.0, 400.0), tokens=rng.randrange(500, 12_000), decodes=True,
            tpot_ms=rng.choice((30.0, 60.0, 100.0)), total_ms=20_000.0, now_ms=0.0,
        )  # fmt: skip
        made.accepted(key, 1, 0.0)
        made.prefilled(key, 1, 0.0)
    made.hear("c", _name(slot), 1, busy_word(rng), 1, 0, 0.0)


def _fill_caches(made: Routing, count: int, rng: random.Random) -> None:
    """Turn an eighth of all bits on. Row by row, past the table's own door: bit by bit it would take minutes."""
    table = made.affinity
    table._widen(count - 1)
    planes = table._planes
    for row in range(AFFINITY_ROWS):
        planes[row] |= rng.getrandbits(count) & rng.getrandbits(count) & rng.getrandbits(count)
    table._touched |= (1 << count) - 1


def _cache(made: Routing, slot: int, rungs: tuple[int, ...]) -> None:
    made.affinity.turn_on(slot, [row for rung in rungs for row in rows_of(rung, AFFINITY_ROWS, AFFINITY_HASHES)])


def ask_for(sketch: Sketch, **more: Any) -> Ask:
    """A request whose sketch came with it."""
    given: dict[str, Any] = dict(
        model=MODEL, prompt_tokens=sketch.tokens, output_tokens=256.0, ttft_ms=2000.0, tpot_ms=60.0, sketch=sketch,
        plans_split=False,
    )  # fmt: skip
    given.update(more)
    return Ask(**given)


def ask(tokens: list[int], **more: Any) -> Ask:
    """A request for ``tokens`` as a policy sees it."""
    return ask_for(sketch_tokens(tokens), **more)
