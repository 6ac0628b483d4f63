"""Workers that a scenario plays: what their agents say on the bus, without an engine behind it."""

import asyncio
import itertools
from fnmatch import fnmatchcase

import msgspec
from router_stage import Stage, worker
from scenarios.prompts import prompt_ids
from scenarios.story import Caches, Flood, Links, Node, State

from quartet_bus import subjects
from quartet_bus.author import StreamAuthor
from quartet_bus.messages import (
    AffinityUpdate,
    Cancel,
    FleetDelta,
    KvLayout,
    LinkInfo,
    LinkState,
    LinkTable,
    NodeInventory,
    Phase,
    Prefill,
    RequestEvent,
    Role,
    Run,
    TransferReason,
    TransferReport,
    WorkerState,
)
from quartet_core import word
from quartet_core.affinity import AffinityCounters
from quartet_core.ladder import sketch_tokens
from quartet_core.openai import Refused
from quartet_core.salt import salt_of
from quartet_core.verdict import Verdict

_encode = msgspec.msgpack.encode


class PlayedWorker:
    """One worker, from its first incarnation to the end of the scenario."""

    def __init__(self, play: "Players", node: Node, ordinal: int) -> None:
        self.id = f"{node.name}-{ordinal}"
        self.node = node
        self.ordinal = ordinal
        self.incarnation = 1
        self.beat = 0
        self.counters = AffinityCounters(play.affinity_rows, play.affinity_hashes)
        self.updates = 0
        self.runs: dict[tuple[str, object], PlayedRun] = {}
        self.lost: list[PlayedRun] = []
        self._play = play

    async def start(self) -> None:
        for topic in (subjects.worker_run(self.id), subjects.worker_prefill(self.id)):
            decode = msgspec.msgpack.Decoder(topic.kind).decode
            await self._play.stage.bus.subscribe(
                topic.subject, lambda m, decode=decode: self._on_dispatch(decode(m.data))
            )
        cancel = msgspec.msgpack.Decoder(Cancel).decode
        await self._play.stage.bus.subscribe(
            subjects.worker_cancel(self.id).subject, lambda m: self._on_cancel(cancel(m.data))
        )

    def info(self):
        node = self.node
        return worker(
            self.id, node.hardware, node.model, incarnation=self.incarnation, tp=node.tp, precision=node.precision,
            kv_tokens=node.kv_tokens, max_context=node.max_context, role=Role(node.role),
            layout=KvLayout(16, 131_072, "bf16", tp=node.tp),
        )  # fmt: skip

    def restart(self) -> None:
        """The engine is new: what it ran is gone, and nobody says so."""
        self.incarnation += 1
        self.counters = AffinityCounters(self._play.affinity_rows, self._play.affinity_hashes)
        self.updates = 0
        self.drop_all()

    def drop_all(self) -> None:
        """Nothing more is heard of its streams, unless the script says so."""
        for run in self.runs.values():
            run.mute()
        self.lost += self.runs.values()
        self.runs.clear()

    def event(self, phase: Phase, dispatch: Run | Prefill, role: Role, **more) -> None:
        self._play.stage.say(
            subjects.request_event(phase),
            RequestEvent(
                phase=phase, stream=dispatch.stream, tenant=dispatch.tenant, model=dispatch.model, worker=self.id,
                incarnation=dispatch.incarnation, role=role, hardware=self.node.hardware, beat=self.beat + 1, **more,
            ),
        )  # fmt: skip

    def _on_dispatch(self, dispatch: Run | Prefill) -> None:
        agent = self.node.agent
        role = Role.PREFILL if isinstance(dispatch, Prefill) else Role.DECODE if dispatch.split else Role.BOTH
        if agent == "silent":
            return
        if agent == "refuses" or dispatch.incarnation != self.incarnation:
            reason = self.node.reason if dispatch.incarnation == self.incarnation else "fenced"
            self.event(Phase.REFUSED, dispatch, role, reason=reason)
            return
        run = PlayedRun(self._play.stage, self, dispatch, role)
        self.runs[(dispatch.tenant, dispatch.stream)] = run
        run.accept()
        if agent == "fails":
            run.fail(self.node.status)
        elif agent == "answers":
            run.answer_by_itself()

    def _on_cancel(self, cancel: Cancel) -> None:
        for run in list(self.runs.values()):
            stream = run.dispatch.stream
            if (cancel.id, cancel.tenant) == (stream.id, run.dispatch.tenant) and cancel.try_ in (0, stream.try_):
                run.cancelled()


class PlayedRun:
    """One dispatch that a played worker took."""

    def __init__(self, stage: Stage, place: PlayedWorker, dispatch: Run | Prefill, role: Role) -> None:
        self.dispatch = dispatch
        self._stage = stage
        self._worker = place
        self._role = role
        self._author = StreamAuthor(stage.bus, dispatch.inbox, dispatch.stream) if isinstance(dispatch, Run) else None
        self._timers: list[asyncio.TimerHandle] = []

    def accept(self) -> None:
        self._say(Phase.ACCEPTED)
        if self._author is not None and self._worker.node.agent != "mute":
            self._author.accepted(self._worker.id)

    def answer_by_itself(self) -> None:
        """First token and end come after the node's times, or those that the router predicted."""
        dispatch, node = self.dispatch, self._worker.node
        later = asyncio.get_running_loop().call_later
        if isinstance(dispatch, Prefill):
            self._timers.append(later(dispatch.predicted_prefill_ms / 1e3, self.end))
            return
        first_ms, last_ms = node.first_token_after_ms, node.ends_after_ms
        if first_ms is None:
            first_ms = dispatch.predicted_ttft_ms - dispatch.waited_ms
        if last_ms is None:
            last_ms = first_ms + dispatch.predicted_total_ms - dispatch.predicted_ttft_ms
        self._timers += (later(first_ms / 1e3, self.first_token), later(last_ms / 1e3, self.end))

    def first_token(self) -> None:
        self._say(Phase.FIRST_TOKEN)
        if self._author is not None:
            self._author.chunk(b'{"choices":[]}')

    def end(self) -> None:
        if self._role is Role.PREFILL:
            self._say(Phase.PREFILLED)
        if self._author is not None:
            self._author.end(output_tokens=1)
        self._over(status="ok", code=200)

    def fail(self, status: int) -> None:
        if self._author is not None:
            self._author.error(Refused(status, "The engine says so.", kind="engine_error", code="engine"))
        self._over(status="error", code=status, reason="invalid" if status == 400 else "engine")

    def cancelled(self) -> None:
        self._over(status="cancelled", code=499)

    def mute(self) -> None:
        """Say nothing any more."""
        for timer in self._timers:
            timer.cancel()
        if self._author is not None:
            self._author.close()

    def _over(self, **how) -> None:
        self.mute()
        self._worker.runs.pop((self.dispatch.tenant, self.dispatch.stream), None)
        self._say(Phase.END, **how)

    def _say(self, phase: Phase, **more) -> None:
        self._worker.event(phase, self.dispatch, self._role, **more)


class Players:
    """All played workers of a scenario, and the collector and coordinator that speak of them."""

    def __init__(self, stage: Stage, nodes: list[Node], *, affinity_rows: int, affinity_hashes: int) -> None:
        self.stage = stage
        self.affinity_rows = affinity_rows
        self.affinity_hashes = affinity_hashes
        self.workers: dict[str, PlayedWorker] = {}
        self._nodes = {node.name: node for node in nodes}
        self._epochs = itertools.count(1)
        self._deltas = itertools.count(1)
        for node in nodes:
            for ordinal in range(node.count):
                played = PlayedWorker(self, node, ordinal)
                self.workers[played.id] = played

    async def start(self) -> None:
        for played in self.workers.values():
            await played.start()
        for name, node in self._nodes.items():
            if not node.joins:
                self.announce(name)

    def announce(self, name: str) -> None:
        """A node's inventory."""
        links = (LinkInfo("RDMA_ROCE", 46.6, 0.4),) if self._nodes[name].linked else ()
        infos = tuple(played.info() for played in self.workers.values() if played.node.name == name)
        self.stage.say(
            subjects.inventory(name),
            NodeInventory(node=name, incarnation=1, epoch=next(self._epochs), workers=infos, links=links),
        )
        for played in self._of_node(name):
            self._affinity(played, full=True)

    def state(self, told: State) -> None:
        """A beat of each of these workers, as a collector passes it on."""
        state = word.pack(
            free_kv=word.free_kv_level(told.free_kv), queue=word.queue_level(told.queue_ms),
            batch=word.batch_level(told.batch), drift=word.drift_level(told.drift), accepting=told.accepting,
            throttled=told.throttled, congested=told.congested, pressed=told.pressed, fault=told.fault,
        )  # fmt: skip
        verdict = Verdict[told.verdict.upper()]
        changes = []
        for played in self.matching(told.worker):
            played.beat += 1
            changes.append(WorkerState(played.id, played.incarnation, state, played.beat, verdict))
            if verdict is Verdict.DEAD:
                played.drop_all()
        self.stage.say(subjects.fleet_delta(), FleetDelta("c", 1, next(self._deltas), tuple(changes)))

    def caches(self, told: Caches) -> None:
        """The engine of a worker holds a prompt."""
        salt = salt_of(told.tenant, "", isolated=bool(told.tenant), adapter=False)
        for played in self.matching(told.worker):
            on: list[int] = []
            for rung in sketch_tokens(prompt_ids(told.prompt), salt=salt).rungs:
                on += played.counters.add(rung)
            self._affinity(played, on=on)

    def flood(self, told: Flood) -> None:
        """More prompts than any table of prompts could hold."""
        turn = itertools.cycle(self.matching(told.worker))
        for _ in range(told.prompts):
            played = next(turn)
            on: list[int] = []
            for rung in sketch_tokens(prompt_ids(f"own {told.tokens}")).rungs:
                on += played.counters.add(rung)
            self._affinity(played, on=on)

    def links(self, told: Links) -> None:
        """The coordinator's link table."""
        links = tuple(
            LinkState(source, target, "RDMA_ROCE", told.gb_per_s, told.setup_ms)
            for source in told.sources
            for target in told.targets
        )
        self.stage.say(subjects.kv_links(), LinkTable(1, "k", links))

    def transfer_fails(self, run: PlayedRun) -> None:
        """The coordinator gives up the transfer of a request's KV, if this is the half that would send it."""
        order = run.dispatch
        if isinstance(order, Prefill):
            self.stage.say(
                subjects.kv_failed(),
                TransferReport(
                    order.split.transfer, order.stream, TransferReason.SPLIT, "aborted", order.worker,
                    order.split.peer, detail="move_failed",
                ),
            )  # fmt: skip

    def restart(self, pattern: str) -> None:
        """Engines start again under the same names."""
        for played in self.matching(pattern):
            played.restart()
        for name in dict.fromkeys(played.node.name for played in self.matching(pattern)):
            self.announce(name)

    def becomes(self, name: str, agent: str) -> None:
        """A node's agent behaves otherwise from now on."""
        self._nodes[name].agent = agent

    def runs(self, pattern: str) -> list[PlayedRun]:
        """What runs now of the requests whose ids match."""
        return [
            run
            for played in self.workers.values()
            for run in list(played.runs.values())
            if fnmatchcase(run.dispatch.stream.id, pattern)
        ]

    def lost(self, pattern: str) -> list[PlayedRun]:
        """What of the requests whose ids match ran in a worker's former life."""
        lost = [run for played in self.workers.values() for run in played.lost]
        return [run for run in lost if fnmatchcase(run.dispatch.stream.id, pattern)]

    def matching(self, pattern: str) -> list[PlayedWorker]:
        """The workers whose ids match."""
        return [played for name, played in self.workers.items() if fnmatchcase(name, pattern)]

    def _of_node(self, name: str) -> list[PlayedWorker]:
        return [played for played in self.workers.values() if played.node.name == name]

    def _affinity(self, played: PlayedWorker, *, on: list[int] | None = None, full: bool = False) -> None:
        played.updates += 1
        rows = played.counters.full() if full else on or []
        self.stage.say(
            subjects.affinity(played.id),
            AffinityUpdate(
                played.id, played.incarnation, played.updates, self.affinity_rows, self.affinity_hashes,
                on=b"".join(row.to_bytes(4, "little") for row in rows), full=full,
            ),
        )  # fmt: skip
