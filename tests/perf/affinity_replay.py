"""Replays prompts over a fleet of caches, routed by the real ``Routing``, with affinity as it is or by an exact index.

All but the index is the same in both: the policy, the filters, the ledger, the words. Agents' counters, their messages
and the table are the product's own; what stands for an engine is in ``affinity_server.py``.
"""

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from sys import getsizeof
from types import MappingProxyType
from typing import Any
from unittest import mock

import fleets
from affinity_index import ExactIndex, Prompt, Tokens, WatchedTable, Workload
from affinity_server import Run, Server

from quartet_core import filters
from quartet_core.ladder import covered_tokens
from quartet_core.plan import Ask
from quartet_core.routing import Routing
from quartet_core.verdict import Verdict

TTFT_MS, TPOT_MS = 2_000.0, 60.0
MAX_CONTEXT = 1 << 20
"""Agents' sessions outgrow the 8B's own window; here the KV memory alone bounds them."""


@dataclass
class Choices:
    """What came of the choices of one way to know who holds what, all asked for the same requests in the same states.

    ``found_tokens`` of the prompts are truly held where they would be sent. ``ttft_ms`` sums their times to the first
    token there, as the policy predicts them from what is truly held.
    """

    asked: Any
    found_tokens: int = 0
    ttft_ms: float = 0.0
    slots: list[int] = field(default_factory=list)

    def note(self, ask: Ask, prompt: Prompt, routing: Routing, server: Server) -> None:
        """A request would be sent to ``server``."""
        cached = server.cached_tokens(prompt)
        self.found_tokens += cached
        self.ttft_ms += routing.policy.whole_plan(ask, server.slot, cached, 0.0).ttft_ms
        self.slots.append(server.slot)


@dataclass
class Outcome:
    """What a replay measured. ``requests`` by slot. ``chosen`` came of the decisions that counted, ``rivals`` of the
    others. ``false_holders`` in ``lookups`` are of decisions by the table; bytes are of its state at the end."""

    prompt_tokens: int = 0
    found_tokens: int = 0
    refused: int = 0
    false_holders: int = 0
    lookups: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    rivals: dict[str, Choices] = field(default_factory=dict)
    chosen: Choices = field(default_factory=lambda: Choices(None))
    table_bytes: int = 0
    index_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in a cache, of all."""
        return self.found_tokens / self.prompt_tokens

    @property
    def mean_ttft_ms(self) -> float:
        """Mean time to the first token."""
        return sum(self.ttft_ms) / len(self.ttft_ms)


def _table_bytes(routing: Routing) -> int:
    planes = routing.affinity._planes
    # Rows that nothing was ever put in are one object.
    return getsizeof(planes) + sum(map(getsizeof, {id(plane): plane for plane in planes}.values()))


RivalOf = Callable[[Any, ExactIndex], Any]
"""Makes what a rival asks from the table and the exact index."""


def replay(
    workload: Workload,
    arrivals: Sequence[tuple[float, int]],
    classes: Sequence[str],
    *,
    exact: bool = False,
    rivals: Mapping[str, RivalOf] = MappingProxyType({}),
) -> Outcome:
    """Replay ``arrivals`` (milliseconds, prompt number) over one worker of each of ``classes``.

    Nobody is held: every request asks for that. ``rivals`` are asked for every decision, too, and change nothing.
    """
    facts = [fleets.facts(f"n{i // 8}-{i % 8}", name, max_context=MAX_CONTEXT) for i, name in enumerate(classes)]
    routing = fleets.routing(facts, long_prompt_tokens=4096, long_context_tokens=4096)
    block_tokens = next(iter(workload.prompts.values())).block_tokens
    servers = [
        Server(slot, each, routing.fleet.at(slot).kind.profile, workload, block_tokens)
        for slot, each in enumerate(facts)
    ]
    index = ExactIndex()
    watched = WatchedTable(routing.affinity, index, {})
    asked_for_real = index if exact else watched
    outcome = Outcome(requests=[0] * len(servers), chosen=Choices(asked_for_real))
    outcome.rivals = {name: Choices(make(routing.affinity, index)) for name, make in rivals.items()}
    with _asks(routing, asked_for_real):
        _play(workload, arrivals, routing, servers, index, outcome)
    outcome.lookups, outcome.false_holders = watched.lookups, watched.false_holders
    outcome.table_bytes = _table_bytes(routing)
    outcome.index_bytes = index.bytes
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


def _ask_rival(rival: Choices, ask: Ask, prompt: Prompt, routing: Routing, servers: list[Server]) -> None:
    policy, turns = routing.policy, routing.policy._last.copy()
    with mock.patch.object(routing._filters, "_affinity", rival.asked):
        plan = routing.decide(ask).plan
    policy._last = turns  # ties are broken in turn, and the others must find the same turn
    if plan is not None:
        rival.note(ask, prompt, routing, servers[plan.prefill])


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
        outcome.chosen.note(ask, prompt, routing, server)
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
