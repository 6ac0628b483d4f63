"""What a policy is given, and what it must answer."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from quartet_core.fleet import Fleet, Worker
from quartet_core.linkbook import LinkBook
from quartet_core.links import left_after_prefill_ms
from quartet_core.load import Load, LoadBoard
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.planes import slots

LESSER = 0.1
"""How much the ratio that does not bind counts. With none, a worker that holds the whole prompt loses to an idle one
by a hair of time per token, and a prefill is computed for nothing (tests/scenarios/B6)."""


def lateness(early: float, often: float) -> float:
    """TTFT and TPOT over their targets, as one number: the worse one, and a little of the other."""
    return early + LESSER * often if early > often else often + LESSER * early


def kv_wait_ms(load: Load, prompt_tokens: int, cached: int, move_ms: float) -> float:
    """How long after its prefill's end on a worker of this ``load`` a prompt's KV, ``move_ms`` on its link, is away.

    Where engines overlap (capability ``overlap``), what is left of it is, as `left_after_prefill_ms` has it: of
    n = ceil(uncached / room) chunks the first takes the cached tokens' KV along, and from its end to the last's pass
    drift x the prefill of the others, and the decode steps that they carry along. All of it otherwise.
    """
    room = int(load.room)
    uncached = prompt_tokens - cached
    if not load.kind.overlaps or uncached <= room:
        return move_ms
    behind = uncached - room
    last = behind % room or room
    meanwhile_ms = load.drift * load.kind.profile.prefill_ms(cached + room, behind) - (-behind // room) * load.step_ms
    return left_after_prefill_ms(move_ms, last / prompt_tokens, meanwhile_ms)


class View:
    """All that a policy may read: the fleet, its believed load, and the links between its nodes.

    ``split_margin``: a split must cost less than this share of the best plan for one worker.
    ``begin`` is where among equals it begins to take turns: replicas that cannot have heard of each other yet must not
    all begin with the same worker.
    """

    __slots__ = ("begin", "board", "fleet", "kappa", "links", "split_margin")

    def __init__(
        self, fleet: Fleet, board: LoadBoard, links: LinkBook, *, kappa: float = 1.0, split_margin: float = 1.0,
        begin: int = 0,
    ) -> None:  # fmt: skip
        self.fleet = fleet
        self.board = board
        self.links = links
        self.kappa = kappa
        self.split_margin = split_margin
        self.begin = begin


class Policy(ABC):
    """Chooses among candidates. Policies keep no state of workers: that is in the view, and is newer there."""

    name: ClassVar[str]
    holds: ClassVar[bool] = False
    """Whether the router keeps requests back for a busy worker that this policy prefers."""
    splits: ClassVar[bool] = False
    """Whether it plans pairs: then ``candidates.whole`` may be empty, else never."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._last: dict[int, int] = {}

    @abstractmethod
    def choose(self, ask: Ask, candidates: Candidates) -> Decision:
        """Decide. Called for every new request, and again for held ones when a worker they could use frees.

        ``candidates.whole`` or a pair of halves is not empty. The view is as new as the last message; nothing may be
        kept from it between calls. Must not raise: a policy that does is counted, and the request is refused.
        """

    def spread(self, plane: int, turn: int) -> int:
        """One slot of a plane of equals: the next after the one that was chosen last in this ``turn`` (any integer
        that names the kind of choice), so that ties never pile up on the first."""
        last = self._last.get(turn)
        after = self.view.begin % plane.bit_length() if last is None else last + 1
        later = plane >> after
        slot = after + (later & -later).bit_length() - 1 if later else (plane & -plane).bit_length() - 1
        self._last[turn] = slot
        return slot

    def whole_plan(self, ask: Ask, slot: int, cached: int, cost: float) -> Plan:
        """The plan that gives all of ``ask`` to one worker, with its predicted times."""
        load = self.view.board.loads[slot]
        uncached = ask.prompt_tokens - cached
        prefill_ms = load.drift * load.kind.profile.prefill_ms(cached, uncached)
        ttft_ms = self.ttft_ms(ask, load, prefill_ms, uncached)
        return Plan(
            prefill=slot,
            decode=slot,
            cached_tokens=cached,
            prefill_ms=prefill_ms,
            ttft_ms=ttft_ms,
            tpot_ms=load.tpot_ms,
            total_ms=ttft_ms + ask.output_tokens * load.tpot_ms,
            ahead_ms=load.drift * load.queue_ms,
            cost=cost,
        )

    @staticmethod
    def ttft_ms(ask: Ask, load: Load, prefill_ms: float, uncached: int) -> float:
        """Predicted time to first token, from arrival: waited, half an iteration and the queue, the prefill, and the
        decode steps that its iterations carry along."""
        iterations = -(-(load.queued_tokens + uncached) // load.room)
        return ask.waited_ms + load.wait_ms + prefill_ms + iterations * load.step_ms

    def decided(self, plan: Plan, candidates: Candidates, reason: Reason = Reason.POLICY) -> Decision:
        """A decision for ``plan``."""
        return Decision(reason=reason, plan=plan, left=candidates.left, considered=(plan,))

    @staticmethod
    def cached_at(slot: int, candidates: Candidates) -> int:
        """How many prompt tokens ``slot`` holds."""
        bit = 1 << slot
        for cached, plane in candidates.holders:
            if plane & bit:
                return cached
        return 0

    def fewest_requests(self, plane: int) -> tuple[int, float]:
        """(slot, requests) of a worker of ``plane`` with the fewest requests running, queued and sent."""
        loads = self.view.board.loads
        equals = 0
        least = math.inf
        for slot in slots(plane):
            batch = loads[slot].batch
            if batch < least:
                least, equals = batch, 0
            if batch == least:
                equals |= 1 << slot
        return self.spread(equals, 0), least

    def worker(self, slot: int) -> Worker:
        """The worker in ``slot``."""
        return self.view.fleet.at(slot)
