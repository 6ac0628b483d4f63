"""Watching an engine's server: whether it is there, since when, what it is, and what its metrics say.

    away ─answers─► learning ─serves our model─► up ─silent, or another process─► away

Every way into ``up`` is a new life of the engine: its cache is empty, and nobody's request is on it any more.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from quartet_agent.engines.dialect import Dialect
from quartet_agent.engines.reading import Reading, read
from quartet_agent.engines.server import EngineAway, EngineServer
from quartet_bus.config.schema import EngineSection


class Learned(Struct, frozen=True):
    """What an engine told of itself. ``models`` are all names that it answers to."""

    models: tuple[str, ...]
    version: str = ""
    max_context: int = 0
    block_tokens: int = 0
    kv_tokens: int = 0
    events: tuple[tuple[str, str], ...] = ()
    """(endpoint, replay endpoint) of its KV events, one a data-parallel rank, as the engine binds them."""


class _Model(Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(Struct):
    data: list[_Model]


class _Version(Struct):
    version: str = ""


class _Source(Struct):
    enable_kv_cache_events: bool = False
    publisher: str = ""
    endpoint: str = ""
    replay_endpoint: str | None = None


class _Info(Struct):
    version: str = ""
    page_size: int = 0
    max_total_num_tokens: int = 0
    kv_events_config: str | None = None
    dp_size: int = 1


class NotServing(Exception):
    """The server answers, and is not what it should be; the text says how."""


class Watch:
    """Probes one server for ever, and calls back from its task: ``up``, ``looked`` while it is, ``lost``; and ``away``
    while it is not, whenever there is another reason for that. ``rank`` is the data-parallel rank that is meant."""

    def __init__(
        self,
        section: EngineSection,
        dialect: Dialect,
        server: EngineServer,
        up: Callable[[Learned, Reading | None], None],
        lost: Callable[[str], None],
        looked: Callable[[Reading | None], None],
        away: Callable[[str], None],
        rank: int | None = None,
    ) -> None:
        self._section = section
        self._dialect = dialect
        self._server = server
        self._up = up
        self._lost = lost
        self._looked = looked
        self._tell_away = away
        self._rank = rank
        self._silent = 0
        self._unread = 0
        self._alive = False
        self._last: Reading | None = None
        self.why_down = "not asked yet"
        """Why the engine is not up, "" while it is."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(self._section.probe_interval_ms / 1e3)

    async def _look(self) -> None:
        try:
            status, _ = await self._server.get(self._dialect.health, self._section.probe_timeout_ms)
            if status in (401, 403):
                raise NotServing(f"it does not take our key ({self._dialect.health} answers {status})")
            if status != 200:
                raise EngineAway(f"{self._dialect.health} answers {status}")
            reading = await self._metrics()
            if self._alive and self._is_another(reading):
                self._away("it was started anew")
            if not self._alive:
                learned = await self._learn(reading)
                self._alive, self._silent, self.why_down = True, 0, ""
                self._last = reading
                self._up(learned, reading)
                return
            self._silent = 0
            self._last = reading if reading is not None and reading.tells_process else self._last
            self._looked(reading)
        except EngineAway as away:
            self._silent += 1
            if away.refused or self._silent >= self._section.probes_lost or not self._alive:
                self._away(str(away))
        except NotServing as wrong:
            self._away(str(wrong))

    def _away(self, why: str) -> None:
        another, self.why_down = why != self.why_down, why
        if self._alive:
            self._alive = False
            self._lost(why)
        elif another:
            self._tell_away(why)

    def _is_another(self, reading: Reading | None) -> bool:
        """Whether these are another process's metrics: it began at another time, or counts from the beginning."""
        last = self._last
        if reading is None or last is None:
            return False
        if reading.started_s and last.started_s:
            return reading.started_s != last.started_s
        return reading.steps is not None and last.steps is not None and reading.steps < last.steps

    async def _metrics(self) -> Reading | None:
        """Its metrics; None for an engine that has none, or that does not give them just now.

        One that goes on not giving them has none that could be read: all that is required is missing then.
        """
        if not self._dialect.metrics:
            return None
        try:
            status, text = await self._server.get(self._dialect.metrics, self._section.probe_timeout_ms)
        except EngineAway as away:
            if away.refused:
                raise
            status, text = 503, b""
        if status < 500:
            self._unread = 0
            return read(text.decode("utf-8", "replace") if status == 200 else "", self._dialect, self._rank)
        self._unread += 1
        return read("", self._dialect) if self._unread >= self._section.probes_lost else None

    async def _learn(self, reading: Reading | None) -> Learned:
        """What it is. Raises ``EngineAway`` or ``NotServing``."""
        self._server.refresh_key()
        models = await self._ask("/v1/models", _Models, needed=True)
        served = self._section.served_model or self._section.model
        names = tuple(model.id for model in models.data)
        if served not in names:
            raise NotServing(f"it does not serve {served!r}; it serves {', '.join(names) or 'nothing'}")
        if reading is not None and reading.ranks and self._rank is not None and str(self._rank) not in reading.ranks:
            raise NotServing(f"it has no data-parallel rank {self._rank}; it has {', '.join(reading.ranks)}")
        version = (await self._ask(self._dialect.version, _Version)).version if self._dialect.version else ""
        info = await self._info()
        return Learned(
            models=names,
            version=version or info.version,
            max_context=next((model.max_model_len or 0 for model in models.data if model.id == served), 0),
            block_tokens=(reading.block_tokens if reading is not None else 0) or info.page_size,
            kv_tokens=(reading.kv_tokens if reading is not None else 0) or info.max_total_num_tokens,
            events=await self._sources(info),
        )

    async def _info(self) -> _Info:
        info = _Info()
        for path in self._dialect.info:
            info = await self._ask(path, _Info)
            if info != _Info():
                break
        return info

    async def _sources(self, info: _Info) -> tuple[tuple[str, str], ...]:
        if self._dialect.events:
            found: dict[str, _Source] = await self._ask(self._dialect.events, dict[str, _Source], default={})
            wanted = found if self._rank is None else found.keys() & {str(self._rank)}
            told = [found[rank] for rank in sorted(wanted, key=lambda rank: (len(rank), rank))]
            return tuple(
                (source.endpoint, source.replay_endpoint or "")
                for source in told
                if source.enable_kv_cache_events and source.publisher == "zmq" and source.endpoint
            )
        if info.kv_events_config:
            try:
                source = msgspec.json.decode(info.kv_events_config, type=_Source)
            except msgspec.DecodeError:
                return ()
            if source.publisher == "zmq" and source.endpoint:
                # It tells what it was started with, from where each rank counts its own ports.
                ranks = range(info.dp_size) if self._rank is None else (self._rank,)
                return tuple(
                    (port_of_rank(source.endpoint, rank), port_of_rank(source.replay_endpoint or "", rank))
                    for rank in ranks
                )
        return ()

    async def _ask(self, path: str, kind: Any, *, needed: bool = False, default: Any = None) -> Any:
        """The answer to a GET as a ``kind``; an empty one where the engine does not know the address."""
        status, data = await self._server.get(path, self._section.probe_timeout_ms)
        if status in (401, 403):
            raise NotServing(f"it does not take our key ({path} answers {status})")
        if status == 200:
            try:
                return msgspec.json.decode(data, type=kind)
            except msgspec.DecodeError as error:
                if needed:
                    raise NotServing(f"{path} is not as OpenAI's: {error}") from None
        elif needed:
            raise EngineAway(f"{path} answers {status}")
        return kind() if default is None else default


def port_of_rank(endpoint: str, rank: int) -> str:
    """Where the publisher of a data-parallel rank is, that was given the same ``endpoint`` as all others."""
    before, colon, port = endpoint.rpartition(":")
    return f"{before}:{int(port) + rank}" if colon and port.isdecimal() else endpoint
