"""Fleets for benches: loaded as real ones are, with many groups of unequal workers."""

import random
from types import SimpleNamespace
from typing import Any

from quartet_core import catalogue
from quartet_core.ladder import sketch_tokens
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
        capabilities=("export", "import", "reserve"), role="both", cordoned=False, adapters=(),
    )  # fmt: skip
    given.update(more)
    return SimpleNamespace(**given)


def routing(workers: list[Any], **more: Any) -> Routing:
    """A routing that knows ``workers``, eight to a node, and has heard no beat yet."""
    known = catalogue.builtin()
    settings: dict[str, Any] = dict(
        policy="finish-time", links=LinkBook(500.0), long_context=("H100_SXM5",), long_prompt_tokens=1 << 20,
        kappa=1.0, hold_ahead_chunks=2.0, affinity_rows=1 << 17, affinity_hashes=4, max_workers=20_000,
    )  # fmt: skip
    settings.update(more)
    made = Routing(lambda f: known.profile(f.hardware, f.model, f.precision, f.tp), POLICIES, **settings)
    for start in range(0, len(workers), 8):
        vacated, refused = made.learn(f"n{start // 8}", workers[start : start + 8], 0.0)
        assert not vacated
        assert not refused
    return made


def loaded(count: int, *, seed: int = 1, holders: int = 6, prompts: int = 200, prompt_tokens: int = 32_768) -> Any:
    """(routing, prompt ids by number): ``count`` busy workers whose caches hold the given prompts in part."""
    rng = random.Random(seed)
    made = routing([facts(f"n{i // 8}-{i % 8}", CLASSES[i % len(CLASSES)]) for i in range(count)])
    for i in range(count):
        word = pack(
            free_kv=free_kv_level(rng.uniform(0.2, 1.0)),
            queue=queue_level(rng.expovariate(1 / 300.0)),
            batch=batch_level(int(rng.uniform(0, 60))),
            drift=drift_level(1.0 if rng.random() < 0.8 else rng.uniform(1.0, 1.5)),
            accepting=rng.random() < 0.99,
        )
        made.hear(f"n{i // 8}-{i % 8}", 1, word, 1, 0, 0.0)
    ids = [[rng.randrange(128_000) for _ in range(prompt_tokens)] for _ in range(prompts)]
    from quartet_core.affinity import rows_of

    for tokens in ids:
        rungs = sketch_tokens(tokens).rungs
        for slot in rng.sample(range(count), min(holders, count)):
            for rung in rungs[: rng.randrange(1, len(rungs) + 1)]:
                made.affinity.turn_on(slot, rows_of(rung, 1 << 17, 4))
    return made, ids


def ask(tokens: list[int], **more: Any) -> Ask:
    """A request for ``tokens`` as a policy sees it."""
    given: dict[str, Any] = dict(
        model=MODEL, prompt_tokens=len(tokens), output_tokens=256.0, ttft_ms=2000.0, tpot_ms=60.0,
        sketch=sketch_tokens(tokens), plans_split=False,
    )  # fmt: skip
    given.update(more)
    return Ask(**given)
