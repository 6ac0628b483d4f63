"""An engine behind OpenAI's HTTP API as a worker's engine: vLLM, SGLang, or any other server that speaks it.

The server stays as it is. Its agent sends it requests as clients wrote them, hears its KV events where it has any,
reads its metrics under whatever names its version gives them, and notices when it is gone, or another one.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from quartet_agent.engines import bodies
from quartet_agent.engines.adapters import Adapters
from quartet_agent.engines.base import CannotLoad, Diagnosis, EngineAdapter, EngineLoad, Life, Listener, Work
from quartet_agent.engines.call import path_of
from quartet_agent.engines.dialect import Dialect
from quartet_agent.engines.estimate import LoadEstimate
from quartet_agent.engines.events import Source, sources_in, sources_of
from quartet_agent.engines.findings import find
from quartet_agent.engines.jobs import Jobs
from quartet_agent.engines.lending import Lending
from quartet_agent.engines.missing import MissingMetrics
from quartet_agent.engines.page_pool import ServedPages
from quartet_agent.engines.pages import EnginePages
from quartet_agent.engines.pools import BlocksFenced, KvPool, PagePool
from quartet_agent.engines.prefixes import CachedPrefixes, ladder_salt
from quartet_agent.engines.reading import Reading
from quartet_agent.engines.server import EngineAway, EngineServer
from quartet_agent.engines.watch import Learned, Watch
from quartet_bus.config.schema import EngineSection, ModelSection
from quartet_bus.messages import Role
from quartet_core.openai import upstream
from quartet_core.profile import Profile

_DISCHARGES = 4
_DISCHARGE_MS = 20_000.0

_encode = msgspec.json.Encoder().encode


class Log(Protocol):
    """What of a logger is used here."""

    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


class ServedAdapter(EngineAdapter):
    """Drives one server, or one data-parallel ``rank`` of it, which every request then names.

    ``kv_tokens`` is what is taken for the size of its KV memory until it says better. ``congested`` says whether the
    bus has more to send than it should: then no stream is read on. ``paging``: its pages belong to the virtual VRAM
    pool.
    """

    def __init__(
        self,
        section: EngineSection,
        model: ModelSection,
        dialect: Dialect,
        profile: Profile,
        kv_tokens: int,
        now_ms: Callable[[], float],
        congested: Callable[[], bool],
        log: Log,
        *,
        rank: int | None = None,
        paging: bool = False,
    ) -> None:
        self._section = section
        self._model = model
        self._dialect = dialect
        self._now_ms = now_ms
        self._log = log
        self._served = section.served_model or section.model
        self._rank = rank
        self._server = EngineServer(section, {} if rank is None else {dialect.rank_header: str(rank)})
        self._watch = Watch(
            section, dialect, self._server, self._on_up, self._on_lost, self._on_looked, self._on_away, rank
        )
        self._adapters = Adapters(section, self._server, dialect.loads_adapters, self._on_adapters)
        self._estimate = LoadEstimate(profile, section.kv_tokens or kv_tokens)
        self._prefixes = CachedPrefixes(section.kv_tokens or kv_tokens, self._estimate.moved)
        self._lending = Lending(section, self._server)
        self._jobs = Jobs(
            self._server, self._estimate, self._prefixes, self._lending, now_ms, congested, self._on_fault
        )
        self._background: set[asyncio.Task[None]] = set()
        self._discharging = asyncio.Semaphore(_DISCHARGES)
        self._changed: Callable[[], None] = lambda: None
        self._life = Life(number=0, up=False)
        self._reading: Reading | None = None
        self._missing = MissingMetrics(dialect, section.probes_lost, log.error, log.info)
        self._pages: EnginePages | None = None
        if section.kv_pages:
            self._pages = EnginePages(section.kv_pages, ladder_salt, self._on_pages, self._nudge, paging=paging)
            self._prefixes.beside = self._pages.mirror
        self._stopped = False

    # As ``EngineAdapter``

    async def start(self, listener: Listener) -> None:
        """As ``EngineAdapter.start``. Does not wait for the server: the worker comes up when that answers."""
        self._jobs.listener = listener
        await self._server.open()
        self._spawn(self._watch.run())
        if self._pages is not None:
            self._spawn(self._pages.run())

    async def stop(self) -> None:
        """As ``EngineAdapter.stop``."""
        self._stopped = True
        self._prefixes.end()
        for task in self._background:
            task.cancel()
        if tasks := [*self._jobs.end(), *self._background]:
            await asyncio.wait(tasks)
        await self._server.close()

    def submit(self, work: Work) -> None:
        """As ``EngineAdapter.submit``."""
        if not self._life.up:
            raise upstream(f"The engine is away: {self._watch.why_down}.", "engine_unreachable")
        pool = None if self.handshake else self._pool
        if work.role is Role.DECODE and not work.parameters and (pool is None or not pool.holds(work.transfer)):
            raise BlocksFenced(work.transfer, "no parameters of the engine that prefilled, and no pages")
        dialect = self._dialect
        model = work.model if work.model in self._section.adapters else self._served
        order = bodies.order(
            work, model=model, usage=dialect.usage, salted=dialect.salted, rid=bool(dialect.abort),
            handshake=bool(self.handshake),
        )  # fmt: skip
        self._jobs.begin(work, order, model, pool)

    def cancel(self, job: str) -> float:
        """As ``EngineAdapter.cancel``. The connection is closed, which ends the request on the engine."""
        busy_ms, ran = self._jobs.cancel(job)
        if ran and self._dialect.abort and not self._stopped:
            # It looks for closed connections now and then only, when the answer is not streamed.
            self._spawn(self._post_quietly(self._dialect.abort, _encode({"rid": job})))
        return busy_ms

    def load(self) -> EngineLoad:
        """As ``EngineAdapter.load``."""
        return self._estimate.load(self._now_ms(), fault=not self._life.up)

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """As ``EngineAdapter.drain_rungs``."""
        return self._prefixes.drain()

    @property
    def kv(self) -> KvPool | None:
        """As ``EngineAdapter.kv``: of an engine with our connector; an unmodified one lets nobody else at its KV."""
        return self._pool

    @property
    def pages(self) -> PagePool | None:
        """As ``EngineAdapter.pages``; from when the engine told how full it is."""
        pool = self._pool
        return pool if pool is not None and pool.fill().total_blocks else None

    @property
    def handshake(self) -> str:
        """As ``EngineAdapter.handshake``."""
        return self._section.kv_connector

    @property
    def life(self) -> Life:
        """As ``EngineAdapter.life``."""
        return self._life

    def on_life(self, changed: Callable[[], None]) -> None:
        """As ``EngineAdapter.on_life``."""
        self._changed = changed

    def discharge(self, work: Work) -> None:
        """As ``EngineAdapter.discharge``: the engine fetches it, which frees it over there, and one token is thrown
        away. If that fails, the other engine's own lease ends it."""
        if self._life.up and not self._stopped:
            self._spawn(self._discharge(work))

    @property
    def loadable(self) -> tuple[str, ...]:
        """As ``EngineAdapter.loadable``."""
        return self._adapters.loadable

    async def load_adapter(self, name: str) -> None:
        """As ``EngineAdapter.load_adapter``."""
        await self._adapters.load(name)

    async def unload_adapter(self, name: str) -> None:
        """As ``EngineAdapter.unload_adapter``."""
        await self._adapters.unload(name)

    def diagnose(self) -> Diagnosis:
        """As ``EngineAdapter.diagnose``."""
        reading = self._reading
        if reading is not None and reading.queries is not None and reading.hits is not None:
            self._jobs.prompts["engine_looked_up_tokens"] = int(reading.queries)
            self._jobs.prompts["engine_cached_tokens"] = int(reading.hits)
        diagnosis = Diagnosis(
            kind=self._dialect.name,
            up=self._life.up,
            url=self._section.url,
            version=self._life.version,
            why_down=self._watch.why_down,
            metrics=reading.generation if reading is not None else "none",
            degraded=self._missing.now,
            ranks=1 if self._rank is not None or reading is None else len(reading.ranks),
            affinity="events" if self._prefixes.exact else "traffic",
            events=self._prefixes.figures(),
            prompts=dict(self._jobs.prompts),
            pages=self._pages.figures() if self._pages is not None else {},
        )
        pages_problem = self._pages.problem if self._pages is not None else ""
        diagnosis.findings = find(
            diagnosis, self._section, self._model, self._prefixes.problems, pages_problem, self._server.key_problem
        )
        return diagnosis

    @property
    def _pool(self) -> ServedPages | None:
        return self._pages.pool if self._pages is not None and self._life.up else None

    # What its connector tells

    def _on_pages(self) -> None:
        """There are pages now, or none any more."""
        assert self._pages is not None  # it called
        self._log.info("engine pages", url=self._section.url, there=self._pages.pool is not None)
        self._life = self._pages.seen_in(self._life)
        if self._life.up:
            self._changed()

    def _nudge(self) -> None:
        if self._life.up and not self._stopped:
            self._spawn(self._lending.step(self._served))

    # What the watch tells

    def _on_up(self, learned: Learned, reading: Reading | None) -> None:
        section = self._section
        kv_tokens = section.kv_tokens or learned.kv_tokens
        if kv_tokens:
            self._estimate.kv_tokens = kv_tokens
        self._estimate.restarted()
        to_load = self._adapters.found(learned.models)
        self._missing.born()
        self._jobs.answered = False
        self._life = Life(
            number=self._life.number + 1,
            version=learned.version,
            kv_tokens=kv_tokens,
            block_tokens=learned.block_tokens,
            max_context=learned.max_context,
            adapters=self._adapters.loaded,
        )
        if self._pages is not None:
            self._life = self._pages.seen_in(self._life)
        if self._server.key_problem:
            self._log.error("engine without a key", url=section.url, why=self._server.key_problem)
        self._log.info("engine up", url=section.url, version=learned.version, models=learned.models)
        self._prefixes.begin(self._sources(learned), kv_tokens)
        self._on_looked(reading)
        self._changed()
        for name in to_load:
            self._spawn(self._load_at_start(name))

    def _on_lost(self, why: str) -> None:
        self._log.error("engine lost", url=self._section.url, why=why)
        self._life = msgspec.structs.replace(self._life, up=False)
        self._prefixes.end()
        error = upstream(f"The engine was lost: {why}.", "engine_lost")
        self._jobs.fail_all("engine_lost", error)
        self._changed()

    def _on_away(self, why: str) -> None:
        self._log.warning("engine not up", url=self._section.url, why=why)

    def _on_looked(self, reading: Reading | None) -> None:
        if reading is None:
            if not self._dialect.metrics:
                self._estimate.moved()  # all that can be seen of it is that it answers
            return
        moved = self._reading is None or reading.steps is None or reading.steps != self._reading.steps
        self._reading = reading
        self._estimate.ranks = 1 if self._rank is not None else max(1, len(reading.ranks))
        self._estimate.read(reading)
        told_by_steps = self._dialect.prefill_steps and reading.steps is not None
        if not told_by_steps and self._estimate.reads_prompt(self._now_ms()):
            self._estimate.moved()
        self._missing.look(reading, answered=self._jobs.answered, url=self._section.url, version=self._life.version)
        if moved:
            self._jobs.assume_first_tokens()

    def _sources(self, learned: Learned) -> tuple[Source, ...]:
        configured = self._section.kv_events
        if configured == "off":
            return ()
        if configured == "auto":
            return sources_of(learned.events, self._section.url)
        sources = sources_in(configured, self._section.kv_replay)
        return sources if self._rank is None else sources[self._rank : self._rank + 1]

    # In the background

    def _on_fault(self, error: Exception) -> None:
        self._log.error("a call to an engine failed", url=self._section.url, error=repr(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("an engine's background task failed", url=self._section.url, error=repr(error))

    async def _post_quietly(self, path: str, body: bytes) -> None:
        with contextlib.suppress(EngineAway):
            await self._server.post(path, body, self._section.probe_timeout_ms)

    async def _discharge(self, work: Work) -> None:
        async with self._discharging:
            path = path_of(work.inference.endpoint)
            try:
                status, _ = await self._server.post(path, bodies.discharge(work, model=self._served), _DISCHARGE_MS)
            except EngineAway as away:
                self._log.warning("KV of another engine could not be freed; its lease will", why=str(away))
                return
            if status != 200:
                self._log.warning("KV of another engine could not be freed; its lease will", why=f"status {status}")

    async def _load_at_start(self, name: str) -> None:
        try:
            await self._adapters.load(name)
        except CannotLoad as error:
            self._log.error("adapter not loaded", url=self._section.url, adapter=name, why=str(error))

    def _on_adapters(self) -> None:
        self._life = msgspec.structs.replace(self._life, adapters=self._adapters.loaded)
        self._changed()
