"""The agent: one per host, for all its engines."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from quartet_agent.affinity import AffinityAuthor
from quartet_agent.answers import unleased_ms
from quartet_agent.beats.port import BeatPort
from quartet_agent.beats.words import WordBoard
from quartet_agent.controls import Controls, NodeStatus, WorkerStatus
from quartet_agent.engines.base import CannotLoad
from quartet_agent.engines.hosted import host_workers
from quartet_agent.events import EventAuthor
from quartet_agent.handshakes import Handshakes
from quartet_agent.inventory import InventoryAuthor
from quartet_agent.kv.arrivals import Arrivals
from quartet_agent.kv.commands import KvCommands
from quartet_agent.kv.departures import Departures
from quartet_agent.kv.figures import FetchFigures
from quartet_agent.kv.mover import Mover
from quartet_agent.kv.pages import Pages
from quartet_agent.kv.pressure import INTERVAL_S as _PRESSURE_INTERVAL_S
from quartet_agent.kv.pressure import PressureAuthor
from quartet_agent.kv.sends import Sends
from quartet_agent.loading.resident import ResidentSet
from quartet_agent.runs import Run, RunPorts
from quartet_agent.store.hosted import host_stores
from quartet_agent.streams import Streams
from quartet_agent.telemetry import wiring
from quartet_agent.telemetry.author import TelemetryAuthor
from quartet_agent.telemetry.gauges import Gauges
from quartet_agent.worker import HostedWorker
from quartet_bus import catalogue, subjects
from quartet_bus.author import StreamAuthor
from quartet_bus.bus import Bus, Message, RequestTimeout
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import Config
from quartet_bus.loop import VirtualLoop
from quartet_bus.messages import (
    AffinityUpdate,
    Cancel,
    Handshake,
    KvPressure,
    NodeInventory,
    Phase,
    PrefetchCommand,
    PrefetchVerb,
    Prefill,
    RequestEvent,
    StreamId,
    TransferReport,
)
from quartet_bus.messages import Run as RunDispatch
from quartet_bus.service import UNREADABLE, Service
from quartet_core.openai import Refused
from quartet_core.transfer_words import State

_TICK_S = 0.05
_AFFINITY_INTERVAL_S = 0.02
_CONGESTED_SHARE = 8
"""Above one part in so many of ``nats.outgoing_bytes`` waiting, engines' streams are not read on."""

_STOP_SHARE = 0.8
"""Part of the stop timeout in which streams may finish; the rest is for saying goodbye."""

_decode_cancel = msgspec.msgpack.Decoder(Cancel).decode


class AgentService(Service):
    """Hears dispatches, cancels, KV and prefetch commands; says frames, request events, inventory, affinity, telemetry
    and beats.

    Owns this node's workers. ``instance`` is the node's name. ``beats`` sends the state words, ``mover`` the KV;
    ``token_bytes`` makes lease secrets, from ``random`` when it is not given; ``real_readings`` reads the host's own
    hardware, where there is some.
    """

    name = "agent"

    def __init__(
        self,
        bus: Bus,
        config: Config,
        *,
        instance: str,
        random: Random,
        beats: BeatPort,
        mover: Mover,
        token_bytes: Callable[[int], bytes] | None = None,
        real_readings: wiring.RealReadings | None = None,
    ) -> None:
        super().__init__(bus, config, instance=instance, random=random)
        self.incarnation = random.randrange(1, 1 << 32)
        self.workers: dict[str, HostedWorker] = {}
        self._catalogue = catalogue.load(config)
        self._beats = beats
        self._mover = mover
        self._token_bytes = token_bytes or random.randbytes
        self._real_readings = real_readings
        self._telemetry: TelemetryAuthor | None = None
        self._gauges = Gauges(self.metrics)
        self._sent_bytes: dict[str, int] = {}
        self._started = False
        self._idle = asyncio.Event()
        self._phases = self.metrics.counter("request_events", "Request events said.", ("phase", "outcome"))
        self._tokens = self.metrics.counter("tokens", "Tokens of ended streams.", ("kind",))
        self._moved = self.metrics.counter("kv_moved_bytes", "KV sent: charged to the link, on the wire.", ("kind",))
        self._sent = self.metrics.counter("kv_sent", "Transfers sent, by the link class that they took.", ("link",))
        self._fetches = FetchFigures(self.metrics)
        self._handshakes_said = self.metrics.counter(
            "handshakes", "Words about KV that engines hand over by themselves, and KV freed for nobody.", ("verb",)
        )
        self._unreadable_cancels = self.metrics.counter("unreadable_cancels", "Cancels that could not be read.")

    async def start(self) -> None:
        """Start the engines, then hear, then beat: whoever sees this node accept can reach it.

        Raises ``ConfigError`` for engines or fabrics that cannot be, ``OSError`` when the mover cannot listen.
        """
        await super().start()
        self._assemble()
        self.arrivals.address = self.inventory.kv_address = await self._mover.serve(self.arrivals)
        for worker in self.workers.values():
            await worker.adapter.start(partial(self.streams.on_engine, worker))
        await self._hear_all()
        self._beats.start(self.instance, self.incarnation)
        self.board.accepting = True
        self._refresh_words()
        self.inventory.announce()
        for affinity in self._affinity.values():
            affinity.say_all()
        self.every(_TICK_S, self._tick)
        self.every(_AFFINITY_INTERVAL_S, self._tick_affinity)
        self.every(self.config.fleet.inventory_interval_ms / 1e3, self.inventory.announce)
        if self.config.kv.pool:
            self.every(_PRESSURE_INTERVAL_S, self.pressure.tick)
        if self._telemetry is not None:
            self._telemetry.start()
            self.every(self.config.telemetry.interval_ms / 1e3, self._tick_telemetry)
        self._started = True

    async def stop(self) -> None:
        """Take nothing new, let streams finish for a while, end the rest with an error, and be silent."""
        try:
            if self._started:
                self._started = False
                await self._let_finish()
                self._end_streams()
                await self._flush()
        finally:
            self._beats.stop()
            if self._telemetry is not None:
                self._telemetry.stop()
            await super().stop()
            await self._mover.close()
            for worker in self.workers.values():
                await worker.adapter.stop()

    def not_ready(self) -> str | None:
        """As ``Service.not_ready``."""
        return None if self._started else "the engines are not up"

    # What it owns

    def _assemble(self) -> None:
        config, loop = self.config, self.loop
        wall_s = loop.time if isinstance(loop, VirtualLoop) else time.time
        hosted = host_workers(
            config, self._catalogue, self.instance, self.random, loop, self._now_ms, wall_s, self._congested, self.log
        )
        engines = list(hosted)
        hosted += host_stores(self.instance, engines, config.kv, loop, self._now_ms, self.random)
        for worker in hosted:
            worker.adapter.on_life(partial(self._on_life, worker))
        self.workers = {worker.id: worker for worker in hosted}
        if not hosted:
            self.log.warning("no engines in [agent], so this node has no workers", node=self.instance)
        self.board = WordBoard(self._beats, hosted)
        events = EventAuthor(self.board, self.incarnation, self._say_event)
        self.handshakes = Handshakes(self.workers, self._say_handshake, self._count_handshake)
        self.streams = Streams(
            self.workers, self.board, events, self._now_ms, self._idle.set, self.handshakes,
            max_running=config.agent.max_running,
        )  # fmt: skip
        self.arrivals = Arrivals(loop, self._token_bytes, self.streams.kv_committed, self.streams.kv_lost)
        self.departures = Departures(
            loop,
            Sends(self._now_ms, self._mover, self.spawn, chunk_bytes=config.kv.chunk_bytes),
            self._say_progress,
            lease_ms=config.kv.lease_ms,
        )
        self.pages = Pages(self.departures, self._page_came, self._page_left) if config.kv.pool else None
        self.pressure = PressureAuthor(self.instance, self.incarnation, hosted, config.kv, self._say_pressure)
        self._ports = RunPorts(
            loop=loop,
            now_ms=self._now_ms,
            events=events,
            author=self._author,
            arrivals=self.arrivals,
            departures=self.departures,
            models=config.models,
            lease_ms=config.kv.lease_ms,
            unleased_ms=unleased_ms(config.kv),
            fetches=self._fetches,
            started=self.streams.started,
            ended=self.streams.end,
            broken=self._broken,
        )
        self.inventory = InventoryAuthor(
            config, self._catalogue, self.instance, self.incarnation, hosted, self._say_inventory
        )
        self.resident = ResidentSet(loop, (worker.facts.model for worker in engines), self._resident_changed)
        self.inventory.resident = self._in_memory()
        rows, hashes = config.router.affinity_rows, config.router.affinity_hashes
        self._affinity = {worker.id: AffinityAuthor(worker, rows, hashes, self._say_affinity) for worker in hosted}
        self._telemetry = self._read_host(engines)
        self._watch()

    def _read_host(self, hosted: list[HostedWorker]) -> TelemetryAuthor | None:
        telemetry = self.config.telemetry
        wiring.check(telemetry)
        match wiring.source_of(telemetry, self.config.agent):
            case "none":
                return None
            case "simulated":
                places, port = wiring.simulated_readings(
                    self.config, hosted, self.loop.time, self._sent_bytes, self.arrivals.tokens_of
                )
            case _ if self._real_readings is None and telemetry.source == "auto":
                return None  # nobody who could look at the host: a fleet within one process
            case source if self._real_readings is None:
                raise ConfigError(WHERE, "telemetry.source", source, "is for real processes alone")
            case _:
                places, port = self._real_readings(self.config)
        return TelemetryAuthor(telemetry, hosted, places, port, self.board.touch, self.log)

    # What it hears

    async def _hear_all(self) -> None:
        for worker in self.workers.values():
            await self.hear(subjects.worker_run(worker.id), self._on_dispatch)
            await self.hear(subjects.worker_prefill(worker.id), self._on_dispatch)
            await self.hear(subjects.worker_cancel(worker.id), partial(self.streams.cancel_on, worker))
            await self.hear(subjects.worker_kv(worker.id), self.handshakes.hear)
        await self.hear_raw(subjects.cancel_raw(), self._on_cancel)
        commands = KvCommands(self.workers, self.arrivals, self.departures, self.pages)
        await self.answer(subjects.kv_command(self.instance), commands.answer)
        await self.hear(subjects.prefetch(self.instance), self._on_prefetch)
        controls = Controls(self.workers, self.board, self.inventory, self._affinity, self._status, self.config)
        await self.controls(controls.handlers())

    def _on_dispatch(self, dispatch: RunDispatch | Prefill) -> None:
        self.streams.take(self._ports, dispatch)

    def _on_cancel(self, message: Message) -> None:
        try:
            cancel = _decode_cancel(message.data)
        except UNREADABLE:
            self._unreadable_cancels.inc()
            return
        cancel.tenant = subjects.text_of(message.subject, 1)  # whatever the body says: the subject is authorised
        self.streams.cancel(cancel)

    def _on_prefetch(self, command: PrefetchCommand) -> None:
        """An adapter goes to the engines that can load it, anything else to the resident set."""
        able = [worker for worker in self.workers.values() if command.model in worker.adapter.loadable]
        for worker in able:
            self.spawn(self._prefetch_adapter(worker, command), f"adapter {command.model}")
        if not able:
            self.resident.command(command)

    async def _prefetch_adapter(self, worker: HostedWorker, command: PrefetchCommand) -> None:
        try:
            if command.verb is PrefetchVerb.RELEASE:
                await worker.adapter.unload_adapter(command.model)
            else:
                await worker.adapter.load_adapter(command.model)
        except CannotLoad as error:
            self.log.warning("adapter not as asked", worker=worker.id, model=command.model, why=str(error))

    def _tick(self) -> None:
        """Time passed: queues got shorter, and the beats may know that this loop runs."""
        self._beats.tick()
        self.board.touch_all()
        self.board.write()

    def _tick_affinity(self) -> None:
        for affinity in self._affinity.values():
            affinity.tick()

    def _tick_telemetry(self) -> None:
        if self._telemetry is not None:
            told = self._telemetry.tick(self.instance, self.incarnation)
            self.board.write()
            self.say(subjects.telemetry(self.instance), told)
            self._gauges.show(told)

    def _on_life(self, worker: HostedWorker) -> None:
        """Its engine came up, was lost, or is another one: what is announced of the worker changes first, so that no
        beat speaks of a life that nobody knows."""
        born = worker.follow(self.random.randrange(1, 1 << 16))
        self.inventory.resident = self._in_memory()
        self.inventory.changed()
        self._refresh_words()
        if born:
            self._affinity[worker.id].say_all()

    def _congested(self) -> bool:
        return self.bus.unsent_bytes > self.config.nats.outgoing_bytes // _CONGESTED_SHARE

    def _in_memory(self) -> tuple[str, ...]:
        """Models whose weights are here, and adapters that an engine has loaded."""
        loaded = (name for worker in self.workers.values() for name in worker.adapter.life.adapters or ())
        return tuple(dict.fromkeys((*self.resident.models, *loaded)))

    def _resident_changed(self) -> None:
        self.inventory.resident = self._in_memory()
        self.inventory.changed()
        self._refresh_words()

    # What it says

    def _say_event(self, event: RequestEvent) -> None:
        self.say(subjects.request_event(event.phase), event)
        self._phases.labels(event.phase.value, event.status or event.reason).inc()
        if event.phase is Phase.END:
            self._tokens.labels("prompt").inc(event.prompt_tokens)
            self._tokens.labels("cached").inc(event.cached_tokens)
            self._tokens.labels("output").inc(event.output_tokens)

    def _say_progress(self, report: TransferReport) -> None:
        self.say(subjects.kv_progress(), report)
        if report.state == State.MOVED:
            self._sent.labels(report.link).inc()
        if report.wire_bytes:
            self._sent_bytes[report.source] = self._sent_bytes.get(report.source, 0) + report.kv_bytes
            self._moved.labels("wire").inc(report.wire_bytes)
            self._moved.labels("charged").inc(report.kv_bytes)

    def _say_pressure(self, pressure: KvPressure) -> None:
        self.say(subjects.kv_pressure(), pressure)

    def _page_came(self, worker: str, transfer: str) -> None:
        self.board.touch(self.workers[worker])
        self.log.debug("a page came", worker=worker, transfer=transfer)

    def _page_left(self, worker: str) -> None:
        self.board.touch(self.workers[worker])

    def _say_handshake(self, word: Handshake) -> None:
        self.say(subjects.worker_kv(word.worker), word)

    def _count_handshake(self, what: str) -> None:
        self._handshakes_said.labels(what).inc()

    def _say_inventory(self, inventory: NodeInventory) -> None:
        self.say(subjects.inventory(self.instance), inventory)

    def _say_affinity(self, worker: str, update: AffinityUpdate) -> None:
        self.say(subjects.affinity(worker), update)

    def _author(self, inbox: str, stream: StreamId) -> StreamAuthor:
        return StreamAuthor(self.bus, inbox, stream)

    # Inside

    def _now_ms(self) -> float:
        return self.now_ns() / 1e6

    def _refresh_words(self) -> None:
        self.board.epoch = self.inventory.epoch
        self.board.touch_all()
        self.board.write()

    def _status(self, workers: list[WorkerStatus], safe: bool) -> NodeStatus:
        return NodeStatus(
            node=self.instance,
            incarnation=self.incarnation,
            safe=safe,
            workers=workers,
            arrivals=len(self.arrivals),
            departures=len(self.departures),
            resident=self.resident.models,
            loading=self.resident.loading,
        )

    async def _let_finish(self) -> None:
        self.streams.stopping = True
        self.board.accepting = False
        self._refresh_words()
        if self.streams.running:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.service.stop_timeout_ms / 1e3 * _STOP_SHARE):
                    await self._idle.wait()

    def _broken(self, run: Run, error: Exception) -> None:
        self.log.error("a stream failed", worker=run.worker.id, stream=run.stream.id, exc_info=error)

    def _end_streams(self) -> None:
        error = Refused(
            503, "The worker is stopping.", kind="service_unavailable", code="worker_stopping", retry_after_s=1.0
        )
        self.streams.fail_all(error, "stopping")
        self.arrivals.close()
        self.departures.close()
        self.resident.close()

    async def _flush(self) -> None:
        try:
            await self.bus.flush()
        except RequestTimeout:
            self.log.warning("the broker did not take the last words")

    def _watch(self) -> None:
        gauge = self.metrics.gauge
        gauge("streams", "Streams accepted and not ended.").set_function(lambda: self.streams.running)
        gauge("kv_arrivals", "Leases on KV blocks that are to come.").set_function(lambda: len(self.arrivals))
        gauge("kv_departures", "Transfers whose KV is kept here.").set_function(lambda: len(self.departures))
        gauge("kv_expired", "Leases that expired, since start.").set_function(
            lambda: self.arrivals.expired + self.departures.expired
        )
        gauge("beat_trouble", "Beats not sent, and senders started again, since start.").set_function(
            lambda: self._beats.trouble
        )
        gauge("beats_realtime", "1 while beats go before all that is not realtime on this host.").set_function(
            lambda: self._beats.realtime
        )
        gauge("beats", "Beats begun, since start.").set_function(lambda: self._beats.sequence)
        gauge("beats_skipped", "Slots that passed without a beat, since start.").set_function(
            lambda: self._beats.skipped
        )
        busy = gauge("engine_busy_ms", "Time an engine was busy, since start.", ("worker",))
        steps = gauge("engine_steps", "Iterations of an engine, since start.", ("worker",))
        up = gauge("engine_up", "1 while the engine answers.", ("worker",))
        degraded = gauge(
            "engine_metrics_missing",
            "Required metrics of an engine that are missing: its state is guessed.",
            ("worker",),
        )
        for worker in self.workers.values():
            busy.labels(worker.id).set_function(partial(_busy_ms, worker))
            steps.labels(worker.id).set_function(partial(_steps, worker))
            up.labels(worker.id).set_function(partial(_up, worker))
            degraded.labels(worker.id).set_function(partial(_missing, worker))


def _busy_ms(worker: HostedWorker) -> float:
    return worker.adapter.load().busy_ms


def _steps(worker: HostedWorker) -> float:
    return worker.adapter.load().steps


def _up(worker: HostedWorker) -> float:
    return float(worker.up)


def _missing(worker: HostedWorker) -> float:
    return len(worker.adapter.diagnose().degraded)
