"""The explored world: the real conductor, the real lease tables of two agents, and a network that does as it likes.

What happens next is always somebody's choice (`World.steps`): a message in flight arrives, in any order; an engine or a
socket gets on; a request reads its blocks. Beyond that a budget of *faults* may be spent: messages lost or doubled,
questions given up while they are still on their way, leases that run out early, connections that break, prefills that
fail, clients that leave, deadlines, and the death of either agent or of the coordinator, each at any step.
"""

from dataclasses import dataclass, field
from functools import cache

from explore.node import BLOCK_TOKENS, KV_BYTES, LEASE_MS, Node, Socket, contents

from quartet_agent.engines.pools import BlocksFenced
from quartet_agent.kv.departures import DepartureEnd
from quartet_agent.kv.mover import MoveError, MoveReason
from quartet_bus import catalogue
from quartet_bus.config.schema import Config, KvSection
from quartet_bus.messages import (
    Cancel,
    KvCommand,
    KvLayout,
    KvReply,
    KvVerb,
    LinkInfo,
    NodeInventory,
    Phase,
    RequestEvent,
    StreamId,
    TransferPlan,
    TransferReason,
    WorkerInfo,
)
from quartet_core.transfer import Hold, Side, State
from quartet_kv_coordinator.commands import ATTEMPTS
from quartet_kv_coordinator.conductor import Conductor
from quartet_kv_coordinator.lanes import Lanes
from quartet_kv_coordinator.roster import Roster
from quartet_kv_coordinator.takeover import Survey, orphaned
from quartet_sim.content import payload
from quartet_sim.pool import Fenced

LEASE_NS = int(LEASE_MS * 1e6)
DEADLINE_MS = 1_000_000.0
TENANT = "tenant"


class Silent:
    """Metrics that nobody reads."""

    def __getattr__(self, name):
        return Silent()

    def __call__(self, *_, **__):
        return Silent()

    def __reduce__(self):
        return Silent, ()


class SharedRoster(Roster):
    """Who is there, by the agents' incarnations: the same object in all worlds, since nobody changes it."""

    def __reduce__(self):
        return roster, self.made_of


@cache
def roster(source: int, target: int, *more: str) -> SharedRoster:
    """Both agents' workers, with ``more`` capabilities than every transfer needs."""
    known = SharedRoster(catalogue.load(Config()))
    known.made_of = (source, target, *more)
    for node, incarnation in (("p", source), ("d", target)):
        info = WorkerInfo(
            id=f"{node}-0", ordinal=0, incarnation=incarnation, hardware="H100_SXM5", model="llama", precision="fp8",
            tp=1, gpus=(0,), kv_tokens=1000, max_context=100, max_batch=8, chunk_tokens=8,
            layout=KvLayout(BLOCK_TOKENS, 131_072, "bf16"), engine="simulated",
            capabilities=("export", "import", "reserve", *more),
        )  # fmt: skip
        known.learn(NodeInventory(node, incarnation, 1, (info,), links=(LinkInfo("TCP", 9.0, 1.0),)), 0)
    return known


@dataclass(eq=False)
class Ask:
    """A question of the coordinator, put up to `ATTEMPTS` times; only the newest copy's answer counts."""

    label: tuple
    node: str
    command: KvCommand
    wanted: object
    answered: object
    attempt: int = 1


@dataclass(eq=False)
class Request:
    """One split request: its decode half waits at the target, and its client for an outcome."""

    transfer: str
    stream: StreamId
    half: str = "reading"
    outcome: str = ""
    told: list[str] = field(default_factory=list)


class World:
    """``transfers`` requests share both agents' pools, which hold ``room`` of them; ``faults`` may happen.

    With ``parts`` a prompt may be computed in two parts, so that the first is sent while the second is computed.
    """

    def __init__(self, faults: int, *, transfers: int = 1, room: int = 1, blocks: int = 2, parts: bool = True) -> None:
        self.parts = parts
        self.blocks = blocks
        self.room = room
        self.faults = faults
        self.harmed = False
        self.story: tuple = ()
        """What happened so far, the last first: (the story before, step)."""
        self.time_ns = 0
        self.term = 1
        self.instance = "c"
        self.lives = {"p": 1, "d": 1}
        self.nodes = {name: Node(self, name, 1, blocks * room) for name in self.lives}
        self.wire: list[tuple] = []
        self.asks: list[Ask] = []
        self.watched: dict[str, TransferPlan] = {}
        self.requests: dict[str, Request] = {}
        self.whole: set[tuple[int, str]] = set()
        """Prompts that were computed to their end, each in which life of the source."""
        self.unheard: set[str] = set()
        """Transfers whose outcome was told and lost on its way to the router."""
        self.lanes = Lanes(KvSection(transfers_per_link=1))
        self.conductor = self._conductor()
        for number in range(transfers):
            self._arrive(f"t{number}", StreamId(f"r{number}"))

    def _conductor(self) -> Conductor:
        return Conductor(self, roster(*self.lives.values()), self.lanes, Silent(), lease_ms=LEASE_MS)

    def _arrive(self, transfer: str, stream: StreamId) -> None:
        plan = TransferPlan(
            transfer, TransferReason.SPLIT, stream, "llama", "p-0", 1, "d-0", 1, self.blocks * BLOCK_TOKENS, KV_BYTES,
            DEADLINE_MS, router="router", tenant=TENANT,
        )  # fmt: skip
        self.requests[transfer] = Request(transfer, stream)
        self.watched[transfer] = plan
        self.wire += [("plan", transfer), ("dispatch", transfer)]

    # The office of the conductor, and what agents say ----------------------------------------------------------------

    def now_ns(self) -> int:
        return self.time_ns

    def carry(self, node, command, wanted, answered) -> None:
        label = (command.verb.value, command.transfer, command.epoch, command.worker, self.term)
        ask = Ask(label, node, command, wanted, answered)
        self.asks.append(ask)
        self.wire.append(("command", ask, 1))

    def announce(self, report, failure) -> None:
        request = self.requests[report.transfer]
        request.told.append("done" if failure is None else "failed")
        self.watched.pop(report.transfer, None)
        if failure is not None:
            self.wire.append(("outcome", report.transfer, True))

    def progress(self, report) -> None:
        self.wire.append(("progress", report))

    def phase(self, transfer: str, phase: Phase, node: Node, status: str = "", reason: str = "") -> None:
        event = RequestEvent(
            phase, self.requests[transfer].stream, TENANT, "llama", node.worker.id, node.worker.incarnation,
            status=status, reason=reason,
        )  # fmt: skip
        self.wire.append(("phase", event))

    # The decode half, as ``quartet_agent.answers`` has it ------------------------------------------------------------

    def committed(self, life: int, worker: str, transfer: str) -> None:
        assert any(name == transfer for _, name in self.whole), "committed before it was computed"
        if self.requests[transfer].half == "read":
            self._reads(self.requests[transfer])

    def lost(self, life: int, worker: str, transfer: str, end) -> None:
        request = self.requests[transfer]
        if request.half in ("reading", "read") and life == self.lives["d"]:
            self._turn_back(request, end.value)

    def _turn_back(self, request: Request, reason: str) -> None:
        request.half = "over"
        self.phase(request.transfer, Phase.REFUSED, self.nodes["d"], reason=reason)
        self._over(request, "failed", "error")

    def _over(self, request: Request, outcome: str, status: str) -> None:
        request.half = "over"
        request.outcome = request.outcome or outcome
        self.nodes["d"].arrivals.release(request.transfer)
        self.phase(request.transfer, Phase.END, self.nodes["d"], status)

    def _reads(self, request: Request) -> None:
        node = self.nodes["d"]
        try:
            node.kv.adopt(request.transfer, contents(request.transfer, self.blocks))
        except Fenced:
            self._turn_back(request, "kv_fenced")
            return
        node.arrivals.hand_over(request.transfer)
        self._over(request, "ok", "ok")

    # What may happen -------------------------------------------------------------------------------------------------

    def steps(self) -> list[tuple]:
        """Everything that may happen next, faults included while there are any left."""
        found: list[tuple] = []
        seen = set()
        for index, message in enumerate(self.wire):
            label = self._label(message)
            if label in seen:
                continue
            seen.add(label)
            found.append(("deliver", index))
            if self.faults and message[0] != "gone":
                found += [("lose", index), ("double", index)]
        for name, node in self.nodes.items():
            room = node.pool.blocks.available >= self.blocks
            found += [("computed", name, t) for t, state in node.prefills.items() if room and state == "computing"]
            found += [
                ("part", name, t)
                for t, state in node.prefills.items()
                if room and state == "computing" and t not in node.parts and self.parts
            ]
            found += [("computed", name, t) for t in node.parts if not room]
            found += [("flow", name, i) for i, socket in enumerate(node.sockets) if node.can_flow(socket)]
            if node.kv.freed and node.pool.blocks.available:
                found.append(("grab", name))
        found += [("begin", request.transfer) for request in self.requests.values() if request.half == "reading"]
        return found + self._faults() if self.faults else found

    @property
    def at_rest(self) -> bool:
        """Whether nothing happens any more unless time passes or a fault comes."""
        faults, self.faults = self.faults, 0
        waits = all(step[0] == "grab" for step in self.steps())
        self.faults = faults
        return waits

    def _faults(self) -> list[tuple]:
        found: list[tuple] = [("silent", index) for index in range(len(self.asks))]
        for name, node in self.nodes.items():
            found += [("expire", name, index) for index in range(len(node.loop.timers))]
            found += [("break_off", name, index) for index in range(len(node.sockets))]
            found += [("prefill_fails", t) for t, state in node.prefills.items() if state == "computing"]
            found += [("preempted", name, t) for t in node.parts]
            found.append(("dies", name))
        found += [("leaves", request.transfer) for request in self.requests.values() if not request.outcome]
        live = any(not entry.machine.announced for entry in self.conductor.book)
        found += [("tick", LEASE_NS // 3), ("tick", int(DEADLINE_MS * 1e6))] if live else []
        return [*found, *(("takeover", how) for how in ("heard", "unheard", "unplanned", "unreachable"))]

    FREE = ("deliver", "part", "computed", "flow", "grab", "begin")

    def step(self, name: str, *arguments) -> None:
        """Let one of `steps` happen, and check what must always hold."""
        if name not in self.FREE:
            self.faults -= 1
            self.harmed = True
        at_wire = name in ("deliver", "lose", "double")
        self.story = (self.story, (name, *(self._label(self.wire[arguments[0]]) if at_wire else arguments)))
        getattr(self, name)(*arguments)
        self.wire = [message for message in self.wire if self._matters(message)]
        self.check()

    def deliver(self, index: int) -> None:
        message = self.wire.pop(index)
        getattr(self, "_hear_" + message[0])(*message[1:])

    def lose(self, index: int) -> None:
        message = self.wire.pop(index)
        if message[0] == "outcome":
            self.unheard.add(message[1])

    def double(self, index: int) -> None:
        self.wire.append(self.wire[index])

    def _hear_plan(self, transfer: str) -> None:
        plan = self.watched.get(transfer)
        if plan is not None:
            self.conductor.plan(plan, self.time_ns)

    def _hear_dispatch(self, transfer: str) -> None:
        if self.lives["p"] == 1:
            self.nodes["p"].dispatch(transfer, self.requests[transfer].stream)

    def _hear_command(self, ask: Ask, attempt: int) -> None:
        reply = self.nodes[ask.node].commands.answer(ask.command)
        self.wire.append(("reply", ask, attempt, reply))

    def _hear_reply(self, ask: Ask, attempt: int, reply: KvReply) -> None:
        if ask in self.asks and ask.attempt == attempt:
            self.asks.remove(ask)
            ask.answered(reply)

    def _hear_progress(self, report) -> None:
        self.conductor.progress(report)

    def _hear_phase(self, event: RequestEvent) -> None:
        self.conductor.request_event(event)

    def _hear_outcome(self, transfer: str, failed: bool) -> None:
        request = self.requests[transfer]
        if failed and not request.outcome:
            request.outcome = "failed"  # the router tries elsewhere, and ends both halves of this try
            self.wire += [("cancel", "p", transfer), ("cancel", "d", transfer)]

    def _hear_cancel(self, where: str, transfer: str) -> None:
        request = self.requests[transfer]
        if where == "coordinator":
            self.conductor.cancelled(Cancel(request.stream.id, tenant=TENANT))
        elif where == "p":
            if self.nodes["p"].prefills.get(transfer) in ("computing", "kept"):
                self._no_prefill(transfer, DepartureEnd.CANCELLED, "cancelled")
            else:
                self.nodes["p"].prefills.setdefault(transfer, "over")  # it overtook its dispatch
        elif request.half != "over":
            self._over(request, "cancelled", "cancelled")

    def _hear_gone(self, worker: str, incarnation: int) -> None:
        self.conductor._roster = roster(*self.lives.values())
        self.conductor.gone([(worker, incarnation)])

    def part(self, name: str, transfer: str) -> None:
        self.nodes[name].part(transfer)

    def preempted(self, name: str, transfer: str) -> None:
        self.nodes[name].preempted(transfer)

    def computed(self, name: str, transfer: str) -> None:
        node = self.nodes[name]
        node.computed(transfer)
        if node.prefills[transfer] == "kept":
            self.phase(transfer, Phase.PREFILLED, node)

    def flow(self, name: str, index: int) -> None:
        """The next piece of a send crosses, or its sender learns that it does not."""
        node = self.nodes[name]
        socket = node.sockets[index]
        departure = node.departures._departures.get(socket.transfer)
        if departure is None or departure.sending is not socket:
            node.sockets.pop(index)  # cancelled
            return
        try:
            self._cross(node, socket)
        except (MoveError, BlocksFenced) as error:
            node.sockets.pop(index)
            node.departures.unsendable(departure, str(error), 1.0)
            return
        if socket.stage == socket.total + 2:
            node.sockets.pop(index)
            node.departures.sent(departure, 64, 1.0, "")

    def _cross(self, node: Node, socket: Socket) -> None:
        if socket.broken:
            raise MoveError(MoveReason.CONNECTION)
        stage, socket.stage = socket.stage, socket.stage + 1
        if stage == 0:
            socket.intake = self.nodes["d"].arrivals.open(socket.transfer, socket.epoch, socket.secret)
        elif stage <= socket.total:
            block = next(node.kv.export(socket.transfer, stage - 1))
            right = payload(contents(self.named(socket.transfer), socket.total)[stage - 1], BLOCK_TOKENS)
            assert block == right, "the source read blocks that were not its prompt's any more"
            socket.intake.take(stage - 1, [block])
        else:
            assert node.kv.exportable(socket.transfer).whole, "the last word before all was computed"
            socket.intake.complete()

    def named(self, transfer: str) -> str:
        """Whose KV it is: in this world, a transfer's own."""
        return transfer

    def grab(self, name: str) -> None:
        self.nodes[name].grab()

    def begin(self, transfer: str) -> None:
        request = self.requests[transfer]
        request.half = "read"
        if self.nodes["d"].arrivals.committed("d-0", transfer):
            self._reads(request)

    # Faults ----------------------------------------------------------------------------------------------------------

    def silent(self, index: int) -> None:
        """The coordinator has waited long enough for an answer, which may still come: ask again, or give up."""
        ask = self.asks[index]
        if ask.attempt < ATTEMPTS and ask.wanted():
            ask.attempt += 1
            self.wire.append(("command", ask, ask.attempt))
        else:
            self.asks.remove(ask)
            ask.answered(None)

    def expire(self, name: str, index: int) -> None:
        self.nodes[name].loop.timers[index].fire()

    def break_off(self, name: str, index: int) -> None:
        self.nodes[name].sockets[index].broken = True

    def prefill_fails(self, transfer: str) -> None:
        self._no_prefill(transfer, DepartureEnd.FAILED, "error")

    def _no_prefill(self, transfer: str, end: DepartureEnd, status: str) -> None:
        self.nodes["p"].no_prefill(transfer, end)
        self.phase(transfer, Phase.END, self.nodes["p"], status)

    def leaves(self, transfer: str) -> None:
        """The client goes away, or sends the request again."""
        self.requests[transfer].outcome = "cancelled"
        self.wire += [("cancel", where, transfer) for where in ("p", "d", "coordinator")]

    def tick(self, ns: int) -> None:
        self.time_ns += ns
        self.conductor.tick()

    def dies(self, name: str) -> None:
        """An agent dies and comes back: whatever it held is gone, and connections with it."""
        gone = self.nodes[name].worker
        self.lives[name] += 1
        self.nodes[name] = Node(self, name, self.lives[name], self.blocks * self.room)
        for socket in self.nodes["p"].sockets:
            socket.broken = True
        if name == "d":
            for request in self.requests.values():
                request.half = "over"
                request.outcome = request.outcome or "failed"  # fenced: the router hears of deaths, too
        self.wire.append(("gone", gone.id, gone.incarnation))

    def takeover(self, how: str) -> None:
        """The coordinator dies at this step, and a standby takes its place, with what it heard and what it finds."""
        self.term += 1
        self.asks.clear()
        plans = list(self.watched.values())
        if how == "unheard":  # the last outcomes did not reach the standby
            plans = [self.plan_of(transfer) for transfer in self.requests]
        elif how == "unplanned":
            plans = []
            self.watched.clear()
        self.lanes = Lanes(KvSection(transfers_per_link=1))
        self.conductor = self._conductor()
        reachable = [node for name, node in self.nodes.items() if how != "unreachable" or name != "d"]
        found: dict[str, list] = {}
        for node in reachable:
            leases = node.commands.answer(KvCommand(KvVerb.LEASES, "", self.term, self.instance)).leases
            for lease in leases:
                found.setdefault(lease.transfer, []).append((node.name, lease))
        survey = Survey(_Direct({node.name: node for node in reachable}), self.term, self.instance)
        begun = [plan for plan in plans if not any(m[:2] == ("plan", plan.transfer) for m in self.wire)]
        for plan in begun:
            self.conductor.adopt(plan, self.time_ns, _run(survey.fate(plan, "d", found.get(plan.transfer, []))))
        for transfer, leases in found.items():
            if transfer not in self.conductor.book and transfer not in self.watched:
                self._free(survey, transfer, orphaned(leases))

    def _free(self, survey: Survey, transfer: str, leases: list) -> None:
        if leases:
            self.wire.append(("outcome", transfer, True))
        for node, lease in leases:
            _run(survey.free(node, lease))

    def plan_of(self, transfer: str) -> TransferPlan:
        twin = World.__new__(World)
        twin.blocks, twin.requests, twin.watched, twin.wire = self.blocks, {}, {}, []
        twin._arrive(transfer, self.requests[transfer].stream)
        return twin.watched[transfer]

    # What must hold --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever happened: nothing leaks, nothing stale is read or written, nothing is announced twice."""
        for node in self.nodes.values():
            node.check()
        for lane in self.lanes:
            assert 0 <= lane.link.bytes_in_flight <= lane.sending * KV_BYTES, "bytes on a link that nobody sends"
            assert lane.trickling >= 0
        for entry in self.conductor.book:
            machine = entry.machine
            if machine.ended:
                assert {machine.hold(side) for side in Side} == {Hold.NOTHING}
            sends = entry.route is not None and entry.route.lane.is_sending(entry.plan.transfer)
            assert not sends or machine.state is State.MOVING, "a place on a link is kept by who does not send"
        for request in self.requests.values():
            assert self.harmed or "failed" not in request.told or self.room < len(self.requests), "failed for nothing"
            assert len(request.told) <= self.term, "one coordinator announced twice"

    def drain(self) -> None:
        """No fault any more: everything in flight arrives, time passes. Then nothing may be left anywhere."""
        self.faults = 0
        for _ in range(500):
            if not self._drain_one():
                break
        else:
            raise AssertionError("it never comes to rest")
        for request in self.requests.values():
            assert request.outcome, "a request never heard what became of it"
        for node in self.nodes.values():
            assert not node.pool.leases(), "leased for ever"
            assert not node.pool.pins(), "pinned for ever"
            assert not node.loop.timers
            assert not len(node.arrivals)
            assert not len(node.departures)
        assert not len(self.conductor.book), "a transfer never ended"
        assert not any(lane.busy or lane.link.bytes_in_flight for lane in self.lanes), "a link is kept"
        if not self.harmed and self.room >= len(self.requests):
            for request in self.requests.values():
                assert (request.outcome, request.told) == ("ok", ["done"])

    def _drain_one(self) -> bool:
        steps = [step for step in self.steps() if step[0] != "grab"]
        if steps:
            self.step(*steps[0])
        elif self.asks:
            self.silent(0)
        elif timers := [timer for node in self.nodes.values() for timer in node.loop.timers]:
            timers[0].fire()
        elif len(self.conductor.book):
            self.tick(int(DEADLINE_MS * 1e6))
        elif stuck := [t for t, state in self.nodes["p"].prefills.items() if state == "computing"]:
            self.prefill_fails(stuck[0])  # no room for it until its own deadline
        elif waiting := [request for request in self.requests.values() if not request.outcome]:
            # Its plan, or the word that it failed, was lost before anything was leased: its patience ends.
            assert self.harmed
            assert not self.nodes["d"].arrivals.holds("", waiting[0].transfer), "leased, and neither ended nor renewed"
            assert waiting[0].half != "over", "it is over, and its client has not heard"
            self._turn_back(waiting[0], "kv_expired")
        else:
            return False
        self.check()
        return True

    # Who is who ------------------------------------------------------------------------------------------------------

    def _label(self, message: tuple) -> tuple:
        kind, *rest = message
        match kind:
            case "command":
                return kind, *rest[0].label, rest[1], rest[0] in self.asks
            case "reply":
                ask, attempt, reply = rest
                # an answer to a question that was put again, or given up, is heard by nobody
                counts = ask in self.asks and ask.attempt == attempt
                return (kind, *ask.label, reply.ok, reply.reason, reply.epoch) if counts else (kind,)
            case "progress":
                return kind, rest[0].transfer, rest[0].state, rest[0].epoch, rest[0].computing, rest[0].left_bytes
            case "phase":
                event = rest[0]
                return kind, event.stream.id, event.phase, event.worker, event.incarnation, event.status, event.reason
        return message

    def tell(self) -> str:
        """The story, a step a line."""
        lines, story = [], self.story
        while story:
            story, step = story
            lines.append("  " + " ".join(str(each) for each in step))
        return "\n".join(reversed(lines))

    def _matters(self, message: tuple) -> bool:
        """Whether hearing it could still change anything. What could not is gone at once: fewer worlds, none lost."""
        kind, *rest = message
        match kind:
            case "reply":
                return rest[0] in self.asks and rest[0].attempt == rest[1]
            case "progress":
                return self._concerns_coordinator(rest[0].transfer)
            case "phase":
                return self._concerns_coordinator("t" + rest[0].stream.id[1:])
            case "outcome":
                return rest[1] and not self.requests[rest[0]].outcome
            case "cancel":
                where, transfer = rest
                if where == "coordinator":
                    return self._concerns_coordinator(transfer)
                if where == "d":
                    return self.requests[transfer].half != "over"
                return self.nodes["p"].prefills.get(transfer) != "over"
        return True

    def _concerns_coordinator(self, transfer: str) -> bool:
        entry = self.conductor.book.live(transfer)
        if entry is not None:
            return not entry.machine.announced
        return any(message[:2] == ("plan", transfer) for message in self.wire)

    def key(self) -> tuple:
        """What tells this world from another one."""
        conductor = self.conductor
        return (
            self.term,
            self.faults,
            self.time_ns,
            self.harmed,
            tuple(sorted(map(repr, map(self._label, self.wire)))),
            tuple(sorted((*map(repr, ask.label), ask.attempt) for ask in self.asks)),
            tuple(sorted(self.watched)),
            tuple(sorted(self.unheard)),
            tuple(
                (r.half, r.outcome, tuple(r.told)) for r in self.requests.values()
            ),
            tuple(self._entry_key(entry) for entry in conductor.book),
            tuple(conductor.book._history),
            tuple((ask, tuple(event.phase for event in kept[1])) for ask, kept in conductor._early.items()),
            tuple(
                (tuple((name, s.trickles) for name, s in lane._sending.items()), tuple(lane._waiting))
                for lane in self.lanes
            ),
            tuple(node.key() for node in self.nodes.values()),
        )  # fmt: skip

    @staticmethod
    def _entry_key(entry) -> tuple:
        m = entry.machine
        renewals = tuple(m._asked_ns.items()), tuple(m._renewed_ns.items())
        holds = tuple(m._holds.values())
        settled = entry.trickled, entry.left_bytes, entry.settled_bytes
        told = m.begun, m.ready, m.taken, m.moving
        return entry.plan.transfer, m.state, m.epoch, told, holds, renewals, entry.reserved_ns, settled


class _Direct:
    """``Commands`` without a network: the answer is there at once, or (a node that cannot be reached) never."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self._nodes = nodes

    async def put(self, node: str, command: KvCommand, wanted) -> KvReply | None:
        found = self._nodes.get(node)
        return None if found is None else found.commands.answer(command)


def _run(work):
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")
