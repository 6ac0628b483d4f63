"""Verdicts: what a collector believes about nodes and workers from the beats it hears.

``UP``; ``SUSPECT``: no beat for max(3 beats, 10 ms), to be used only when nothing better is there; ``DEAD``: none for
100 ms, everything it held is fenced; ``FROZEN``: beats arrive and work is queued, but the engine has not stepped for
max(1 s, 3 predicted steps): to be probed with one request. The first three are a node's, the last is a worker's.

Ages are counted on the board's own time, which advances only while the collector runs: what a stopped collector did
not hear, nobody failed to say. Where half of eight or more nodes fall silent at once, the fault is likelier between
them and us than in all of them: they are suspect, and an alarm is raised, but nobody is dead for it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

import msgspec

NodeKey = int | str
"""A node: its hash on the wire, or its name. One board uses one of the two."""

WorkerKey = tuple[NodeKey, int]
"""A worker: its node and its ordinal there."""

_MS: Final = 1_000_000


class Verdict(IntEnum):
    """Ordered: the higher, the less alive. Of two collectors that heard equally much, the lower verdict wins."""

    UP = 0
    SUSPECT = 1
    FROZEN = 2
    DEAD = 3


class VerdictLimits(msgspec.Struct, frozen=True):
    """When silence means what. All times are nanoseconds."""

    beat_ns: int = 500_000
    """The nodes' beat period."""
    suspect_beats: int = 3
    suspect_floor_ns: int = 10 * _MS
    dead_ns: int = 100 * _MS
    frozen_floor_ns: int = 1_000 * _MS
    frozen_steps: int = 3
    """Predicted steps without a step until a worker is frozen, if that is longer than the floor."""
    tick_ns: int = 2 * _MS
    """The period at which ``tick`` is meant to be called."""
    return_beats: int = 3
    """Times a silent node must be heard, with no silence between, to be up again: until then it is suspect."""
    mass_nodes: int = 8
    mass_hold_ns: int = 60_000 * _MS
    """A mass silence keeps nodes suspect for so long at most; then they are judged one by one again."""
    keep_dead_ns: int = 600_000 * _MS
    """A node dead for so long is forgotten."""
    max_nodes: int = 4_096

    @property
    def suspect_after_ns(self) -> int:
        return max(self.suspect_beats * self.beat_ns, self.suspect_floor_ns)

    @property
    def dead_after_ns(self) -> int:
        """``dead_ns``, but never before a slowly beating node has been suspect as long as it took to become so."""
        return max(self.dead_ns, 2 * self.suspect_after_ns)


class Change(msgspec.Struct, frozen=True):
    """A verdict that is new. ``ordinal`` is None where it is the node's, and so concerns all its workers."""

    node: NodeKey
    ordinal: int | None
    incarnation: int
    sequence: int
    """The last beat heard: of two collectors, the one that names the higher sequence knows better."""
    verdict: Verdict


class MassSilence(msgspec.Struct, frozen=True):
    """The alarm: ``silent`` of ``known`` living nodes are not heard, since ``since_ns`` on the caller's clock."""

    silent: int
    known: int
    since_ns: int


class BoardFull(Exception):
    """More living nodes, or workers of a node, than the board has room for."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(f"the verdict board has room for {limit} {what}")
        self.what = what
        self.limit = limit


class _WorkerWatch:
    """The steps of one worker; it is stalled while work is queued and ``counter`` stays."""

    __slots__ = ("counter", "frozen", "incarnation", "patience_ns", "queued", "since")

    def __init__(self, incarnation: int, counter: int) -> None:
        self.incarnation = incarnation
        self.counter = counter
        self.queued = False
        self.since = 0  # board time from which a step is owed
        self.patience_ns = 0
        self.frozen = False


class NodeWatch:
    """What the board knows about one node."""

    __slots__ = ("heard_at", "heard_in_row", "incarnation", "sequence", "verdict", "workers")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sequence = -1
        self.verdict: Verdict | None = None  # until the first tick
        self.heard_at = 0  # board time of the last beat
        self.heard_in_row = 0  # since the last silence
        self.workers: dict[int, _WorkerWatch] = {}


_MAX_WORKERS_PER_NODE: Final = 256


class VerdictBoard:
    """The verdicts of a whole fleet.

    ``heard`` and ``steps`` only note; ``tick`` judges, and says what changed. Its cost grows with the nodes that are
    silent and the workers that are stalled, not with the fleet. All ``now_ns`` are the collector's monotonic clock;
    one that jumps back stands still until it has caught up.
    """

    def __init__(self, limits: VerdictLimits | None = None) -> None:
        self.limits = limits or VerdictLimits()
        self.alarm: MassSilence | None = None
        """Set while half of eight or more nodes are silent at once."""
        self._time = 0
        self._ticked_ns: int | None = None
        self._nodes: OrderedDict[NodeKey, NodeWatch] = OrderedDict()  # not dead, longest unheard first
        self._dead: OrderedDict[NodeKey, NodeWatch] = OrderedDict()  # longest dead first
        self._owing: OrderedDict[WorkerKey, _WorkerWatch] = (
            OrderedDict()
        )  # with work queued, longest without a step first
        self._returning: dict[NodeKey, NodeWatch] = {}  # heard, and neither new nor up
        self._changes: list[Change] = []
        self._mass_since = 0

    def heard(self, node: NodeKey, sequence: int, now_ns: int, *, incarnation: int = 0) -> None:
        """A beat of ``node`` arrived that counts: which do (no replays, no jumps) is the caller's to say, once.

        A batch of beats may be told by its last one. Another ``incarnation`` than before begins anew: its workers are
        unknown again. Raises ``BoardFull``.
        """
        self.heard_all(((node, incarnation, sequence, now_ns),))

    def heard_all(self, beats: Iterable[tuple[NodeKey, int, int, int]]) -> None:
        """As ``heard``, for (node, incarnation, sequence, when it arrived) of many nodes, longest unheard first."""
        nodes, returning = self._nodes, self._returning
        time, most = self._time, 2 * self.limits.tick_ns
        ticked_ns = self._ticked_ns
        for node, incarnation, sequence, arrived_ns in beats:
            watch = nodes.get(node)
            if watch is None or watch.incarnation != incarnation:
                watch = self._welcome(node, incarnation)
            watch.sequence = sequence
            # As ``_at``, in line: this is done for every node of the fleet hundreds of times a second.
            age = 0 if ticked_ns is None else arrived_ns - ticked_ns
            watch.heard_at = time if age <= 0 else time + (age if age < most else most)
            if watch.verdict is not Verdict.UP:
                watch.heard_in_row += 1
                returning[node] = watch
            if node in nodes:
                nodes.move_to_end(node)

    def steps(
        self,
        worker: WorkerKey,
        step_counter: int,
        queued: bool,
        now_ns: int,
        *,
        predicted_step_ns: int = 0,
        incarnation: int = 0,
    ) -> None:
        """The word of ``worker`` said so; it is enough to tell changes, and those of nodes that were ``heard``.

        ``queued``: its queue or batch level is above 0. ``predicted_step_ns``: how long a step should take it now.
        Workers of unknown nodes are not noted. Raises ``BoardFull``.
        """
        node, ordinal = worker
        watch = self._nodes.get(node) or self._dead.get(node)
        if watch is None:
            return
        state = watch.workers.get(ordinal)
        if state is None or state.incarnation != incarnation:
            if state is None and len(watch.workers) >= _MAX_WORKERS_PER_NODE:
                raise BoardFull("workers per node", _MAX_WORKERS_PER_NODE)
            if state is not None:
                self._settle(worker, watch, state)
            state = watch.workers[ordinal] = _WorkerWatch(incarnation, step_counter)
        limits = self.limits
        state.patience_ns = max(limits.frozen_floor_ns, limits.frozen_steps * predicted_step_ns)
        if not queued or step_counter != state.counter:
            self._settle(worker, watch, state)
        if queued and worker not in self._owing and node in self._nodes:
            state.since = self._at(now_ns)
            self._owing[worker] = state
        state.counter = step_counter
        state.queued = queued

    def stepped(self, steps: Iterable[tuple[WorkerKey, int, int]], now_ns: int) -> None:
        """As ``steps`` for (worker, incarnation, step counter) of many that have stepped, and have work queued still.

        Those of which ``steps`` has not said that work is queued are not noted.
        """
        owing, at = self._owing, self._at(now_ns)
        for worker, incarnation, counter in steps:
            state = owing.get(worker)
            if state is None or state.incarnation != incarnation:
                continue
            if state.frozen:
                self._settle(worker, self._nodes[worker[0]], state)
                owing[worker] = state
            state.counter = counter
            state.since = at
            owing.move_to_end(worker)

    def tick(self, now_ns: int, ran_ns: int | None = None) -> list[Change]:
        """Judge all nodes and workers; return what changed since the last tick.

        ``ran_ns`` is how much of the time since the last tick the collector was running, by its own measure; None:
        all of it. Either way no tick ages anybody by more than two tick periods: a longer gap is a collector that
        was not scheduled, whatever it believes. Read what has arrived before calling.
        """
        gap = 0 if self._ticked_ns is None else max(0, now_ns - self._ticked_ns)
        ran = gap if ran_ns is None else min(gap, max(0, ran_ns))
        self._time += min(ran, 2 * self.limits.tick_ns)
        self._ticked_ns = now_ns if self._ticked_ns is None else max(now_ns, self._ticked_ns)
        self._take_back()
        self._judge_silence(now_ns)
        self._judge_stalls()
        self._forget_long_dead()
        changes, self._changes = self._changes, []
        return changes

    def verdict(self, node: NodeKey, ordinal: int | None = None) -> Verdict | None:
        """The verdict on a node, or on a worker of it, as of the last tick; None for a node never heard."""
        watch = self._nodes.get(node) or self._dead.get(node)
        if watch is None:
            return None
        state = None if ordinal is None else watch.workers.get(ordinal)
        return Verdict.FROZEN if state is not None and state.frozen else watch.verdict

    def frozen(self, node: NodeKey) -> list[int]:
        """The ordinals of the workers of ``node`` that are frozen, as of the last tick."""
        watch = self._nodes.get(node)
        return [] if watch is None else [ordinal for ordinal, state in watch.workers.items() if state.frozen]

    def forget(self, node: NodeKey) -> None:
        """``node`` left the fleet for good. Forgetting an unknown node does nothing."""
        watch = self._nodes.pop(node, None) or self._dead.pop(node, None)
        self._returning.pop(node, None)
        for ordinal in watch.workers if watch else ():
            self._owing.pop((node, ordinal), None)

    def __len__(self) -> int:
        return len(self._nodes) + len(self._dead)

    def _at(self, now_ns: int) -> int:
        """The board time of an event since the last tick."""
        if self._ticked_ns is None:
            return self._time
        return self._time + min(max(0, now_ns - self._ticked_ns), 2 * self.limits.tick_ns)

    def _welcome(self, node: NodeKey, incarnation: int) -> NodeWatch:
        dead = self._dead.get(node)
        if dead is not None and dead.incarnation == incarnation:
            return dead
        if node not in self._nodes and node not in self._dead and len(self) >= self.limits.max_nodes:
            if not self._dead:
                raise BoardFull("nodes", self.limits.max_nodes)
            self._dead.popitem(last=False)
        self.forget(node)
        watch = self._nodes[node] = NodeWatch(incarnation)
        # It has not been silent, so it need not show that it is back.
        watch.heard_in_row = self.limits.return_beats
        return watch

    def _take_back(self) -> None:
        limits = self.limits
        for node, watch in self._returning.items():
            if self._dead.pop(node, None) is not None:
                self._nodes[node] = watch
            verdict = Verdict.UP if watch.heard_in_row >= limits.return_beats else Verdict.SUSPECT
            if verdict is not watch.verdict:
                self._excuse(node, watch)
            self._judge(node, watch, verdict)
        self._returning.clear()

    def _judge_silence(self, now_ns: int) -> None:
        limits = self.limits
        silent = []
        for node, watch in self._nodes.items():
            if self._time - watch.heard_at < limits.suspect_after_ns:
                break
            silent.append((node, watch))
        known = len(self._nodes)
        mass = known >= limits.mass_nodes and 2 * len(silent) >= known
        if mass and self.alarm is None:
            self._mass_since = self._time
        if self.alarm is not None and not mass:
            # The others' beats may be a moment behind: let them be suspect once more before they can be dead.
            for _, watch in silent:
                watch.heard_at = self._time - limits.suspect_after_ns
        since_ns = self.alarm.since_ns if self.alarm is not None else now_ns
        self.alarm = MassSilence(len(silent), known, since_ns) if mass else None
        spared = mass and self._time - self._mass_since < limits.mass_hold_ns
        for node, watch in silent:
            watch.heard_in_row = 0
            if self._time - watch.heard_at >= limits.dead_after_ns and not spared:
                del self._nodes[node]
                self._dead[node] = watch
                self._judge(node, watch, Verdict.DEAD)
            else:
                self._judge(node, watch, Verdict.SUSPECT)

    def _judge_stalls(self) -> None:
        for (node, ordinal), state in self._owing.items():
            age_ns = self._time - state.since
            if age_ns < self.limits.frozen_floor_ns:
                break
            watch = self._nodes[node]
            if not state.frozen and age_ns >= state.patience_ns and watch.verdict is Verdict.UP:
                state.frozen = True
                self._changes.append(Change(node, ordinal, watch.incarnation, watch.sequence, Verdict.FROZEN))

    def _forget_long_dead(self) -> None:
        while self._dead:
            node, watch = next(iter(self._dead.items()))
            if self._time - watch.heard_at < self.limits.keep_dead_ns:
                break
            self.forget(node)

    def _judge(self, node: NodeKey, watch: NodeWatch, verdict: Verdict) -> None:
        if watch.verdict is verdict:
            return
        watch.verdict = verdict
        self._changes.append(Change(node, None, watch.incarnation, watch.sequence, verdict))
        for ordinal, state in watch.workers.items():
            if verdict is Verdict.DEAD:
                self._owing.pop((node, ordinal), None)
                state.frozen = False
            elif state.frozen:
                # A node's verdict is taken for all its workers; this one's is another.
                self._changes.append(Change(node, ordinal, watch.incarnation, watch.sequence, Verdict.FROZEN))

    def _excuse(self, node: NodeKey, watch: NodeWatch) -> None:
        """``node`` is heard again: in the time that nobody heard it, no worker of it could be seen to step."""
        for ordinal, state in watch.workers.items():
            if state.queued:
                state.since = self._time
                self._owing[node, ordinal] = state
                self._owing.move_to_end((node, ordinal))

    def _settle(self, worker: WorkerKey, watch: NodeWatch, state: _WorkerWatch) -> None:
        """``worker`` owes no step: it made one, or has nothing to do."""
        self._owing.pop(worker, None)
        if state.frozen:
            state.frozen = False
            verdict = watch.verdict or Verdict.UP
            self._changes.append(Change(*worker, watch.incarnation, watch.sequence, verdict))
