"""A store as a worker's engine: it finds prefixes that it has and keeps them for their transfer. Nothing else."""

from asyncio import AbstractEventLoop
from bisect import bisect_left

from quartet_agent.engines.base import Diagnosis, EngineAdapter, EngineLoad, Failed, Listener, Prefilled, Usage, Work
from quartet_agent.store.memory import StoreMemory
from quartet_bus.messages import Role
from quartet_core.ladder import BLOCK_TOKENS, RUNGS, Sketch, sketch_text, sketch_tokens
from quartet_core.openai import Inference, Refused

NOT_STORED = "not_stored"

_RUNG_TOKENS = [blocks * BLOCK_TOKENS for blocks in RUNGS]


class StoreAdapter(EngineAdapter):
    """Lends out of one ``StoreMemory``."""

    def __init__(self, memory: StoreMemory, loop: AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop
        self._listener: Listener | None = None
        self._jobs: set[str] = set()
        self._lent = 0

    async def start(self, listener: Listener) -> None:
        """As ``EngineAdapter.start``."""
        self._listener = listener

    async def stop(self) -> None:
        """As ``EngineAdapter.stop``."""
        self._listener = None

    def submit(self, work: Work) -> None:
        """As ``EngineAdapter.submit``. Raises ``Refused`` for all but prefixes that are lent."""
        if work.role is not Role.PREFILL or not work.prefix_tokens:
            raise Refused(503, "A store computes nothing.", kind="service_unavailable", code="no_engine")
        sketch = _sketch(work.inference, work.salt)
        first = bisect_left(_RUNG_TOKENS, work.prefix_tokens)
        lent = self._memory.lend(work.transfer, sketch.rungs[first:], work.prefix_tokens)
        self._jobs.add(work.job)
        self._loop.call_soon(self._tell, work, lent)

    def _tell(self, work: Work, lent: bool) -> None:
        if self._listener is None or work.job not in self._jobs:
            return
        self._jobs.remove(work.job)
        if lent:
            self._lent += 1
            self._listener([Prefilled(work.job, Usage(work.prefix_tokens, work.prefix_tokens))])
        else:
            gone = "That prefix is not stored here (any more)."
            error = Refused(503, gone, kind="service_unavailable", code=NOT_STORED)
            self._listener([Failed(work.job, NOT_STORED, error, elsewhere=True)])

    def cancel(self, job: str) -> float:
        """As ``EngineAdapter.cancel``; what is lent ends with its transfer."""
        self._jobs.discard(job)
        return 0.0

    def load(self) -> EngineLoad:
        """As ``EngineAdapter.load``: idle. Older pages make room for newer ones, so only what is in use is not free."""
        fill = self._memory.fill()
        free = (fill.empty_blocks + fill.idle_blocks) / fill.total_blocks
        return EngineLoad(free_kv_fraction=free, queued_prefill_ms=0.0, running=0, waiting=0, steps=self._lent)

    def diagnose(self) -> Diagnosis:
        """As ``EngineAdapter.diagnose``: what it has, it knows by the manifests of its pages."""
        held = {"held_blocks": self._memory.cache.cached}
        return Diagnosis(kind="store", up=True, affinity="exact: manifests of pages", events=held)

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """As ``EngineAdapter.drain_rungs``."""
        return self._memory.drain_rungs()

    @property
    def kv(self) -> StoreMemory:
        """As ``EngineAdapter.kv``."""
        return self._memory

    @property
    def pages(self) -> StoreMemory:
        """As ``EngineAdapter.pages``."""
        return self._memory


def _sketch(inference: Inference, salt: bytes) -> Sketch:
    """A prompt's sketch, as its router made it to find this store."""
    if inference.prompt_ids is not None:
        return sketch_tokens(inference.prompt_ids, salt=salt)
    return sketch_text(inference.prompt_text, salt=salt)
