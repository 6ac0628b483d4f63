"""How much of what a pool could carry was asked of it.

An engine that decodes a single sequence is busy all the time, and could decode fifty more: busy time says nothing about
how full it is. So *used* is the share of its time in which a pool would do the same work with full batches:

    used = (sum of prefills + sum of output tokens x step(b*, c) / b*) / (workers x seconds)

with the profile's times, c the mean context of the answer, and b* the largest batch in which an answer of that context
keeps the model's target for time per output token, within the engine's batch limit and its KV memory.
"""

from msgspec import Struct

from quartet_bus.config.schema import EngineSection
from quartet_bus.messages import RequestEvent, Role
from quartet_core.catalogue import Catalogue
from quartet_core.profile import Profile

_CONTEXT_STEP = 256


class Pool(Struct, frozen=True):
    """The workers of one model on one hardware class."""

    model: str
    hardware: str


class PoolCapacity:
    """What one worker of a pool needs for a piece of work at full batches. ``gpus`` is over all of its workers."""

    def __init__(self, profile: Profile, *, max_batch: int, kv_tokens: int, tpot_ms: float) -> None:
        self.workers = 0
        self.gpus = 0
        self._profile = profile
        self._max_batch = max_batch
        self._kv_tokens = kv_tokens
        self._tpot_ms = tpot_ms
        self._per_token_ms: dict[int, float] = {}

    def work_ms(self, end: RequestEvent) -> float:
        """The time that what ``end`` tells of would take."""
        had = end.cached_tokens + (end.transferred_tokens if end.role is Role.BOTH else 0)
        prefill_ms = 0.0 if end.role is Role.DECODE else self._profile.prefill_ms(had, end.prompt_tokens - had)
        if end.role is Role.PREFILL:
            return prefill_ms
        context = end.prompt_tokens + end.output_tokens // 2
        return prefill_ms + end.output_tokens * self.token_ms(context)

    def token_ms(self, context: int) -> float:
        """One token of an answer with a mean context of ``context`` tokens, its share of a full batch's step."""
        rounded = -(-max(context, 1) // _CONTEXT_STEP) * _CONTEXT_STEP
        known = self._per_token_ms.get(rounded)
        if known is None:
            batch = self._full_batch(rounded)
            known = self._per_token_ms[rounded] = self._profile.step_ms_at(batch, rounded) / batch
        return known

    def _full_batch(self, context: int) -> int:
        batch = max(1, min(self._max_batch, self._kv_tokens // context))
        while batch > 1 and self._profile.step_ms_at(batch, context) > self._tpot_ms:
            batch -= 1
        return batch


def capacities(
    catalogue: Catalogue, engines: list[EngineSection], targets_tpot_ms: dict[str, float], specs: dict[str, str]
) -> dict[Pool, PoolCapacity]:
    """The pools that ``engines`` (of all nodes) form; ``specs`` are the models' names in the catalogue."""
    pools: dict[Pool, PoolCapacity] = {}
    for engine in engines:
        spec = specs[engine.model]
        pool = pools.get(key := Pool(engine.model, engine.hardware))
        if pool is None:
            kv_tokens = engine.kv_tokens or catalogue.kv_capacity_tokens(
                engine.hardware, spec, engine.precision, engine.tp
            )
            pool = pools[key] = PoolCapacity(
                catalogue.profile(engine.hardware, spec, engine.precision, engine.tp),
                max_batch=engine.max_batch,
                kv_tokens=kv_tokens,
                tpot_ms=targets_tpot_ms[engine.model],
            )
        pool.workers += engine.count
        pool.gpus += engine.count * engine.tp
    return pools
