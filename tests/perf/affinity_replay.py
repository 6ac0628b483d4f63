"""Replays prompts over a fleet of caches, routed by the real ``Routing``, with affinity as it is or by an exact index.

All but the index is the same in both: the policy, the filters, the ledger, the words. Agents' counters, their messages
and the table are the product's own. What stands for an engine is simple, and quick enough for whole traces: it computes
one prompt at a time, first come first served, in the time that its profile says, decode steps carried along; a decode
runs at the step time of the batch it joined. Its KV is an LRU of the trace's blocks, of which those in use stay.
"""

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import fleets

from quartet_agent.affinity import AffinityAuthor
from quartet_bus.messages import AffinityUpdate
from quartet_core import filters
from quartet_core.ladder import RUNGS, Sketch, covered_tokens
from quartet_core.plan import Ask
from quartet_core.profile import Profile
from quartet_core.routing import Routing
from quartet_core.verdict import Verdict
from quartet_core.word import batch_level, free_kv_level, pack, queue_level

TTFT_MS, TPOT_MS = 2_000.0, 60.0
MAX_CONTEXT = 1 << 20
"""Agents' sessions outgrow the 8B's own window; here the KV memory alone bounds them."""


class Prompt(Sketch, frozen=True):
    """A sketch that also knows the prompt's whole blocks and how many tokens one has."""

    blocks: Any
    block_tokens: int
    output_tokens: int

    def holds_of(self, tokens: int) -> int:
        """The id of the block in which the first ``tokens`` tokens end."""
        block: int = self.blocks[(tokens - 1) // self.block_tokens]
        return block


class Workload:
    """Prompts by number, when they arrive (milliseconds, number), and which rungs end in which block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prompts: dict[int, Prompt] = {}
        self.rungs_in: dict[int, tuple[int, ...]] = {}

    def add(
        self,
        number: int,
        tokens: int,
        rungs: tuple[int, ...],
        blocks: Sequence[int],
        block_tokens: int,
        output_tokens: int,
    ) -> None:
        """Add a prompt. An equal block id must mean an equal prefix up to and including that block."""
        self.prompts[number] = Prompt(rungs, tokens, blocks, block_tokens, max(output_tokens, 1))
        rungs_in = self.rungs_in
        fresh = bisect_left(blocks, True, key=lambda block: block not in rungs_in)
        found: dict[int, list[int]] = {block: [] for block in blocks[fresh:]}
        for rung, depth in zip(rungs, RUNGS, strict=False):
            place = (depth * 64 - 1) // block_tokens
            if place >= fresh:
                found[blocks[place]].append(rung)
        for block, ending in found.items():
            rungs_in[block] = tuple(ending)

    @property
    def mean_output_tokens(self) -> float:
        """What a router has learned of the answers' lengths."""
        return sum(prompt.output_tokens for prompt in self.prompts.values()) / len(self.prompts)


class ExactIndex:
    """What the table is measured against: block → plane of the workers that hold it. Answers as the table does, but in
    tokens instead of rungs, to the block."""

    def __init__(self) -> None:
        self.planes: dict[int, int] = {}
        self.most_entries = 0

    def turn(self, slot: int, on: Iterable[int], off: Iterable[int]) -> None:
        """A worker's blocks were cached or evicted."""
        planes, bit = self.planes, 1 << slot
        for block in on:
            planes[block] = planes.get(block, 0) | bit
        self.most_entries = max(self.most_entries, len(planes))
        for block in off:
            left = planes[block] ^ bit
            if left:
                planes[block] = left
            else:
                del planes[block]

    def deepest(self, sketch: Prompt, mask: int, **_as_the_table: int) -> list[tuple["Tokens", int]]:
        """The workers of ``mask`` by how many tokens of the prompt each holds, most first."""
        blocks, planes = sketch.blocks, self.planes
        groups = []
        beyond, left = len(blocks), mask
        while beyond and left:
            deep = bisect_left(blocks, True, 0, beyond, key=lambda block: not planes.get(block, 0) & left)
            if not deep:
                break
            found = planes[blocks[deep - 1]] & left
            groups.append((Tokens(min(deep * sketch.block_tokens, sketch.tokens)), found))
            left ^= found
            beyond = deep
        return groups


class Tokens(int):
    """A depth in tokens, where the table tells the number of a rung."""


class WatchedTable:
    """The router's table, with every answer compared with the exact index. ``options`` change how it is asked."""

    def __init__(self, table: Any, index: ExactIndex, options: dict[str, int]) -> None:
        self._table = table
        self._index = index
        self._options = options
        self.lookups = 0
        self.false_holders = 0

    def deepest(self, sketch: Prompt, mask: int, **options: int) -> list[tuple[int, int]]:
        """As the table says. A worker told deeper than it holds is a false holder."""
        groups: list[tuple[int, int]] = self._table.deepest(sketch, mask, **(options | self._options))
        self.lookups += 1
        for rung, plane in groups:
            true = self._index.planes.get(sketch.holds_of(covered_tokens(rung)), 0)
            self.false_holders += (plane & ~true).bit_count()
        return groups


class RoundedIndex:
    """The exact index, its depths rounded down to ``depths`` (tokens, rising): what another ladder would tell."""

    def __init__(self, index: ExactIndex, depths: Sequence[int]) -> None:
        self._index = index
        self._depths = depths

    def deepest(self, sketch: Prompt, mask: int, **_as_the_table: int) -> list[tuple[Tokens, int]]:
        """As the exact index, rounded."""
        rounded: dict[int, int] = {}
        for tokens, plane in self._index.deepest(sketch, mask):
            place = bisect_right(self._depths, tokens)
            if place:
                depth = self._depths[place - 1]
                rounded[depth] = rounded.get(depth, 0) | plane
        return [(Tokens(depth), plane) for depth, plane in rounded.items()]


@dataclass
class Rival:
    """Another way to know who holds what, asked for the same decisions in the same states: what came of its choices.

    Prompts' tokens truly held where it would send them, and their times to the first token as the policy predicts them
    from what is truly held.
    """

    index: Any
    found_tokens: int = 0
    ttft_ms: float = 0.0
    choices: list[int] = field(default_factory=list)


class PrefixCache:
    """An LRU of ``capacity`` blocks. Blocks in use stay; a prefix leaves from its end, so what is left is whole."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._uncached = 0  # blocks of answers, and of prompts that are being computed
        self.gained: list[int] = []
        self.lost: list[int] = []

    @property
    def free_fraction(self) -> float:
        """Free, or to be had by forgetting."""
        return 1.0 - (len(self._uses) - len(self._idle) + self._uncached) / self.capacity

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` blocks are cached."""
        uses = self._uses
        return bisect_left(blocks, True, 0, limit, key=lambda block: block not in uses)

    def take(self, blocks: Sequence[int], hits: int, more: int) -> bool:
        """Use the first ``hits`` blocks and room for ``more``; False, and nothing changed, when that does not fit."""
        uses, idle = self._uses, self._idle
        found = blocks[:hits]
        available = self.capacity - len(uses) + len(idle) - self._uncached
        if more > available - sum(block in idle for block in found):
            return False
        for block in found:
            if not uses[block]:
                del idle[block]
            uses[block] += 1
        self._uncached += more
        for _ in range(len(uses) + self._uncached - self.capacity):
            block, _unused = idle.popitem(last=False)
            del uses[block]
            self.lost.append(block)
        return True

    def keep(self, blocks: Sequence[int]) -> None:
        """Blocks were computed in room that was taken. One that is cached already gives its room back."""
        uses, idle = self._uses, self._idle
        for block in blocks:
            others = uses.get(block)
            if others is None:
                self.gained.append(block)
            elif not others:
                del idle[block]
            uses[block] = (others or 0) + 1
        self._uncached -= len(blocks)

    def leave(self, blocks: Sequence[int], answer_blocks: int) -> None:
        """A request no longer uses its blocks."""
        uses, idle = self._uses, self._idle
        for block in reversed(blocks):
            left = uses[block] = uses[block] - 1
            if not left:
                idle[block] = None
        self._uncached -= answer_blocks


@dataclass(slots=True)
class Run:
    """A request on its worker."""

    number: int
    prompt: Prompt
    arrived_ms: float
    guess_ms: float
    hits: int = 0
    answer_blocks: int = 0


class Server:
    """What stands for a worker: its engine, its cache, and its agent's side of affinity."""

    def __init__(self, slot: int, facts: Any, profile: Profile, workload: Workload, block_tokens: int) -> None:
        self.slot = slot
        self.id = facts.id
        self.incarnation = facts.incarnation
        self.hardware = facts.hardware
        self.beat = 0
        self.cache = PrefixCache(facts.kv_tokens // block_tokens)
        self.queue: deque[Run] = deque()
        self.computing: Run | None = None
        self.batch = 0
        self.context_tokens = 0
        self.updates: list[AffinityUpdate] = []
        self.author = AffinityAuthor(
            SimpleNamespace(id=facts.id, incarnation=facts.incarnation, adapter=self),
            fleets.AFFINITY_ROWS, fleets.AFFINITY_HASHES, lambda _, update: self.updates.append(update),
        )  # fmt: skip
        self._rungs_in = workload.rungs_in
        self._profile = profile
        self._chunk_tokens = facts.chunk_tokens
        self._until_ms = 0.0

    def submit(self, run: Run) -> None:
        """Queue a request."""
        prompt = run.prompt
        run.guess_ms = self._profile.prefill_ms(*self._parts(prompt, self._hits(prompt)))
        every = -(-(prompt.tokens + prompt.output_tokens) // prompt.block_tokens)
        # An answer that outgrows the memory ends there.
        run.answer_blocks = min(every, self.cache.capacity) - len(prompt.blocks)
        self.queue.append(run)

    def cached_tokens(self, prompt: Prompt) -> int:
        """How many tokens of a prompt need not be computed here."""
        return self._parts(prompt, self._hits(prompt))[0]

    def start(self, now_ms: float) -> float | None:
        """Begin the next prompt, if one waits and fits; return when its first token is there."""
        if self.computing is not None or not self.queue:
            return None
        run = self.queue[0]
        blocks = run.prompt.blocks
        run.hits = self._hits(run.prompt)
        if not self.cache.take(blocks, run.hits, len(blocks) - run.hits + run.answer_blocks):
            return None
        self.queue.popleft()
        self.computing = run
        cached, new = self._parts(run.prompt, run.hits)
        iterations = -(-new // self._chunk_tokens)
        carried_ms = self._step_ms() - self._profile.weight_read_ms if self.batch else 0.0
        self._until_ms = now_ms + self._profile.prefill_ms(cached, new) + iterations * carried_ms
        return self._until_ms

    def computed(self, now_ms: float) -> tuple[Run, float]:
        """The prompt is computed; return it, and when its answer will be complete."""
        run = self.computing
        assert run is not None
        self.computing = None
        self.cache.keep(run.prompt.blocks[run.hits :])
        self.batch += 1
        self.context_tokens += run.prompt.tokens
        return run, now_ms + run.prompt.output_tokens * self._step_ms()

    def ended(self, run: Run) -> None:
        """An answer is complete."""
        self.batch -= 1
        self.context_tokens -= run.prompt.tokens
        self.cache.leave(run.prompt.blocks, run.answer_blocks)

    def word(self, now_ms: float) -> int:
        """What its beats say."""
        waiting_ms = sum(run.guess_ms for run in self.queue)
        if self.computing is not None:
            waiting_ms += self._until_ms - now_ms
        self.beat += 1
        return pack(
            free_kv=free_kv_level(self.cache.free_fraction), queue=queue_level(waiting_ms),
            batch=batch_level(self.batch), drift=0, accepting=True,
        )  # fmt: skip

    def drain_rungs(self) -> tuple[list[int], list[int]]:
        """As an engine adapter does for its agent."""
        rungs_in = self._rungs_in
        cache = self.cache
        return (
            [rung for block in cache.gained for rung in rungs_in[block]],
            [rung for block in cache.lost for rung in rungs_in[block]],
        )

    def _hits(self, prompt: Prompt) -> int:
        # An engine computes at least one token, to have something to begin the answer with.
        limit = min(len(prompt.blocks), (prompt.tokens - 1) // prompt.block_tokens)
        return self.cache.match(prompt.blocks, limit)

    @staticmethod
    def _parts(prompt: Prompt, hits: int) -> tuple[int, int]:
        cached = hits * prompt.block_tokens
        return cached, prompt.tokens - cached

    def _step_ms(self) -> float:
        return self._profile.step_ms_at(self.batch, self.context_tokens / self.batch)


@dataclass
class Outcome:
    """What a replay measured. ``requests`` and ``first_tokens`` by slot."""

    prompt_tokens: int = 0
    found_tokens: int = 0
    refused: int = 0
    false_holders: int = 0
    lookups: int = 0
    index_entries: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    hardware: list[str] = field(default_factory=list)
    rivals: dict[str, Rival] = field(default_factory=dict)
    routing: Routing | None = None

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a cache, of all."""
        return self.found_tokens / self.prompt_tokens

    @property
    def mean_ttft_ms(self) -> float:
        """Mean time to the first token."""
        return sum(self.ttft_ms) / len(self.ttft_ms)


RivalOf = Callable[[Any, ExactIndex], Any]
"""Makes what a rival asks from the table and the exact index."""


def replay(
    workload: Workload,
    arrivals: Sequence[tuple[float, int]],
    classes: Sequence[str],
    *,
    exact: bool = False,
    asked: dict[str, int] | None = None,
    policy: str = "finish-time",
    rivals: Mapping[str, "RivalOf"] = MappingProxyType({}),
) -> Outcome:
    """Replay ``arrivals`` (milliseconds, prompt number) over one worker of each of ``classes``.

    Nobody is held: every request asks for that. ``asked`` overrides how the table is asked (``max_probes``, ``grain``).
    ``rivals`` are asked for every decision, too, and change nothing.
    """
    facts = [fleets.facts(f"n{i // 8}-{i % 8}", name, max_context=MAX_CONTEXT) for i, name in enumerate(classes)]
    routing = fleets.routing(facts, policy=policy, long_prompt_tokens=4096)
    block_tokens = next(iter(workload.prompts.values())).block_tokens
    servers = [
        Server(slot, each, routing.fleet.at(slot).kind.profile, workload, block_tokens)
        for slot, each in enumerate(facts)
    ]
    index = ExactIndex()
    watched = WatchedTable(routing.affinity, index, asked or {})
    outcome = Outcome(requests=[0] * len(servers), hardware=list(classes), routing=routing)
    outcome.rivals = {name: Rival(make(routing.affinity, index)) for name, make in rivals.items()}
    with _asks(routing, index if exact else watched):
        _play(workload, arrivals, routing, servers, index, outcome)
    outcome.lookups, outcome.false_holders = watched.lookups, watched.false_holders
    outcome.index_entries = index.most_entries
    return outcome


@contextmanager
def _asks(routing: Routing, index: Any) -> Iterator[None]:
    """The filters ask ``index``; depths that are in tokens already are taken as such."""

    def tokens_of(depth: int) -> int:
        return int(depth) if isinstance(depth, Tokens) else covered_tokens(depth)

    with (
        mock.patch.object(routing._filters, "_affinity", index),
        mock.patch.object(filters, "covered_tokens", tokens_of),
    ):
        yield


def _ask_rival(rival: Rival, ask: Ask, prompt: Prompt, routing: Routing, servers: list[Server]) -> None:
    policy, turns = routing.policy, routing.policy._last.copy()
    with mock.patch.object(routing._filters, "_affinity", rival.index):
        plan = routing.decide(ask).plan
    # Ties are broken in turn, and the others must find the same turn.
    policy._last = turns
    if plan is not None:
        cached = servers[plan.prefill].cached_tokens(prompt)
        rival.found_tokens += cached
        rival.ttft_ms += policy.whole_plan(ask, plan.prefill, cached, 0.0).ttft_ms
        rival.choices.append(plan.prefill)


def _play(
    workload: Workload,
    arrivals: Sequence[tuple[float, int]],
    routing: Routing,
    servers: list[Server],
    index: ExactIndex,
    outcome: Outcome,
) -> None:
    output_tokens = workload.mean_output_tokens
    events: list[tuple[float, int, Server, Run]] = []  # the number tells runs apart: no two are equal
    ended: set[int] = set()
    number = 0

    def say(server: Server, now_ms: float) -> None:
        """What the worker's agent says after anything happened: its word, and the rows that changed."""
        word = server.word(now_ms)
        routing.hear("c", server.id, server.incarnation, word, server.beat, Verdict.UP, now_ms)
        cache = server.cache
        if not cache.gained and not cache.lost:
            return
        server.author.tick()
        index.turn(server.slot, cache.gained, cache.lost)
        cache.gained, cache.lost = [], []
        for update in server.updates:
            routing.affinity.turn_on(server.slot, array("I", update.on))
            routing.affinity.turn_off(server.slot, array("I", update.off))
        server.updates.clear()

    def begin(server: Server, now_ms: float) -> None:
        until_ms = server.start(now_ms)
        if until_ms is not None:
            assert server.computing is not None
            heapq.heappush(events, (until_ms, server.computing.number, server, server.computing))

    def pass_until(limit_ms: float) -> None:
        while events and events[0][0] <= limit_ms:
            now_ms, number, server, run = heapq.heappop(events)
            key = ("t", str(number), 1, server.id, server.incarnation)
            if run is server.computing:
                _, end_ms = server.computed(now_ms)
                outcome.ttft_ms.append(now_ms - run.arrived_ms)
                outcome.found_tokens += run.hits * run.prompt.block_tokens
                outcome.prompt_tokens += run.prompt.tokens
                heapq.heappush(events, (end_ms, number, server, run))
                routing.prefilled(key, server.beat + 1, now_ms)
            else:
                server.ended(run)
                routing.ended(key, server.beat + 1, now_ms)
            begin(server, now_ms)
            say(server, now_ms)

    for number, (now_ms, name) in enumerate(arrivals):
        pass_until(now_ms)
        prompt = workload.prompts[name]
        ask = Ask(fleets.MODEL, prompt.tokens, output_tokens, TTFT_MS, TPOT_MS, prompt, plans_split=False)
        for rival in outcome.rivals.values():
            _ask_rival(rival, ask, prompt, routing, servers)
        plan = routing.decide(ask).plan
        if plan is None:
            outcome.refused += 1
            continue
        server = servers[plan.prefill]
        outcome.requests[server.slot] += 1
        key = ("t", str(number), 1, server.id, server.incarnation)
        routing.sent({server.slot: key}, plan, ask, now_ms)
        server.submit(Run(number, prompt, now_ms, 0.0))
        begin(server, now_ms)
        routing.accepted(key, server.beat + 1, now_ms)
        say(server, now_ms)
    pass_until(float("inf"))
    if len(routing.ledger):
        raise AssertionError(f"{len(routing.ledger)} requests were never ended")
