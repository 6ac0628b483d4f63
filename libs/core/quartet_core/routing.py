"""Routing: everything a router knows, and the decisions that follow. Router, simulator and tests run this object.

What happens is told to it as it happens (inventories, words, affinity, ledger events); ``decide`` answers from what
is known. Time is handed in, in milliseconds of one clock.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from quartet_core.affinity import AffinityTable
from quartet_core.breaker import Breakers
from quartet_core.catalogue import HardwareClass
from quartet_core.containment import Containment
from quartet_core.filters import Filters
from quartet_core.fleet import Fleet, ProfileOf, WorkerFacts
from quartet_core.ledger import Key, Ledger
from quartet_core.linkbook import LinkBook
from quartet_core.load import LoadBoard
from quartet_core.plan import Ask, Candidates, Decision, Plan, Reason
from quartet_core.policy.base import Policy, View
from quartet_core.verdict import Verdict
from quartet_core.word import ACCEPTING, FAULT, drift_ratio

_UNUSABLE_DRIFT = 10.0
"""Stands for "unusable" where a finite factor is needed; filters have taken such workers out."""

_WORKS = ACCEPTING.mask | FAULT.mask

_SWEEP_ROWS = 1024

TRIAL_TOKENS = 2048
"""The longest prompt that is sent to a resting worker to see whether it is back."""

PolicyOf = Callable[[View], Policy]


class UnknownPolicy(Exception):
    """A policy that was not imported at start."""

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        super().__init__(f"no policy {name!r}; there are: {', '.join(allowed)}")
        self.name = name
        self.allowed = tuple(allowed)


class Routing:
    """The state and the rules of a router.

    ``policies`` by name; ``policy`` is the one in use. ``freed`` collects models of which a worker became able to take
    held work (accepting, with no more ahead of it than its kind keeps) since the caller last cleared it: the only
    change that can end a hold early. ``begin`` is the replica's own number, see ``View``.
    """

    def __init__(
        self,
        profile_of: ProfileOf,
        hardware_of: Callable[[str], HardwareClass],
        policies: Mapping[str, PolicyOf],
        *,
        policy: str,
        links: LinkBook,
        long_context: Sequence[str],
        long_prompt_tokens: int,
        long_context_tokens: int,
        kappa: float,
        split_margin: float = 1.0,
        hold_ahead_chunks: float,
        affinity_rows: int,
        affinity_hashes: int,
        max_workers: int,
        without_prefill_worker: str = "whole",
        long_prefill_ms: float = 0.0,
        long_prefill_share: float = 1.0,
        begin: int = 0,
    ) -> None:
        self.fleet = Fleet(
            profile_of,
            hardware_of,
            max_workers=max_workers,
            long_context=long_context,
            hold_ahead_chunks=hold_ahead_chunks,
        )
        self.affinity = AffinityTable(affinity_rows, affinity_hashes)
        contains = long_prefill_share < 1.0
        self.ledger = Ledger(long_prefill_ms=long_prefill_ms if contains else math.inf)
        self.board = LoadBoard(kappa)
        self.breakers = Breakers()
        self.links = links
        self._filters = Filters(
            self.fleet,
            self.affinity,
            long_prompt_tokens=long_prompt_tokens,
            long_context_tokens=long_context_tokens,
        )
        self._containment: Containment | None = None
        if contains:
            self._containment = Containment(self.fleet, self.ledger, long_ms=long_prefill_ms, share=long_prefill_share)
        view = View(self.fleet, self.board, links, kappa=kappa, split_margin=split_margin, begin=begin)
        self._policies = {name: make(view) for name, make in policies.items()}
        self.policy = self.known(policy)
        self._whole_without_pair = without_prefill_worker == "whole"
        self.fallbacks = 0
        """Requests given whole to a worker whose role is one half only, for want of a pair."""
        self.freed: dict[str, None] = {}
        self._able = 0  # workers with less than their kind's hold-ahead work before them
        self._leaving: list[int] = []  # vacated slots whose affinity column is not swept yet

    # Decisions

    def decide(self, ask: Ask) -> Decision:
        """What to do with a request now."""
        resting = self.breakers.open
        if resting:
            trial = self._trial(ask)
            if trial is not None:
                return trial
            # A worker of one role is tried by letting it back into the choice: a trial of its own needs a whole one.
            resting &= ~(self.breakers.due(ask.at_ms) & (self.fleet.prefills ^ self.fleet.decodes))
            excluded, ask.excluded = ask.excluded, ask.excluded | resting
            candidates = self._candidates(ask)
            ask.excluded = excluded
            if candidates is Reason.NO_WORKER:
                candidates = self._candidates(ask)  # rather a resting worker than none
        else:
            candidates = self._candidates(ask)
        if isinstance(candidates, Reason):
            return Decision(reason=candidates)
        return self._choose(self.policy, ask, candidates)

    def _candidates(self, ask: Ask) -> Candidates | Reason:
        candidates = self._filters.candidates(ask)
        if self._containment is not None and not isinstance(candidates, Reason):
            self._containment.contain(ask, candidates)
        return candidates

    def _choose(self, policy: Policy, ask: Ask, candidates: Candidates) -> Decision:
        """Have ``policy`` choose. Of a fleet of halves it gets pairs if it can plan them; without any pair that will
        do, one half does all, if the configuration says so, and is counted."""
        if candidates.whole:
            if ask.whole_first:
                candidates.prefill = 0  # no place for a first half alone
            return policy.choose(ask, candidates)
        if policy.splits and ask.plans_split and candidates.prefill and candidates.decode:
            decision = policy.choose(ask, candidates)
            if decision.plan is not None:
                return decision
        half = candidates.prefill or candidates.decode
        if not half or not self._whole_without_pair:
            return Decision(reason=Reason.NO_PREFILL_WORKER, left=candidates.left)
        candidates.whole = half
        self.fallbacks += 1
        return policy.choose(ask, candidates)

    def _trial(self, ask: Ask) -> Decision | None:
        """Send this request to a resting worker whose trial is due, if it is a small one that the worker could take."""
        fleet = self.fleet
        due = self.breakers.due(ask.at_ms) & fleet.serving.get(ask.model, 0) & ~ask.excluded
        due &= (fleet.up | fleet.suspect | fleet.frozen) & fleet.planes.sound & fleet.open
        due &= fleet.prefills & fleet.decodes
        if not due or ask.prompt_tokens > TRIAL_TOKENS:
            return None
        slot = (due & -due).bit_length() - 1
        if ask.prompt_tokens + ask.max_tokens > min(fleet.at(slot).kind.max_context, fleet.at(slot).kind.kv_tokens):
            return None
        plan = self.policy.whole_plan(ask, slot, 0, 0.0)
        return Decision(reason=Reason.TRIAL, plan=plan, considered=(plan,))

    def would(self, name: str, ask: Ask) -> Decision:
        """What policy ``name`` would do with a request now. Nothing comes of it. Raises ``UnknownPolicy``."""
        candidates = self._candidates(ask)
        if isinstance(candidates, Reason):
            return Decision(reason=candidates)
        return self._choose(self.known(name), ask, candidates)

    def choose_policy(self, name: str) -> None:
        """Decide by another policy from now on. Raises ``UnknownPolicy``; then the old one stays."""
        self.policy = self.known(name)

    def known(self, name: str) -> Policy:
        """The policy of that name. Raises ``UnknownPolicy``."""
        policy = self._policies.get(name)
        if policy is None:
            raise UnknownPolicy(name, self.policy_names)
        return policy

    @property
    def policy_names(self) -> list[str]:
        """The policies that may be chosen."""
        return list(self._policies)

    # Work

    def sent(self, keys: Mapping[int, Key], plan: Plan, ask: Ask, now_ms: float, reserved_for_ms: float = 0.0) -> None:
        """A plan was dispatched (or, with ``reserved_for_ms``, is held): ``keys`` by slot go into the ledger."""
        for slot, key in keys.items():
            self.opened(
                key, slot,
                prefill_ms=plan.prefill_ms / self._drift(slot) if slot == plan.prefill else 0.0,
                tokens=plan.fetched_tokens if slot == plan.source else ask.prompt_tokens + int(ask.output_tokens / 2),
                decodes=slot == plan.decode,
                tpot_ms=ask.tpot_ms,
                total_ms=plan.total_ms,
                now_ms=now_ms,
                reserved_for_ms=reserved_for_ms,
            )  # fmt: skip

    def opened(
        self, key: Key, slot: int, *, prefill_ms: float, tokens: int, decodes: bool, tpot_ms: float, total_ms: float,
        now_ms: float, reserved_for_ms: float = 0.0,
    ) -> None:  # fmt: skip
        """Somebody's work was put on a worker."""
        if self.ledger.open(
            key, slot, prefill_ms=prefill_ms, tokens=tokens, decodes=decodes, tpot_ms=tpot_ms, total_ms=total_ms,
            now_ms=now_ms, reserved_for_ms=reserved_for_ms,
        ):  # fmt: skip
            self.refresh(slot, now_ms)

    def accepted(self, key: Key, beat: int, now_ms: float) -> None:
        """A worker took a request."""
        self._changed(self.ledger.accepted(key, beat), now_ms)

    def prefilled(self, key: Key, beat: int, now_ms: float) -> None:
        """A worker has computed a prompt."""
        self._changed(self.ledger.prefilled(key, beat), now_ms)

    def ended(self, key: Key, beat: int, now_ms: float) -> None:
        """A request left a worker; ``beat`` 0 when it never got there."""
        self._changed(self.ledger.ended(key, beat), now_ms)

    # Fleet

    def learn(
        self,
        node: str,
        facts: Sequence[WorkerFacts],
        now_ms: float,
        fabrics: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[list[int], list[Exception]]:
        """Take a node's inventory; return the vacated slots (their requests are lost) and what was refused.

        ``fabrics`` are the node's links: class → GB/s.
        """
        fresh, vacated, refused = self.fleet.learn(node, facts, fabrics)
        for slot in vacated:
            self._leave(slot)
        for slot in fresh:
            self.refresh(slot, now_ms)
        return vacated, refused

    def forget_node(self, node: str) -> list[int]:
        """A node is gone; return its vacated slots, whose requests are lost."""
        vacated = self.fleet.forget_node(node)
        for slot in vacated:
            self._leave(slot)
        return vacated

    def doubt(self, slot: int, now_ms: float) -> None:
        """A worker was announced, and no collector has heard it although they hear others: not to be preferred."""
        self.fleet.doubt(slot)
        self.refresh(slot, now_ms)

    def hear(
        self, collector: str, worker: str, incarnation: int, state: int, beat: int, verdict: int, now_ms: float
    ) -> int | None:
        """Take a collector's word; return the slot if this killed its worker, whose requests are lost."""
        slot = self.fleet.slot_of(worker)
        before = Verdict.DEAD if slot is None else self.fleet.verdict(slot)
        slot = self.fleet.hear(collector, worker, incarnation, state, beat, verdict)
        return None if slot is None else self._believed(slot, before, now_ms)

    def stamp(self, collector: str, stamps: Iterable[tuple[str, int]], now_ms: float) -> list[int]:
        """Take how far a collector has heard nodes, as (node, sequence); return the slots of workers this killed."""
        fleet = self.fleet
        for node, sequence in stamps:
            fleet.stamp(collector, node, sequence)
        killed = []
        for slot in sorted(fleet.disputed):
            before = fleet.verdict(slot)
            if fleet.settle(slot) is not None and self._believed(slot, before, now_ms) is not None:
                killed.append(slot)
        return killed

    def _believed(self, slot: int, before: int, now_ms: float) -> int | None:
        """What follows from a new belief about ``slot``; return it if its worker is dead by it."""
        if before != Verdict.DEAD and self.fleet.verdict(slot) == Verdict.DEAD:
            self.ledger.fence(slot)
            self.affinity.forget(slot)
            self.breakers.drop(slot)
            self.refresh(slot, now_ms)
            return slot
        told = self.fleet.verdict(slot)
        if told == Verdict.FROZEN:
            self.breakers.freeze(slot, now_ms)
        elif before == Verdict.FROZEN:
            self.breakers.thaw(slot)
        self.ledger.heard(slot, self.fleet.at(slot).beat)
        self.refresh(slot, now_ms)
        return None

    def refresh(self, slot: int, now_ms: float) -> None:
        """Recompute a worker's load after its word or its entries changed."""
        worker = self.fleet.at(slot)
        word = self.fleet.planes.word(slot) or 0
        belief = self.ledger.belief(slot, word, now_ms)
        load = self.board.update(slot, worker.kind, belief, self._drift(slot))
        bit = 1 << slot
        able = load.queue_ms <= worker.kind.ahead_ms and word & _WORKS == ACCEPTING.mask and self.fleet.up & bit
        if not able:
            self._able &= ~bit
        elif not self._able & bit:
            self._able |= bit
            for name in (worker.kind.model, *worker.facts.adapters):
                self.freed[name] = None

    def tend(self, now_ms: float) -> None:
        """Once a second: expire what nobody ended."""
        for slot in self.ledger.expire(now_ms):
            if self.fleet.workers[slot] is not None:
                self.refresh(slot, now_ms)

    def sweep(self) -> None:
        """A slice (some 80 us at 1,000 workers) of the clean-up after dead workers; vacated slots come free by it."""
        if self.affinity.sweep(_SWEEP_ROWS) and self._leaving:
            for slot in self._leaving:
                self.fleet.recycle(slot)
            self._leaving.clear()

    @property
    def sweeping(self) -> bool:
        """Whether ``sweep`` has anything to do."""
        return bool(self.affinity.dirty or self._leaving)

    def least_prefill_ms(self, ask: Ask) -> float:
        """What the prompt would take on the quickest kind that serves the model, uncached; 0 without any."""
        kinds = self.fleet.kinds_of.get(ask.model, ())
        return min((kind.profile.prefill_ms(0, ask.prompt_tokens) for kind in kinds), default=0.0)

    def longest_context(self, model: str) -> int:
        """The longest prompt, in tokens, that any worker of a model takes."""
        plane = self.fleet.serving.get(model, 0)
        return max((min(k.max_context, k.kv_tokens) for k in self.fleet.kinds if k.plane & plane), default=0)

    def _leave(self, slot: int) -> None:
        self.ledger.fence(slot)
        self.affinity.forget(slot)
        self.breakers.drop(slot)
        self.board.drop(slot)
        self._able &= ~(1 << slot)
        self._leaving.append(slot)

    def _changed(self, slot: int | None, now_ms: float) -> None:
        if slot is not None and self.fleet.workers[slot] is not None:
            self.refresh(slot, now_ms)

    def _drift(self, slot: int) -> float:
        return min(drift_ratio(self.fleet.drift(slot)), _UNUSABLE_DRIFT)
